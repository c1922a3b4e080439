"""A loss that a network computes itself, given labels, beside the one that the objectives are made of."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_cgd.models.heads import Head
from hf_cgd.models.modes import modes_kept
from hf_cgd.models.outputs import own_loss_of

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Relative difference up to which two losses count as the same, by the type of the logits."""
COARSE_TOLERANCE = 2e-2
"""The same in half precision."""
ADDED_TERM = 1e-5
"""Relative difference from which on a term counts that reaches parameters by another way than through the scores."""
ROWS_OF_TOKENS = 2
"""Rows that are looked at where each has scores for many tokens, as wide as a vocabulary."""
ROWS_OF_A_TARGET = 2
"""Rows of each target that are looked at elsewhere: they tell what the whole batch does."""


class LossComparison(NamedTuple):
    """A network's own loss of a batch, and the mean of the losses of its examples.

    Attributes:
        own: the network's.
        ours: that of the examples.
        same: whether both, and their gradients by the logits, are equal.
    """

    own: float
    ours: float
    same: bool


def compare_losses(
    network: nn.Module,
    inputs: Mapping[str, Any],
    labels: Tensor,
    head: Head,
    losses_of: Callable[[Any, Tensor], Tensor],
) -> LossComparison | None:
    """Compare a network's own loss with ours in a pass of its own, which leaves no trace.

    Gradients are compared as well: at the start of training all losses of a batch may be log C, whatever their
    weights.

    Args:
        network: without wrappers.
        inputs: a batch with its labels.
        labels: those, as the head has them.
        head: of the network. Of tokens, the mean is one over all tokens. A few rows tell.
        losses_of: the loss of each example [B], of the head's scores and labels.

    Returns:
        None where it cannot be told: the network returned no finite loss, or the batch is of one class (which class
        weights cancel out of).
    """
    if head.of_tokens:
        rows = head.labelled(labels).nonzero().flatten()[:ROWS_OF_TOKENS]
        if not len(rows):
            return None
    elif not labels.is_floating_point() and len(labels[head.labelled(labels)].unique(dim=0)) < 2:
        return None
    else:
        rows = _first_of_each(labels.unique(dim=0, return_inverse=True)[1], ROWS_OF_A_TARGET)
    if head.of_tokens or all(has_rows(value, len(labels)) for value in inputs.values() if isinstance(value, Tensor)):
        inputs = {name: value[rows] if has_rows(value, len(labels)) else value for name, value in inputs.items()}
        labels = labels[rows]
    config = getattr(network, "config", None)
    declared = getattr(config, "problem_type", None)
    devices = [labels.device] if labels.device.type == "cuda" else []
    with modes_kept(network), torch.random.fork_rng(devices), torch.enable_grad():
        try:
            network.eval()
            return _compare(network(**inputs), labels, head, losses_of)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError):
            # A loss that cannot be computed is none that a run could miss.
            return None
        finally:
            # Models of transformers write into their config what the labels look like.
            if config is not None and hasattr(config, "problem_type"):
                config.problem_type = declared


def _compare(
    outputs: Any, labels: Tensor, head: Head, losses_of: Callable[[Any, Tensor], Tensor]
) -> LossComparison | None:
    own = own_loss_of(outputs)
    if own is None:
        return None
    has_loss_first = isinstance(outputs, (tuple, list)) and not hasattr(outputs, "logits")
    logits = head.scores_of(outputs, after_loss=has_loss_first)
    ours = head.mean(losses_of(logits, labels), labels)
    if not bool(own.isfinite() & ours.isfinite()):
        return None
    tolerance = TOLERANCE.get(logits.dtype, COARSE_TOLERANCE)
    same = bool((own - ours).abs() <= tolerance * ours.abs().clamp_min(1e-6))
    if same and logits.requires_grad and own.requires_grad:
        (by_own,) = torch.autograd.grad(own, logits, retain_graph=True, allow_unused=True)
        (by_ours,) = torch.autograd.grad(ours, logits, retain_graph=True, allow_unused=True)
        if by_own is not None and by_ours is not None:
            same = bool((by_own - by_ours).norm() <= 10 * tolerance * by_ours.norm().clamp_min(1e-12))
            # A small term, such as the balance of experts, is lost in the tolerance.
            is_added = bool((own - ours).abs() > ADDED_TERM * ours.abs())
            same = same and not (is_added and _has_another_way(own, logits))
    return LossComparison(own.item(), ours.item(), same)


def _has_another_way(own: Tensor, scores: Tensor) -> bool:
    """Whether a loss depends on leaves of the graph otherwise than through the scores."""
    stop = get_gradient_edge(scores).node
    todo: list[Any] = [get_gradient_edge(own).node]
    seen = {stop, *todo}
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            return True
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        todo.extend(following)
    return False


def _first_of_each(numbers: Tensor, most: int) -> Tensor:
    """Places of the first `most` entries of each number among [N], in ascending order."""
    ordered, places = numbers.sort(stable=True)
    ranks = torch.arange(len(numbers), device=numbers.device) - torch.searchsorted(ordered, ordered)
    return places[ranks < most].sort().values


def has_rows(value: Any, size: int) -> bool:
    """Whether a value of a batch is a tensor with one entry for each of `size` examples."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == size
