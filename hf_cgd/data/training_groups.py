"""From a dataset to its groups, with every check that can be made before the first step."""

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import torch.utils.data

from hf_cgd.data.attached import parts_of
from hf_cgd.data.columns import Column, class_names_of, column_names, read_columns, require_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.values import group_name
from hf_cgd.monitors import GroupRobustWarning

MOST_COMBINATIONS = 10_000
"""Combinations of classes that are looked through for the names of a stream's groups."""
SHOWN_GROUPS = 20
"""Groups that a message lists."""
IGNORED = -100
"""The label of an example that has no class."""


def is_stream(dataset: Any) -> bool:
    """Whether the dataset can only be iterated (`datasets.IterableDataset` is one of torch's too)."""
    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__")


def training_columns(dataset: Any, columns: Sequence[str], label_columns: Sequence[str]) -> dict[str, Column]:
    """The group columns of a map-style training set, and the first of `label_columns` that it has, read in one go.

    Raises:
        ValueError: an empty dataset, or a missing group column.
    """
    if len(dataset) == 0:
        raise ValueError("The training dataset is empty: expected at least one example for each group.")
    advice = "Set it to the column that tells an example's group, and keep that through map() and remove_columns()."
    require_columns(dataset, columns, "group_column", "training dataset", advice)
    return read_with_labels(dataset, columns, label_columns)


def read_with_labels(dataset: Any, columns: Sequence[str], label_columns: Sequence[str]) -> dict[str, Column]:
    """Those of the columns that a map-style dataset has, and the first of `label_columns` that it has."""
    names = column_names(dataset) or []
    label = next((name for name in label_columns if name in names), None)
    wanted = [name for name in columns if name in names] + ([label] if label else [])
    return read_columns(dataset, wanted) if wanted else {}


def stored_labels(dataset: Any, label_columns: Sequence[str]) -> dict[str, Column]:
    """The labels of a dataset whose columns can be read without its rows; nothing of any other."""
    if dataset is None or is_stream(dataset) or not all(isinstance(p, datasets.Dataset) for p in parts_of(dataset)):
        return {}
    return read_with_labels(dataset, [], label_columns)


def training_groups(
    read: Mapping[str, Column],
    columns: Sequence[str],
    given: GroupInfo | None,
    min_group_size: int,
    classes: Column | None = None,
) -> tuple[GroupInfo, np.ndarray]:
    """Groups of a training set and the group id of each example, [N].

    Args:
        read: columns of the dataset.
        columns: the group column, or several to cross.
        given: groups that the user has counted; None to count here.
        min_group_size: smallest group that is accepted, in examples that have a label.
        classes: the labels, where they are classes: an example of class `IGNORED` is not counted. None: all are.

    Raises:
        ValueError: values that cannot name a group, a group that is not among the given ones, or too small a group.
    """
    of_groups = {name: read[name] for name in columns}
    groups = GroupInfo.from_columns(of_groups)
    if given is not None:
        groups = replace(given, columns=tuple(columns), class_names={**groups.class_names, **given.class_names})
    ids = groups.encode_columns(of_groups)
    counts = groups.counts
    if given is None and classes is not None:
        different, codes = classes.factors
        has_label = np.asarray([not _is_ignored(value) for value in different])[codes]
        counts = tuple(np.bincount(ids[has_label], minlength=len(groups)).tolist())
    labelled = "" if counts == groups.counts else " with a label"
    small = [f"{n} ({c})" for n, c in zip(groups.names, counts or (), strict=False) if c < max(min_group_size, 1)]
    if small:
        more = f" and {len(small) - SHOWN_GROUPS:,} more" if len(small) > SHOWN_GROUPS else ""
        raise ValueError(
            f"Every training group needs at least {max(min_group_size, 1)} examples{labelled}, but these have fewer: "
            f"{', '.join(small[:SHOWN_GROUPS])}{more}. Check the group column(s) {list(columns)} for typing errors or "
            "ids, merge or drop small groups, or lower min_group_size."
        )
    if len(groups) == 1:
        warnings.warn(
            f"All training examples are in one group, {groups.names[0]!r}: every objective is then ERM.",
            GroupRobustWarning,
            stacklevel=2,
        )
    return replace(groups, counts=counts), ids


def stream_groups(dataset: Any, columns: Sequence[str], given: GroupInfo | None) -> GroupInfo:
    """Groups of a stream: those that were given, since it cannot be counted before training.

    Raises:
        ValueError: none were given.
    """
    if given is None:
        raise ValueError(
            f"The groups of a stream ({type(dataset).__name__}) cannot be counted before training: pass "
            "groups=GroupInfo(names, counts) with the training examples of each group, or a map-style dataset."
        )
    return with_class_names(replace(given, columns=tuple(columns)), dataset)


def with_class_names(groups: GroupInfo, dataset: Any) -> GroupInfo:
    """Groups that know the names of the classes of a stream, unless they are called by the numbers of these."""
    columns = groups.columns
    own = {name: names for name in columns if (names := class_names_of(dataset, name))}
    named = replace(groups, class_names={**groups.class_names, **own})
    parts = [own.get(name, ()) for name in columns]
    if not own or groups.class_names or math.prod(map(len, parts)) > MOST_COMBINATIONS:
        return named
    numbers = {
        group_name(columns, [str(i) for i in key]) for key in itertools.product(*(range(len(p)) for p in parts))
    }
    return groups if set(groups.names) <= numbers - set(itertools.chain(*parts)) else named


def count_classes(
    objective: str, name: str, column: Column, group_ids: np.ndarray, num_groups: int
) -> tuple[tuple[int, ...], ...]:
    """Training examples of each class in each group, [C, K]; C is the largest label plus one.

    Args:
        objective: its name, for the message.
        name: that of the column.
        column: a class for each example.
        group_ids: [N] integers in [0, K).
        num_groups: K.

    Raises:
        ValueError: labels that are not single integers >= 0.
    """
    different, codes = column.factors
    bad = [value for value in different if not _is_class(value)]
    if bad:
        raise ValueError(
            f"objective={objective!r} compares the groups within each class: expected one integer >= 0 per example in "
            f"column {name!r}, got {bad[0]!r}. Use another objective for regression and multi-label problems."
        )
    labels = np.asarray([int(value) for value in different])[codes]
    labelled = labels != IGNORED
    counts = np.zeros((max(labels.max(), 0) + 1, num_groups), dtype=np.int64)
    np.add.at(counts, (labels[labelled], group_ids[labelled]), 1)
    return tuple(map(tuple, counts.tolist()))


def _is_ignored(value: Any) -> bool:
    number = np.asarray(value).reshape(-1)
    return number.size == 1 and number.dtype.kind == "i" and bool(number[0] == IGNORED)


def _is_class(value: Any) -> bool:
    dtype = str(getattr(value, "dtype", type(value).__name__))
    is_integer = np.size(value) == 1 and not isinstance(value, list) and any(kind in dtype for kind in ("int", "bool"))
    return is_integer and (int(value) >= 0 or int(value) == IGNORED)
