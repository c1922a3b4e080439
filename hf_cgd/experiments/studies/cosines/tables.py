"""Tables of numbers as settings of the study: real data, with groups that are in it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from hf_cgd.experiments.studies.cosines.data import Split, StudyTask, first_layers, with_ones

SHARES = {"train": 0.6, "validation": 0.2, "test": 0.2}
HIDDEN = 16
SMALLEST_GROUP = 20
"""Examples of a group, over all splits, below which a group says nothing about itself."""


SPOILT_SHARE = 0.8
"""Of the training labels of a spoilt group, this share is drawn at random."""


def read_table(
    path: str | Path, label: str, groups: Sequence[str], leave_out: Sequence[str] = (), rows: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Features [N, D], labels [N], group ids [N] and the K names of the groups, from a CSV file of numbers.

    Args:
        path: the file.
        label: column of the classes.
        groups: columns whose values, crossed, are the groups; "label" among them stands for the classes. They are
            features as well, but for the label.
        leave_out: columns that are no features, as those that tell the label in other words.
        rows: take so many at random, the same at every call; None for all.

    Raises:
        ValueError: a column that is not there or holds something else than numbers, or too small a group.
    """
    table = pd.read_csv(path, dtype=float)
    missing = [name for name in (label, *groups, *leave_out) if name not in table.columns and name != "label"]
    if missing or table.isna().to_numpy().any():
        raise ValueError(
            f"{path}: expected numbers in every cell and the columns {', '.join(missing) or label}. It has "
            f"{', '.join(map(str, table.columns[:20]))}. Name others, or fill its empty cells."
        )
    if rows is not None:
        table = table.sample(min(rows, len(table)), random_state=0)
    labels = np.unique(table[label], return_inverse=True)[1]
    values = [labels if name == "label" else table[name].astype(int).to_numpy() for name in groups]
    kinds, ids = np.unique(np.stack(values, axis=1), axis=0, return_inverse=True)
    names = [" ".join(f"{column}:{value}" for column, value in zip(groups, kind, strict=True)) for kind in kinds]
    counts = np.bincount(ids.ravel())
    if counts.min() < SMALLEST_GROUP:
        raise ValueError(
            f"{path}: expected {SMALLEST_GROUP} examples or more in each group, got {counts.min()} in "
            f"{names[int(counts.argmin())]!r}. Choose other columns."
        )
    features = table.drop(columns=[label, *leave_out]).to_numpy(np.float32)
    return features, labels, ids.ravel(), names


def table_task(
    title: str,
    features: np.ndarray,
    labels: np.ndarray,
    group_ids: np.ndarray,
    seeds: Sequence[int],
    watched: tuple[list[int], str],
    hidden: int = HIDDEN,
    spoilt: int | None = None,
) -> StudyTask:
    """A table as a setting: each seed splits the rows anew, and features have mean 0 and deviation 1 in training.

    Each group falls into the splits by the same shares, so that all seeds have groups of the same sizes.

    Args:
        title: for tables and pictures.
        features: [N, D]; labels: [N] in [0, C); group_ids: [N] in [0, K).
        seeds: S of them.
        watched: see `StudyTask`.
        hidden: units of the one hidden layer; 0 for a linear classifier.
        spoilt: a group whose training labels are drawn at random for `SPOILT_SHARE` of its examples; None for none.
    """
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in SHARES}
    for seed in seeds:
        random = np.random.default_rng(seed)
        parts: dict[str, list[np.ndarray]] = {name: [] for name in SHARES}
        for group in range(group_ids.max() + 1):
            rows = random.permutation(np.flatnonzero(group_ids == group))
            ends = np.round(np.cumsum([0, *SHARES.values()]) * len(rows)).astype(int)
            for place, name in enumerate(SHARES):
                parts[name].append(rows[ends[place] : ends[place + 1]])
        for name, rows_of in parts.items():
            drawn[name].append(np.concatenate(rows_of))
    train = np.stack(drawn["train"])
    means = features[train].mean(axis=1, keepdims=True)
    spreads = features[train].std(axis=1, keepdims=True)
    splits = {}
    for name, rows_of in drawn.items():
        rows = np.stack(rows_of)
        scaled = torch.from_numpy((features[rows] - means) / np.where(spreads > 0, spreads, 1)).clamp(-10, 10)
        shown = labels[rows]
        if name == "train" and spoilt is not None:
            for number, seed in enumerate(seeds):
                random = np.random.default_rng(1000 + seed)
                own = np.flatnonzero(group_ids[rows[number]] == spoilt)
                wrong = own[random.random(len(own)) < SPOILT_SHARE]
                shown[number, wrong] = random.integers(0, labels.max() + 1, len(wrong))
        splits[name] = Split(with_ones(scaled), torch.from_numpy(shown), group_ids[rows])
    sizes = [features.shape[1], *([hidden] if hidden else []), int(labels.max()) + 1]
    return StudyTask(title, watched, splits, first_layers(sizes, seeds, torch.float32))
