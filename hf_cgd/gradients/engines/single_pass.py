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

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_cgd.gradients.autograd import Cut, modules_around, owned_parameters
from hf_cgd.gradients.base import GroupGradients, NotExactError
from hf_cgd.gradients.compiled import network_is_compiled
from hf_cgd.gradients.engines.backward_pass import BackwardPass
from hf_cgd.gradients.engines.group_rows import MEMORY_BUDGET, GroupRows
from hf_cgd.gradients.fast_engine import FastEngine
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import LayerCall, OutputGradients, ReusedMemory
from hf_cgd.gradients.mixing import IndependenceCheck
from hf_cgd.gradients.recording import (
    IN_GRAPH,
    CallRecorder,
    require_rows,
    require_separable_examples,
    require_single_uses,
)
from hf_cgd.gradients.structure import LossGraph, leaves_before


class SinglePassEngine(FastEngine):
    """Gradients of the groups' loss sums over the scope, from activations and their gradients.

    Args:
        model: the network that runs the forward pass, or what it wraps.
        parameters: the gradient scope.
        memory_budget: bytes that the groups' gradients may take (see `GroupRows`).

    Attributes:
        group_rows: forms the groups' gradients out of what a backward pass left.
        owned: of each module the parameters of the scope that it holds, by name.
        outside: of each module the trainable parameters outside of the scope that it holds, by name.
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
        self.owned = owned_parameters(model, self.parameters)
        self.group_rows = GroupRows(self.parameters, self.owned, memory_budget)
        self._scope = frozenset(map(id, self.parameters))
        # Which modules hold them shows on the first step only, and hooks on all would break compiled code into pieces.
        serves = self.serves_others and not network_is_compiled()
        others = [p for p in model.parameters() if id(p) not in self._scope] if serves else []
        self.outside = owned_parameters(model, others)
        self._held = {
            module: {**self.owned.get(module, {}), **self.outside.get(module, {})}
            for module in {**self.owned, **self.outside}
        }
        self._own_ids = {module: frozenset(map(id, own.values())) for module, own in self._held.items()}
        self._others = {id(p): p for own in self.outside.values() for p in own.values()}
        self.scaling_memory = ReusedMemory()
        followers, around = self.outside.keys() - self.owned.keys(), modules_around(model, self.parameters)
        self._recorder = CallRecorder(self.owned, self.keeps_graph, followers, around)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._modules: list[int] | None = None
        self._independence = IndependenceCheck()

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
        step = BackwardPass(
            parameters=self.parameters,
            owned=self.owned,
            calls=[each for each in with_gradients if each[0].module in self.owned],
            order=order,
            device=losses.device,
            dtype=losses.dtype,
            reached=reached,
            cut=cut,
            at_cut=at_cut,
            others=[parameter for place, parameter in self._others.items() if place in reached],
            outside=self.outside,
            calls_of_others=[each for each in with_gradients if each[0].module in self.outside],
            memory=self.scaling_memory,
        )
        return self.gradients_of(step)

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
        graph.require_within_scope(self._scope | (self._others.keys() & found_in), self._names)
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

    def gradients_of(self, step: BackwardPass) -> GroupGradients:
        """The groups' gradients of a backward pass."""
        return self.group_rows.gradients_of(step)
