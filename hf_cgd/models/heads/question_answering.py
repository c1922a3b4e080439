"""Heads that find an answer in a text: scores of each place for the answer's first and last token."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.data.training_groups import IGNORED
from hf_cgd.models.heads.base import LossOptions, TokenHead

POSITIONS = ("start_positions", "end_positions")
"""The labels; the scores go by the names of `SCORES`."""
SCORES = ("start_logits", "end_logits")


class QuestionAnsweringHead(TokenHead):
    """`*ForQuestionAnswering`: labels [B, 2] are places, scores [B, 2, L].

    The loss of an example is the mean of the cross-entropies of its two places. A place behind the end of the row is
    left out, as the networks do; -100 stands for no label, and other negative numbers for the first place.
    """

    name = "question_answering"
    missing_labels = "The tokenizer's offsets tell start_positions and end_positions of an answer."

    def labels_in(self, inputs: Mapping[str, Any], names: Sequence[str]) -> Tensor | None:
        """See `Head.labels_in`: both places, [B, 2]."""
        parts = [inputs.get(name) for name in POSITIONS]
        if any(part is None for part in parts):
            return None
        labels = torch.stack([torch.as_tensor(part).reshape(-1) for part in parts], dim=1)
        rows = inputs.get("input_ids")
        return labels if rows is None else _inside(labels, rows.shape[1])

    def label_names(self, names: Sequence[str]) -> list[str]:
        """See `Head.label_names`."""
        return list(POSITIONS)

    def joined(self, labels: Any, names: Sequence[str]) -> Any:
        """See `Head.joined`."""
        if not isinstance(labels, (tuple, list)):
            return labels
        # Other columns may be among the labels, and the places in any order; a prediction_step may give these alone.
        order = [names.index(name) for name in POSITIONS] if len(labels) == len(names) else range(len(POSITIONS))
        return torch.stack([labels[place].reshape(-1) for place in order], dim=1)

    def scores_of(self, outputs: Any, after_loss: bool = False) -> Tensor:
        """See `Head.scores_of`: those of the first and of the last token, [B, 2, L].

        Raises:
            ValueError: there are none of these names.
        """
        if isinstance(outputs, Tensor):
            return outputs
        if isinstance(outputs, Mapping):
            parts = [outputs.get(name) for name in SCORES]
        elif isinstance(outputs, (tuple, list)) and not hasattr(outputs, SCORES[0]):
            parts = list(outputs)[after_loss : after_loss + 2]
        else:
            parts = [getattr(outputs, name, None) for name in SCORES]
        if len(parts) < 2 or any(not isinstance(part, Tensor) for part in parts):
            raise ValueError(f"Expected the network to return {' and '.join(SCORES)}, got {type(outputs).__name__}.")
        return torch.stack([part for part in parts if part is not None], dim=1)

    def token_losses(self, scores: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropies of the two places, [B, 2]."""
        return super().token_losses(scores, _inside(labels, scores.shape[-1]), label_smoothing)

    def losses(self, scores: Tensor, labels: Tensor, network: nn.Module, options: LossOptions) -> Tensor:
        """See `Head.losses`.

        Raises:
            ValueError: label smoothing, which no such network is trained with.
        """
        if options.label_smoothing:
            raise ValueError(
                "label_smoothing_factor has no effect on question answering, in the Trainer either: leave it at 0."
            )
        return super().losses(scores, _inside(labels, scores.shape[-1]), network, options)

    def wrong_labels(self, labels: Tensor, num_outputs: int | None) -> Tensor:
        """See `TokenHead.wrong_labels`: any place may stand for one outside."""
        return torch.zeros_like(labels, dtype=torch.bool)


def _inside(labels: Tensor, length: int) -> Tensor:
    """Places within a row: behind its end they do not count, before its start they are the first."""
    return labels.where(labels == IGNORED, labels.clamp_min(0)).masked_fill(labels >= length, IGNORED)
