"""The training set as it is read, once and with all checks: its groups, the group of each row, the order of draws."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_cgd.data.attached import RowsWithGroups, ids_by_row, rows_tell
from hf_cgd.data.columns import Column
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.sampling import BalancedGroupSampler, GroupSampler, GroupSampling, WeightedGroupSampler
from hf_cgd.data.training_groups import (
    count_classes,
    is_stream,
    stored_labels,
    stream_groups,
    training_columns,
    training_groups,
)
from hf_cgd.data.weight_sampling import DrawnGroups, GroupWeightSampler
from hf_cgd.objectives import Objective
from hf_cgd.trainer.config import GroupOptions
from hf_cgd.trainer.label_setup import LabelSetup


@dataclass(frozen=True)
class TrainingSet:
    """What is known of a training set.

    Attributes:
        dataset: map-style or a stream; None for a trainer that only evaluates.
        sampling: the order in which its examples are drawn.
        groups: names and counts; None without a group column or a training set.
        ids: group of each row [N], UNKNOWN_GROUP for rows that are None; None without groups, and of a stream.
        rows_tell: whether a reader's rows tell their group.
    """

    dataset: Any
    sampling: GroupSampling = "none"
    groups: GroupInfo | None = None
    ids: np.ndarray | None = None
    rows_tell: bool = True

    @property
    def counts(self) -> dict[str, int] | None:
        """Examples of each group by name, None where they are not known."""
        if self.groups is None or self.groups.counts is None:
            return None
        return dict(zip(self.groups.names, self.groups.counts, strict=True))

    @property
    def draws_by_weight(self) -> bool:
        """Whether groups are drawn in proportion to their weights."""
        return self.sampling == "weights"

    def suits(self, dataset: Any, objective: Objective) -> bool:
        """Whether this was read from that data set and holds all that the objective needs."""
        uncounted = self.groups is not None and self.groups.class_counts is None
        return self.dataset is dataset and not (uncounted and "class_counts" in objective.reads)

    def with_ids(self, dataset: Any) -> Any:
        """The rows of a data set; with ids by row index where they do not tell their group (see `RowsWithGroups`)."""
        return dataset if self.rows_tell or self.ids is None else RowsWithGroups(dataset, self.ids)

    def sampler(
        self,
        batch_size: int,
        seed: int,
        drop_last: bool,
        processes: int,
        batches_of_step: int,
        memory: DrawnGroups | None,
    ) -> GroupSampler | None:
        """The sampler that `group_sampling` asks for, None for the Trainer's own.

        Args:
            batch_size, seed, drop_last, processes: see `GroupSampler`.
            batches_of_step: runs of `batch_size` in an optimizer step, over all processes.
            memory: what drawing by weights remembers; None elsewhere.
        """
        if self.sampling == "none":
            return None
        assert self.ids is not None
        together = {"processes": processes, "step_size": batch_size * batches_of_step}
        if memory is not None:
            return GroupWeightSampler(self.ids, batch_size, seed, drop_last, memory=memory, **together)
        kind = BalancedGroupSampler if self.sampling == "balanced" else WeightedGroupSampler
        return kind(self.ids, batch_size, seed, drop_last, **together)


def read_training_set(
    dataset: Any,
    columns: Sequence[str],
    labels: LabelSetup,
    objective: Objective,
    options: GroupOptions,
    given: GroupInfo | None = None,
) -> tuple[TrainingSet, dict[str, Column]]:
    """Read and check a training set: what is known of it, and the columns that were read.

    Args:
        dataset: map-style or a stream; None for none.
        columns: those of the groups; none for plain ERM.
        labels: checks those of the data set.
        objective: tells whether group sizes matter and whether classes have to be counted.
        options: those of the run.
        given: groups that the user has counted; None to count here.

    Raises:
        ValueError: whatever of the data, the options and the objective does not fit together.
    """
    sampling: GroupSampling = options.group_sampling
    _require_sampling(sampling, dataset, columns, objective)
    if dataset is None or not columns:
        read = stored_labels(dataset, labels.columns)
        labels.check(dataset, read, "training dataset")
        return TrainingSet(dataset), read
    counts_classes = "class_counts" in objective.reads
    if counts_classes and (not labels.may_be_classes or labels.outputs == 1):
        raise ValueError(
            f"objective={objective.name!r} compares predicted probabilities of classes, but this model has "
            f"problem_type {labels.declared!r} and {labels.outputs} output(s). Use 'irm', 'coral' or another "
            "objective for regression and multi-label problems."
        )
    if is_stream(dataset):
        return TrainingSet(dataset, groups=stream_groups(dataset, columns, given)), {}
    read = training_columns(dataset, columns, labels.columns)
    labels.check(dataset, read, "training dataset")
    label = labels.column_in(read)
    classes = read[label] if label is not None and labels.may_be_classes and labels.outputs != 1 else None
    smallest = 1 if objective.plain_mean else options.min_group_size
    groups, ids = training_groups(read, columns, given, smallest, classes)
    if counts_classes and groups.class_counts is None and label is not None:
        counts = count_classes(objective.name, label, read[label], ids, len(groups))
        groups = replace(groups, class_counts=counts)
    ids = ids_by_row(ids, read[columns[0]], len(dataset))
    return TrainingSet(dataset, sampling, groups, ids, rows_tell(dataset, read, columns)), read


def _require_sampling(sampling: GroupSampling, dataset: Any, columns: Sequence[str], objective: Objective) -> None:
    """Raise a ValueError for an order of draws that this training set or objective cannot have."""
    if sampling == "none":
        return
    if sampling == "weights" and not objective.has_weights:
        raise ValueError(
            f"group_sampling='weights' draws groups by their weights, but objective={objective.name!r} has none. "
            "Use 'balanced', or an objective with group weights, such as 'group_dro' or 'cgd'."
        )
    if dataset is None or not columns:
        raise ValueError("group_sampling needs group_column and a train_dataset to balance the groups of.")
    if is_stream(dataset):
        raise ValueError(
            f"group_sampling={sampling!r} needs access by index, which an IterableDataset "
            f"({type(dataset).__name__}) does not have. Use a map-style dataset, or group_sampling='none' "
            "with a stream that is already mixed."
        )
