"""From a dataset to its groups, with every check that can be made before the first step."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.utils.data

from hf_cgd.columns import Column, class_names_of, column_names, read_columns
from hf_cgd.groups import GroupInfo
from hf_cgd.guard_rails import GroupRobustWarning

LABEL_COLUMNS = ("labels", "label", "label_ids")


def is_stream(dataset: Any) -> bool:
    """Whether the dataset can only be iterated (`datasets.IterableDataset` is one of torch's too)."""
    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__")


def training_groups(
    dataset: Any, columns: Sequence[str], given: GroupInfo | None, min_group_size: int
) -> tuple[GroupInfo, np.ndarray | None]:
    """Groups of a training set and the group id of each example, [N]; None for a stream.

    Args:
        dataset: map-style, or a stream, for which the groups must be `given`.
        columns: the group column, or several to cross.
        given: groups that the user has counted; None to count here.
        min_group_size: smallest group that is accepted.

    Raises:
        ValueError: an empty dataset, a missing column, values that cannot name a group, or too small a group.
    """
    if is_stream(dataset):
        if given is None:
            raise ValueError(
                f"The groups of a stream ({type(dataset).__name__}) cannot be counted before training: pass "
                "groups=GroupInfo(names, counts) with the training examples of each group, or a map-style dataset."
            )
        return replace(given, columns=tuple(columns)), None
    if len(dataset) == 0:
        raise ValueError("The training dataset is empty: expected at least one example for each group.")
    require_columns(dataset, columns, "training", "group_column")
    read = read_columns(dataset, columns)
    groups = GroupInfo.from_columns(read)
    if given is not None:
        groups = replace(given, columns=tuple(columns), class_names={**groups.class_names, **given.class_names})
    small = [f"{n} ({c})" for n, c in zip(groups.names, groups.counts or (), strict=False) if c < min_group_size]
    if small:
        raise ValueError(
            f"Every training group needs at least {min_group_size} examples, but these have fewer: "
            f"{', '.join(small[:20])}. Check the group column(s) {list(columns)} for typing errors or ids, "
            "merge or drop small groups, or lower min_group_size."
        )
    if len(groups) == 1:
        warnings.warn(
            f"All training examples are in one group, {groups.names[0]!r}: every objective is then ERM.",
            GroupRobustWarning,
            stacklevel=2,
        )
    return groups, groups.encode_columns(read)


def evaluation_groups(dataset: Any, known: GroupInfo) -> GroupInfo:
    """`known` groups followed by those that only this evaluation set has; its own class names, where it has any.

    A stream, or a set without the columns, adds none.
    """
    names = column_names(dataset)
    if names is None or not all(column in names for column in known.columns):
        return known
    if is_stream(dataset):
        own = {c: classes for c in known.columns if (classes := class_names_of(dataset, c))}
        return replace(known, class_names={**known.class_names, **own})
    if len(dataset) == 0:
        return known
    read = {
        name: Column(column.values, column.class_names or known.class_names.get(name))
        for name, column in read_columns(dataset, known.columns).items()
    }
    found = GroupInfo.from_columns(read)
    return known.extended(found.names, found.class_names)


def require_subgroup_columns(dataset: Any, columns: Sequence[str]) -> None:
    """Raise a ValueError unless every column that the (map-style) dataset has holds zeros and ones or bools only."""
    present = [name for name in columns if name in (column_names(dataset) or ())]
    if is_stream(dataset):
        return
    for name, column in read_columns(dataset, present).items():
        bad = [value for value in column.values if isinstance(value, float) or value not in (0, 1)]
        if bad:
            raise ValueError(
                f"Several eval_group_column entries stand for subgroups, one 0/1 column each, but {name!r} holds "
                f"{bad[0]!r}. Name a single column to group by its values, or turn it into 0/1 columns."
            )


def require_columns(dataset: Any, columns: Sequence[str], kind: str, option: str) -> None:
    """Raise a ValueError that names the columns there are unless all `columns` are among them."""
    names = column_names(dataset)
    if names is None:
        raise ValueError(
            f"The {kind} dataset ({type(dataset).__name__}) must yield dicts with the column(s) {list(columns)}, but "
            f"yields {type(dataset[0]).__name__}."
        )
    missing = [name for name in columns if name not in names]
    if missing:
        hidden = [name for name in missing if name in (getattr(dataset, "column_names", None) or ())]
        hint = f" (set_format hides {hidden}: call dataset.reset_format() or list them)" if hidden else ""
        raise ValueError(
            f"The {kind} dataset has no column {', '.join(map(repr, missing))}{hint}. It has {names}. Set {option} to "
            "the column that tells an example's group, and keep it through map() and remove_columns()."
        )


def require_valid_labels(dataset: Any, num_classes: int) -> None:
    """Raise a ValueError that names the row of the first label of a map-style dataset outside [0, num_classes)."""
    names = column_names(dataset) or []
    column = next((name for name in LABEL_COLUMNS if name in names), None)
    if column is None or is_stream(dataset) or len(dataset) == 0:
        return
    values = read_columns(dataset, [column])[column].values
    if not all(isinstance(value, (int, np.integer)) or getattr(value, "ndim", None) == 0 for value in values):
        if any(value is None for value in values):
            raise ValueError(f"Column {column!r}, row {values.index(None)}: expected a class, got None.")
        return
    labels = np.asarray([int(value) for value in values])
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise ValueError(
            f"Column {column!r}, row {wrong[0]}: expected a class in 0..{num_classes - 1}, got {labels[wrong[0]]} "
            f"({len(wrong)} such rows). Build the model with num_labels={labels.max() + 1}, or correct the labels."
        )
