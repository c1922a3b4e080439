"""Labels of tokens: the checks that can be made of a batch on the host, before a device fails without a word."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_cgd.models.heads.base import TokenHead


class TokenLabelCollator:
    """Wraps a collator: refuses labels of tokens that the network cannot be trained on, and rows of several examples.

    Args:
        collator: makes a batch.
        names: keys of the labels.
        head: tells what labels are.
        num_outputs: number of classes or words; None where it is not known.
        packs: whether a row may hold several examples, of one group. It may where means are over tokens.
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Any],
        names: Sequence[str],
        head: TokenHead,
        num_outputs: int | None,
        packs: bool,
    ) -> None:
        self.collator, self.names, self.head = collator, names, head
        self.num_outputs, self.packs = num_outputs, packs

    def __call__(self, features: list[Any]) -> Any:
        """The batch of the wrapped collator.

        Raises:
            ValueError: labels that are no integers or out of range, or a row in which positions start anew.
        """
        batch = self.collator(features)
        if isinstance(batch, Mapping):
            self._require_one_example(batch, len(features))
            labels = self.head.labels_in(batch, self.names)
            if isinstance(labels, Tensor):
                self._require_classes(labels)
        return batch

    def _require_one_example(self, batch: Mapping[str, Any], size: int) -> None:
        if batch.get("shift_labels") is not None:
            raise ValueError(
                "The batch holds shift_labels, which this trainer does not read: expected labels in the places of "
                "their tokens. Use a collator that pads rows and makes labels."
            )
        positions = batch.get("position_ids")
        if not isinstance(positions, Tensor) or positions.ndim != 2 or self.packs:
            return
        # Padding is constant, so a second example is a fall to 0 between places that rise.
        steps = positions.diff(dim=1)
        rises = steps == 1
        falls = (steps < 0) & (positions[:, 1:] == 0)
        starts = (rises.cumsum(dim=1) > 0)[:, :-2] & falls[:, 1:-1] & rises[:, 2:]
        rows = starts.any(dim=1).nonzero().flatten().tolist()
        if rows:
            raise ValueError(
                f"Row {rows[0]} of a batch is packed: its position_ids start anew within it, so that it holds several "
                "examples, and their mean losses are not known. Leave packing out, or set group_unit='token' and pack "
                "examples of one group only: then each token counts alike and the row's group is that of all."
            )

    def _require_classes(self, labels: Tensor) -> None:
        if labels.is_floating_point() or labels.ndim != 2:
            raise ValueError(
                f"Expected labels of tokens, a tensor [B, L] of integers with -100 for those that do not count, got "
                f"{tuple(labels.shape)} ({labels.dtype}) for a model for {self.head.name}. {self.head.missing_labels}"
            )
        if labels.device.type != "cpu":
            return
        wrong = self.head.wrong_labels(labels, self.num_outputs)
        if bool(wrong.any()):
            row, place = wrong.nonzero()[0].tolist()
            limit = "" if self.num_outputs is None else f" below {self.num_outputs}"
            raise ValueError(
                f"Labels of a batch: expected classes of tokens from 0{limit}, or -100 for tokens that do not count, "
                f"got {int(labels[row, place])} (row {row}, token {place}). Correct the labels, give padding -100, or "
                "build the model with as many outputs."
            )
