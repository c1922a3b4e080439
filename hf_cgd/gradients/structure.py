"""What the graph of the losses is made of, from the losses down to the cut, whatever the numbers in it are.

Gradients that are zero in one batch (behind a head that starts at zero, say) tell nothing about later batches. The
graph does: it shows every parameter that the losses depend on, and through which modules.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from hf_cgd.gradients.autograd import Cut
from hf_cgd.gradients.base import NotExactError
from hf_cgd.gradients.layers.base import LayerCall
from hf_cgd.gradients.rearranging import Rows, rows_behind

Edge = tuple[Node, int]
"""One output of a node of the autograd graph."""

REDUCTIONS = ("Sum", "Mean", "Var", "Std", "Norm", "LinalgVectorNorm", "Logsumexp", "Softmax", "LogSoftmax", "Cumsum")
"""Beginnings of the names of nodes that reduce dimensions, or normalise over them."""

CHECKPOINT = "CheckpointFunctionBackward"
"""The node of a re-entrant checkpoint."""
LEAF = "AccumulateGrad"
"""The node of a leaf of the graph."""
HARMLESS = frozenset(f"{name}Backward0" for name in ("Add", "Addmm", "Gelu", "Mm", "Mul", "Relu", "T", "View"))
"""Frequent nodes that neither mix examples nor hide anything."""

REENTRANT = (
    "Re-entrant gradient checkpointing hides the modules of the gradient scope from autograd, so that group gradients "
    "cannot be taken. Set gradient_checkpointing_kwargs={'use_reentrant': False}."
)

SYNCED = (
    "Networks with BatchNorm take a backward pass for each group that a process holds, and with SyncBatchNorm each "
    "pass adds up what all processes have, which is of other groups. Leave BatchNorm as it was (each process has "
    "statistics of its own), freeze it (hf_cgd.models.batch_norm.freeze_batch_norm), compare the layer behind it "
    "alone (gradient_layers='head'), or use objective='group_dro', which needs the losses only."
)


def edge_of(tensor: Tensor) -> Edge:
    """Where the gradient of a tensor arrives."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def leaves_before(cut: Cut) -> set[int] | None:
    """Ids of the leaves that a cut is computed from; None where a re-entrant checkpoint hides some."""
    found = set()
    for node in _nodes_from(cut.edge[0]):
        name = type(node).__name__
        if name == CHECKPOINT:
            return None
        if name == LEAF:
            found.add(id(node.variable))
    return found


def require_unsynced(losses: Tensor, scope: Collection[int]) -> None:
    """Raise a ValueError where a pass from the losses to the scope, given by ids, takes in what other processes have.

    SyncBatchNorm sums over the processes in it.
    """
    for node in _nodes_from(edge_of(losses)[0]):
        if "SyncBatchNorm" in type(node).__name__:
            leaves = (one for one in _nodes_from(node) if type(one).__name__ == LEAF)
            if any(id(leaf.variable) in scope for leaf in leaves):
                raise ValueError(SYNCED)


def _nodes_from(start: Any) -> Iterator[Any]:
    """A node of the graph and all that it is computed from."""
    todo = [start]
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        todo.extend(following)


class LossGraph:
    """A walk from the losses to the cut that knows within which call of a module it is.

    Args:
        losses: [B] with graph.
        calls: of the modules of the scope.
        cut: where the walk ends; None where nothing flows into the scope.
        watched: edges of weights that are no leaves, to be listed in `uses`.

    Attributes:
        leaves: every leaf that was reached, with the call within which it is used; None for outside of all calls.
        uses: every watched edge that was reached, with the call within which it is used.
        nodes: names of the nodes within each call, by the call's number.
        mixing: a node that computes statistics of the batch in the manner of BatchNorm; None for none.
        reduction: a node that sums or averages over the examples in another manner; None for none.
        form: how many nodes of each kind were met.
        hides_parameters: whether a re-entrant checkpoint was met, beyond which nothing can be seen.
    """

    def __init__(
        self, losses: Tensor, calls: Sequence[LayerCall], cut: Cut | None, watched: Collection[Edge] = ()
    ) -> None:
        self.leaves: list[tuple[Tensor, LayerCall | None]] = []
        self.uses: list[tuple[Edge, LayerCall | None]] = []
        self._watched = watched
        self.nodes: dict[int, set[str]] = {call.number: set() for call in calls}
        self.mixing: str | None = None
        self.reduction: str | None = None
        self._not_harmless: list[tuple[Any, str]] = []
        self._batch = len(losses)
        self._kinds: dict[str, int] = {}
        self.hides_parameters = False
        self._by_number = {call.number: call for call in calls}
        self._ends_of: dict[Edge, list[LayerCall]] = {}
        for call in calls if len(calls) == 1 else sorted(calls, key=lambda call: call.number):
            for end in call.outputs:
                edge = (end.node, end.output_nr)
                # What a module hands through unchanged is not its own.
                if edge not in call.starts:
                    self._ends_of.setdefault(edge, []).append(call)
        self._walk(edge_of(losses), None if cut is None else cut.edge)

    @property
    def form(self) -> frozenset[tuple[str, int]]:
        """See `LossGraph`."""
        return frozenset(self._kinds.items())

    @cached_property
    def rows(self) -> dict[Rows, str]:
        """What is known of the places of the batch's rows, with the name of a node for each finding but `KEPT`.

        Found when it is first asked for: to read places within a checkpoint is to compute that part once more.
        """
        nodes = self._not_harmless if self._batch > 1 else []
        found = {rows_behind(node, name, self._batch): name for node, name in nodes}
        found.pop(Rows.KEPT, None)
        return found

    @property
    def reached(self) -> set[int]:
        """Ids of the leaves."""
        return {id(leaf) for leaf, _ in self.leaves}

    @property
    def users(self) -> set[int]:
        """Numbers of the calls that use a leaf themselves, not through a call within them."""
        return {call.number for _, call in self.leaves if call is not None}

    def _walk(self, start: Edge, stop: Edge | None) -> None:
        todo: list[tuple[Edge, LayerCall | None]] = [(start, None)]
        seen: set[tuple[Edge, int]] = set()
        ends, watched, kinds = self._ends_of, self._watched, self._kinds
        while todo:
            edge, call = todo.pop()
            if edge == stop:
                continue
            if call is not None or edge in ends:
                call = self._within(edge, call)
            key = (edge, -1 if call is None else call.number)
            if key in seen:
                continue
            seen.add(key)
            if watched and edge in watched:
                self.uses.append((edge, call))
            node: Any = edge[0]
            name = type(node).__name__
            if name == LEAF:
                self.leaves.append((node.variable, call))
                continue
            kinds[name] = kinds.get(name, 0) + 1
            if call is not None:
                self.nodes[call.number].add(name)
            if name not in HARMLESS:
                self._look_at(node, name)
            for following in node.next_functions:
                if following[0] is not None:
                    todo.append((following, call))

    def _look_at(self, node: Any, name: str) -> None:
        """Take note of a node that may mix examples, or hide something."""
        if "BatchNorm" in name and _mixes_rows(node, name):
            self.mixing = name
        if name.startswith(REDUCTIONS) and self._reduces_rows(node):
            self.reduction = name
        self.hides_parameters |= name == CHECKPOINT
        self._not_harmless.append((node, name))

    def _within(self, edge: Edge, call: LayerCall | None) -> LayerCall | None:
        """The innermost call that an edge belongs to, when it is reached from within `call`."""
        while call is not None and edge in call.starts:
            call = self._parent(call)
        for other in self._ends_of.get(edge, ()):
            if not self._contains(other, call):
                call = other
        return call

    def _reduces_rows(self, node: Any) -> bool:
        """Whether a sum, mean or the like runs over the examples: over the first of several dimensions."""
        dims = getattr(node, "_saved_dim", None)
        source, place = node.next_functions[0]
        if dims is None or source is None or hasattr(source, "variable"):
            return False
        shape = source._input_metadata[place].shape
        over = dims if isinstance(dims, tuple) else (dims,)
        # A negative number comes back as one near 2^64.
        first = {0, 2**64 - len(shape), -len(shape)}
        return len(shape) > 1 and shape[0] == self._batch > 1 and bool(first & set(over))

    def _parent(self, call: LayerCall) -> LayerCall | None:
        return None if call.parent is None else self._by_number.get(call.parent)

    def _contains(self, outer: LayerCall, call: LayerCall | None) -> bool:
        while call is not None:
            if call is outer:
                return True
            call = self._parent(call)
        return False

    # ---- What engines ask for ---------------------------------------------------------------------------------------

    def require_visible(self) -> None:
        """Raise a ValueError if a re-entrant checkpoint lies between the losses and the cut."""
        if self.hides_parameters:
            raise ValueError(REENTRANT)

    def require_within_scope(self, scope: Collection[int], names: dict[int, str]) -> None:
        """Raise a NotExactError unless everything trainable that was reached is in the scope, given by ids."""
        for leaf, _ in self.leaves:
            if id(leaf) not in scope:
                raise NotExactError(
                    f"{_name(leaf, names)} is not in the gradient scope but reaches the loss by another way than "
                    "through the scope's first input"
                )

    def require_own_modules(self, own: Mapping[nn.Module, Collection[int]], names: dict[int, str]) -> None:
        """Raise a NotExactError unless every parameter is used within the module that holds it, and nowhere else.

        `own` has the ids of each module's parameters in the scope.
        """
        for leaf, call in self.leaves:
            if call is None or id(leaf) not in own[call.module]:
                raise NotExactError(f"{_name(leaf, names)} is used outside of the module that holds it")

    def require_separate_rows(self) -> None:
        """Raise a NotExactError if batch statistics mix the examples."""
        if self.mixing is not None:
            raise NotExactError(f"batch statistics ({self.mixing}) mix the examples of a batch")


def _mixes_rows(node: Any, name: str) -> bool:
    """Whether a node of a batch norm takes statistics over several rows; that of weights or of one image does not."""
    if not getattr(node, "_saved_training", "Sync" in name):
        return False
    shape = node._input_metadata[0].shape
    return len(shape) > 0 and shape[0] > 1


def _name(leaf: Tensor, names: dict[int, str]) -> str:
    return names.get(id(leaf), f"a tensor {list(leaf.shape)} that is no parameter of the model")
