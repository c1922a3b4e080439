"""The cross-entropy of each token, without a copy of the scores, which are as wide as the vocabulary."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_cgd.data.training_groups import IGNORED

CHUNK = 2**24
"""Scores that are taken to float32 at a time: 64 MiB of them."""


def token_losses(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each token, float32 (or float64) of the shape of the targets.

    Beside the scores themselves the forward pass holds a chunk of them, and the backward pass their gradient and a
    chunk. (`torch.nn.functional.cross_entropy` holds their log-softmax as well, and a float32 copy of half precision.)

    Args:
        logits: [..., V] in any floating type.
        targets: [...] integers in [0, V); 0 without gradient where they are `IGNORED` (-100).
        label_smoothing: in [0, 1): the target's probability becomes 1 minus this, and all V share it.
    """
    scores = logits.reshape(-1, logits.shape[-1])
    losses: Tensor = _TokenLosses.apply(scores, targets.reshape(-1), label_smoothing)
    return losses.view(targets.shape)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        counted = targets != IGNORED
        places = targets.masked_fill(~counted, 0).unsqueeze(1)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        normalisers = torch.empty(len(scores), dtype=dtype, device=scores.device)
        losses = torch.empty_like(normalisers)
        for rows in _chunks(scores):
            part = scores[rows].to(dtype)
            normalisers[rows] = part.logsumexp(dim=1)
            scored = part.gather(1, places[rows]).squeeze(1)
            if smoothing:
                scored = (1 - smoothing) * scored + smoothing * part.mean(dim=1)
            losses[rows] = normalisers[rows] - scored
        ctx.save_for_backward(scores, places, counted, normalisers)
        ctx.smoothing = smoothing
        return losses.where(counted, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None]:
        scores, places, counted, normalisers = ctx.saved_tensors
        gradient = torch.empty_like(scores)
        factors = upstream.to(normalisers.dtype).where(counted, 0.0).unsqueeze(1)
        for rows in _chunks(scores):
            # Out of place: the scores are the network's own.
            part = (scores[rows].to(normalisers.dtype) - normalisers[rows].unsqueeze(1)).exp_()
            if ctx.smoothing:
                part -= ctx.smoothing / part.shape[1]
            part.scatter_add_(1, places[rows], part.new_full((1, 1), ctx.smoothing - 1).expand(len(part), 1))
            part *= factors[rows]
            # Zero times what is not finite is no number, and a token that is left out has no gradient.
            gradient[rows] = part.masked_fill_(~counted[rows].unsqueeze(1), 0.0)
        return gradient, None, None


def _chunks(scores: Tensor) -> Iterator[slice]:
    size = max(CHUNK // max(scores.shape[1], 1), 1)
    for start in range(0, len(scores), size):
        yield slice(start, start + size)
