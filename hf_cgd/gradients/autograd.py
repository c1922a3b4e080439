"""Finishing a step whose gradients are known in the scope: a scalar that carries them, and the cut."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from hf_cgd.arithmetic import is_on_host
from hf_cgd.gradients.base import NotExactError
from hf_cgd.models.outputs import tensors_in


@dataclass(frozen=True)
class Cut:
    """The tensor that flows into the scope from the body: the first input of the scope that carries a gradient."""

    tensor: Tensor
    version: int
    edge: tuple[Node, int]

    @classmethod
    def of(cls, inputs: Any) -> "Cut | None":
        """The cut among a module's inputs; None where no gradient flows on from them."""
        tensor = next((part for part in tensors_in(inputs) if part.requires_grad), None)
        if tensor is None:
            return None
        edge = get_gradient_edge(tensor)
        return cls(tensor, tensor._version, (edge.node, edge.output_nr))

    def require_intact(self) -> None:
        """Raise a NotExactError unless the tensor is as it was when it was noted."""
        if self.tensor._version != self.version:
            raise NotExactError("what flows into the scope is changed in place afterwards")


CONTAINERS = (nn.ParameterDict, nn.ParameterList)
"""Modules that nobody calls: what they hold is used by the module that they are a part of."""


def held_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module holds itself, or in a container: "weight", "scales.first"."""
    held = dict(module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if isinstance(child, CONTAINERS):
            held.update({f"{name}.{own}": parameter for own, parameter in held_parameters(child).items()})
    return held


def owned_parameters(
    model: nn.Module, parameters: Sequence[nn.Parameter], in_containers: bool = True
) -> dict[nn.Module, dict[str, nn.Parameter]]:
    """The modules that hold trainable parameters of the scope themselves, with these by their own names.

    Where `in_containers`, what a container holds is the module's whose part it is (see `held_parameters`).
    """
    wanted = {id(parameter) for parameter in parameters if parameter.requires_grad}
    owned = {}
    for module in model.modules():
        if in_containers and isinstance(module, CONTAINERS) and module is not model:
            continue
        held = held_parameters(module) if in_containers else dict(module.named_parameters(recurse=False))
        own = {name: p for name, p in held.items() if id(p) in wanted}
        if own:
            owned[module] = own
    return owned


def modules_around(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[nn.Module]:
    """The modules around the first of the scope that are partly frozen and train nothing outside of it, outer first.

    Adapters lie beside residual connections, which pass their first input by. The input of their block is passed by
    nothing.
    """
    scope, holding = {id(parameter) for parameter in parameters}, owned_parameters(model, parameters)
    modules = dict(model.named_modules(remove_duplicate=False))
    parts = next((name for name, module in modules.items() if module in holding), "").split(".")
    found = []
    for place in range(len(parts)):
        module = modules[".".join(parts[:place])]
        trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        if trained <= scope and len(trained) < sum(1 for _ in module.parameters()):
            found.append(module)
    return found


def scalar_with_gradients(value: Tensor, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A scalar with that `value` whose gradients with respect to the `tensors` are the given ones; usable once."""
    return _WithGradients.apply(value.detach() if value.requires_grad else value, list(gradients), *tensors)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = grad_outputs
        # Nobody else may hold the gradients, or autograd would copy them into `.grad` in place of handing them over.
        gradients, ctx.gradients = ctx.gradients, None
        if not is_on_host(factor) or factor != 1:
            _scale(gradients, factor)
        return (None, None, *gradients)


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply the gradients in place: those of one type in one call, since on a device each call is a launch."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), some in alike.items():
        torch._foreach_mul_(some, factor.to(device, dtype))


def require_dense(gradients: Iterable[Tensor | None]) -> None:
    """Raise a NotExactError for a sparse gradient, which the parameter's optimizer expects as such."""
    if any(gradient is not None and gradient.is_sparse for gradient in gradients):
        raise NotExactError("an embedding gives sparse gradients")


def flatten(gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> Tensor:
    """One vector [P] of the gradients of all parameters, zeros for None, in at least float32."""
    parts = [
        torch.zeros_like(parameter) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return torch.cat([part.flatten().to(torch.promote_types(part.dtype, torch.float32)) for part in parts])


def unflatten(vector: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """A vector [P] as gradients in the shapes and types of the parameters."""
    pieces = torch.split_with_sizes(vector, [parameter.numel() for parameter in parameters])
    shaped = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
    return [
        piece if piece.dtype == p.dtype else piece.to(p.dtype) for piece, p in zip(shaped, parameters, strict=True)
    ]


@dataclass(frozen=True)
class RowBlock:
    """Gradients of the groups with respect to some of the parameters.

    Attributes:
        rows: [G, c].
        places: from which column to which a parameter's gradient stands, by id of the parameter.
    """

    rows: Tensor
    places: dict[int, tuple[int, int]]

    def weighted_sums(self, coefficients: Tensor) -> dict[int, Tensor]:
        """Sum [numel] over the groups with these coefficients [G] for each parameter, by its id."""
        whole = weighted_sum(self.rows, coefficients)
        return {parameter: whole[start:end] for parameter, (start, end) in self.places.items()}

    def pieces(self) -> dict[int, Tensor]:
        """The gradients [G, numel] with respect to each parameter, by its id."""
        return {parameter: self.rows[:, start:end] for parameter, (start, end) in self.places.items()}


def weighted_sum(rows: Tensor, coefficients: Tensor) -> Tensor:
    """Sum [P] of the rows [G, P] with these coefficients [G]."""
    same = coefficients.dtype == rows.dtype and coefficients.device == rows.device
    return torch.mv(rows.T, coefficients if same else coefficients.to(rows))
