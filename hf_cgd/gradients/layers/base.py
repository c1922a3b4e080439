"""What a rule for a type of layer is: it forms the weight gradients of the groups from one use of a layer."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from hf_cgd.gradients.autograd import held_parameters
from hf_cgd.gradients.base import NotExactError
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.memory import ReusedMemory
from hf_cgd.models.outputs import first_tensor

PLAIN_NODES = frozenset(
    f"{name}Backward{number}"
    for name in ("Alias", "Expand", "Permute", "ReshapeAlias", "Squeeze", "ToCopy", "Transpose", "UnsafeView",
                 "Unsqueeze", "View")
    for number in (0, 1)
)  # fmt: skip
"""Nodes that change shapes and types only."""
OutputGradients = Sequence[Tensor | None]
"""Gradients of a call's outputs, [B, …] each; None for an output that the loss does not depend on."""


@dataclass
class LayerCall:
    """One use of a module in a forward pass.

    Attributes:
        module: what was called. Under tensor hooks it is a stand-in whose parameters have their shapes, but their
            values only if the rule has `needs_weights`.
        arguments, keywords: what it was called with.
        outputs: where the gradients of its outputs can be asked for.
        rule: forms its weight gradients.
        autocast: whether that was in force, in which type and on what kind of device, for running the module again.
        output_places: where those outputs stand among all tensors that the module gave.
        number, parent: calls are numbered as they begin; the parent is the call within which this one was made.
        differentiable_inputs: those with a gradient, and where it was asked for before the module ran.
        versions: the inputs, with their versions before the module ran.
        repeats: whether a second run would give the same and leave no trace.
    """

    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: list[GradientEdge]
    rule: "LayerRule"
    autocast: tuple[bool, torch.dtype | None, str] = (False, None, "cpu")
    output_places: tuple[int, ...] = (0,)
    number: int = 0
    parent: int | None = None
    differentiable_inputs: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    repeats: bool = True
    _starts: set[tuple[Node, int]] | None = None

    @property
    def starts(self) -> set[tuple[Node, int]]:
        """Where the graph of the call ends, towards its inputs."""
        if self._starts is None:
            self._starts = {(edge.node, edge.output_nr) for edge, _ in self.differentiable_inputs}
        return self._starts

    def require_intact(self) -> None:
        """Raise a NotExactError if what the rule reads was changed in place after the module took it."""
        read = self.versions[:1] if self.rule.reads_one_input else self.versions
        if not self.rule.reads_graph and any(version_of(tensor) != version for tensor, version in read):
            raise NotExactError(f"an input of {type(self.module).__name__} is changed in place")

    @cached_property
    def inputs(self) -> Tensor:
        """The first tensor that went in, [B, …]."""
        found = first_tensor(self.arguments, self.keywords)
        assert found is not None
        return found

    def as_cast(self) -> AbstractContextManager[Any]:
        """Within it autocast is as it was when the module ran."""
        enabled, dtype, device = self.autocast
        return torch.autocast(device, dtype, enabled=enabled)


class LayerRule(ABC):
    """Forms the weight gradients of one type of layer.

    A rule needs `matches` and `add_gradients`. The other methods have defaults that build on `add_gradients`; a rule
    overrides one where it knows a faster way. Rules hold no state.

    Attributes:
        needs_weights: whether `add_gradients` reads the values of the module's parameters. Where they are sharded,
            tensor hooks then keep a copy until the end of the micro-batch.
        nodes: names of the nodes of the autograd graph that a use of the layer may consist of; None for any. A layer
            that computes something else as well (a subclass, a hook, a factor that is 1 at first) is told by them.
        reads_graph: whether gradients are taken through the graph of the forward pass, which then has to be kept.
        reads_one_input: whether no input but the first tensor is read.
        runs_again: whether the module is run a second time.
        keeps_example_gradients: whether steps with static shapes keep the gradients [B, numel] of the examples until
            the end of the step. False: `weighted_gradients` is called in their place, which saves memory.
        sums_vectors: whether `example_gradients` of parameters with one dimension (biases, scales) is a few operations
            on the whole batch. On a device, where each of them is a launch, it then serves all groups at once.
    """

    needs_weights: ClassVar[bool] = True
    nodes: ClassVar[frozenset[str] | None] = None
    reads_graph: ClassVar[bool] = False
    reads_one_input: ClassVar[bool] = True
    runs_again: ClassVar[bool] = False
    keeps_example_gradients: ClassVar[bool] = True
    sums_vectors: ClassVar[bool] = False

    @abstractmethod
    def matches(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
        """Whether this rule is right for the module, asked at its first call. The arguments are a forward hook's."""

    def still_matches(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> bool:
        """Whether the rule is right for a later call of a module that it matched at first; True by default.

        Called in every forward pass, so it must be cheap and wait for no device.
        """
        return True

    @abstractmethod
    def add_gradients(
        self, call: LayerCall, gradients: OutputGradients, order: GroupOrder, targets: dict[str, Tensor]
    ) -> None:
        """Add the weight gradient of each group.

        Args:
            call: the use of the module.
            gradients: of its outputs; at least one is not None.
            order: the groups.
            targets: [G, numel] to add to, by the parameter's name in the module. Only those that are wanted.
        """

    def form_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        targets: dict[str, Tensor],
        fresh: Collection[str] = (),
    ) -> None:
        """Add the weight gradient of each group, or write it where nothing is to be added to.

        Args: as for `add_gradients`; all gradients may be None.
            fresh: names of the targets whose memory holds nothing yet. They are written over.
        """
        for name in fresh:
            targets[name].zero_()
        if any(gradient is not None for gradient in gradients):
            self.add_gradients(call, gradients, order, targets)

    def small_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        names: Collection[str],
        dtype: torch.dtype,
    ) -> dict[str, Tensor] | None:
        """The weight gradients of all groups of a layer so small that calls count and not work; None to leave it.

        Args:
            call, gradients, order: as for `form_gradients`.
            names: of the wanted parameters in the module.
            dtype: of the result.

        Returns:
            {name: [G, numel]}, or None: `form_gradients` is asked then, as by default.
        """
        return None

    def weighted_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        coefficients: Tensor,
        names: Sequence[str],
        dtype: torch.dtype,
        memory: ReusedMemory,
    ) -> dict[str, Tensor]:
        """The weight gradient over all examples, each example's multiplied by its coefficient.

        Args:
            call, gradients: as for `form_gradients`.
            coefficients: [B].
            names: of the wanted parameters in the module.
            dtype: of the result.
            memory: for a copy that lives within this method.

        Returns:
            {name: [numel]}.
        """
        parameters = held_parameters(call.module)
        rows = {name: coefficients.new_zeros(1, parameters[name].numel(), dtype=dtype) for name in names}
        scaled = [None if gradient is None else scaled_by_example(gradient, coefficients) for gradient in gradients]
        everyone = GroupOrder.one_group(len(coefficients), coefficients.device)
        self.form_gradients(call, scaled, everyone, rows)
        return {name: row[0] for name, row in rows.items()}

    def projected(
        self, call: LayerCall, gradients: OutputGradients, name: str, projections: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Two narrow factors of the sketch S1 G S2 of each group's gradient G of one parameter.

        Args:
            call, gradients: as for `form_gradients`.
            name: of the parameter, which has two dimensions or more.
            projections: S1 [r, first dimension of the parameter] and S2 [product of the others, r].

        Returns:
            [B, N, r] twice. The sketch is the sum of left_p right_p^T over a group's examples and their N positions p.
            None where the layer has none: `add_projected` is called then.
        """
        return None

    def add_projected(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        name: str,
        projections: tuple[Tensor, Tensor],
        target: Tensor,
    ) -> None:
        """Add the sketch S1 G S2 of each group's gradient G of one parameter, which is formed whole.

        Args:
            call, gradients, order: as for `form_gradients`.
            name, projections: as for `projected`.
            target: [G, r * r] to add to.
        """
        if all(gradient is None for gradient in gradients):
            return
        left, right = projections
        whole = target.new_zeros(len(order.bounds), left.shape[1] * right.shape[0])
        self.form_gradients(call, gradients, order, {name: whole})
        target += (left.to(whole) @ whole.view(len(whole), left.shape[1], -1) @ right.to(whole)).flatten(1)

    def example_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        names: Sequence[str],
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """The weight gradient of every example, in operations whose shapes depend on no value.

        Args:
            call, gradients: as for `form_gradients`.
            order: every example as a group of its own.
            names: of the wanted parameters in the module.
            dtype: of the result.

        Returns:
            {name: [B, numel]}.
        """
        batch, device = len(order.bounds), order.first.device
        sizes = {name: parameter.numel() for name, parameter in held_parameters(call.module).items()}
        rows = {name: torch.zeros(batch, sizes[name], device=device, dtype=dtype) for name in names}
        self.form_gradients(call, gradients, order, rows)
        return rows


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def scaled_by_example(tensor: Tensor, coefficients: Tensor) -> Tensor:
    """The tensor [B, …] with each example's entries multiplied by its coefficient, rounded once."""
    return (tensor * coefficients.view([-1] + [1] * (tensor.ndim - 1))).to(tensor.dtype)


def others_zero(tensor: Tensor, chosen: Tensor) -> Tensor:
    """A copy of the tensor [B, …] in which all rows but the chosen ones are zero."""
    return torch.zeros_like(tensor).index_copy_(0, chosen, tensor.index_select(0, chosen))
