"""What a trainer knows about the groups of its data sets: read once, with all checks, before the first step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from hf_cgd.data.collator import GROUP_IDS, GroupCollator, RenamingCollator, SubgroupCollator
from hf_cgd.data.columns import Column, column_names
from hf_cgd.data.evaluation_groups import EvaluationGroups
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.sampling import BalancedGroupSampler, GroupSampler, WeightedGroupSampler
from hf_cgd.data.training_groups import (
    LABEL_COLUMNS,
    count_classes,
    is_stream,
    require_valid_labels,
    stream_groups,
    training_columns,
    training_groups,
)
from hf_cgd.models.example_losses import CLASSIFICATION
from hf_cgd.models.outputs import (
    declared_problem_type,
    forward_parameters,
    num_outputs_of,
    renamed_input,
    require_supported_head,
)
from hf_cgd.objectives import Objective
from hf_cgd.trainer.config import GroupOptions
from hf_cgd.trainer.example_weights import class_weights_of, require_weight_column

Collator = Callable[[list[Any]], Any]


class GroupSetup:
    """Groups of the training set, those of evaluation sets, and how batches come to hold group ids.

    Args:
        train_dataset: map-style or a stream; None for a trainer that only evaluates.
        eval_dataset: one set or several by name; None for none.
        objective: tells whether group sizes matter and whether classes have to be counted.
        model: tells the number of classes and the names of its inputs.
        options: those of the run.
        columns: the group columns of the training set; none for plain ERM.
        labels: columns that hold the targets.
        given: groups that the user has counted; None to count here.

    Raises:
        ValueError: whatever of the data, the options and the model does not fit together.
    """

    def __init__(
        self,
        train_dataset: Any,
        eval_dataset: Any,
        objective: Objective,
        model: nn.Module,
        *,
        options: GroupOptions,
        columns: Sequence[str],
        labels: Sequence[str],
        given: GroupInfo | None = None,
    ) -> None:
        require_supported_head(model)
        if not columns and not objective.plain_mean:
            raise ValueError(
                f"objective={objective.name!r} needs to know the groups: set group_column to the column that tells an "
                "example's group. Only objective='erm' does without."
            )
        self.train_dataset = train_dataset
        self.columns = list(columns)
        self.groups: GroupInfo | None = None
        """Names and counts of the training groups, None without a group column or a training set."""
        self._options = options
        self._label_columns = (*labels, *LABEL_COLUMNS)
        self._model_columns = (*self._label_columns, *forward_parameters(model))
        own_name = len(self.columns) == 1 and self.columns[0] not in self._model_columns
        self.key = self.columns[0] if own_name else GROUP_IDS
        """Batch key of the group ids: the column's own name where there is one and the model has no use for it."""
        self.renamed = self._renamed_input(model, train_dataset if train_dataset is not None else eval_dataset)
        """{column: argument} for a model whose input is not named like a column."""
        self._train_group_ids: np.ndarray | None = None
        self._read(objective, model, given)
        classes = num_outputs_of(model)
        self.class_weights = class_weights_of(options.class_weights, train_dataset, self._label_columns, classes)
        """Weight of each class in the training loss [C]; None for none."""
        require_weight_column(options.example_weight_column, train_dataset)
        self.evaluation = EvaluationGroups(self.columns, options.eval_group_column, self.groups)
        """Groups that evaluations are reported for."""
        if eval_dataset is not None:
            self.evaluation.add_named(eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset})

    @property
    def train_counts(self) -> dict[str, int] | None:
        """Training examples of each group by name, None where they are not known."""
        if self.groups is None or self.groups.counts is None:
            return None
        return dict(zip(self.groups.names, self.groups.counts, strict=True))

    @property
    def counts_of_evaluated(self) -> dict[str, int] | None:
        """The same where the groups that are evaluated are the training groups, else None."""
        return self.train_counts if self.evaluation.are_of_training else None

    def by_name(self, values: Tensor | None) -> dict[str, float] | None:
        """A value of each training group, [K], by name; None for None, and where other groups are evaluated."""
        if values is None or self.groups is None or not self.evaluation.are_of_training:
            return None
        return dict(zip(self.groups.names, values.tolist(), strict=True))

    @property
    def extra_columns(self) -> list[str]:
        """Columns that a dataset has to keep although the model has no argument of their name."""
        return [*self.columns, *self.evaluation.columns, *self.renamed, *self.keys_beside[1:]]

    def suits(self, train_dataset: Any, objective: Objective) -> bool:
        """Whether this was read from that training set and holds all that the objective needs."""
        uncounted = self.groups is not None and self.groups.class_counts is None
        return self.train_dataset is train_dataset and not (uncounted and "class_counts" in objective.reads)

    @property
    def keys_beside(self) -> list[str]:
        """Keys of a batch that no model takes: those of group ids and of example weights."""
        column = self._options.example_weight_column
        return [self.key] if column is None else [self.key, column]

    def require_ids(self, ids: Any, inputs: Mapping[str, Any]) -> None:
        """Raise a ValueError where a training batch has none."""
        if ids is None:
            raise ValueError(
                f"Expected the batch to hold the group ids under {self.key!r}, got {sorted(inputs)}. Build "
                "loaders with collate_fn=self.data_collator in get_train_dataloader(), which keeps them, or put the "
                "ids there. A compute_loss that calls super().compute_loss must hand on some tensor of its batch."
            )

    def training_collator(self, collator: Collator, in_group_order: bool) -> Collator:
        """The user's collator, made to keep the group ids of a training set; see `GroupCollator`."""
        if self.renamed:
            collator = RenamingCollator(collator, self.renamed)
        if self.groups is None:
            return collator
        return GroupCollator(
            collator, self.groups, batch_key=self.key, group_columns=self._hidden, in_group_order=in_group_order
        )

    def evaluation_collator(self, collator: Collator, dataset: Any) -> Collator:
        """The user's collator, made to keep the group ids of an evaluation set, whose groups are added."""
        groups = self.evaluation.add(dataset)
        if self.renamed:
            collator = RenamingCollator(collator, self.renamed)
        if groups is None:
            return collator
        kind = SubgroupCollator if self.evaluation.overlapping else GroupCollator
        return kind(collator, groups, batch_key=self.key, group_columns=self._hidden, optional=True)

    def sampler(self, batch_size: int, seed: int, drop_last: bool) -> GroupSampler | None:
        """The sampler that `group_sampling` asks for, None for the Trainer's own."""
        if self._options.group_sampling == "none":
            return None
        assert self._train_group_ids is not None
        kind = BalancedGroupSampler if self._options.group_sampling == "balanced" else WeightedGroupSampler
        return kind(self._train_group_ids, batch_size, seed, drop_last)

    @property
    def samples_by_group(self) -> bool:
        """Whether `group_sampling` decides the order of the training examples."""
        return self._options.group_sampling != "none"

    @property
    def _hidden(self) -> list[str]:
        """Group columns that must not reach the model."""
        columns = dict.fromkeys([*self.columns, *self.evaluation.columns])
        return [name for name in columns if name not in self._model_columns]

    def _renamed_input(self, model: nn.Module, dataset: Any) -> dict[str, str]:
        if isinstance(dataset, Mapping):
            dataset = next(iter(dataset.values()))
        columns = None if dataset is None else column_names(dataset)
        return {} if columns is None else renamed_input(model, columns, (*LABEL_COLUMNS, *self.columns))

    def _read(self, objective: Objective, model: nn.Module, given: GroupInfo | None) -> None:
        dataset, sampling = self.train_dataset, self._options.group_sampling
        if dataset is None or not self.columns:
            if sampling != "none":
                raise ValueError("group_sampling needs group_column and a train_dataset to balance the groups of.")
            return
        read: dict[str, Column] = {}
        if is_stream(dataset):
            if sampling != "none":
                raise ValueError(
                    f"group_sampling={sampling!r} needs access by index, which an IterableDataset "
                    f"({type(dataset).__name__}) does not have. Use a map-style dataset, or group_sampling='none' "
                    "with a stream that is already mixed."
                )
            self.groups = stream_groups(dataset, self.columns, given)
        else:
            read = training_columns(dataset, self.columns, self._label_columns)
            smallest = 1 if objective.plain_mean else self._options.min_group_size
            self.groups, self._train_group_ids = training_groups(read, self.columns, given, smallest)
        label = next((name for name in read if name in self._label_columns), None)
        num_classes = num_outputs_of(model)
        may_classify = declared_problem_type(model) in (None, CLASSIFICATION)
        if label is not None and num_classes is not None and num_classes > 1 and may_classify:
            require_valid_labels(label, read[label], num_classes)
        if "class_counts" in objective.reads:
            if not may_classify or num_classes == 1:
                raise ValueError(
                    f"objective={objective.name!r} compares predicted probabilities of classes, but this model has "
                    f"problem_type {declared_problem_type(model)!r} and {num_classes} output(s). Use 'irm', 'coral' "
                    "or another objective for regression and multi-label problems."
                )
            if self.groups.class_counts is None and label is not None:
                assert self._train_group_ids is not None
                counts = count_classes(objective.name, label, read[label], self._train_group_ids, len(self.groups))
                self.groups = replace(self.groups, class_counts=counts)
