"""The exact engine: one `autograd.grad` per group. Right for any network, and the oracle of every faster one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


class GroupGradients:
    """Gradients of one micro-batch's group loss sums, and the scalar that finishes the step.

    Attributes:
        rows: [G, P], one row per group, in at least float32.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        """What to call `backward()` on for the gradient of sum_n coefficients_n l_n, whose value is `loss`.

        Args:
            loss: that sum, with the graph of the forward pass.
            coefficients: [B], the same for all examples of a group.
        """
        return loss


class PerGroupEngine:
    """Gradients of the groups' loss sums over the scope, one backward pass per group that is present.

    Args:
        parameters: the gradient scope, all trainable. P is their total number of elements.
    """

    name = "per_group"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def recording(self) -> AbstractContextManager[None]:
        """Goes around the forward pass; this engine has nothing to record."""
        return nullcontext()

    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """Gradient of the *sum* of each listed group's losses.

        Sums, so that micro-batches and processes can be added up. The graph of `losses` [B] is kept for the backward
        pass of the step; `.grad` is not touched. A parameter that the loss does not depend on gives zeros.
        """
        rows = []
        for group in groups:
            loss_sum = losses[group_ids == group].sum()
            gradients = torch.autograd.grad(loss_sum, self.parameters, retain_graph=True, allow_unused=True)
            rows.append(self._flat(gradients))
        return GroupGradients(torch.stack(rows))

    def _flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        parts = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
        ]
        return torch.cat([part.flatten().to(torch.promote_types(part.dtype, torch.float32)) for part in parts])


def gram_matrix(rows: Tensor) -> Tensor:
    """Inner products [G, G] of the rows [G, P], in float64 on the CPU.

    Rows whose squares would leave the range of float32 are scaled to a largest entry of 1 first; a zero row gives
    zeros.
    """
    largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True).to("cpu", torch.float64)
    scale = torch.where((largest == 0) | ((largest > 1e-10) & (largest < 1e10)), 1.0, largest)
    if bool((scale != 1).any()):
        rows = rows / scale.to(rows)
    return (rows @ rows.T).to("cpu", torch.float64) * scale * scale.T
