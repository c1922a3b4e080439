"""The groups of evaluation sets, which may differ from those of the training set."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hf_cgd.data.by_dataset import ByDataset
from hf_cgd.data.columns import Column, column_names, read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.training_groups import is_stream, with_class_names
from hf_cgd.monitors import GroupRobustWarning


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
        self.are_of_training = training is not None and not self.overlapping and training.columns == self.columns
        """Whether these are the training groups (and what evaluation sets add), which have counts and weights."""
        self._known: GroupInfo | None = None
        self._columns_of: ByDataset[list[str] | None] = ByDataset()
        if self.overlapping:
            self._known = GroupInfo(self.columns, None, self.columns)
        elif training is not None and self.are_of_training:
            self._known = replace(training, counts=None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all groups so far; group ids are indices into this."""
        return () if self._known is None else self._known.names

    def add(self, dataset: Any, read: Mapping[str, Column] | None = None) -> GroupInfo | None:
        """Add the groups of an evaluation set.

        Args:
            dataset: any dataset of rows.
            read: its group columns, if they have been read already.

        Returns:
            what its collator encodes by; None where no groups are known.

        Raises:
            ValueError: values that cannot name a group, or subgroup columns that hold more than zeros and ones.
        """
        names = list(read) if read else self._names_of(dataset) or []
        if self.overlapping:
            _require_zeros_and_ones(dataset, [name for name in self.columns if name in names], read)
            return self._known
        if not self.columns or not all(column in names for column in self.columns):
            return self._known
        if is_stream(dataset):
            return self._known and with_class_names(self._known, dataset)
        if len(dataset) == 0:
            return self._known
        trained = {} if self._known is None else self._known.class_names
        columns = read or read_columns(dataset, self.columns)
        found = GroupInfo.from_columns(
            {name: columns[name].with_class_names(trained.get(name)) for name in self.columns}
        )
        known = replace(found, counts=None) if self._known is None else self._known.extended(found.names)
        self._known = known
        return replace(known, class_names={**known.class_names, **found.class_names})

    def warn_of_missing(self, dataset: Any, where: str) -> None:
        """Warn of an evaluation set without the columns, which can only be evaluated as a whole.

        `where` is what it is: "evaluation set 'test'".
        """
        if not self.covers(dataset):
            warnings.warn(
                f"The {where} has no column {', '.join(map(repr, self.missing_in(dataset)))}, so it is evaluated as a "
                f"whole, and no group of it is reported. It has {self._names_of(dataset)}. Keep the column through "
                "map() and remove_columns().",
                GroupRobustWarning,
                stacklevel=2,
            )

    def covers(self, dataset: Any) -> bool:
        """Whether an evaluation set has the columns; True where only reading an example could tell."""
        return not self.missing_in(dataset)

    def missing_in(self, dataset: Any) -> list[str]:
        """The columns that an evaluation set does not have."""
        if is_stream(dataset) or len(dataset) == 0:
            return []
        names = self._names_of(dataset)
        return [] if names is None else [name for name in self.columns if name not in names]

    def _names_of(self, dataset: Any) -> list[str] | None:
        """The columns of a dataset; looking at an example may be dear, so that is done once."""
        return self._columns_of.of(dataset, column_names)

    def ids_of(self, groups: GroupInfo, read: Mapping[str, Column]) -> np.ndarray | None:
        """Group ids of whole columns [N], or memberships [N, K]; None where not all columns are there."""
        if self.overlapping:
            size = len(next(iter(read.values())))
            factors = [read[name].factors if name in read else None for name in self.columns]
            columns = [np.zeros(size) if one is None else np.asarray(one[0])[one[1]] for one in factors]
            return np.stack(columns, axis=1).astype(np.int64)
        return groups.encode_columns(read) if all(name in read for name in self.columns) else None


def _require_zeros_and_ones(dataset: Any, columns: Sequence[str], read: Mapping[str, Column] | None) -> None:
    if is_stream(dataset):
        return
    read = read or read_columns(dataset, columns)
    for name in columns:
        bad = [value for value in read[name].factors[0] if isinstance(value, float) or value not in (0, 1)]
        if bad:
            raise ValueError(
                f"Several eval_group_column entries stand for subgroups, one 0/1 column each, but {name!r} holds "
                f"{bad[0]!r}. Name a single column to group by its values, or turn it into 0/1 columns."
            )
