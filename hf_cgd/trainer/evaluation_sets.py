"""Evaluation sets as they are read, each once: their labels checked, their groups known, the ids of their rows."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hf_cgd.data.attached import RowsWithGroups, ids_by_row, reads_columns, rows_tell
from hf_cgd.data.by_dataset import ByDataset
from hf_cgd.data.columns import Column
from hf_cgd.data.evaluation_groups import EvaluationGroups
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.training_groups import is_stream, read_with_labels, stored_labels
from hf_cgd.trainer.label_setup import LabelSetup


class ReadSet(NamedTuple):
    """What is known of an evaluation set.

    Attributes:
        groups: what its collator encodes by; None where no groups are known.
        ids: groups of the rows, [N] or [N, K], where a reader's rows do not tell them; None where they do.
        ids_of_columns: groups of the rows, [N], where they can stand in for the group columns; None elsewhere.
    """

    groups: GroupInfo | None
    ids: np.ndarray | None = None
    ids_of_columns: np.ndarray | None = None


class EvaluationSets:
    """Reads evaluation sets, each when it is first asked for.

    Args:
        groups: those that are known, to which each set adds its own.
        labels: checks those of each set.
    """

    def __init__(self, groups: EvaluationGroups, labels: LabelSetup) -> None:
        self.groups = groups
        self._labels = labels
        self._read_sets: ByDataset[ReadSet] = ByDataset()

    def read(
        self, dataset: Any, where: str = "evaluation dataset", columns: Mapping[str, Column] | None = None
    ) -> ReadSet:
        """What is known of a set.

        Args:
            dataset: any dataset of rows.
            where: what it is, for messages.
            columns: its columns, if they have been read already.

        Raises:
            ValueError: labels or groups that do not fit.
        """
        return self._read_sets.of(dataset, lambda dataset: self._read(dataset, where, columns))

    def with_ids(self, dataset: Any) -> Any:
        """The set; with ids by row index where a reader's rows do not tell their group (see `RowsWithGroups`)."""
        ids = self.read(dataset).ids
        return dataset if ids is None else RowsWithGroups(dataset, ids)

    def without_columns(self, dataset: Any, hidden: list[str], needed: Callable[[Any], Any]) -> Any:
        """A set whose rows hold their ids in place of group columns, which then need not be read.

        Args:
            dataset: as the user gave it. It is handed on as it is where its columns are wanted, or save no time.
            hidden: the group columns that no model takes.
            needed: gives a data set with the columns that are needed, those of the groups among them.
        """
        ids = self.read(dataset).ids_of_columns if reads_columns(dataset) else None
        if ids is None:
            return dataset
        rest = needed(dataset)
        present = [name for name in rest.column_names if name in hidden]
        if not present or len(present) == len(rest.column_names):
            return dataset
        return RowsWithGroups(rest.remove_columns(present), ids)

    def _read(self, dataset: Any, where: str, read: Mapping[str, Column] | None) -> ReadSet:
        if is_stream(dataset) or len(dataset) == 0:
            return ReadSet(self.groups.add(dataset))
        columns, labels = self.groups.columns, self._labels.columns
        if read is None or not set(columns) <= set(read):
            read = read_with_labels(dataset, columns, labels) if columns else stored_labels(dataset, labels)
        self._labels.check(dataset, read, where)
        groups = self.groups.add(dataset, read)
        if groups is None:
            return ReadSet(None)
        present = [name for name in columns if name in read]
        if present and not rows_tell(dataset, read, present):
            ids = self.groups.ids_of(groups, read)
            return ReadSet(groups, None if ids is None else ids_by_row(ids, read[present[0]], len(dataset)))
        ids = self.groups.ids_of(groups, read) if reads_columns(dataset) and not self.groups.overlapping else None
        return ReadSet(groups, None, None if ids is None else ids.astype(np.min_scalar_type(-len(groups))))
