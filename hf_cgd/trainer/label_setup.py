"""What a trainer knows about the labels of its data sets: checked as whole columns, before the first step."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from hf_cgd.data.attached import rows_tell
from hf_cgd.data.columns import Column
from hf_cgd.models.example_losses import CLASSIFICATION
from hf_cgd.models.heads import Head
from hf_cgd.models.labels import LabelChecks, other_order, require_same_classes
from hf_cgd.models.outputs import class_names_of, declared_problem_type
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.sample import Sample


class LabelSetup:
    """The kind of problem that labels and model say this is.

    Args:
        model: tells what its labels have to be.
        sample: rows of a dataset and the batch made of them.
        columns: names that labels may have, the first found is read.
        renamed: see `GroupSetup.renamed`.
        own_loss: whether the user's loss gives the labels their meaning.
        head: of the model. For one of tokens there is nothing to check here.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        columns: Sequence[str],
        renamed: Mapping[str, str],
        own_loss: bool,
        head: Head,
    ) -> None:
        self._sample = sample
        # Labels of tokens are looked at batch by batch: collators make them, and a column of them is long.
        self.columns = () if head.of_tokens else tuple(columns)
        self._of_tokens = head.of_tokens
        self.outputs = head.num_outputs(model)
        if self.outputs is None and not head.of_tokens and getattr(model, "config", None) is not None:
            self.outputs = sample.outputs_of(model, renamed)
        self.declared = declared_problem_type(model)
        self.checks = LabelChecks(self.outputs, self.declared, own_loss)
        self._names = class_names_of(model)
        self.kind: str | None = None
        """The problem type by the labels that were read; None where none were, or they do not tell."""
        self.may_be_shares = False
        """Whether the data set holds whole numbers, so that floats [B, C] in a batch are shares of the classes."""
        self._trained: Column | None = None

    @property
    def may_be_classes(self) -> bool:
        """Whether the model declares nothing else."""
        return self.declared in (None, CLASSIFICATION) and not self._of_tokens

    def column_in(self, read: Mapping[str, Column]) -> str | None:
        """Name of the labels among columns that were read."""
        return next((name for name in self.columns if name in read), None)

    def check(self, dataset: Any, read: Mapping[str, Column], where: str) -> None:
        """Check the labels of a dataset, those of the training set first.

        Args:
            dataset: map-style.
            read: its columns.
            where: what it is, for messages.

        Raises:
            ValueError: labels that do not fit the model, or the classes of which do not go with those of training.
        """
        name = self.column_in(read)
        if name is None or len(dataset) == 0:
            return
        column = read[name]
        if not column.renumbered and not rows_tell(dataset, read, [name]):
            # A transform makes the labels, so the stored ones may be anything. Each batch is looked at.
            return
        try:
            kind = self.checks.kind_of(name, column, where)
        except ValueError:
            if self._sample.makes_labels(name, self.columns):
                return
            raise
        if kind == CLASSIFICATION:
            require_same_classes(name, self._trained or column, column, where)
            wrong = "" if self._trained is not None else other_order(name, column, self._names)
            if wrong:
                warnings.warn(wrong, GroupRobustWarning, stacklevel=2)
        self._trained = self._trained or column
        if kind is None and all(isinstance(value, (int, np.integer)) for value in column.factors[0]):
            self.may_be_shares = True
        self.may_be_shares |= kind == CLASSIFICATION
        self.kind = self.kind or kind


def names_of_labels(given: list[str] | None, guessed: list[str] | None, head: Head) -> list[str]:
    """Names of the labels: those the user gave, or else "labels" where the model has that argument.

    The `Trainer` guesses every argument with "label" in its name, weights of labels among them, and takes a class that
    is derived from one for question answering, and has a name of its own, for none.
    """
    names = ["labels"] if not guessed or (given is None and "labels" in guessed) else guessed
    return names if given else head.label_names(names)
