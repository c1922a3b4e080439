"""What a trainer knows about the labels of its data sets: checked as whole columns, before the first step."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_cgd.data.attached import rows_tell
from hf_cgd.data.columns import Column
from hf_cgd.models.example_losses import CLASSIFICATION
from hf_cgd.models.labels import LabelChecks, require_same_classes
from hf_cgd.models.outputs import declared_problem_type, num_outputs_of
from hf_cgd.trainer.sample import Sample


class LabelSetup:
    """The kind of problem that labels and model say this is.

    Args:
        model: tells what its labels have to be.
        sample: rows of a dataset and the batch made of them.
        columns: names that labels may have, the first found is read.
        renamed: see `GroupSetup.renamed`.
        own_loss: whether the user's loss gives the labels their meaning.
    """

    def __init__(
        self, model: nn.Module, sample: Sample, columns: Sequence[str], renamed: Mapping[str, str], own_loss: bool
    ) -> None:
        self._sample = sample
        self.columns = tuple(dict.fromkeys(columns))
        self.outputs = num_outputs_of(model)
        if self.outputs is None and getattr(model, "config", None) is not None:
            self.outputs = sample.outputs_of(model, renamed)
        self.declared = declared_problem_type(model)
        self.checks = LabelChecks(self.outputs, self.declared, own_loss)
        self.kind: str | None = None
        """The problem type by the labels that were read; None where none were, or they do not tell."""
        self._trained: Column | None = None

    @property
    def may_be_classes(self) -> bool:
        """Whether the model declares nothing else."""
        return self.declared in (None, CLASSIFICATION)

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
        if not column.renumbered and not rows_tell(dataset, dict(read), [name]):
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
        self._trained = self._trained or column
        self.kind = self.kind or kind
