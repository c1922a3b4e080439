"""The groups of evaluation sets, which may differ from those of the training set."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hf_cgd.data.columns import Column, class_names_of, column_names, read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.training_groups import is_stream
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
        self._added: dict[int, tuple[weakref.ref[Any], GroupInfo | None]] = {}
        if self.overlapping:
            self._known = GroupInfo(self.columns, None, self.columns)
        elif training is not None and self.are_of_training:
            self._known = replace(training, counts=None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all groups so far; group ids are indices into this."""
        return () if self._known is None else self._known.names

    def add(self, dataset: Any) -> GroupInfo | None:
        """Add the groups of an evaluation set, which is read the first time only.

        Returns:
            what its collator encodes by; None where no groups are known.

        Raises:
            ValueError: values that cannot name a group, or subgroup columns that hold more than zeros and ones.
        """
        seen = self._added.get(id(dataset))
        if seen is not None and seen[0]() is dataset:
            return seen[1]
        groups = self._read(dataset)
        # A list of rows cannot be referred to weakly, and is cheap to read again.
        with suppress(TypeError):
            self._added[id(dataset)] = (weakref.ref(dataset), groups)
        return groups

    def add_named(self, datasets: Mapping[str, Any]) -> None:
        """Add the evaluation sets that a trainer is built with.

        Warns of a set without the columns, which can only be evaluated as a whole.

        Raises:
            ValueError: see `add`; the message names the set.
        """
        for name, dataset in datasets.items():
            which = f"The evaluation set {name!r}" if name else "The evaluation set"
            try:
                self.add(dataset)
            except ValueError as error:
                raise ValueError(f"{which}: {error}") from error
            if self.columns and not self.covers(dataset):
                warnings.warn(
                    f"{which} has no column {', '.join(map(repr, self.missing_in(dataset)))}, so it is evaluated as a "
                    "whole, and no group of it is reported. Keep the column through map() and remove_columns().",
                    GroupRobustWarning,
                    stacklevel=2,
                )

    def covers(self, dataset: Any) -> bool:
        """Whether an evaluation set has the columns; True where only reading an example could tell."""
        return not self.missing_in(dataset)

    def missing_in(self, dataset: Any) -> list[str]:
        """The columns that an evaluation set does not have."""
        names = None if is_stream(dataset) or len(dataset) == 0 else column_names(dataset)
        return [] if names is None else [name for name in self.columns if name not in names]

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
