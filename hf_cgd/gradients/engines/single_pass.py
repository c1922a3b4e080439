"""The fast engine: the gradients of all groups from one pass over the activations.

Where examples do not interact, the rows of a layer's output gradient that belong to a group are that group's alone.
Its weight gradient is a product of those rows with the same rows of the layer's input: over all groups together, the
arithmetic of one ordinary weight gradient. One `autograd.grad` over the layers' outputs and the cut (the tensor that
flows into the scope from the body) gives all of them and frees the scope's graph. A scalar finishes the step. Its
gradient is exactly sum_i c_i g_i in the scope and c_g(n) dh_n at the cut. So one ordinary `backward()` runs through
the body, with DDP's hooks, loss scaling and accumulation.

A trainable parameter behind the cut that is outside of the scope (a head that is tied to the embedding, say) is in no
row and no inner product. The scalar carries its gradient too: the rows of all groups, each times its coefficient. What
the same parameter does before the cut reaches it through the body, as ever, and autograd adds the two up.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_cgd.arithmetic import is_on_host
from hf_cgd.gradients.autograd import Cut, RowBlock, modules_around, owned_parameters
from hf_cgd.gradients.base import FastEngine, GroupGradients, NotExactError
from hf_cgd.gradients.compiled import network_is_compiled
from hf_cgd.gradients.engines.backward_pass import BackwardPass
from hf_cgd.gradients.gram import inner_products
from hf_cgd.gradients.layers.base import GroupOrder, LayerCall, OutputGradients, ReusedMemory
from hf_cgd.gradients.mixing import IndependenceCheck
from hf_cgd.gradients.recording import (
    IN_GRAPH,
    CallRecorder,
    require_rows,
    require_separable_examples,
    require_single_uses,
)
from hf_cgd.gradients.structure import LossGraph, leaves_before
from hf_cgd.gradients.verification import row_error

MEMORY_BUDGET = 2 * 2**30
"""Default bytes for the gradients of all groups."""
SMALL_ROWS = 2**18
"""Numbers in the gradients of all groups up to which they are formed at once: the cache holds them anyway."""


class SinglePassEngine(FastEngine):
    """Gradients of the groups' loss sums over the scope, from activations and their gradients.

    Args:
        model: the network that runs the forward pass, or what it wraps.
        parameters: the gradient scope.
        memory_budget: bytes that the groups' gradients may take. Where they would take more and only inner products
            are needed, the last modules' gradients are not kept: their weighted sum is formed anew later.

    Attributes:
        places: where a parameter (by id) stands in a row [P].
        size: P.
        owned: of each module the parameters of the scope that it holds, by name.
        outside: of each module the trainable parameters outside of the scope that it holds, by name.
        shares_parameters: whether a parameter belongs to several modules.
        scaling_memory: for a copy that lives within a call of a rule.
    """

    name = "single_pass"
    keeps_graph: ClassVar[bool] = True
    """Whether rules may take gradients through the graph of the forward pass."""
    serves_others: ClassVar[bool] = True
    """Whether parameters behind the cut may be outside of the scope."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], memory_budget: float = MEMORY_BUDGET
    ) -> None:
        self.parameters = list(parameters)
        self.memory_budget = memory_budget
        self.places: dict[int, tuple[int, int]] = {}
        start = 0
        for parameter in self.parameters:
            self.places[id(parameter)] = (start, start + parameter.numel())
            start += parameter.numel()
        self.size = start
        self.owned = owned_parameters(model, self.parameters)
        # Which modules hold them shows on the first step only, and hooks on all would break compiled code into pieces.
        serves = self.serves_others and not network_is_compiled()
        others = [p for p in model.parameters() if id(p) not in self.places] if serves else []
        self.outside = owned_parameters(model, others)
        self._held = {
            module: {**self.owned.get(module, {}), **self.outside.get(module, {})}
            for module in {**self.owned, **self.outside}
        }
        self._own_ids = {module: frozenset(map(id, own.values())) for module, own in self._held.items()}
        self._others = {id(p): p for own in self.outside.values() for p in own.values()}
        owners = Counter(id(parameter) for own in self.owned.values() for parameter in own.values())
        self.shares_parameters = max(owners.values(), default=0) > 1
        self.scaling_memory = ReusedMemory()
        followers, around = self.outside.keys() - self.owned.keys(), modules_around(model, self.parameters)
        self._recorder = CallRecorder(self.owned, self.keeps_graph, followers, around)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._modules: list[int] | None = None
        self._independence = IndependenceCheck()
        self._row_memory = ReusedMemory()

    @property
    def computed_in(self) -> torch.dtype:
        """The least precise type among the outputs of the scope's modules in the last recorded pass."""
        return self._recorder.computed_in

    @property
    def cut(self) -> Cut | None:
        """See `FastEngine.cut`."""
        return self._recorder.cut

    def recording(self) -> AbstractContextManager[object]:
        """Goes around the forward pass: within, every use of a module of the scope is noted."""
        return self._recorder.recording()

    def group_gradients(
        self,
        losses: Tensor,
        group_ids: Tensor,
        groups: Sequence[int],
        keep_graph: bool = False,
    ) -> GroupGradients:
        """Gradient of the sum of each listed group's losses; the graph of the scope is used up unless `keep_graph`.

        With `keep_graph`, or where the graph has a form that was not met before, one more pass through the scope tells
        whether the examples are independent.

        Args: as for `GradientEngine.group_gradients`. `groups` must be all that are present, in ascending order.

        Raises:
            NotExactError: the recorded pass does not have the needed form: a parameter is used outside of its module,
                or reached round the cut, or examples influence one another.
        """
        calls, cut = self._recorder.take()
        # A compiled network may leave hooks out without a word, which would leave gradients out.
        modules = sorted([id(call.module) for call in calls if call.module in self.owned])
        graph = LossGraph(losses, calls, cut)
        recorded, calls = calls, self._calls_that_count(graph, calls)
        require_separable_examples(calls, cut, len(losses))
        self._require_structure(graph, calls)
        self._require_others(recorded, calls, cut)
        # Something that mixes examples may have been put in later, or be taken in some steps only.
        if keep_graph or self.keeps_graph:
            self._independence.require(graph, losses, calls, cut, anyway=keep_graph)
        if self._modules is not None and modules != self._modules:
            raise NotExactError("other modules of the scope ran than on the first step")
        self._modules = modules
        edges = [edge for call in calls for edge in call.outputs]
        sources: list[Any] = [*edges, *([] if cut is None else [cut.tensor])]
        keep_graph = keep_graph or any(call.rule.reads_graph for call in calls)
        ones = torch.ones_like(losses)
        found = torch.autograd.grad(losses, sources, ones, retain_graph=keep_graph, allow_unused=True)
        with_gradients: list[tuple[LayerCall, OutputGradients]] = []
        for call in calls:
            require_rows(call, found[: len(call.outputs)], len(losses))
            with_gradients.append((call, found[: len(call.outputs)]))
            found = found[len(call.outputs) :]
        order = self.order_of(group_ids, groups, losses.device)
        at_cut = found[0] if found else None
        reached = graph.reached
        others = [parameter for place, parameter in self._others.items() if place in reached]
        return self.gradients_of(self.backward_pass(with_gradients, order, losses, cut, at_cut, others))

    def _calls_that_count(self, graph: LossGraph, calls: list[LayerCall]) -> list[LayerCall]:
        """Without those that use none of their own parameters: of modules outside of the scope, or which lend them.

        BERT's head for masked words holds the bias that its decoder adds.
        """
        users, reached = graph.users, graph.reached
        return [
            call
            for call in calls
            if call.number in users or (call.module in self.owned and not self._own_ids[call.module] & reached)
        ]

    def _require_structure(self, graph: LossGraph, calls: list[LayerCall]) -> None:
        """Check the graph of the losses, and take gradients through it where a layer is not what its rule expects."""
        graph.require_visible()
        found_in = {id(leaf) for leaf, call in graph.leaves if call is not None}
        graph.require_within_scope(self.places.keys() | (self._others.keys() & found_in), self._names)
        graph.require_own_modules(self._own_ids, self._names)
        graph.require_separate_rows()
        for call in calls:
            nodes = call.rule.nodes
            if nodes is not None and not graph.nodes[call.number] <= nodes:
                if not self.keeps_graph:
                    raise NotExactError(f"{type(call.module).__name__} computes more than its type says")
                call.rule = IN_GRAPH
        require_single_uses(calls, self._held)

    def _require_others(self, recorded: list[LayerCall], calls: list[LayerCall], cut: Cut | None) -> None:
        """Check the uses of parameters outside of the scope, and look at no other modules outside of it from now on.

        Raises:
            NotExactError: a gradient through the graph would hold what comes through the cut, or a module is in one
                that a rule takes for elementary, or has a rule that says nothing on the nodes of its graph.
        """
        if not self.outside:
            return
        elementary = {call.number for call in recorded if call.rule.nodes is not None}
        following = [call for call in calls if call.module in self.outside]
        unclear = [call for call in recorded if call.module in self.outside and call.parent in elementary]
        unclear += [
            call for call in following if not (call.rule.nodes or call.rule.reads_graph or call.rule.runs_again)
        ]
        for call in unclear:
            raise NotExactError(
                f"{type(call.module).__name__} has parameters outside of the gradient scope, and its rule cannot "
                "tell whether it computes something else as well"
            )
        through_graph = [call for call in following if call.rule.reads_graph]
        if through_graph and cut is not None:
            before = leaves_before(cut)
            for call in through_graph:
                own = self.outside[call.module].values()
                if before is None or any(id(parameter) in before for parameter in own):
                    raise NotExactError(
                        f"parameters of {type(call.module).__name__}, outside of the gradient scope, are used before "
                        "its first input too, or that cannot be seen"
                    )
        if self._modules is None:
            self._recorder.followers = {call.module: None for call in following if call.module not in self.owned}

    def order_of(self, group_ids: Tensor, groups: Sequence[int], device: torch.device) -> GroupOrder:
        """The order in which the rules take the examples."""
        return GroupOrder.by_group(group_ids, groups, device)

    def backward_pass(
        self,
        calls: list[tuple[LayerCall, OutputGradients]],
        order: GroupOrder,
        losses: Tensor,
        cut: Cut | None = None,
        at_cut: Tensor | None = None,
        others: Sequence[nn.Parameter] = (),
    ) -> BackwardPass:
        """The results of a backward pass, from which `gradients_of` forms the groups' gradients."""
        return BackwardPass(
            parameters=self.parameters,
            owned=self.owned,
            calls=[each for each in calls if each[0].module in self.owned],
            order=order,
            cut=cut,
            at_cut=at_cut,
            others=others,
            outside=self.outside,
            calls_of_others=[each for each in calls if each[0].module in self.outside],
            device=losses.device,
            dtype=losses.dtype,
            memory=self.scaling_memory,
        )

    def gradients_of(self, step: BackwardPass) -> GroupGradients:
        """The groups' gradients of a backward pass."""
        return _SinglePassGradients(self, step)

    def error_of_row(self, expected: Tensor, row: Tensor, floor: float = 0.0) -> float:
        """Largest relative error of a row that this engine forms, given the gradient [P] that is expected.

        `floor`: share of the largest entry of all that is added to each parameter's own.
        """
        allowance = floor * float(expected.abs().max())
        return row_error(expected, row, self.parameters, [allowance] * len(self.parameters))

    def rows_of(self, step: BackwardPass) -> Tensor:
        """The groups' gradients [G, P], valid until the next call of this or `gram_by_module`."""
        if len(step.order.bounds) * self.size <= SMALL_ROWS:
            small = self._small_rows_of(step)
            if small is not None:
                return small
        rows = self._row_memory.of_shape((len(step.order.bounds), self.size), step.device, step.dtype)
        vectors = self.vectors_of(step)
        known = {} if vectors is None else vectors.pieces()
        for parameter, piece in known.items():
            rows[:, slice(*self.places[parameter])] = piece
        fresh = self.places.keys() - known.keys()
        for call, gradients in step.calls:
            own = {name: p for name, p in self.owned[call.module].items() if id(p) not in known}
            if not own:
                continue
            targets = {name: rows[:, slice(*self.places[id(parameter)])] for name, parameter in own.items()}
            first = [name for name, parameter in own.items() if id(parameter) in fresh]
            call.rule.form_gradients(call, gradients, step.order, targets, first)
            fresh.difference_update(id(parameter) for parameter in own.values())
        for parameter in fresh:
            rows[:, slice(*self.places[parameter])] = 0
        return rows

    def vectors_of(self, step: BackwardPass) -> RowBlock | None:
        """Gradients of biases and scales, for all groups and layers at once; None where there are none.

        None on the host as well: there a slice of a layer that is in the cache anyway is faster than a call is short.
        """
        if is_on_host(step.order.first):
            return None
        left_out = {
            id(p) for call, _ in step.calls if not call.rule.sums_vectors for p in self.owned[call.module].values()
        }
        everyone = GroupOrder.one_group_per_example(step.order.bounds[-1][1], step.device)
        found: dict[int, Tensor] = {}
        for call, gradients in step.calls:
            own = self.owned[call.module]
            names = [name for name, p in own.items() if p.ndim == 1 and id(p) not in left_out]
            if not names or gradients[0] is None:
                continue
            for name, rows in call.rule.example_gradients(call, gradients, everyone, names, step.dtype).items():
                place = id(own[name])
                found[place] = found[place] + rows if place in found else rows
        if not found:
            return None
        ends = list(accumulate(rows.shape[1] for rows in found.values()))
        sums = step.order.sums(torch.cat(list(found.values()), dim=1))
        return RowBlock(sums, dict(zip(found, pairwise([0, *ends]), strict=True)))

    def _small_rows_of(self, step: BackwardPass) -> Tensor | None:
        """The same for a small network whose rules form all of it at once; None where one does not."""
        parts: dict[int, Tensor] = {}
        for call, gradients in step.calls:
            own = self.owned[call.module]
            found = call.rule.small_gradients(call, gradients, step.order, own, step.dtype)
            if found is None:
                return None
            for name, parameter in own.items():
                place = id(parameter)
                parts[place] = found[name] if place not in parts else parts[place] + found[name]
        if len(parts) < len(self.parameters):
            return None
        return torch.cat([parts[id(parameter)] for parameter in self.parameters], dim=1)

    def gram_by_module(self, step: BackwardPass, reads_values: bool) -> tuple[Tensor, list[RowBlock]]:
        """The Gram matrix, on the host taken module by module while the gradients are in the cache.

        Returns:
            [G, G] as of `inner_products`, and the gradients of as many parameters as the memory budget lets. They are
            valid until the next call of this or `rows_of`.
        """
        vectors = self.vectors_of(step)
        known = {} if vectors is None else vectors.places
        uses: dict[nn.Module, list[tuple[LayerCall, OutputGradients]]] = {}
        for call, gradients in step.calls:
            if any(id(p) not in known for p in self.owned[call.module].values()):
                uses.setdefault(call.module, []).append((call, gradients))
        owned = {module: {n: p for n, p in self.owned[module].items() if id(p) not in known} for module in uses}
        groups = len(step.order.bounds)
        sizes = {module: sum(p.numel() for p in own.values()) for module, own in owned.items()}
        keep = _within_budget(sizes, int(self.memory_budget // (groups * step.dtype.itemsize)))
        kept_size = sum(sizes[module] for module in keep)
        last = max((size for module, size in sizes.items() if module not in keep), default=0)
        memory = self._row_memory.of_shape((groups * (kept_size + last),), step.device, step.dtype)
        kept = memory[: groups * kept_size].view(groups, kept_size)
        by_module = is_on_host(step.order.first)
        products: list[Tensor] = []
        places: dict[int, tuple[int, int]] = {}
        used = 0
        for module, calls in uses.items():
            own, size = owned[module], sizes[module]
            is_kept = module in keep
            block = (
                kept[:, used : used + size] if is_kept else memory[kept.numel() :][: groups * size].view(groups, size)
            )
            columns = block.split([p.numel() for p in own.values()], dim=1)
            targets = dict(zip(own, columns, strict=True))
            for place, (call, gradients) in enumerate(calls):
                fresh = () if place else targets
                call.rule.form_gradients(call, gradients, step.order, targets, fresh)
            if by_module or not is_kept:
                products.append(inner_products(block, reads_values))
            if is_kept:
                for parameter in own.values():
                    places[id(parameter)] = (used, used + parameter.numel())
                    used += parameter.numel()
        blocks = [RowBlock(kept, places)] if kept_size else []
        if vectors is not None:
            blocks.append(vectors)
        if not by_module:
            products += [inner_products(block.rows, reads_values) for block in blocks]
        return torch.stack(products).sum(dim=0), blocks


class _SinglePassGradients(GroupGradients):
    """Forms what it is asked for: rows, or the Gram matrix module by module, or neither."""

    reads_graph = False

    def __init__(self, engine: SinglePassEngine, step: BackwardPass) -> None:
        super().__init__()
        self.others = step.others
        self._engine = engine
        self._step = step
        self._gram: Tensor | None = None
        self._kept: list[RowBlock] = []

    def _form_rows(self) -> Tensor:
        self._kept = []
        with torch.no_grad():
            return self._engine.rows_of(self._step)

    def gram(self, reads_values: bool = True) -> Tensor:
        """See `GroupGradients.gram`."""
        size = self._engine.size * len(self._step.order.bounds)
        fits = size * self._step.dtype.itemsize <= self._engine.memory_budget
        if (size <= SMALL_ROWS and fits) or self._engine.shares_parameters:
            return super().gram(reads_values)
        if self._gram is None:
            with torch.no_grad():
                self._gram, self._kept = self._engine.gram_by_module(self._step, reads_values)
        return self._gram

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        if self._rows is not None:
            return self._step.scalar_of_rows(loss, coefficients, self._rows)
        return self._step.scalar(loss, coefficients, self._kept)


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
