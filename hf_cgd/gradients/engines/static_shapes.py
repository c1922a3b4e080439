"""The single pass with shapes that do not depend on who is in which group, for devices that compile a step (XLA).

Each example is taken for a group of its own, which fixes all shapes; the groups' gradients are then the product of a
matrix of zeros and ones [G, B] with those of the examples. That takes as many operations as one weight gradient of the
scope (and 2 G B P), and memory for the examples' gradients of a layer, [B, numel]. They serve the inner products: the
step's own gradients of matrices are formed anew, weighted, as an ordinary backward pass would form them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cgd.gradients.base import GroupGradients
from hf_cgd.gradients.engines.single_pass import BackwardPass, SinglePassEngine
from hf_cgd.gradients.layers.rules import Call, Members, ReusedMemory, add_gradients

MATRICES = ("linear", "transposed")
"""Kinds of modules with a matrix for a weight."""


def needs_static_shapes(device: torch.device) -> bool:
    """Whether the device compiles a step for its shapes, and waits wherever a value is looked at: XLA (TPUs)."""
    return device.type == "xla"


class _FreshMemory(ReusedMemory):
    """Nothing is kept: a compiler plans the memory itself."""

    def of_shape(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.empty(list(shape), device=device, dtype=dtype)


class OneHotEngine(SinglePassEngine):
    """Gradients of the groups' loss sums over the scope; rows of groups without examples are zero.

    Args:
        model: the network that runs the forward pass, or what it wraps.
        parameters: the gradient scope.
    """

    name = "one_hot"

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(model, parameters)
        self.scaling_memory = _FreshMemory()
        self._by_group = torch.empty(0)

    def members_of(self, group_ids: Tensor, groups: Sequence[int]) -> Members:
        """Every example by itself; the groups are taken note of, any of them, in any order."""
        wanted = torch.tensor(list(groups), device=group_ids.device)
        self._by_group = wanted[:, None] == group_ids[None, :]
        examples = torch.arange(len(group_ids), device=group_ids.device)
        return Members(None, [(place, place + 1) for place in range(len(group_ids))], examples)

    def gradients_of(self, step: BackwardPass) -> GroupGradients:
        """See `SinglePassEngine.gradients_of`."""
        return _OneHotGradients(step, self._by_group.to(step.dtype))


class _OneHotGradients(GroupGradients):
    def __init__(self, step: BackwardPass, by_group: Tensor) -> None:
        super().__init__()
        self._step = step
        self._by_group = by_group
        self._kept: dict[int, Tensor] = {}

    def _form_rows(self) -> Tensor:
        parts: dict[int, Tensor] = {}
        kept: dict[int, Tensor] = {}
        in_matrices: set[int] = set()
        with torch.no_grad():
            for call, gradients in self._step.calls:
                own = self._step.engine.owned[call.module]
                for name, rows in _of_examples(call, gradients, list(own), self._step).items():
                    place = id(own[name])
                    _add(parts, place, self._by_group @ rows)
                    if call.kind in MATRICES:
                        in_matrices.add(place)
                    else:
                        _add(kept, place, rows)
            self._kept = {place: rows for place, rows in kept.items() if place not in in_matrices}
            return torch.cat(
                [
                    parts[id(p)] if id(p) in parts else self._by_group.new_zeros(len(self._by_group), p.numel())
                    for p in self._step.engine.parameters
                ],
                dim=1,
            )

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        # Small, or dear to form anew; matrices are cheap to, in place of being kept for all examples.
        return self._step.scalar(loss, coefficients, self._kept)


def _add(sums: dict[int, Tensor], place: int, part: Tensor) -> None:
    sums[place] = sums[place] + part if place in sums else part


def _of_examples(
    call: Call, gradients: Sequence[Tensor | None], names: Sequence[str], step: BackwardPass
) -> dict[str, Tensor]:
    """A call's weight gradients of each example, [B, numel] by the parameters' names in the module."""
    gradient, batch = gradients[0], len(step.members.bounds)
    if call.kind in (*MATRICES, "layer_norm") and gradient is not None:
        found = {}
        if call.kind == "layer_norm":
            assert isinstance(call.module, nn.LayerNorm)
            inputs, gradient = call.inputs.to(step.dtype), gradient.to(step.dtype)
            normal = F.layer_norm(inputs, call.module.normalized_shape, eps=call.module.eps)
            size = call.module.weight.numel()
            found["weight"] = (gradient * normal).reshape(batch, -1, size).sum(dim=1)
        else:
            inputs, size = call.inputs.to(gradient.dtype), gradient.shape[-1]
            left, right = gradient.reshape(batch, -1, size), inputs.reshape(batch, -1, inputs.shape[-1])
            product = left.transpose(1, 2) @ right if call.kind == "linear" else right.transpose(1, 2) @ left
            found["weight"] = product.flatten(1)
        found["bias"] = gradient.reshape(batch, -1, size).sum(dim=1, dtype=step.dtype)
        return {name: found[name].to(step.dtype) for name in names}
    parameters = dict(call.module.named_parameters(recurse=False))
    rows = {name: torch.zeros(batch, parameters[name].numel(), device=step.device, dtype=step.dtype) for name in names}
    add_gradients(call, gradients, step.members, rows)
    return rows
