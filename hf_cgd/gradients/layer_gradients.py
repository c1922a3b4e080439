"""The weight gradient of each group in one layer, from the layer's inputs and the gradients of its outputs."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.grad import conv2d_weight

from hf_cgd.gradients.surrogate import tensors_in


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


@dataclass(frozen=True)
class Members:
    """The examples of a batch sorted by group: their order [B], where each group begins and ends, who is where."""

    order: Tensor
    bounds: list[tuple[int, int]]
    matrix: Tensor

    @classmethod
    def of(cls, group_ids: Tensor, groups: Sequence[int]) -> "Members":
        """Members of the listed groups, which must be all that are present, in ascending order."""
        wanted = torch.tensor(groups, device=group_ids.device)
        matrix = group_ids[None, :] == wanted[:, None]
        sizes = matrix.sum(dim=1).tolist()
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        bounds = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return cls(group_ids.argsort(stable=True), bounds, matrix)

    @property
    def first(self) -> Tensor:
        """Place of one example of each group, [G]."""
        return self.order[[start for start, _ in self.bounds]]

    def together(self) -> "Members":
        """All examples as one group."""
        return Members(self.order, [(0, len(self.order))], torch.ones_like(self.matrix[:1]))

    def sorted(self, tensor: Tensor) -> Tensor:
        """The tensor [B, …] in the order of the groups; as it is where there is but one."""
        return tensor if len(self.bounds) == 1 else tensor.index_select(0, self.order)


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
    features = len(module.normalized_shape)
    dtype = next(iter(targets.values())).dtype
    gradient, matrix = gradient.to(dtype), members.matrix.to(dtype)
    if "weight" in targets:
        normalised = F.layer_norm(call.inputs.to(dtype), module.normalized_shape, None, None, module.eps)
        targets["weight"] += matrix @ _over_positions(normalised * gradient, features)
    if "bias" in targets:
        targets["bias"] += matrix @ _over_positions(gradient, features)


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
    batch = len(members.order)
    parameters = dict(call.module.named_parameters(recurse=False))
    own = [parameters[name] for name in targets]
    used = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
    for group, (start, end) in enumerate(members.bounds):
        chosen = members.order[start:end]
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


def _over_positions(tensor: Tensor, features: int) -> Tensor:
    """Sum over all but the batch and the last `features` dimensions: [B, …]."""
    between = list(range(1, tensor.ndim - features))
    return (tensor.sum(dim=between) if between else tensor).flatten(1)


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
