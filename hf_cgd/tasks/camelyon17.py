"""Camelyon17-WILDS: is there a tumour in a patch of tissue, in a hospital that was never seen?

Patches of 96 x 96 pixels of lymph nodes from five hospitals, which stain and scan in their own way (Bandi et al.,
2018; Koh et al., 2021). Training groups are three hospitals; a fourth validates, a fifth tests. The metric is the
average accuracy there, which is one group. The network trains from scratch and has BatchNorm; WILDS finds seeds to
differ by many points.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import ClassLabel, DatasetDict, Features, Image, Value
from PIL import Image as Picture

from hf_cgd.data.image_preparation import ImagePreparation
from hf_cgd.tasks.base import HubData, Hyperparameters, Published, TaskInfo, WildsData
from hf_cgd.tasks.hub_source import hub_splits, in_our_classes, with_our_classes
from hf_cgd.tasks.paper import ON_WILDS
from hf_cgd.tasks.raw_files import codes, images_at, numbers, read_csv, require_files
from hf_cgd.tasks.wilds_source import metadata_of
from hf_cgd.tasks.wilds_task import SAMPLED, WildsTask

LABELS = ("normal", "tumor")
HOSPITALS = range(5)
VALIDATION_HOSPITAL, TEST_HOSPITAL = 1, 2
SPLITS = {"train": "train", "val": "validation", "test": "test", "id_val": "id_validation"}
DEMO_ROWS, DEMO_SIDE = 600, 32

DENSENET = {"model": "densenet121", "pretrained": False, "optim": "sgd", "optim_args": "momentum=0.9",
            "learning_rate": 1e-3, "weight_decay": 0.01, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
            "per_device_train_batch_size": 32}  # fmt: skip
IMAGES = ImagePreparation(resize=(96, 96))

HUB = HubData("wltjr1007/Camelyon17-WILDS", revision="d784d5344ba6c967f83f9f3d9b2f1e2a4d6eb78f")
INFO = TaskInfo(
    name="camelyon17",
    kind="image",
    inputs=("image",),
    group_columns=("hospital",),
    label_names=LABELS,
    metric="accuracy",
    average_metric="accuracy",
    splits=tuple(SPLITS.values()),
    sources=("hub", "wilds", "files", "demo"),
    licence="CC0",
    citation="Bandi et al.: From detection of individual metastases to classification of lymph node status at the "
    "patient level: the CAMELYON17 challenge. IEEE TMI 2018. Splits: Koh et al.: WILDS. ICML 2021.",
    hub=HUB,
    wilds=WildsData("camelyon17", SPLITS),
    layout="metadata.csv (patient, node, x_coord, y_coord, tumor, slide, center, split) and "
    "patches/patient_<p>_node_<n>/patch_patient_<p>_node_<n>_x_<x>_y_<y>.png",
    places=(
        "the wilds package: wilds.get_dataset('camelyon17', root_dir=…, download=True)",
        "https://huggingface.co/datasets/wltjr1007/Camelyon17-WILDS",
    ),
    split_counts={"train": 302436, "validation": 34904, "test": 85054, "id_validation": 33560},
    size="455,954 patches, of which 302,436 train; 10.7 GB packed",
    hyperparameters={
        # The paper says that its network was pretrained; the configuration that it cites trains from scratch.
        "paper": Hyperparameters({**DENSENET, "num_train_epochs": 5}, SAMPLED, IMAGES),
        "wilds1.2": Hyperparameters({**DENSENET, "num_train_epochs": 5}, SAMPLED, IMAGES),
        "wilds2.0": Hyperparameters({**DENSENET, "num_train_epochs": 10}, SAMPLED, IMAGES),
        "demo": Hyperparameters(
            {
                **DENSENET, "model": "test_resnet", "learning_rate": 0.02, "num_train_epochs": 6,
                "per_device_eval_batch_size": 256, "save_strategy": "no", "load_best_model_at_end": False,
            },
            SAMPLED,
            ImagePreparation(resize=(DEMO_SIDE, DEMO_SIDE)),
        ),
    },
    search=replace(ON_WILDS, seeds=10),
    published={
        # Table 4: per cent.
        "paper": Published(
            ("accuracy",),
            {
                "coral": ("59.5 (7.7)",),
                "irm": ("64.2 (8.1)",),
                "erm": ("70.3 (6.4)",),
                "group_dro": ("68.4 (7.3)",),
                "cgd": ("69.4 (7.8)",),
            },
        )
    },
)  # fmt: skip

FEATURES = Features(
    image=Image(), label=ClassLabel(names=list(LABELS)), hospital=Value("int64"), slide=Value("int64"),
    patient=Value("string"), node=Value("int64"), x_coord=Value("int64"), y_coord=Value("int64"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Camelyon17(WildsTask):
    """Camelyon17; `seed` is that of made-up data alone."""

    name = INFO.name
    metadata = "metadata.csv"
    folders = ("camelyon17_v1.0",)
    wilds_class = ("wilds.datasets.camelyon17_dataset", "Camelyon17Dataset")

    @property
    def info(self) -> TaskInfo:
        """The same in all settings."""
        return INFO

    def _from_hub(self, folder: Path | None) -> DatasetDict:
        """Its `validation` holds the patches of the training hospitals and of the fourth one, here taken apart."""
        names = {"train": "train", "validation": "validation", "test": "test"}
        splits = hub_splits(INFO, folder, names, ("image", "label", "center"))
        for name, rows in splits.items():
            values = in_our_classes(rows, "center", list(map(str, HOSPITALS)), f"{folder or HUB.id}, {name} split")
            rows = rows.remove_columns(["center"])
            splits[name] = rows.add_column("hospital", values, feature=FEATURES["hospital"])
        held_out = splits["validation"]
        hospital = np.asarray(held_out["hospital"][:])
        new = hospital == VALIDATION_HOSPITAL
        if not new.any() or new.all():
            raise ValueError(
                f"{HUB.id}: expected patches of hospital {VALIDATION_HOSPITAL} and of others in the validation split, "
                f"got those of {sorted(set(hospital.tolist()))}."
            )
        splits["id_validation"] = held_out.select(np.flatnonzero(~new))
        splits["validation"] = held_out.select(np.flatnonzero(new))
        return with_our_classes(splits, "label", FEATURES["label"], str(folder or HUB.id))

    def _check(self, folder: Path) -> None:
        path = folder / self.metadata
        wanted = ("patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
        table = read_csv(INFO, folder, self.metadata, wanted, dtype={"patient": "str"})
        codes(table, "tumor", range(len(LABELS)), path)
        codes(table, "center", HOSPITALS, path)
        # Those of the hospitals that are held out are set by the package.
        codes(table, "split", (0, 1, 2, 3), path)
        for name in ("node", "x_coord", "y_coord", "slide"):
            numbers(table, name, path)

    def _columns(self, dataset: Any) -> tuple[Mapping[str, Any], Features]:
        values, table = metadata_of(dataset), dataset._metadata_df
        columns = {
            "image": images_at(require_files(INFO, Path(dataset.data_dir), dataset._input_array)),
            "label": values["y"],
            "hospital": values["hospital"],
            **{name: table[name].to_numpy() for name in FEATURES if name in table.columns},
        }
        return columns, FEATURES

    def _write_demo(self, folder: Path) -> None:
        """Tumours are dark spots in the middle; each hospital stains in its own tone, and two of them more."""
        generator = np.random.default_rng(self.seed)
        rows = []
        for number in range(DEMO_ROWS):
            center, tumor, node = number % len(HOSPITALS), int(generator.integers(2)), int(generator.integers(2))
            patient, x, y = f"{4 + 20 * center:03d}", 32 * number, 64 * number
            name = f"patient_{patient}_node_{node}"
            path = folder / "patches" / name / f"patch_{name}_x_{x}_y_{y}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            _stained(center, bool(tumor), generator).save(path)
            # One patch in eight of the training hospitals validates.
            rows.append((patient, node, x, y, tumor, 10 * center + node, center, int(number % 8 == 7)))
        head = ["patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"]
        pd.DataFrame(rows, columns=head).to_csv(folder / self.metadata)


def _stained(center: int, tumor: bool, generator: np.random.Generator) -> Picture.Image:
    values = generator.integers(120, 200, (DEMO_SIDE, DEMO_SIDE, 3))
    values[..., center % 3] += 10 * (center + 1)
    if tumor:
        third = DEMO_SIDE // 3
        values[third:-third, third:-third] -= 60
    return Picture.fromarray(values.clip(0, 255).astype(np.uint8))
