"""From a dataset to its groups, with every check that can be made before the first step."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
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


def training_columns(dataset: Any, columns: Sequence[str], label_names: Sequence[str]) -> dict[str, Column]:
    """The group columns, and the labels' if there is one, of a map-style training set, read in one go.

    Raises:
        ValueError: an empty dataset, or a missing group column.
    """
    if len(dataset) == 0:
        raise ValueError("The training dataset is empty: expected at least one example for each group.")
    require_columns(dataset, columns, "training", "group_column")
    names = column_names(dataset) or []
    label = next((name for name in (*label_names, *LABEL_COLUMNS) if name in names), None)
    return read_columns(dataset, dict.fromkeys([*columns, *([label] if label else [])]))


def training_groups(
    read: Mapping[str, Column], columns: Sequence[str], given: GroupInfo | None, min_group_size: int
) -> tuple[GroupInfo, np.ndarray]:
    """Groups of a training set and the group id of each example, [N].

    Args:
        read: columns of the dataset.
        columns: the group column, or several to cross.
        given: groups that the user has counted; None to count here.
        min_group_size: smallest group that is accepted.

    Raises:
        ValueError: values that cannot name a group, a group that is not among the given ones, or too small a group.
    """
    of_groups = {name: read[name] for name in columns}
    groups = GroupInfo.from_columns(of_groups)
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
    return groups, groups.encode_columns(of_groups)


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
    return replace(given, columns=tuple(columns))


class EvaluationGroups:
    """The groups that evaluations are reported for: those of the training set, and what each evaluation set adds.

    Args:
        columns: group columns of the training set.
        eval_columns: other columns to evaluate by, or None for the same. Several of them stand for subgroups that may
            overlap, one for each column of zeros and ones.
        training: the training groups, or None without a training set.
    """

    def __init__(self, columns: Sequence[str], eval_columns: Sequence[str] | None, training: GroupInfo | None) -> None:
        self.columns = tuple(eval_columns or columns)
        self.overlapping = eval_columns is not None and len(eval_columns) > 1
        self._known: GroupInfo | None = None
        self._met: dict[int, tuple[weakref.ref[Any], GroupInfo | None]] = {}
        if self.overlapping:
            self._known = GroupInfo(self.columns, None, self.columns)
        elif training is not None and training.columns == self.columns:
            self._known = replace(training, counts=None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all groups met so far; group ids are indices into this."""
        return () if self._known is None else self._known.names

    def meet(self, dataset: Any) -> GroupInfo | None:
        """Take in the groups of an evaluation set; what its collator has to encode by, None if it knows no groups.

        A dataset is read the first time it is met.

        Raises:
            ValueError: values that cannot name a group, or subgroup columns that hold more than zeros and ones.
        """
        seen = self._met.get(id(dataset))
        if seen is not None and seen[0]() is dataset:
            return seen[1]
        groups = self._read(dataset)
        # A list of rows cannot be referred to weakly, and is cheap to read again.
        with suppress(TypeError):
            self._met[id(dataset)] = (weakref.ref(dataset), groups)
        return groups

    def _read(self, dataset: Any) -> GroupInfo | None:
        names = column_names(dataset) or []
        if self.overlapping:
            _require_zeros_and_ones(dataset, [name for name in self.columns if name in names])
            return self._known
        if not self.columns or not all(column in names for column in self.columns):
            return self._known
        if is_stream(dataset):
            own = {c: classes for c in self.columns if (classes := class_names_of(dataset, c))}
            return self._known and replace(self._known, class_names={**self._known.class_names, **own})
        if len(dataset) == 0:
            return self._known
        trained = {} if self._known is None else self._known.class_names
        found = GroupInfo.from_columns(
            {
                name: Column(column.values, column.class_names or trained.get(name))
                for name, column in read_columns(dataset, self.columns).items()
            }
        )
        known = replace(found, counts=None) if self._known is None else self._known.extended(found.names)
        self._known = known
        return replace(known, class_names={**known.class_names, **found.class_names})


def _require_zeros_and_ones(dataset: Any, columns: Sequence[str]) -> None:
    if is_stream(dataset):
        return
    for name, column in read_columns(dataset, columns).items():
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


def count_classes(name: str, column: Column, group_ids: np.ndarray, num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Training examples of each class in each group, [C, K]; C is the largest label plus one.

    Raises:
        ValueError: labels that are not single integers >= 0.
    """
    bad = [value for value in column.values if not _is_integer(value) or int(value) < 0]
    if bad:
        raise ValueError(
            f"objective='pgi' compares the groups within each class: expected one integer >= 0 per example in column "
            f"{name!r}, got {bad[0]!r}. Use another objective for regression and multi-label problems."
        )
    labels = np.asarray([int(value) for value in column.values])
    counts = np.zeros((labels.max() + 1, num_groups), dtype=np.int64)
    np.add.at(counts, (labels, group_ids), 1)
    return tuple(map(tuple, counts.tolist()))


def _is_integer(value: Any) -> bool:
    dtype = str(getattr(value, "dtype", type(value).__name__))
    return getattr(value, "ndim", 0) == 0 and any(kind in dtype for kind in ("int", "bool"))


def require_valid_labels(name: str, column: Column, num_classes: int) -> None:
    """Raise a ValueError that names the row of the first label that is no class in [0, num_classes).

    Labels that are not single integers are left alone: they belong to another kind of problem.
    """
    values = column.values
    if None in values:
        raise ValueError(f"Column {name!r}, row {values.index(None)}: expected a class, got None. Drop such rows.")
    if not all(isinstance(value, (int, np.integer)) or getattr(value, "ndim", None) == 0 for value in values):
        return
    labels = np.asarray([int(value) for value in values])
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise ValueError(
            f"Column {name!r}, row {wrong[0]}: expected a class in 0..{num_classes - 1}, got {labels[wrong[0]]} "
            f"({len(wrong)} such rows). Build the model with num_labels={labels.max() + 1}, or correct the labels."
        )
