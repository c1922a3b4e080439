"""A batch of two rows, made before training: what the collator makes of rows, and how many outputs the network has."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_cgd.data.alike_rows import array_of
from hf_cgd.data.collator import TAKE_ANY_NUMBER
from hf_cgd.data.columns import column_names, row_names
from hf_cgd.data.rows import has_value, undisturbed, value_of
from hf_cgd.data.training_groups import is_stream
from hf_cgd.models.modes import modes_kept
from hf_cgd.models.outputs import forward_parameters, logits_of

ROWS = 2


class Sample:
    """The first rows of a dataset and the batch that the user's collator makes of them. Streams are not read.

    Args:
        dataset: of the trainer, None for none.
        collator: the user's, None where it is not known.
    """

    def __init__(self, dataset: Any, collator: Callable[[list[Any]], Any] | None) -> None:
        self._dataset = dataset
        self._collator = collator
        name = getattr(collator, "__name__", None) or type(collator).__name__
        self._keeps_columns = collator is None or name in TAKE_ANY_NUMBER

    @cached_property
    def names(self) -> list[str] | None:
        """What a row holds; None where it has no names or there is no dataset."""
        if self._dataset is None or is_stream(self._dataset):
            return None if self._dataset is None else column_names(self._dataset)
        return row_names(self._dataset)

    @cached_property
    def rows(self) -> list[Any]:
        """The first rows that are not None."""
        if self._dataset is None or is_stream(self._dataset):
            return []
        found: list[Any] = []
        with undisturbed(self._dataset):
            for index in range(len(self._dataset)):
                row = self._dataset[index]
                found += [] if row is None else [row]
                if len(found) == ROWS:
                    break
        return found

    @cached_property
    def batch(self) -> Mapping[str, Any] | None:
        """The batch of these rows; None where the collator makes none of them."""
        if self._collator is None or not self.rows:
            return None
        with undisturbed(self._dataset):
            try:
                batch = self._collator(self.rows)
            # What it cannot make a batch of (columns that are removed later) is for the loader to find out.
            except Exception:
                return None
        return batch if isinstance(batch, Mapping) else None

    def input_names(self, model: nn.Module) -> list[str] | None:
        """Names by which a network can be given the data: those of rows, or else those the collator makes."""
        if self.names is None or self._keeps_columns or any(name in forward_parameters(model) for name in self.names):
            return self.names
        return self.names if self.batch is None else list(self.batch)

    def makes_labels(self, name: str, candidates: Sequence[str]) -> bool:
        """Whether the collator makes the labels of a batch, out of whatever the rows hold under that name."""
        if self._keeps_columns or self.batch is None:
            return False
        labels = array_of(next((self.batch[key] for key in candidates if key in self.batch), None))
        if labels is None or not all(has_value(row, name) for row in self.rows):
            return labels is not None
        own = array_of([value_of(row, name) for row in self.rows])
        if own is None or own.size != labels.size or own.dtype.kind != labels.dtype.kind:
            return True
        return sorted(own.ravel().tolist()) != sorted(labels.ravel().tolist())

    def outputs_of(self, model: nn.Module, renamed: Mapping[str, str]) -> int | None:
        """Number of outputs of a network on this batch; None where it cannot be run on it as it is."""
        if self.batch is None:
            return None
        parameters = forward_parameters(model)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        inputs = {
            renamed.get(name, name): value.to(device)
            for name, value in self.batch.items()
            if renamed.get(name, name) in parameters and isinstance(value, torch.Tensor) and "label" not in name
        }
        with modes_kept(model), undisturbed(), torch.no_grad():
            try:
                logits = logits_of(model.eval()(**inputs))
            # A network that wants more than its inputs is measured by its first batch.
            except Exception:
                return None
        return logits.shape[-1] if logits.ndim > 1 else 1
