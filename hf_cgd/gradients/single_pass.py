"""The fast engine: the gradients of all groups from one pass over the activations.

Where examples do not interact, the rows of a layer's output gradient that belong to a group are that group's alone, so
its weight gradient is a product of those rows with the same rows of the layer's input: over all groups together the
arithmetic of one ordinary weight gradient. One `autograd.grad` over the layers' outputs and the *cut* (the tensor that
flows into the scope from the body) gives all of them and frees the scope's graph. The step is finished by a scalar
whose gradient is exactly sum_i c_i g_i in the scope and c_g(n) dh_n at the cut, so that one ordinary `backward()` runs
through the body, with DDP's hooks, loss scaling and accumulation working as ever.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.grad import conv2d_weight

from hf_cgd.gradients.per_group import GroupGradients


class NotSinglePassError(Exception):
    """This step's gradients cannot be had in a single pass; the message says why."""


@dataclass
class _Call:
    """One use of a module of the scope: what went in, and where the gradient of what came out can be asked for."""

    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: list[GradientEdge]
    kind: str


@dataclass(frozen=True)
class _Members:
    """The examples of a batch sorted by group: their order [B], and where each group begins and ends."""

    order: Tensor
    bounds: list[tuple[int, int]]
    matrix: Tensor

    @classmethod
    def of(cls, group_ids: Tensor, groups: Sequence[int]) -> "_Members":
        wanted = torch.tensor(groups, device=group_ids.device)
        matrix = group_ids[None, :] == wanted[:, None]
        sizes = matrix.sum(dim=1).tolist()
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        bounds = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return cls(group_ids.argsort(stable=True), bounds, matrix)

    def sorted(self, tensor: Tensor) -> Tensor:
        """The tensor [B, …] in the order of the groups."""
        return tensor if len(self.bounds) == 1 else tensor.index_select(0, self.order)


class SinglePassEngine:
    """Gradients of the groups' loss sums over the scope, from activations and their gradients.

    Args:
        model: the network that runs the forward pass, or what it wraps.
        parameters: the gradient scope.

    Raises:
        NotSinglePassError: from `group_gradients`, before anything of the graph is used up, where the recorded pass
            does not have the needed form. Whether the form tells the truth (no second path round the cut, no
            interaction between examples) only a comparison can say: see `AutoEngine`.
    """

    name = "single_pass"

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._places: dict[int, tuple[int, int]] = {}
        start = 0
        for parameter in self.parameters:
            self._places[id(parameter)] = (start, start + parameter.numel())
            start += parameter.numel()
        self.size = start
        self._owned: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for module in model.modules():
            own = {n: p for n, p in module.named_parameters(recurse=False) if id(p) in self._places}
            if own:
                self._owned[module] = own
        self._kinds: dict[nn.Module, str] = {}
        self._calls: list[_Call] = []
        self._cut: tuple[Tensor, int] | None = None
        self.computed_in: torch.dtype = torch.float64
        """Least precise type among the outputs of the scope's modules in the last recorded pass."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass: within, every use of a module of the scope is taken note of."""
        self._calls, self._cut, self.computed_in = [], None, torch.float64
        hooks = [module.register_forward_hook(self._note, with_kwargs=True) for module in self._owned]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def group_gradients(
        self, losses: Tensor, group_ids: Tensor, groups: Sequence[int], keep_graph: bool = False
    ) -> GroupGradients:
        """Gradient of the sum of each listed group's losses; the graph of the scope is used up.

        Args: as for `PerGroupEngine.group_gradients`. `groups` must be all that are present. `keep_graph` leaves the
        graph of `losses` intact, for a comparison.
        """
        calls, self._calls = self._calls, []
        cut, self._cut = self._cut, None
        self._require_form(calls, cut, len(losses))
        edges = [edge for call in calls for edge in call.outputs]
        sources: list[Any] = [*edges, *([cut[0]] if cut is not None else [])]
        gradients = torch.autograd.grad(losses.sum(), sources, retain_graph=keep_graph, allow_unused=True)
        members = _Members.of(group_ids, groups)
        rows = torch.zeros(len(groups), self.size, device=losses.device, dtype=losses.dtype)
        with torch.no_grad():
            position = 0
            for call in calls:
                own = gradients[position : position + len(call.outputs)]
                position += len(call.outputs)
                self._add(call, own, members, rows)
        if cut is None:
            return _SinglePassGradients(rows, members, self, None, None)
        return _SinglePassGradients(rows, members, self, cut[0], gradients[-1])

    def split(self, flat: Tensor) -> list[Tensor]:
        """A vector [P] as gradients in the shapes and types of the parameters."""
        pieces = []
        for parameter in self.parameters:
            start, end = self._places[id(parameter)]
            pieces.append(flat[start:end].view_as(parameter).to(parameter.dtype))
        return pieces

    # ---- Recording --------------------------------------------------------------------------------------------------

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        outputs = [part for part in _tensors(output) if part.requires_grad]
        if not self._calls:
            inputs = [part for part in _tensors((arguments, keywords)) if part.requires_grad]
            self._cut = (inputs[0], inputs[0]._version) if inputs else None
        if module not in self._kinds:
            self._kinds[module] = _kind_of(module, arguments, keywords, output)
        for part in outputs:
            if torch.finfo(part.dtype).eps > torch.finfo(self.computed_in).eps:
                self.computed_in = part.dtype
        # An edge is taken in place of the output itself, which an in-place activation may change.
        edges = [get_gradient_edge(part) for part in outputs]
        self._calls.append(_Call(module, arguments, keywords, edges, self._kinds[module]))

    def _require_form(self, calls: list[_Call], cut: tuple[Tensor, int] | None, batch: int) -> None:
        if not calls:
            raise NotSinglePassError("no module of the scope was seen in the forward pass")
        for call in calls:
            kind = type(call.module).__name__
            if isinstance(call.module, nn.modules.batchnorm._BatchNorm) and call.module.training:
                raise NotSinglePassError(f"{kind} in training mode mixes the examples of a batch")
            first = next(_tensors((call.arguments, call.keywords)), None)
            if first is None or first.ndim == 0 or len(first) != batch:
                raise NotSinglePassError(f"an input of {kind} has no entry for each example")
        if cut is not None and (cut[0].ndim == 0 or len(cut[0]) != batch):
            raise NotSinglePassError("what flows into the scope has no entry for each example")
        if cut is not None and cut[0]._version != cut[1]:
            raise NotSinglePassError("what flows into the scope is changed in place afterwards")

    # ---- Weight gradients -------------------------------------------------------------------------------------------

    def _add(self, call: _Call, output_gradients: Sequence[Tensor | None], members: _Members, rows: Tensor) -> None:
        """Add a call's weight gradients of each group to `rows`."""
        if all(gradient is None for gradient in output_gradients):
            return
        own = self._owned[call.module]
        if call.kind == "other":
            self._add_rerun(call, output_gradients, members, rows)
            return
        (gradient,) = output_gradients
        assert gradient is not None
        inputs = next(_tensors((call.arguments, call.keywords)))
        if call.kind in ("linear", "transposed"):
            self._add_linear(call, own, inputs, gradient, members, rows)
        elif call.kind == "layer_norm":
            self._add_norm(call.module, own, inputs, gradient, members, rows)
        else:
            self._add_convolution(call.module, own, inputs, gradient, members, rows)

    def _slot(self, rows: Tensor, parameter: nn.Parameter) -> Tensor:
        start, end = self._places[id(parameter)]
        return rows[:, start:end]

    def _add_linear(
        self,
        call: _Call,
        own: dict[str, nn.Parameter],
        inputs: Tensor,
        gradient: Tensor,
        members: _Members,
        rows: Tensor,
    ) -> None:
        gradient = members.sorted(gradient)
        weight = own.get("weight")
        if weight is not None:
            inputs = members.sorted(inputs.to(gradient.dtype))
            slot = self._slot(rows, weight)
            for group, (start, end) in enumerate(members.bounds):
                left, right = gradient[start:end].flatten(0, -2), inputs[start:end].flatten(0, -2)
                if call.kind == "transposed":
                    left, right = right, left
                target = slot[group].view(weight.shape)
                if target.dtype == left.dtype:
                    target.addmm_(left.T, right)
                else:
                    target += (left.T @ right).to(target.dtype)
        if "bias" in own:
            slot = self._slot(rows, own["bias"])
            for group, (start, end) in enumerate(members.bounds):
                slot[group] += gradient[start:end].flatten(0, -2).sum(dim=0, dtype=slot.dtype)

    def _add_norm(
        self,
        module: nn.Module,
        own: dict[str, nn.Parameter],
        inputs: Tensor,
        gradient: Tensor,
        members: _Members,
        rows: Tensor,
    ) -> None:
        assert isinstance(module, nn.LayerNorm)
        matrix = members.matrix.to(rows.dtype)
        shape = module.normalized_shape
        gradient = gradient.to(rows.dtype)
        if "weight" in own:
            normalised = F.layer_norm(inputs.to(rows.dtype), shape, None, None, module.eps)
            self._slot(rows, own["weight"]).add_(matrix @ _over_positions(normalised * gradient, len(shape)))
        if "bias" in own:
            self._slot(rows, own["bias"]).add_(matrix @ _over_positions(gradient, len(shape)))

    def _add_convolution(
        self,
        module: nn.Module,
        own: dict[str, nn.Parameter],
        inputs: Tensor,
        gradient: Tensor,
        members: _Members,
        rows: Tensor,
    ) -> None:
        assert isinstance(module, nn.Conv2d)
        inputs, gradient = members.sorted(inputs.to(gradient.dtype)), members.sorted(gradient)
        for group, (start, end) in enumerate(members.bounds):
            part = gradient[start:end]
            if "weight" in own:
                weight = own["weight"]
                full = conv2d_weight(
                    inputs[start:end],
                    weight.shape,
                    part,
                    module.stride,
                    module.padding,
                    module.dilation,
                    module.groups,
                )
                self._slot(rows, weight)[group] += full.flatten().to(rows.dtype)
            if "bias" in own:
                self._slot(rows, own["bias"])[group] += part.sum(dim=(0, 2, 3), dtype=rows.dtype)

    def _add_rerun(
        self, call: _Call, output_gradients: Sequence[Tensor | None], members: _Members, rows: Tensor
    ) -> None:
        """For modules of any other kind: run the module again on each group's examples."""
        batch = len(members.order)
        own = list(self._owned[call.module].values())
        used = [place for place, gradient in enumerate(output_gradients) if gradient is not None]
        for group, (start, end) in enumerate(members.bounds):
            chosen = members.order[start:end]
            with torch.enable_grad():
                output = call.module(
                    *_examples(call.arguments, chosen, batch), **_examples(call.keywords, chosen, batch)
                )
                outputs = [part for part in _tensors(output) if part.requires_grad]
                gradients = torch.autograd.grad(
                    [outputs[place] for place in used],
                    own,
                    [output_gradients[place].index_select(0, chosen) for place in used],  # type: ignore[union-attr]
                    allow_unused=True,
                )
            for parameter, gradient in zip(own, gradients, strict=True):
                if gradient is not None:
                    self._slot(rows, parameter)[group] += gradient.flatten().to(rows.dtype)


class _SinglePassGradients(GroupGradients):
    """Rows, and what the surrogate scalar needs."""

    def __init__(
        self, rows: Tensor, members: _Members, engine: SinglePassEngine, cut: Tensor | None, gradient: Tensor | None
    ) -> None:
        super().__init__(rows)
        self._members = members
        self._engine = engine
        self._cut = cut
        self._gradient = gradient

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        first = self._members.order[[start for start, _ in self._members.bounds]]
        combined = coefficients.to(self.rows)[first] @ self.rows
        tensors: list[Tensor] = list(self._engine.parameters)
        gradients = self._engine.split(combined)
        if self._cut is not None and self._gradient is not None:
            shape = [-1] + [1] * (self._gradient.ndim - 1)
            tensors.append(self._cut)
            gradients.append(self._gradient * coefficients.to(self._gradient).view(shape))
        return _WithGradients.apply(loss.detach(), gradients, *tensors)


class _WithGradients(torch.autograd.Function):
    """A value whose gradients with respect to the given tensors are the given ones."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = grad_outputs
        return (None, None, *(gradient * factor.to(gradient.dtype) for gradient in ctx.gradients))


def _kind_of(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> str:
    """How a module's weight gradient is formed, decided by what it computes where its class does not tell."""
    if type(module) is nn.LayerNorm:
        return "layer_norm"
    if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return "conv2d"
    inputs = next(_tensors((arguments, keywords)), None)
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


def _over_positions(tensor: Tensor, features: int) -> Tensor:
    """Sum over all but the batch and the last `features` dimensions: [B, …]."""
    between = list(range(1, tensor.ndim - features))
    return (tensor.sum(dim=between) if between else tensor).flatten(1)


def _examples(value: Any, chosen: Tensor, batch: int) -> Any:
    """The chosen rows of every tensor that has one for each example."""
    if isinstance(value, Tensor):
        rows = value.detach()
        return rows.index_select(0, chosen) if rows.ndim > 0 and len(rows) == batch else rows
    if isinstance(value, (tuple, list)):
        return type(value)(_examples(part, chosen, batch) for part in value)
    if isinstance(value, dict):
        return {name: _examples(part, chosen, batch) for name, part in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
