"""The single pass with shapes that do not depend on who is in which group, for devices that compile a step (XLA).

Each example is taken for a group of its own, which fixes all shapes. The groups' gradients are the product of a matrix
of zeros and ones [G, B] with those of the examples. That takes as many operations as one weight gradient of the scope
(and 2 G B P), and memory for the examples' gradients of a layer, [B, numel]. They serve the inner products. The step's
own gradients of matrices are formed anew, weighted, as an ordinary backward pass would form them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_cgd.gradients.autograd import RowBlock
from hf_cgd.gradients.base import GroupGradients
from hf_cgd.gradients.engines.backward_pass import BackwardPass
from hf_cgd.gradients.engines.single_pass import SinglePassEngine
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import ReusedMemory


def needs_static_shapes(device: torch.device) -> bool:
    """Whether the device compiles a step for its shapes, and waits wherever a value is looked at: XLA (TPUs)."""
    return device.type == "xla"


class _FreshMemory(ReusedMemory):
    """Nothing is kept: a compiler plans the memory itself."""

    def of_shape(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.empty(list(shape), device=device, dtype=dtype)


class StaticShapesEngine(SinglePassEngine):
    """Gradients of the groups' loss sums over the scope; rows of groups without examples are zero.

    Args:
        model: the network that runs the forward pass, or what it wraps.
        parameters: the gradient scope.
    """

    name = "static_shapes"
    keeps_graph = False
    serves_others = False

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(model, parameters)
        self.scaling_memory = _FreshMemory()
        self._by_group = torch.empty(0)

    def order_of(self, group_ids: Tensor, groups: Sequence[int], device: torch.device) -> GroupOrder:
        """Every example by itself; the groups are noted, any of them, in any order."""
        wanted = torch.tensor(list(groups), device=group_ids.device)
        self._by_group = wanted[:, None] == group_ids[None, :]
        return GroupOrder.one_group_per_example(len(group_ids), group_ids.device)

    def gradients_of(self, step: BackwardPass) -> GroupGradients:
        """See `SinglePassEngine.gradients_of`."""
        return _StaticGradients(step, self._by_group.to(step.dtype))


class _StaticGradients(GroupGradients):
    reads_graph = False

    def __init__(self, step: BackwardPass, by_group: Tensor) -> None:
        super().__init__()
        self._step = step
        self._by_group = by_group
        self._kept: list[RowBlock] = []

    def _form_rows(self) -> Tensor:
        columns: dict[int, Tensor] = {}
        kept: dict[int, Tensor] = {}
        not_kept: set[int] = set()
        step = self._step
        with torch.no_grad():
            for call, gradients in step.calls:
                own = step.owned[call.module]
                found = call.rule.example_gradients(call, gradients, step.order, list(own), step.dtype)
                for name, rows in found.items():
                    place = id(own[name])
                    _add(columns, place, self._by_group @ rows)
                    if call.rule.keeps_example_gradients:
                        _add(kept, place, rows)
                    else:
                        not_kept.add(place)
            self._kept = [
                RowBlock(rows, {place: (0, rows.shape[1])}) for place, rows in kept.items() if place not in not_kept
            ]
            return torch.cat(
                [
                    columns[id(p)] if id(p) in columns else self._by_group.new_zeros(len(self._by_group), p.numel())
                    for p in step.parameters
                ],
                dim=1,
            )

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        return self._step.scalar(loss, coefficients, self._kept)


def _add(sums: dict[int, Tensor], place: int, gradient: Tensor) -> None:
    sums[place] = sums[place] + gradient if place in sums else gradient
