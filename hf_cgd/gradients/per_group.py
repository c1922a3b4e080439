"""The exact engine: one `autograd.grad` per group. Right for any network, and the oracle of every faster one."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PerGroupEngine:
    """Gradients of the groups' loss sums over the scope, one backward pass per group that is present.

    Args:
        parameters: the gradient scope, all trainable. P is their total number of elements.
    """

    name = "per_group"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def gradient_sums(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> Tensor:
        """Gradient of the *sum* of each listed group's losses: [len(groups), P], in at least float32.

        Sums, so that micro-batches and processes can be added up. The graph of `losses` [B] is kept for the backward
        pass of the step; `.grad` is not touched. A parameter that the loss does not depend on gives zeros.
        """
        rows = []
        for group in groups:
            loss_sum = losses[group_ids == group].sum()
            gradients = torch.autograd.grad(loss_sum, self.parameters, retain_graph=True, allow_unused=True)
            rows.append(self._flat(gradients))
        return torch.stack(rows)

    def _flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        parts = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
        ]
        return torch.cat([part.flatten().to(torch.promote_types(part.dtype, torch.float32)) for part in parts])


def gram_matrix(rows: Tensor) -> Tensor:
    """Inner products [G, G] of the rows [G, P], in float64 on the CPU.

    Each row is scaled to a largest entry of 1 before the products, so that neither tiny nor huge gradients leave the
    range of float32; a zero row gives zeros.
    """
    largest = rows.abs().amax(dim=1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)
    unit = rows / scale
    products = (unit @ unit.T).to("cpu", torch.float64)
    scale64 = scale.to("cpu", torch.float64)
    return products * scale64 * scale64.T
