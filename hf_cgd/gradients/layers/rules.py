"""The weight gradient of each group in one layer, from the layer's inputs and the gradients of its outputs."""

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.grad import conv2d_weight

from hf_cgd.models.outputs import tensors_in


@dataclass
class Call:
    """One use of a module of the scope: what went in, and where the gradient of what came out can be asked for.

    `autocast` is what was in force then, for running the module again.
    """

    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: list[GradientEdge]
    kind: str
    autocast: AbstractContextManager[Any] = field(default_factory=nullcontext)

    @property
    def inputs(self) -> Tensor:
        """The first tensor that went in, [B, …]."""
        return next(tensors_in((self.arguments, self.keywords)))


class ReusedMemory:
    """Memory that is kept from step to step: fresh memory of the size of a layer costs as much as a layer."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def of_shape(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """A tensor of that shape and type, whatever is in it; one at a time."""
        size = math.prod(shape)
        memory = self._memory
        if memory is None or len(memory) < size or memory.dtype != dtype or memory.device != device:
            self._memory = memory = torch.empty(size, device=device, dtype=dtype)
        return memory[:size].view(shape)


@dataclass(frozen=True)
class Members:
    """The examples of a batch sorted by group: their order [B], where each group begins and ends, who is where.

    Attributes:
        order: [B] places of the examples; None where they already stand in order.
        bounds: where each of the G groups begins and ends in that order.
        first: [G], the place of one example of each group in the batch.
    """

    order: Tensor | None
    bounds: list[tuple[int, int]]
    first: Tensor

    @classmethod
    def of(cls, group_ids: Tensor, groups: Sequence[int]) -> "Members":
        """Members of the listed groups, which must be all that are present, in ascending order."""
        order = group_ids.argsort(stable=True)
        wanted = torch.tensor(groups, device=group_ids.device)
        starts = torch.searchsorted(group_ids[order], wanted)
        edges = [*starts.tolist(), len(group_ids)]
        in_order = bool((group_ids[1:] >= group_ids[:-1]).all())
        return cls(None if in_order else order, list(pairwise(edges)), order[starts])

    def together(self) -> "Members":
        """All examples as one group."""
        return Members(None, [(0, self.bounds[-1][1])], self.first[:1])

    def sorted(self, tensor: Tensor) -> Tensor:
        """The tensor [B, …] in the order of the groups."""
        return tensor if self.order is None else tensor.index_select(0, self.order)

    def of_group(self, place: int) -> Tensor:
        """Places in the batch of the examples of one group."""
        start, end = self.bounds[place]
        if self.order is not None:
            return self.order[start:end]
        return torch.arange(start, end, device=self.first.device)


def kind_of(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> str:
    """How a module's weight gradient is formed, decided by what it computes where its class does not tell."""
    if type(module) is nn.LayerNorm:
        return "layer_norm"
    if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return "conv2d"
    inputs = next(tensors_in((arguments, keywords)), None)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    only_affine = {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    if not only_affine or inputs is None or not isinstance(output, Tensor) or not isinstance(weight, Tensor):
        return "other"
    if weight.ndim != 2 or inputs.ndim < 2 or not inputs.is_floating_point():
        return "other"
    with torch.no_grad():
        for kind, matrix in (("linear", weight), ("transposed", weight.T)):
            if matrix.shape == (output.shape[-1], inputs.shape[-1]):
                again = F.linear(inputs, matrix.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))
                if torch.allclose(again.to(output.dtype), output, rtol=1e-2, atol=1e-3):
                    return kind
    return "other"


def add_gradients(
    call: Call,
    gradients: Sequence[Tensor | None],
    members: Members,
    targets: dict[str, Tensor],
    fresh: Collection[str] = (),
) -> None:
    """Add a call's weight gradients of each group to `targets`.

    Args:
        call: the use of the module.
        gradients: of its outputs, [B, …] each, None for one that the loss does not depend on.
        members: the groups.
        targets: [G, numel] views to add to, by the parameters' names in the module.
        fresh: names of targets that hold nothing yet, whatever memory they are in.
    """
    writes_over = call.kind in ("linear", "transposed") and gradients[0] is not None
    for name in fresh:
        if not (writes_over and name == "weight"):
            targets[name].zero_()
    if all(gradient is None for gradient in gradients):
        return
    if call.kind in ("linear", "transposed"):
        assert gradients[0] is not None
        _add_linear(call, gradients[0], members, targets, "weight" in fresh)
        return
    if call.kind == "other":
        _add_rerun(call, gradients, members, targets)
        return
    (gradient,) = gradients
    assert gradient is not None
    {"layer_norm": _add_norm, "conv2d": _add_convolution}[call.kind](call, gradient, members, targets)


def weighted_gradients(
    call: Call,
    gradients: Sequence[Tensor | None],
    coefficients: Tensor,
    names: Sequence[str],
    dtype: torch.dtype,
    memory: ReusedMemory,
) -> dict[str, Tensor]:
    """Weight gradients of a call over all examples, each example's multiplied by its coefficient.

    Args:
        call: the use of the module.
        gradients: of its outputs, as for `add_gradients`.
        coefficients: [B].
        names: of the wanted parameters in the module.
        dtype: of the result.
        memory: for a copy that lives within the call.

    Returns:
        {name: [numel]}.
    """
    if call.kind not in ("linear", "transposed") or gradients[0] is None or "weight" not in names:
        parameters = dict(call.module.named_parameters(recurse=False))
        rows = {name: coefficients.new_zeros(1, parameters[name].numel(), dtype=dtype) for name in names}
        scaled = [None if gradient is None else scaled_by_example(gradient, coefficients) for gradient in gradients]
        everyone = Members(None, [(0, len(coefficients))], coefficients.new_zeros(1, dtype=torch.long))
        add_gradients(call, scaled, everyone, rows)
        return {name: row[0] for name, row in rows.items()}
    gradient = gradients[0]
    inputs = call.inputs.to(gradient.dtype)
    smaller = min(gradient, inputs, key=Tensor.numel)
    column = coefficients.view([-1] + [1] * (smaller.ndim - 1))
    scaled_part = torch.mul(smaller, column, out=memory.of_shape(smaller.shape, smaller.device, smaller.dtype))
    left, right = (scaled_part, inputs) if smaller is gradient else (gradient, scaled_part)
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    found = {}
    if "bias" in names:
        of_positions = coefficients.repeat_interleave(len(left) // len(coefficients))
        bias = left.sum(dim=0, dtype=dtype) if smaller is gradient else left.T @ of_positions.to(left)
        found["bias"] = bias.to(dtype)
    product = left.T @ right if call.kind == "linear" else right.T @ left
    return {"weight": product.flatten().to(dtype), **found}


def scaled_by_example(tensor: Tensor, coefficients: Tensor) -> Tensor:
    """The tensor [B, …] with each example's entries multiplied by its coefficient, rounded once."""
    return (tensor * coefficients.view([-1] + [1] * (tensor.ndim - 1))).to(tensor.dtype)


def _add_linear(call: Call, gradient: Tensor, members: Members, targets: dict[str, Tensor], write_over: bool) -> None:
    gradient = members.sorted(gradient)
    if "weight" in targets:
        inputs = members.sorted(call.inputs.to(gradient.dtype))
        weight: Any = call.module.weight
        for target, (start, end) in zip(targets["weight"], members.bounds, strict=True):
            left, right = gradient[start:end].flatten(0, -2), inputs[start:end].flatten(0, -2)
            if call.kind == "transposed":
                left, right = right, left
            matrix = target.view(weight.shape)
            # One pass over the target in place of three; it is as large as all the groups' gradients.
            if matrix.dtype != left.dtype:
                product = (left.T @ right).to(matrix.dtype)
                matrix.copy_(product) if write_over else matrix.add_(product)
            elif write_over:
                torch.mm(left.T, right, out=matrix)
            else:
                matrix.addmm_(left.T, right)
    if "bias" in targets:
        for target, (start, end) in zip(targets["bias"], members.bounds, strict=True):
            target += gradient[start:end].flatten(0, -2).sum(dim=0, dtype=target.dtype)


def _add_norm(call: Call, gradient: Tensor, members: Members, targets: dict[str, Tensor]) -> None:
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    shape = list(module.normalized_shape)
    dtype = next(iter(targets.values())).dtype
    inputs, gradient = members.sorted(call.inputs).to(dtype), members.sorted(gradient).to(dtype)
    _, mean, scale = torch.native_layer_norm(inputs, shape, None, None, module.eps)
    wanted = [False, "weight" in targets, "bias" in targets]
    for group, (start, end) in enumerate(members.bounds):
        part = slice(start, end)
        _, weight, bias = torch.ops.aten.native_layer_norm_backward(
            gradient[part], inputs[part], shape, mean[part], scale[part], module.weight, module.bias, wanted
        )
        for name, found in (("weight", weight), ("bias", bias)):
            if name in targets:
                targets[name][group] += found.flatten().to(dtype)


def _add_convolution(call: Call, gradient: Tensor, members: Members, targets: dict[str, Tensor]) -> None:
    module = call.module
    assert isinstance(module, nn.Conv2d)
    inputs, gradient = members.sorted(call.inputs.to(gradient.dtype)), members.sorted(gradient)
    form = (module.stride, module.padding, module.dilation, module.groups)
    for group, (start, end) in enumerate(members.bounds):
        part = gradient[start:end]
        if "weight" in targets:
            full = conv2d_weight(inputs[start:end], module.weight.shape, part, *form)
            targets["weight"][group] += full.flatten().to(targets["weight"].dtype)
        if "bias" in targets:
            targets["bias"][group] += part.sum(dim=(0, 2, 3), dtype=targets["bias"].dtype)


def _add_rerun(call: Call, gradients: Sequence[Tensor | None], members: Members, targets: dict[str, Tensor]) -> None:
    """For modules of any other kind: run the module again on each group's examples."""
    batch = members.bounds[-1][1]
    parameters = dict(call.module.named_parameters(recurse=False))
    own = [parameters[name] for name in targets]
    used = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
    for group in range(len(members.bounds)):
        chosen = members.of_group(group)
        with torch.enable_grad(), call.autocast:
            output = call.module(*_rows(call.arguments, chosen, batch), **_rows(call.keywords, chosen, batch))
            outputs = [part for part in tensors_in(output) if part.requires_grad]
            found = torch.autograd.grad(
                [outputs[place] for place in used],
                own,
                [gradient.index_select(0, chosen) for gradient in used.values()],
                allow_unused=True,
            )
        for name, gradient in zip(targets, found, strict=True):
            if gradient is not None:
                targets[name][group] += gradient.flatten().to(targets[name].dtype)


def _rows(value: Any, chosen: Tensor, batch: int) -> Any:
    """The chosen rows of every tensor that has one for each example."""
    if isinstance(value, Tensor):
        rows = value.detach()
        return rows.index_select(0, chosen) if rows.ndim > 0 and len(rows) == batch else rows
    if isinstance(value, (tuple, list)):
        return type(value)(_rows(part, chosen, batch) for part in value)
    if isinstance(value, dict):
        return {name: _rows(part, chosen, batch) for name, part in value.items()}
    return value
