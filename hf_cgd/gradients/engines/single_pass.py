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

from hf_cgd.gradients.autograd import (
    Cut,
    owned_parameters,
    scalar_with_gradients,
    weighted_sum,
)
from hf_cgd.gradients.base import GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.gram import gram_matrix
from hf_cgd.gradients.layers.rules import (
    Call,
    Members,
    ReusedMemory,
    add_gradients,
    kind_of,
    scaled_by_example,
    weighted_gradients,
)
from hf_cgd.models.outputs import tensors_in

MEMORY_BUDGET = 2 * 2**30
"""Default bytes for the gradients of all groups."""


class SinglePassEngine(GradientEngine):
    """Gradients of the groups' loss sums over the scope, from activations and their gradients.

    Args:
        model: the network that runs the forward pass, or what it wraps.
        parameters: the gradient scope.
        memory_budget: bytes that the groups' gradients may take. Where they would take more and only inner products
            are needed, those of the last modules are used for the inner products and computed anew, weighted, later.
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
        self.shares_parameters = max(owners.values(), default=0) > 1
        self.computed_in: torch.dtype = torch.float64
        """Least precise type among the outputs of the scope's modules in the last recorded pass."""
        self._kinds: dict[nn.Module, str] = {}
        self._calls: list[Call] = []
        self._cut: Cut | None = None
        self._modules: Counter[int] | None = None
        self._row_memory = ReusedMemory()
        self.scaling_memory = ReusedMemory()

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
        members = self.members_of(group_ids, groups)
        at_cut = found[0] if found else None
        return self.gradients_of(BackwardPass(self, backward, members, cut, at_cut, losses.device, losses.dtype))

    def members_of(self, group_ids: Tensor, groups: Sequence[int]) -> Members:
        """Who is in which group."""
        return Members.of(group_ids, groups)

    def gradients_of(self, step: "BackwardPass") -> GroupGradients:
        """Group gradients from a pass over the activations."""
        return _SinglePassGradients(step)

    def rows_of(self, step: "BackwardPass") -> Tensor:
        """The groups' gradients [G, P], valid until the next call of this or `gram_by_module`."""
        rows = self._row_memory.of_shape((len(step.members.bounds), self.size), step.device, step.dtype)
        fresh = set(self.places)
        for call, gradients in step.calls:
            own = self.owned[call.module]
            targets = {name: rows[:, slice(*self.places[id(parameter)])] for name, parameter in own.items()}
            first = [name for name, parameter in own.items() if id(parameter) in fresh]
            add_gradients(call, gradients, step.members, targets, first)
            fresh.difference_update(id(parameter) for parameter in own.values())
        for parameter in fresh:
            rows[:, slice(*self.places[parameter])] = 0
        return rows

    def parts_of(self, rows: Tensor) -> dict[int, Tensor]:
        """The gradients [G, numel] by id of the parameter."""
        return {parameter: rows[:, slice(*place)] for parameter, place in self.places.items()}

    def gram_by_module(self, step: "BackwardPass") -> tuple[Tensor, dict[int, Tensor]]:
        """The Gram matrix, taken module by module while the gradients are in the cache.

        Returns:
            float64 [G, G], and the gradients [G, numel] of as many parameters as the memory budget lets, by id. They
            are valid until the next call of this or `rows_of`.
        """
        uses: dict[nn.Module, list[tuple[Call, Sequence[Tensor | None]]]] = {}
        for call, gradients in step.calls:
            uses.setdefault(call.module, []).append((call, gradients))
        groups = len(step.members.bounds)
        sizes = {module: sum(p.numel() for p in self.owned[module].values()) for module in uses}
        keep = _within_budget(sizes, int(self.memory_budget // (groups * step.dtype.itemsize)))
        kept_size = sum(sizes[module] for module in keep)
        last = max((size for module, size in sizes.items() if module not in keep), default=0)
        memory = self._row_memory.of_shape((groups * (kept_size + last),), step.device, step.dtype)
        gram = torch.zeros(groups, groups, dtype=torch.float64)
        kept: dict[int, Tensor] = {}
        used = 0
        for module, calls in uses.items():
            own = self.owned[module]
            start = used if module in keep else kept_size
            block = memory[groups * start : groups * (start + sizes[module])].view(groups, -1)
            parts = block.split([p.numel() for p in own.values()], dim=1)
            targets = dict(zip(own, parts, strict=True))
            for place, (call, gradients) in enumerate(calls):
                add_gradients(call, gradients, step.members, targets, fresh=() if place else targets)
            gram += gram_matrix(block)
            if module in keep:
                kept.update((id(parameter), targets[name]) for name, parameter in own.items())
                used += sizes[module]
        return gram, kept

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
        device = next((part.device.type for part in outputs), "cpu")
        cast = torch.autocast(device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))
        self._calls.append(Call(module, arguments, keywords, edges, self._kinds[module], cast))


@dataclass(frozen=True)
class BackwardPass:
    """What one pass over the activations leaves: the calls with the gradients of their outputs, and the cut's."""

    engine: SinglePassEngine
    calls: list[tuple[Call, Sequence[Tensor | None]]]
    members: Members
    cut: Cut | None
    at_cut: Tensor | None
    device: torch.device
    dtype: torch.dtype

    def scalar(self, loss: Tensor, coefficients: Tensor, parts: dict[int, Tensor]) -> Tensor:
        """The scalar that finishes the step.

        Args:
            loss: its value.
            coefficients: [B].
            parts: gradients [G, numel] of the groups, by id of the parameter, as far as they are at hand.
        """
        with torch.no_grad():
            of_groups = coefficients[self.members.first]
            found = {parameter: weighted_sum(part, of_groups) for parameter, part in parts.items()}
            self._add_missing(found, coefficients)
        tensors: list[Tensor] = list(self.engine.parameters)
        gradients = [
            found[id(p)].view_as(p).to(p.dtype) if id(p) in found else torch.zeros_like(p)
            for p in self.engine.parameters
        ]
        if self.cut is not None and self.at_cut is not None:
            tensors.append(self.cut.tensor)
            gradients.append(scaled_by_example(self.at_cut, coefficients))
        return scalar_with_gradients(loss, tensors, gradients)

    def _add_missing(self, found: dict[int, Tensor], coefficients: Tensor) -> None:
        """Weighted gradients [numel] of the parameters that are not in `found`, straight from the activations."""
        given = set(found)
        for call, gradients in self.calls:
            missing = {name: id(p) for name, p in self.engine.owned[call.module].items() if id(p) not in given}
            if missing:
                memory = self.engine.scaling_memory
                weighted = weighted_gradients(call, gradients, coefficients, list(missing), self.dtype, memory)
                for name, gradient in weighted.items():
                    old = found.get(missing[name])
                    found[missing[name]] = gradient if old is None else old + gradient


class _SinglePassGradients(GroupGradients):
    """Forms what it is asked for: rows, or the Gram matrix module by module, or neither."""

    def __init__(self, step: BackwardPass) -> None:
        super().__init__()
        self._step = step
        self._gram: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def _form_rows(self) -> Tensor:
        self._parts = {}
        with torch.no_grad():
            return self._step.engine.rows_of(self._step)

    def gram(self) -> Tensor:
        """See `GroupGradients.gram`."""
        if self._step.engine.shares_parameters:
            return super().gram()
        if self._gram is None:
            with torch.no_grad():
                self._gram, self._parts = self._step.engine.gram_by_module(self._step)
        return self._gram

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        parts = self._parts if self._rows is None else self._step.engine.parts_of(self._rows)
        return self._step.scalar(loss, coefficients, parts)


def _within_budget(sizes: dict[nn.Module, int], most: int) -> set[nn.Module]:
    """The modules whose gradients are kept; where not all are, one module at a time needs room beside them."""
    if sum(sizes.values()) <= most:
        return set(sizes)
    keep, left = set(), most - max(sizes.values())
    for module, size in sizes.items():
        if size <= left:
            keep.add(module)
            left -= size
    return keep


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
