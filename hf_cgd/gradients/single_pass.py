"""The fast engine: the gradients of all groups from one pass over the activations.

Where examples do not interact, the rows of a layer's output gradient that belong to a group are that group's alone, so
its weight gradient is a product of those rows with the same rows of the layer's input: over all groups together the
arithmetic of one ordinary weight gradient. One `autograd.grad` over the layers' outputs and the cut (the tensor that
flows into the scope from the body) gives all of them and frees the scope's graph. The step is finished by a scalar
whose gradient is exactly sum_i c_i g_i in the scope and c_g(n) dh_n at the cut, so that one ordinary `backward()` runs
through the body, with DDP's hooks, loss scaling and accumulation working as ever.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_cgd.gradients.layer_gradients import Call, Members, add_gradients, kind_of
from hf_cgd.gradients.per_group import GroupGradients, gram_matrix, unflatten
from hf_cgd.gradients.surrogate import (
    Cut,
    NotExactError,
    owned_parameters,
    scalar_with_gradients,
    tensors_in,
)

MEMORY_BUDGET = 1 * 2**30
"""Default bytes for the gradients of all groups."""


class SinglePassEngine:
    """Gradients of the groups' loss sums over the scope, from activations and their gradients.

    Args:
        model: the network that runs the forward pass, or what it wraps.
        parameters: the gradient scope.
        memory_budget: bytes that the groups' gradients may take. Where they would take more and only inner products
            are needed, these are formed module by module and the weighted gradient is computed anew.
    """

    name = "single_pass"

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], memory_budget: float = MEMORY_BUDGET
    ) -> None:
        self.parameters = list(parameters)
        self.memory_budget = memory_budget
        self.places: dict[int, tuple[int, int]] = {}
        """Where a parameter (by id) stands in a row [P]."""
        start = 0
        for parameter in self.parameters:
            self.places[id(parameter)] = (start, start + parameter.numel())
            start += parameter.numel()
        self.size = start
        self.owned = owned_parameters(model, self.parameters)
        owners = Counter(id(parameter) for own in self.owned.values() for parameter in own.values())
        self._shared = max(owners.values(), default=0) > 1
        self.computed_in: torch.dtype = torch.float64
        """Least precise type among the outputs of the scope's modules in the last recorded pass."""
        self._kinds: dict[nn.Module, str] = {}
        self._calls: list[Call] = []
        self._cut: Cut | None = None
        self._modules: Counter[int] | None = None
        self._memory: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass: within, every use of a module of the scope is taken note of."""
        self._calls, self._cut, self.computed_in = [], None, torch.float64
        hooks = [module.register_forward_hook(self._note, with_kwargs=True) for module in self.owned]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def group_gradients(
        self,
        losses: Tensor,
        group_ids: Tensor,
        groups: Sequence[int],
        need_rows: bool = True,
        keep_graph: bool = False,
    ) -> GroupGradients:
        """Gradient of the sum of each listed group's losses; the graph of the scope is used up unless `keep_graph`.

        Args: as for `PerGroupEngine.group_gradients`. `groups` must be all that are present, in ascending order.

        Raises:
            NotExactError: the recorded pass does not have the needed form. Whether the form tells the truth (no second
                path round the cut, no interaction between examples, no trainable gaps in the scope) only a comparison
                can say: see `AutoEngine`.
        """
        calls, self._calls = self._calls, []
        cut, self._cut = self._cut, None
        require_form(calls, cut, len(losses))
        # A compiled network may leave hooks out without a word, which would leave gradients out.
        modules = Counter(id(call.module) for call in calls)
        if self._modules is not None and modules != self._modules:
            raise NotExactError("other modules of the scope ran than on the first step")
        self._modules = modules
        edges = [edge for call in calls for edge in call.outputs]
        sources: list[Any] = [*edges, *([] if cut is None else [cut.tensor])]
        found = torch.autograd.grad(losses.sum(), sources, retain_graph=keep_graph, allow_unused=True)
        backward: list[tuple[Call, Sequence[Tensor | None]]] = []
        for call in calls:
            backward.append((call, found[: len(call.outputs)]))
            found = found[len(call.outputs) :]
        with torch.no_grad():
            step = BackwardPass(self, backward, Members.of(group_ids, groups), cut, found[0] if found else None)
            return self.gather(step, losses, need_rows)

    def gather(self, step: "BackwardPass", losses: Tensor, need_rows: bool) -> GroupGradients:
        """Group gradients (inner products will do unless `need_rows`) from a pass over the activations."""
        size = len(step.members.bounds) * self.size * losses.element_size()
        if need_rows or size <= self.memory_budget or self._shared:
            # Nobody keeps the rows beyond the step where only inner products are asked for.
            memory = None if need_rows else self._kept(len(step.members.bounds), self.size, losses)
            return _RowGradients(self.rows_of(step.calls, step.members, losses, memory), step)
        return DeferredGradients(step, losses, self._gram_by_module(step, losses))

    def _kept(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Memory that is kept from step to step: fresh memory of this size costs as much as a layer."""
        size = rows * columns
        if self._memory is None or len(self._memory) < size or self._memory.dtype != like.dtype:
            self._memory = torch.empty(size, device=like.device, dtype=like.dtype)
        return self._memory[:size].view(rows, columns)

    def _gram_by_module(self, step: "BackwardPass", losses: Tensor) -> Tensor:
        """The Gram matrix module by module, so that the rows of one module only are there at a time."""
        uses: dict[nn.Module, list[tuple[Call, Sequence[Tensor | None]]]] = {}
        for call, gradients in step.calls:
            uses.setdefault(call.module, []).append((call, gradients))
        groups = len(step.members.bounds)
        gram = torch.zeros(groups, groups, dtype=torch.float64)
        sizes = {module: [p.numel() for p in self.owned[module].values()] for module in uses}
        memory = self._kept(1, groups * max(sum(parts) for parts in sizes.values()), losses).flatten()
        for module, calls in uses.items():
            block = memory[: groups * sum(sizes[module])].view(groups, -1)
            targets = dict(zip(self.owned[module], block.split(sizes[module], dim=1), strict=True))
            for place, (call, gradients) in enumerate(calls):
                add_gradients(call, gradients, step.members, targets, fresh=() if place else targets)
            gram += gram_matrix(block)
        return gram

    def rows_of(
        self,
        backward: list[tuple[Call, Sequence[Tensor | None]]],
        members: Members,
        losses: Tensor,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Rows [G, P] from all calls and the gradients of their outputs, in `memory` if there is any."""
        rows = memory
        if rows is None:
            rows = torch.empty(len(members.bounds), self.size, device=losses.device, dtype=losses.dtype)
        fresh = set(self.places)
        for call, gradients in backward:
            own = self.owned[call.module]
            targets = {name: rows[:, slice(*self.places[id(parameter)])] for name, parameter in own.items()}
            first = [name for name, parameter in own.items() if id(parameter) in fresh]
            add_gradients(call, gradients, members, targets, first)
            fresh.difference_update(id(parameter) for parameter in own.values())
        for parameter in fresh:
            rows[:, slice(*self.places[parameter])] = 0
        return rows

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not self._calls:
            self._cut = Cut.of((arguments, keywords))
        if module not in self._kinds:
            self._kinds[module] = kind_of(module, arguments, keywords, output)
        outputs = [part for part in tensors_in(output) if part.requires_grad]
        for part in outputs:
            if torch.finfo(part.dtype).eps > torch.finfo(self.computed_in).eps:
                self.computed_in = part.dtype
        # An edge is taken in place of the output itself, which an in-place activation may change.
        edges = [get_gradient_edge(part) for part in outputs]
        self._calls.append(Call(module, arguments, keywords, edges, self._kinds[module]))


@dataclass(frozen=True)
class BackwardPass:
    """What one pass over the activations leaves: the calls with the gradients of their outputs, and the cut's."""

    engine: SinglePassEngine
    calls: list[tuple[Call, Sequence[Tensor | None]]]
    members: Members
    cut: Cut | None
    at_cut: Tensor | None

    def scalar(self, loss: Tensor, coefficients: Tensor, gradients: list[Tensor]) -> Tensor:
        """The scalar that carries the weighted `gradients` of the scope, and the weighted one of the cut."""
        tensors: list[Tensor] = list(self.engine.parameters)
        if self.cut is not None and self.at_cut is not None:
            tensors.append(self.cut.tensor)
            gradients = [*gradients, scaled_by_example(self.at_cut, coefficients)]
        return scalar_with_gradients(loss, tensors, gradients)


class _RowGradients(GroupGradients):
    """The gradients of all groups at hand."""

    def __init__(self, rows: Tensor, step: BackwardPass) -> None:
        super().__init__(rows)
        self._step = step

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        combined = coefficients.to(self.rows)[self._step.members.first] @ self.rows
        return self._step.scalar(loss, coefficients, unflatten(combined, self._step.engine.parameters))


class DeferredGradients(GroupGradients):
    """Inner products (or sketches) at hand; the weighted gradient is formed once the coefficients are known.

    Args:
        step: the pass.
        losses: [B], for device and type.
        gram: [G, G]; None where `rows` is given.
        rows: [G, S] sketches; None where `gram` is given.
    """

    def __init__(
        self, step: BackwardPass, losses: Tensor, gram: Tensor | None = None, rows: Tensor | None = None
    ) -> None:
        if rows is not None:
            super().__init__(rows)
        self._step = step
        self._losses = losses.detach()
        self._gram = gram

    def gram(self) -> Tensor:
        """See `GroupGradients.gram`."""
        return super().gram() if self._gram is None else self._gram

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        """See `GroupGradients.scalar`; the coefficients may differ within a group."""
        step = self._step
        scaled: list[tuple[Call, Sequence[Tensor | None]]] = [
            (call, [None if gradient is None else scaled_by_example(gradient, coefficients) for gradient in gradients])
            for call, gradients in step.calls
        ]
        with torch.no_grad():
            rows = step.engine.rows_of(scaled, step.members.together(), self._losses)
        return step.scalar(loss, coefficients, unflatten(rows[0], step.engine.parameters))


def scaled_by_example(tensor: Tensor, coefficients: Tensor) -> Tensor:
    """The tensor [B, …] with each example's entries multiplied by its coefficient."""
    return tensor * coefficients.to(tensor).view([-1] + [1] * (tensor.ndim - 1))


def require_form(calls: list[Call], cut: Cut | None, batch: int) -> None:
    """Raise a NotExactError unless the rows of the `batch` examples can be told apart in every call and the cut."""
    if not calls:
        raise NotExactError("no module of the scope was seen in the forward pass")
    for call in calls:
        kind = type(call.module).__name__
        if isinstance(call.module, nn.modules.batchnorm._BatchNorm) and call.module.training:
            raise NotExactError(f"{kind} in training mode mixes the examples of a batch")
        first = next(tensors_in((call.arguments, call.keywords)), None)
        if first is None or first.ndim == 0 or len(first) != batch:
            raise NotExactError(f"an input of {kind} has no entry for each example")
    if cut is not None:
        cut.require_intact()
        if cut.tensor.ndim == 0 or len(cut.tensor) != batch:
            raise NotExactError("what flows into the scope has no entry for each example")
