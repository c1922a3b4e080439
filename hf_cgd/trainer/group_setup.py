"""What a trainer knows about the groups of its data sets: read once, with all checks, before the first step."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

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
from hf_cgd.data.columns import require_columns, require_one_dataset
from hf_cgd.data.evaluation_groups import EvaluationGroups
from hf_cgd.data.groups import GroupInfo
from hf_cgd.models.heads import TokenHead, head_of
from hf_cgd.models.labels import LabelCollator
from hf_cgd.models.outputs import forward_parameters, renamed_input
from hf_cgd.models.token_labels import TokenLabelCollator
from hf_cgd.objectives import Objective
from hf_cgd.trainer.config import GroupOptions
from hf_cgd.trainer.evaluation_sets import EvaluationSets
from hf_cgd.trainer.example_weights import class_weights_of, require_weight_column
from hf_cgd.trainer.host_ids import HOST_IDS
from hf_cgd.trainer.label_setup import LabelSetup
from hf_cgd.trainer.sample import Sample
from hf_cgd.trainer.training_set import read_training_set

Collator = Callable[[list[Any]], Any]
READ_ONCE = (
    "eval_group_column", "group_sampling", "class_weights", "example_weight_column", "reference_losses",
    "min_group_size",
)  # fmt: skip
"""Options that a `GroupSetup` is made by."""


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
        self.columns = list(columns)
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
        self.labels = LabelSetup(model, sample, self.label_columns, self.renamed, own_loss, self._head)
        self._num_outputs = self._head.num_outputs(model)
        self._packs = options.unit_of(objective) == "token"
        self.training, read = read_training_set(train_dataset, self.columns, self.labels, objective, options, given)
        self.groups = self.training.groups
        """Names and counts of the training groups, None without a group column or a training set."""
        self.class_weights = class_weights_of(
            options.class_weights, train_dataset, self.label_columns, self.labels.outputs
        )
        """Weight of each class in the training loss [C]; None for none."""
        require_weight_column(options.example_weight_column, train_dataset)
        self.evaluation = EvaluationGroups(self.columns, options.eval_group_column, self.groups)
        """Groups that evaluations are reported for."""
        self.evaluated = EvaluationSets(self.evaluation, self.labels)
        for where, dataset in sets.items():
            self.evaluated.read(dataset, where, read if dataset is train_dataset else None)
            if options.eval_group_column and not any(self.evaluation.covers(one) for one in sets.values()):
                advice = "Set it to a column that tells an example's group, or leave it out to take group_column."
                require_columns(dataset, self.evaluation.columns, "eval_group_column", where, advice)
            self.evaluation.warn_of_missing(dataset, where)

    @property
    def counts_of_evaluated(self) -> dict[str, int] | None:
        """Training examples of each group by name, where the groups that are evaluated are those; else None."""
        return self.training.counts if self.evaluation.are_of_training else None

    @property
    def extra_columns(self) -> list[str]:
        """Columns that a dataset has to keep although the model has no argument of their name."""
        return [*self.columns, *self.evaluation.columns, *self.renamed, ROW_GROUP, *self._beside_columns]

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
        groups = self.evaluated.read(dataset).groups
        if groups is not None:
            kind = SubgroupCollator if self.evaluation.overlapping else GroupCollator
            collator = kind(
                collator, groups, batch_key=self.key, group_columns=self._hidden, labels=self.label_columns,
                optional=True,
            )  # fmt: skip
        elif self._hidden:
            collator = DroppingCollator(collator, self._hidden)
        return self._finished(collator)

    def without_group_columns(self, dataset: Any, needed: Callable[[Any], Any], collator: Collator) -> Any:
        """An evaluation set whose rows hold their ids in place of group columns (see `EvaluationSets`).

        `collator` is the user's. Where it might want the columns, the data set is handed on as it is.
        """
        return self.evaluated.without_columns(dataset, self._hidden, needed) if keeps_order(collator) else dataset

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


def read_once(options: GroupOptions, objective: Objective, columns: Sequence[str]) -> dict[str, Any]:
    """All that a `GroupSetup` is made by besides data and model; where it is another, groups have to be read anew."""
    of_objective = objective.plain_mean, objective.has_weights, options.unit_of(objective)
    found = {name: getattr(options, name) for name in READ_ONCE}
    return copy.deepcopy({**found, "columns": list(columns), "objective": of_objective})


def _sets_by_name(eval_dataset: Any) -> dict[str, Any]:
    """Evaluation sets by what messages call them."""
    if isinstance(eval_dataset, Mapping):
        return {f"evaluation dataset {name!r}": dataset for name, dataset in eval_dataset.items()}
    return {} if eval_dataset is None else {"evaluation dataset": eval_dataset}
