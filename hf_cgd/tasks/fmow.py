"""FMoW-WILDS: what is the building or land in a satellite image used for, in later years and everywhere alike?

62 classes of images of the Functional Map of the World (Christie et al., 2018; Koh et al., 2021). Training groups are
the years 2002 to 2012; the years 2013 to 2015 validate, 2016 and 2017 test. Evaluation groups are the five regions of
the world; places of no region ("Other") count in the average alone. The metric is the accuracy of the worst region.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import ClassLabel, Features, Image, Value
from PIL import Image as Picture

from hf_cgd.data.image_preparation import ImagePreparation
from hf_cgd.tasks.base import Hyperparameters, Published, TaskInfo, WildsData
from hf_cgd.tasks.paper import ON_WILDS
from hf_cgd.tasks.raw_files import images_at, read_csv, require_files, require_one_of
from hf_cgd.tasks.wilds_source import metadata_of
from hf_cgd.tasks.wilds_task import SAMPLED, WildsTask

CATEGORIES = (
    "airport", "airport_hangar", "airport_terminal", "amusement_park", "aquaculture", "archaeological_site", "barn",
    "border_checkpoint", "burial_site", "car_dealership", "construction_site", "crop_field", "dam",
    "debris_or_rubble", "educational_institution", "electric_substation", "factory_or_powerplant", "fire_station",
    "flooded_road", "fountain", "gas_station", "golf_course", "ground_transportation_station", "helipad",
    "hospital", "impoverished_settlement", "interchange", "lake_or_pond", "lighthouse", "military_facility",
    "multi-unit_residential", "nuclear_powerplant", "office_building", "oil_or_gas_facility", "park",
    "parking_lot_or_garage", "place_of_worship", "police_station", "port", "prison", "race_track", "railway_bridge",
    "recreational_facility", "road_bridge", "runway", "shipyard", "shopping_mall", "single-unit_residential",
    "smokestack", "solar_farm", "space_facility", "stadium", "storage_tank", "surface_mine", "swimming_pool",
    "toll_booth", "tower", "tunnel_opening", "waste_disposal", "water_treatment_facility", "wind_farm", "zoo",
)  # fmt: skip
REGIONS = ("Asia", "Europe", "Africa", "Americas", "Oceania")
OTHER = "Other"
"""Of places whose country is in no region."""
FIRST_YEAR, LAST_YEAR = 2002, 2017
COUNTRY_FILE = "country_code_mapping.csv"
SPLITS = {"train": "train", "val": "validation", "test": "test", "id_val": "id_validation", "id_test": "id_test"}
DEMO_ROWS, DEMO_SIDE, DEMO_CLASSES = 900, 32, 3

DENSENET = {"model": "densenet121", "optim": "adamw_torch", "learning_rate": 1e-4, "weight_decay": 0.0,
            "lr_scheduler_type": "constant", "lr_decay_per_epoch": 0.96, "max_grad_norm": 0.0}  # fmt: skip
WILDS_1 = {**DENSENET, "per_device_train_batch_size": 64, "num_train_epochs": 50}
IMAGES = ImagePreparation(resize=(224, 224))

INFO = TaskInfo(
    name="fmow",
    kind="image",
    inputs=("image",),
    group_columns=("year",),
    evaluation_group_columns=REGIONS,
    label_names=CATEGORIES,
    metric="worst_group_accuracy",
    average_metric="accuracy",
    splits=tuple(SPLITS.values()),
    sources=("wilds", "files", "demo"),
    licence="FMoW Challenge Public License",
    citation="Christie, Fendley, Wilson, Mukherjee: Functional Map of the World. CVPR 2018. Splits: Koh et al.: "
    "WILDS. ICML 2021.",
    wilds=WildsData("fmow", SPLITS),
    layout="rgb_metadata.csv (split, category, country_code, timestamp, …), country_code_mapping.csv (alpha-3, "
    "region) and images/rgb_img_<row>.png",
    places=(
        "the wilds package: wilds.get_dataset('fmow', root_dir=…, download=True)",
        "the Hub has its test split alone (djghosh/wds_wilds-fmow_test), so nothing to train on",
    ),
    size="141,696 images, of which 76,863 train; 54 GB packed",
    split_counts={"train": 76_863},
    hyperparameters={
        "paper": Hyperparameters(WILDS_1, SAMPLED, IMAGES),
        "wilds1.2": Hyperparameters(WILDS_1, SAMPLED, IMAGES),
        "wilds2.0": Hyperparameters(
            {**DENSENET, "per_device_train_batch_size": 32, "num_train_epochs": 60}, SAMPLED, IMAGES
        ),
        "demo": Hyperparameters(
            {
                **DENSENET, "model": "test_resnet", "learning_rate": 2e-3, "per_device_train_batch_size": 32,
                "num_train_epochs": 4, "per_device_eval_batch_size": 256, "save_strategy": "no",
                "load_best_model_at_end": False,
            },
            SAMPLED,
            ImagePreparation(resize=(DEMO_SIDE, DEMO_SIDE)),
        ),
    },
    search=replace(ON_WILDS, seeds=3),
    published={
        # Table 4: per cent, of years that were not trained on.
        "paper": Published(
            ("worst_group_accuracy",),
            {
                "coral": ("31.7 (1.2)",),
                "irm": ("30.0 (1.4)",),
                "erm": ("32.3 (1.2)",),
                "group_dro": ("30.8 (0.8)",),
                "cgd": ("32.0 (2.2)",),
            },
        )
    },
)  # fmt: skip

FEATURES = Features(
    image=Image(), label=ClassLabel(names=list(CATEGORIES)), year=Value("int64"), region=Value("string"),
    country_code=Value("string"), timestamp=Value("string"), **dict.fromkeys(REGIONS, Value("int64")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FMoW(WildsTask):
    """FMoW; `seed` is that of made-up data alone."""

    name = INFO.name
    metadata = "rgb_metadata.csv"
    folders = ("fmow_v1.1",)
    wilds_class = ("wilds.datasets.fmow_dataset", "FMoWDataset")

    @property
    def info(self) -> TaskInfo:
        """The same in all settings."""
        return INFO

    def _check(self, folder: Path) -> None:
        path = folder / self.metadata
        table = read_csv(INFO, folder, self.metadata, ("split", "category", "country_code", "timestamp"))
        require_one_of(table, "split", ("train", "val", "test", "seq"), path)
        require_one_of(table, "category", CATEGORIES, path)
        # A date that is none would be taken for one long ago, and its image for one to train on.
        years = pd.to_datetime(table["timestamp"], errors="coerce", utc=True).dt.year
        require_one_of(table, "timestamp", range(FIRST_YEAR, LAST_YEAR + 1), path, years)
        places = read_csv(INFO, folder, COUNTRY_FILE, ("alpha-3", "region"), keep_default_na=False)
        require_one_of(places, "region", (*REGIONS, OTHER, ""), folder / COUNTRY_FILE)

    def _columns(self, dataset: Any) -> tuple[Mapping[str, Any], Features]:
        values, rows = metadata_of(dataset), dataset.full_idxs
        table = dataset.metadata.iloc[rows]
        region = np.asarray([str(name) for name in dataset.metadata_map["region"]])[values["region"]]
        names = [f"images/rgb_img_{row}.png" for row in rows]
        columns = {
            "image": images_at(require_files(INFO, Path(dataset.data_dir), names)),
            "label": values["y"],
            "year": values["year"] + FIRST_YEAR,
            "region": region,
            **{name: table[name].astype(str).tolist() for name in ("country_code", "timestamp")},
            **{name: (region == name).astype(np.int64) for name in REGIONS},
        }
        return columns, FEATURES

    def _write_demo(self, folder: Path) -> None:
        """Three classes, each with its brightness; a little noise more in each region and year."""
        generator = np.random.default_rng(self.seed)
        countries = [("CHN", "Asia"), ("FRA", "Europe"), ("ETH", "Africa"), ("BRA", "Americas"), ("AUS", "Oceania")]
        pd.DataFrame(countries, columns=["alpha-3", "region"]).to_csv(folder / COUNTRY_FILE, index=False)
        (folder / "images").mkdir()
        rows = []
        for number in range(DEMO_ROWS):
            label, place = int(generator.integers(DEMO_CLASSES)), int(generator.integers(len(countries) + 1))
            # Later years have nothing to train on; half of the images are of these.
            early = generator.random() < 0.5
            year = int(generator.integers(*((FIRST_YEAR, 2013) if early else (2013, LAST_YEAR + 1))))
            code = countries[place][0] if place < len(countries) else "XKX"
            split = str(generator.choice(["train", "val", "test"], p=[0.7, 0.15, 0.15] if early else [0, 0.5, 0.5]))
            noise = generator.integers(0, 40 + 12 * place + 2 * (year - FIRST_YEAR), (DEMO_SIDE, DEMO_SIDE, 3))
            values = (60 * label + noise).clip(0, 255).astype(np.uint8)
            Picture.fromarray(values).save(folder / "images" / f"rgb_img_{number}.png")
            rows.append((split, CATEGORIES[label], code, f"{year}-05-03T08:17:27Z"))
        head = ["split", "category", "country_code", "timestamp"]
        pd.DataFrame(rows, columns=head).to_csv(folder / self.metadata, index=False)
