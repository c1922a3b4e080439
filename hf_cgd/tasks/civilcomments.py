"""CivilComments-WILDS: is a comment toxic, whoever it speaks of?

Comments of Borkan et al. (2019) in the setting of WILDS (Koh et al., 2021). A comment is toxic, and mentions an
identity, where at least half of those who read it say so. Training groups are label x black (4). Evaluation is over 16
subgroups, eight identities x label, which overlap: a comment may mention several identities or none. The metric is the
accuracy of the worst of them.

Other work groups by "any identity x label", or gives a comment with two identities twice: their numbers differ.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import ClassLabel, DatasetDict, Features, Value

from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.tasks.base import HubData, Hyperparameters, Published, Task, TaskInfo, WildsData
from hf_cgd.tasks.hub_source import hub_splits
from hf_cgd.tasks.paper import ON_WILDS
from hf_cgd.tasks.raw_files import base_folder, by_split, numbers, read_csv
from hf_cgd.tasks.wilds_source import metadata_of, split_names, wilds_dataset

LABELS = ("non-toxic", "toxic")
IDENTITIES = ("male", "female", "LGBTQ", "christian", "muslim", "other_religions", "black", "white")
AUXILIARY = ("identity_any", "severe_toxicity", "obscene", "threat", "insult", "identity_attack", "sexual_explicit")
SUBGROUPS = {f"{identity} {label}": (identity, code) for identity in IDENTITIES for code, label in enumerate(LABELS)}
"""Columns of zeros and ones: the 16 groups of evaluation, and what makes them."""
CUT = 0.5
"""The share of readers from which on something counts."""
FILE = "all_data_with_identities.csv"
SPLIT_NAMES = {"train": "train", "val": "validation", "test": "test"}
FOLDERS = ("civilcomments_v1.0",)
MOST_TOKENS = 300
DEMO_SIZES = {"train": 1500, "val": 500, "test": 500}

DISTILBERT = {
    "model": "distilbert-base-uncased", "optim": "adamw_torch", "learning_rate": 1e-5, "weight_decay": 0.01,
    "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "per_device_train_batch_size": 16, "num_train_epochs": 5,
    "max_length": MOST_TOKENS,
}  # fmt: skip
SAMPLED = {name: {"group_sampling": "weighted"} for name in ("group_dro", "cgd")} | {
    "irm": {"penalty_weight": 1.0, "group_sampling": "balanced"},
    "coral": {"penalty_weight": 10.0, "group_sampling": "balanced"},
}
"""Groups drawn equally often, with replacement; for penalties as many of each in every batch."""

INFO = TaskInfo(
    name="civilcomments",
    group_columns=("label", "black"),
    evaluation_group_columns=tuple(SUBGROUPS),
    label_names=LABELS,
    metric="worst_group_accuracy",
    splits=("train", "validation", "test"),
    sources=("hub", "wilds", "files", "demo"),
    licence="CC0",
    citation="Borkan, Dixon, Sorensen, Thain, Vasserman: Nuanced metrics for measuring unintended bias with real data "
    "for text classification. WWW 2019. Setting: Koh, Sagawa et al.: WILDS. ICML 2021.",
    hub=HubData("pietrolesci/civilcomments-wilds", "raw", "c227534cc0a34cf21db6a0bf0edd0f9050c8b305"),
    wilds=WildsData("civilcomments", SPLIT_NAMES),
    layout=f"{FILE}, with comment_text, split, toxicity, {', '.join(IDENTITIES)} and {', '.join(AUXILIARY)}.",
    places=(
        "the wilds package: wilds.get_dataset('civilcomments', root_dir=…, download=True)",
        "https://huggingface.co/datasets/pietrolesci/civilcomments-wilds (config raw)",
        "https://huggingface.co/datasets/shlomihod/civil-comments-wilds (the file itself)",
    ),
    split_counts={"train": 269038, "validation": 45180, "test": 133782},
    size="448,000 comments, of which 269,038 train; 0.1 GB packed",
    search=replace(ON_WILDS, seeds=5),
    hyperparameters={
        "paper": Hyperparameters(DISTILBERT, SAMPLED),
        "wilds1.2": Hyperparameters(DISTILBERT, SAMPLED),
        # With one group in a batch, its default from version 2 on, CORAL's penalty is zero; that is not done here.
        "wilds2.0": Hyperparameters(DISTILBERT, SAMPLED),
        "demo": Hyperparameters({
            "optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.0, "per_device_train_batch_size": 64,
            "per_device_eval_batch_size": 250, "num_train_epochs": 4, "max_length": 32, "lr_scheduler_type": "linear",
            "save_strategy": "no", "load_best_model_at_end": False,
        }, {**SAMPLED, "coral": {"penalty_weight": 1.0, "group_sampling": "balanced"}}),
    },
    published={
        # Table 4: per cent, five seeds.
        "paper": Published(
            ("worst_group_accuracy",),
            {
                "coral": ("65.6 (1.3)",),
                "irm": ("66.3 (2.1)",),
                "erm": ("56.0 (3.6)",),
                "group_dro": ("70.0 (2.0)",),
                "cgd": ("69.1 (1.9)",),
            },
        )
    },
)  # fmt: skip

MENTIONED = ClassLabel(names=["no", "yes"])
FEATURES = Features(
    {"text": Value("string"), "label": ClassLabel(names=list(LABELS))}
    | dict.fromkeys((*IDENTITIES, *AUXILIARY), MENTIONED)
    | dict.fromkeys(SUBGROUPS, Value("int8"))
)


@dataclass(frozen=True, kw_only=True)
class CivilComments(Task):
    """CivilComments-WILDS; `seed` is that of made-up data alone."""

    name = INFO.name

    @property
    def info(self) -> TaskInfo:
        """The same in all settings."""
        return INFO

    def _from_hub(self, folder: Path | None) -> DatasetDict:
        wanted = ("comment_text", "split", "toxicity", *IDENTITIES, *AUXILIARY)
        rows = hub_splits(INFO, folder, {"train": "train"}, wanted)["train"]
        return _splits(rows.select_columns(list(wanted)).to_pandas(), folder or Path(INFO.hub.id if INFO.hub else ""))

    def _from_wilds(self, root: Path) -> DatasetDict:
        dataset = wilds_dataset(INFO, root)
        metadata = metadata_of(dataset)
        texts = list(dataset._text_array)
        if not all(isinstance(text, str) for text in texts):
            # The package takes a comment like "NA", or an empty one, for a missing one.
            table = read_csv(INFO, Path(dataset.data_dir), FILE, ("comment_text",), keep_default_na=False)
            texts = table["comment_text"].tolist()
        columns: dict[str, Any] = {"text": texts, "label": metadata["y"]} | {
            name: metadata[name] for name in (*IDENTITIES, *AUXILIARY)
        }
        split = np.asarray(dataset.split_array).astype(np.int64)
        return by_split(_with_subgroups(columns), split, split_names(INFO, dataset), FEATURES, dataset.data_dir)

    def _from_files(self, folder: Path) -> DatasetDict:
        folder = base_folder(INFO, folder, FILE, FOLDERS)
        figures = ("toxicity", *IDENTITIES, *AUXILIARY)
        wanted = ("comment_text", "split", *figures)
        # "NA" and "null" are comments, not missing ones.
        table = read_csv(
            INFO, folder, FILE, wanted, usecols=lambda name: name in wanted, keep_default_na=False,
            na_values={name: ["", "NaN", "nan"] for name in figures},
        )  # fmt: skip
        return _splits(table, folder / FILE)

    def _write_demo(self, folder: Path) -> None:
        """Toxic comments have a rude word; in training an identity goes along with toxicity as well."""
        generator = np.random.default_rng(self.seed)
        rows = []
        for split, size in DEMO_SIZES.items():
            for _ in range(size):
                toxic = generator.random() < 0.3
                shares = dict.fromkeys(IDENTITIES, 0.0)
                identity = str(generator.choice(IDENTITIES))
                if generator.random() < (0.8 if toxic else 0.3):
                    shares[identity] = round(float(generator.uniform(0.5, 1)), 2)
                words = [str(word) for word in generator.choice(("the", "a", "bus", "tax", "river", "vote"), 5)]
                words += [name.lower() for name, share in shares.items() if share >= CUT]
                words += (
                    [str(generator.choice(("stupid", "idiot", "trash")))] if toxic and generator.random() < 0.9 else []
                )
                toxicity = generator.uniform(0.5, 1) if toxic else generator.uniform(0, 0.49)
                rest = dict.fromkeys(AUXILIARY, 0.0) | {"identity_any": max(shares.values())}
                text = " ".join(generator.permutation(words))
                rows.append({"comment_text": text, "split": split, "toxicity": toxicity, **shares, **rest})
        pd.DataFrame(rows).to_csv(folder / FILE)


def _splits(table: pd.DataFrame, where: Path) -> DatasetDict:
    label = numbers(table, "toxicity", where) >= CUT
    columns: dict[str, Any] = {"text": table["comment_text"].tolist(), "label": label.astype(np.int64)}
    for name in (*IDENTITIES, *AUXILIARY):
        shares = pd.to_numeric(table[name], errors="coerce").to_numpy(dtype=np.float64)
        if np.isnan(shares).any():
            warnings.warn(
                f"{where}: column {name!r} has no number in {int(np.isnan(shares).sum()):,} rows, which count as not "
                "mentioning it, as in the wilds package.",
                GroupRobustWarning,
                stacklevel=4,
            )
        columns[name] = (shares >= CUT).astype(np.int64)
    return by_split(_with_subgroups(columns), table["split"].to_numpy(dtype=object), SPLIT_NAMES, FEATURES, where)


def _with_subgroups(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns and those of `SUBGROUPS`."""
    label = np.asarray(columns["label"])
    return columns | {
        name: ((np.asarray(columns[identity]) == 1) & (label == code)).astype(np.int8)
        for name, (identity, code) in SUBGROUPS.items()
    }
