"""PovertyMap-WILDS: how wealthy is the village in a satellite image, in countries that were never seen?

Images of eight bands, a number to predict (an index of the assets of households, of mean 0), 23 African countries
(Yeh et al., 2020; Koh et al., 2021). Training groups are the countries. The metric is the smaller of the correlations
(Pearson's r) over urban and over rural places, in five folds that hold back other countries to validate and to test.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from datasets import ClassLabel, DatasetDict, Features, Value

from hf_cgd.tasks.base import HubData, Hyperparameters, Published, TaskInfo, WildsData
from hf_cgd.tasks.hub_source import hub_splits
from hf_cgd.tasks.paper import ON_WILDS
from hf_cgd.tasks.raw_files import numbers, read_csv, require_files, require_one_of
from hf_cgd.tasks.satellite import SatellitePreparation, read_bands
from hf_cgd.tasks.wilds_source import metadata_of
from hf_cgd.tasks.wilds_task import SAMPLED, WildsTask

Fold = Literal["A", "B", "C", "D", "E", "of_seed"]
OF_SEED: Fold = "of_seed"
"""The fold that belongs to the seed: A to 0, B to 1, …, as the paper averages over folds in place of seeds."""
FOLDS: tuple[Fold, ...] = get_args(Fold)[:-1]
COUNTRIES = (
    "angola", "benin", "burkina_faso", "cameroon", "cote_d_ivoire", "democratic_republic_of_congo", "ethiopia",
    "ghana", "guinea", "kenya", "lesotho", "malawi", "mali", "mozambique", "nigeria", "rwanda", "senegal",
    "sierra_leone", "tanzania", "togo", "uganda", "zambia", "zimbabwe",
)  # fmt: skip
"""In the order of the package's numbers."""
AREAS = ("rural", "urban")
HELD_BACK = 2000
"""Rows of the training countries that the package keeps to validate and to test."""
SPLITS = {"train": "train", "val": "validation", "test": "test", "id_val": "id_validation", "id_test": "id_test"}
FOLD_A_SIZES = {"train": 9797, "validation": 3909, "test": 3963, "id_test": 1000}
"""Rows of the splits of fold A. Of its "id_validation", 1,000 as well, the copy on the Hub lacks one."""
DEMO_ROWS, DEMO_SIDE = 2500, 16

RESNET = {"model": "resnet18", "pretrained": False, "optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.0,
          "lr_scheduler_type": "constant", "lr_decay_per_epoch": 0.96, "max_grad_norm": 0.0,
          "per_device_train_batch_size": 64, "num_train_epochs": 200}  # fmt: skip

HUB = HubData("1aurent/PovertyMap")
INFO = TaskInfo(
    name="povertymap",
    kind="image",
    inputs=("image",),
    image_format={"in_chans": 8},
    group_columns=("country",),
    evaluation_group_columns=("urban",),
    label_names=(),
    metric="worst_group_pearson",
    average_metric="pearson",
    splits=tuple(SPLITS.values()),
    sources=("hub", "wilds", "files", "demo"),
    licence="Landsat, DMSP and VIIRS images: public domain (U.S.); the surveys: terms of the DHS Program",
    citation="Yeh et al.: Using publicly available satellite imagery and deep learning to understand economic "
    "well-being in Africa. Nature Communications 2020. Splits: Koh et al.: WILDS. ICML 2021.",
    hub=HUB,
    wilds=WildsData("poverty", SPLITS),
    layout="dhs_metadata.csv (country, urban, wealthpooled, …) and images/landsat_poverty_img_<row>.npz, whose array "
    "'x' is float32 [8, 224, 224].",
    places=(
        "the wilds package: wilds.get_dataset('poverty', root_dir=…, download=True)",
        "https://huggingface.co/datasets/1aurent/PovertyMap (fold A alone; its column `label` is cut to integers)",
    ),
    size="19,669 images, of which 9,797 train in fold A; 13 GB packed",
    hyperparameters={
        "paper": Hyperparameters(RESNET, SAMPLED, SatellitePreparation(changes="wilds1.2")),
        "wilds1.2": Hyperparameters(RESNET, SAMPLED, SatellitePreparation(changes="wilds1.2")),
        "wilds2.0": Hyperparameters(RESNET, SAMPLED, SatellitePreparation(changes="none")),
        "demo": Hyperparameters(
            {
                **RESNET, "model": "test_resnet", "learning_rate": 3e-3, "num_train_epochs": 4,
                "per_device_eval_batch_size": 256, "save_strategy": "no", "load_best_model_at_end": False,
            },
            SAMPLED,
            SatellitePreparation(changes="flips_and_jitter"),
        ),
    },
    search=replace(ON_WILDS, seeds=5, options={"fold": OF_SEED}),
    published={
        # Table 4: five folds.
        "paper": Published(
            ("id_test:worst_group_pearson", "worst_group_pearson"),
            {
                "coral": ("0.59 (0.03)", "0.44 (0.06)"),
                "irm": ("0.57 (0.08)", "0.43 (0.07)"),
                "erm": ("0.57 (0.07)", "0.45 (0.06)"),
                "group_dro": ("0.54 (0.11)", "0.39 (0.06)"),
                "cgd": ("0.58 (0.05)", "0.43 (0.03)"),
            },
        )
    },
)  # fmt: skip

FEATURES = Features(
    image=Value("string"), label=Value("float32"), country=ClassLabel(names=list(COUNTRIES)),
    urban=ClassLabel(names=list(AREAS)),
)  # fmt: skip
FURTHER = Features(year=Value("int64"), lat=Value("float64"), lon=Value("float64"))
"""Columns that are kept where the table has them."""


@dataclass(frozen=True, kw_only=True)
class PovertyMap(WildsTask):
    """PovertyMap; `seed` is that of made-up data alone."""

    name = INFO.name
    metadata = "dhs_metadata.csv"
    folders = ("poverty_v1.1",)
    wilds_class = ("wilds.datasets.poverty_dataset", "PovertyMapDataset")
    fold: Fold = field(default="A", metadata={"help": "Which countries are held back: A to E, or by the seed."})

    def __post_init__(self) -> None:
        if self.fold not in get_args(Fold):
            raise ValueError(f"fold must be one of {', '.join(map(repr, get_args(Fold)))}, got {self.fold!r}.")

    @property
    def replicate(self) -> str:
        """The fold, A to E."""
        return FOLDS[self.seed % len(FOLDS)] if self.fold == OF_SEED else self.fold

    @property
    def info(self) -> TaskInfo:
        """The same in all folds but for the sizes of splits; the published cells are means over the folds."""
        return replace(INFO, split_counts=FOLD_A_SIZES if self.replicate == "A" else {})

    @property
    def _wilds_options(self) -> dict[str, Any]:
        return {"fold": self.replicate}

    def open_image(self, value: Any) -> Any:
        """Float32 [8, H, W] of the path of a .npz file, or of nested lists."""
        return read_bands(value)

    def _from_hub(self, folder: Path | None) -> DatasetDict:
        if self.replicate != "A":
            raise ValueError(f"fold: the Hub has fold 'A' alone, got {self.replicate!r}. Read others from files.")
        splits = hub_splits(INFO, folder, SPLITS, ("image", "wealthpooled", "country", "urban"))
        for name, rows in splits.items():
            # Its `label` is `wealthpooled` cut to whole numbers.
            rows = rows.remove_columns([column for column in ("label",) if column in rows.column_names])
            labels = np.asarray(rows["wealthpooled"][:], dtype=np.float64)
            if not np.isfinite(labels).all():
                row = int(np.flatnonzero(~np.isfinite(labels))[0])
                raise ValueError(f"{HUB.id}: column 'wealthpooled': expected a number, got NaN in {name} row {row}.")
            splits[name] = rows.rename_column("wealthpooled", "label").cast_column("label", FEATURES["label"])
        for name in ("country", "urban"):
            if not isinstance(splits["train"].features[name], ClassLabel):
                splits = _as_classes(splits, name)
        return splits

    def _check(self, folder: Path) -> None:
        path = folder / self.metadata
        table = read_csv(INFO, folder, self.metadata, ("country", "urban", "wealthpooled"))
        require_one_of(table, "country", COUNTRIES, path)
        require_one_of(table, "urban", (0, 1), path)
        numbers(table, "wealthpooled", path)

    def _columns(self, dataset: Any) -> tuple[Mapping[str, Any], Features]:
        folder = Path(dataset.data_dir)
        names = [f"images/landsat_poverty_img_{row}.npz" for row in range(len(dataset))]
        values = metadata_of(dataset)
        further = [name for name in FURTHER if name in dataset.metadata.columns]
        columns = {
            "image": require_files(INFO, folder, names),
            "label": dataset.y_array.flatten().numpy(),
            **{name: values[name].astype(np.int64) for name in ("country", "urban")},
            **{name: dataset.metadata[name].to_numpy() for name in further},
        }
        return columns, Features({**FEATURES, **{name: FURTHER[name] for name in further}})

    def _write_demo(self, folder: Path) -> None:
        """Wealth shows in the lights of the night and in how grey the ground is, and in each country a little less."""
        generator = np.random.default_rng(self.seed)
        (folder / "images").mkdir()
        country = generator.integers(0, len(COUNTRIES), DEMO_ROWS + HELD_BACK)
        urban = generator.random(len(country)) < 0.4
        wealth = generator.normal(size=len(country)) * 0.6 + urban * 0.8 - 0.4
        for row, (place, value) in enumerate(zip(country, wealth, strict=True)):
            bands = generator.normal(size=(8, DEMO_SIDE, DEMO_SIDE)).astype(np.float32)
            bands[-1] += value
            bands[:3] += 0.5 * value + 0.1 * (place % 5)
            np.savez(folder / "images" / f"landsat_poverty_img_{row}.npz", x=bands)
        names = np.asarray(COUNTRIES)[country]
        table = {"country": names, "year": generator.integers(2009, 2017, len(country)), "urban": urban}
        pd.DataFrame({**table, "wealthpooled": wealth}).to_csv(folder / self.metadata, index=False)


def _as_classes(splits: DatasetDict, column: str) -> DatasetDict:
    """The column as numbers of our classes: of names, or of zeros and ones."""
    feature = FEATURES[column]
    places: dict[Any, int] = {name: place for place, name in enumerate(feature.names)}
    places |= {place: place for place in range(len(feature.names))} if column == "urban" else {}
    for name, rows in splits.items():
        values = rows[column][:]
        unknown = [row for row, value in enumerate(values) if value not in places]
        if unknown:
            raise ValueError(
                f"{INFO.name}: column {column!r}: expected one of {list(feature.names)[:10]}, got "
                f"{values[unknown[0]]!r} in {name} row {unknown[0]}."
            )
        splits[name] = rows.remove_columns([column]).add_column(
            column, [places[value] for value in values], feature=feature
        )
    return splits
