"""What a trainer knows about the groups of its data sets: read once, with all checks, before the first step."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
from torch import nn

from hf_cgd.data.attached import RowsWithGroups, parts_of, reads_columns, rows_tell
from hf_cgd.data.collator import (
    GROUP_IDS,
    LABEL_COLUMNS,
    ROW_GROUP,
    DroppingCollator,
    GroupCollator,
    RenamingCollator,
    SubgroupCollator,
    keeps_order,
)
from hf_cgd.data.columns import Column, require_columns, require_one_dataset
from hf_cgd.data.evaluation_groups import EvaluationGroups
from hf_cgd.data.groups import UNKNOWN_GROUP, GroupInfo
from hf_cgd.data.sampling import BalancedGroupSampler, GroupSampler, WeightedGroupSampler
from hf_cgd.data.training_groups import (
    count_classes,
    is_stream,
    read_with_labels,
    stream_groups,
    training_columns,
    training_groups,
)
from hf_cgd.data.weight_sampling import DrawnGroups, GroupWeightSampler
from hf_cgd.models.heads import TokenHead, head_of
from hf_cgd.models.labels import LabelCollator
from hf_cgd.models.outputs import forward_parameters, renamed_input
from hf_cgd.models.token_labels import TokenLabelCollator
from hf_cgd.objectives import Objective
from hf_cgd.trainer.config import GroupOptions
from hf_cgd.trainer.example_weights import class_weights_of, require_weight_column
from hf_cgd.trainer.host_ids import HOST_IDS
from hf_cgd.trainer.label_setup import LabelSetup
from hf_cgd.trainer.sample import Sample

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
        reference_column: holds reference losses; None for none.
        collator: the user's, for what it makes of the rows; None where it is not known.
        own_loss: whether the user's `compute_loss_func` gives the labels their meaning.

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
        reference_column: str | None = None,
        collator: Collator | None = None,
        own_loss: bool = False,
    ) -> None:
        self._head = head_of(model)
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
        own = (options.example_weight_column, reference_column)
        self._beside_columns = list(dict.fromkeys(column for column in own if column is not None))
        """Columns with a number for each example that travel beside the batches."""
        self.label_names = self._head.label_names(labels)
        """Batch keys of the labels."""
        if len(labels) > 1 and self.label_names[0] in columns and "labels" not in labels:
            raise ValueError(
                f"label_names={list(labels)} begins with the group column {labels[0]!r}, so the model would learn "
                "to predict the group. Put the name of the labels first."
            )
        self.label_columns = tuple(dict.fromkeys((*self.label_names, *LABEL_COLUMNS)))
        # Labels of tokens are looked at batch by batch: collators make them, and a column of them is long.
        self._columns_of_classes = () if self._head.of_tokens else self.label_columns
        self._model_columns = (*labels, *self.label_columns, *forward_parameters(model))
        own_name = len(self.columns) == 1 and self.columns[0] not in self._model_columns
        self.key = self.columns[0] if own_name else GROUP_IDS
        """Batch key of the group ids: the column's own name where there is one and the model has no use for it."""
        sets = _sets_by_name(eval_dataset)
        for where, dataset in {"training dataset": train_dataset, **sets}.items():
            require_one_dataset(dataset, where)
        sample = Sample(next((d for d in (train_dataset, *sets.values()) if d is not None), None), collator)
        names = sample.input_names(model)
        not_inputs = (*LABEL_COLUMNS, *self.columns)
        self.renamed = {} if names is None else renamed_input(model, names, not_inputs)
        """{column: argument} for a model whose input is not named like a column."""
        self.labels = LabelSetup(model, sample, self._columns_of_classes, self.renamed, own_loss, self._head)
        self._num_outputs = self._head.num_outputs(model)
        self._packs = options.unit_of(objective) == "token"
        self._train_group_ids: np.ndarray | None = None
        """Group of each row [N], UNKNOWN_GROUP for rows that are None."""
        self._train_rows_tell = True
        read = self._read(given, objective)
        self.class_weights = class_weights_of(
            options.class_weights, train_dataset, self.label_columns, self.labels.outputs
        )
        """Weight of each class in the training loss [C]; None for none."""
        require_weight_column(options.example_weight_column, train_dataset)
        self.evaluation = EvaluationGroups(self.columns, options.eval_group_column, self.groups)
        """Groups that evaluations are reported for."""
        self._seen: dict[int, tuple[weakref.ref[Any], GroupInfo | None, Any]] = {}
        self._ids_of_columns: dict[int, tuple[weakref.ref[Any], np.ndarray]] = {}
        """Of evaluation sets whose group columns need not be read: the ids of the rows."""
        for where, dataset in sets.items():
            self._read_evaluation_set(dataset, where, read if dataset is train_dataset else None)
            if options.eval_group_column and not any(self.evaluation.covers(one) for one in sets.values()):
                advice = "Set it to a column that tells an example's group, or leave it out to take group_column."
                require_columns(dataset, self.evaluation.columns, "eval_group_column", where, advice)
            self.evaluation.warn_of_missing(dataset, where)

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

    @property
    def extra_columns(self) -> list[str]:
        """Columns that a dataset has to keep although the model has no argument of their name."""
        return [*self.columns, *self.evaluation.columns, *self.renamed, ROW_GROUP, *self._beside_columns]

    def suits(self, train_dataset: Any, objective: Objective) -> bool:
        """Whether this was read from that training set and holds all that the objective needs."""
        uncounted = self.groups is not None and self.groups.class_counts is None
        return self.train_dataset is train_dataset and not (uncounted and "class_counts" in objective.reads)

    @property
    def keys_beside(self) -> list[str]:
        """Keys of a batch that no model takes: those of group ids, of example weights and of reference losses."""
        return [self.key, HOST_IDS, *self._beside_columns]

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
        if self.groups is not None:
            collator = GroupCollator(
                collator, self.groups, batch_key=self.key, group_columns=self._hidden, labels=self.label_columns,
                in_group_order=in_group_order,
            )  # fmt: skip
        return self._finished(collator)

    def evaluation_collator(self, collator: Collator, dataset: Any) -> Collator:
        """The user's collator, made to keep the group ids of an evaluation set, whose groups are added."""
        groups, _ = self._read_evaluation_set(dataset, "evaluation dataset")
        if groups is not None:
            kind = SubgroupCollator if self.evaluation.overlapping else GroupCollator
            collator = kind(
                collator, groups, batch_key=self.key, group_columns=self._hidden, labels=self.label_columns,
                optional=True,
            )  # fmt: skip
        elif self._hidden:
            collator = DroppingCollator(collator, self._hidden)
        return self._finished(collator)

    def rows_with_groups(self, dataset: Any, is_training: bool) -> Any:
        """The dataset; with ids by row index where a reader's rows do not tell their group (see `RowsWithGroups`)."""
        if is_training:
            ids = None if self._train_rows_tell else self._train_group_ids
        else:
            _, ids = self._read_evaluation_set(dataset, "evaluation dataset")
        return dataset if ids is None else RowsWithGroups(dataset, ids)

    def without_group_columns(self, dataset: Any, needed: Callable[[Any], Any], collator: Collator) -> Any:
        """An evaluation set whose rows hold their ids in place of group columns, which then need not be read.

        Args:
            dataset: as the user gave it.
            needed: gives a data set with the columns that are needed, those of the groups among them.
            collator: the user's. Where it might want the columns, the data set is handed on as it is.
        """
        ids = self._ids_of_columns.get(id(dataset))
        if ids is None or ids[0]() is not dataset or not keeps_order(collator):
            return dataset
        rest = needed(dataset)
        hidden = [name for name in rest.column_names if name in self._hidden]
        if not hidden or len(hidden) == len(rest.column_names):
            return dataset
        return RowsWithGroups(rest.remove_columns(hidden), ids[1])

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
        if self._options.group_sampling == "none":
            return None
        assert self._train_group_ids is not None
        ids, together = self._train_group_ids, {"processes": processes, "step_size": batch_size * batches_of_step}
        if memory is not None:
            return GroupWeightSampler(ids, batch_size, seed, drop_last, memory=memory, **together)
        kind = BalancedGroupSampler if self._options.group_sampling == "balanced" else WeightedGroupSampler
        return kind(ids, batch_size, seed, drop_last, **together)

    @property
    def samples_by_group(self) -> bool:
        """Whether `group_sampling` decides the order of the training examples."""
        return self._options.group_sampling != "none"

    @property
    def draws_by_weight(self) -> bool:
        """Whether groups are drawn in proportion to their weights."""
        return self._options.group_sampling == "weights"

    @property
    def _hidden(self) -> list[str]:
        """Group columns that must not reach the model."""
        columns = dict.fromkeys([*self.columns, *self.evaluation.columns])
        return [name for name in columns if name not in self._model_columns]

    def _finished(self, collator: Collator) -> Collator:
        """With the names and the kind of labels that the model takes."""
        if self.renamed:
            collator = RenamingCollator(collator, self.renamed)
        if isinstance(self._head, TokenHead):
            return TokenLabelCollator(collator, self.label_names, self._head, self._num_outputs, self._packs)
        return LabelCollator(collator, self.label_columns[0], self.labels.kind or self.labels.declared)

    def _read(self, given: GroupInfo | None, objective: Objective) -> dict[str, Column]:
        """Read and check the training set; its columns."""
        dataset, sampling, labels = self.train_dataset, self._options.group_sampling, self.labels
        if sampling == "weights" and not objective.has_weights:
            raise ValueError(
                f"group_sampling='weights' draws groups by their weights, but objective={objective.name!r} has none. "
                "Use 'balanced', or an objective with group weights, such as 'group_dro' or 'cgd'."
            )
        if dataset is None or not self.columns:
            if sampling != "none":
                raise ValueError("group_sampling needs group_column and a train_dataset to balance the groups of.")
            read = _cheap_columns(dataset, self._columns_of_classes)
            labels.check(dataset, read, "training dataset")
            return read
        read = {}
        if is_stream(dataset):
            if sampling != "none":
                raise ValueError(
                    f"group_sampling={sampling!r} needs access by index, which an IterableDataset "
                    f"({type(dataset).__name__}) does not have. Use a map-style dataset, or group_sampling='none' "
                    "with a stream that is already mixed."
                )
            self.groups = stream_groups(dataset, self.columns, given)
        else:
            read = training_columns(dataset, self.columns, self._columns_of_classes)
            smallest = 1 if objective.plain_mean else self._options.min_group_size
            labels.check(dataset, read, "training dataset")
            label = labels.column_in(read)
            classes = read[label] if label is not None and labels.may_be_classes and labels.outputs != 1 else None
            self.groups, found = training_groups(read, self.columns, given, smallest, classes)
            self._train_group_ids = _by_row(found, read[self.columns[0]], len(dataset))
            self._train_rows_tell = rows_tell(dataset, read, self.columns)
        if "class_counts" in objective.reads:
            if not labels.may_be_classes or labels.outputs == 1:
                raise ValueError(
                    f"objective={objective.name!r} compares predicted probabilities of classes, but this model has "
                    f"problem_type {labels.declared!r} and {labels.outputs} output(s). Use 'irm', 'coral' or another "
                    "objective for regression and multi-label problems."
                )
            name = labels.column_in(read)
            if self.groups.class_counts is None and name is not None:
                counts = count_classes(objective.name, name, read[name], found, len(self.groups))
                self.groups = replace(self.groups, class_counts=counts)
        return read

    def _read_evaluation_set(
        self, dataset: Any, where: str, read: dict[str, Column] | None = None
    ) -> tuple[GroupInfo | None, Any]:
        """What an evaluation set's collator encodes by, and the ids of its rows where these do not tell them.

        A dataset is read the first time only, and its labels are checked.
        """
        seen = self._seen.get(id(dataset))
        if seen is not None and seen[0]() is dataset:
            return seen[1], seen[2]
        ids = None
        if is_stream(dataset) or len(dataset) == 0:
            return self.evaluation.add(dataset), None
        columns = self.evaluation.columns
        if read is None or not set(columns) <= set(read):
            read = (
                read_with_labels(dataset, columns, self._columns_of_classes)
                if columns
                else _cheap_columns(dataset, self._columns_of_classes)
            )
        self.labels.check(dataset, read, where)
        groups = self.evaluation.add(dataset, read)
        present = [name for name in columns if name in read]
        if groups is not None and present and not rows_tell(dataset, read, present):
            ids = self.evaluation.ids_of(groups, read)
            ids = None if ids is None else _by_row(ids, read[present[0]], len(dataset))
        elif groups is not None and not self.evaluation.overlapping and reads_columns(dataset):
            by_column = self.evaluation.ids_of(groups, read)
            if by_column is not None:
                numbers = by_column.astype(np.min_scalar_type(-len(groups)))
                self._ids_of_columns[id(dataset)] = (weakref.ref(dataset), numbers)
        # A list of rows cannot be referred to weakly, and is cheap to read again.
        with suppress(TypeError):
            self._seen[id(dataset)] = (weakref.ref(dataset), groups, ids)
        return groups, ids


def _sets_by_name(eval_dataset: Any) -> dict[str, Any]:
    """Evaluation sets by what messages call them."""
    if isinstance(eval_dataset, Mapping):
        return {f"evaluation dataset {name!r}": dataset for name, dataset in eval_dataset.items()}
    return {} if eval_dataset is None else {"evaluation dataset": eval_dataset}


def _cheap_columns(dataset: Any, labels: Sequence[str]) -> dict[str, Column]:
    """The labels of a dataset whose columns can be read without its rows; nothing of any other."""
    if dataset is None or is_stream(dataset) or not all(isinstance(p, datasets.Dataset) for p in parts_of(dataset)):
        return {}
    return read_with_labels(dataset, [], labels)


def _by_row(ids: np.ndarray, column: Column, size: int) -> np.ndarray:
    """Ids of the rows of a dataset, of which those that are None have none."""
    if column.rows is None:
        return ids
    whole = np.full((size, *ids.shape[1:]), UNKNOWN_GROUP if ids.ndim == 1 else 0, dtype=np.int64)
    whole[column.rows] = ids
    return whole
