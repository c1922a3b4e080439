"""Group gradients out of the one ordinary backward pass: the engine for sharded parameters.

FSDP and DeepSpeed shard the parameters and control the backward pass. A second backward pass is not possible there,
and nobody holds the parameters' gradients in the middle of a step. Tensor hooks on the outputs of the scope's modules
see the gradients dO of the ordinary weighted loss, whoever owns the weights. Row n of dO carries example n's own
coefficient and nothing else. So a group's weight gradient, divided by the group's coefficient, is that of its
unweighted loss. It is known only after the backward pass: the weights that come of it serve the next step.

Weights are read within the forward pass only, where they are whole. The weight gradients are formed on stand-ins of
the scope's modules. Where a rule needs the weights, a copy lives until the end of the micro-batch. In the first
micro-batch the sum of the groups' gradients is compared with the gradients that arrive at the weights, and in each one
the graph of the losses is looked through. That finds a weight that is used outside of its module, and examples that
interact by statistics of the batch. One more pass through the scope finds those that interact in ways of their own,
where nothing is sharded.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hf_cgd.arithmetic import is_on_host
from hf_cgd.gradients.base import GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.engines.backward_pass import BackwardPass
from hf_cgd.gradients.engines.group_rows import GroupRows
from hf_cgd.gradients.engines.hooked_calls import HookedCalls
from hf_cgd.gradients.engines.sketch import GroupSketches
from hf_cgd.gradients.engines.stand_ins import refuse_flat_or_compiled
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import LayerCall
from hf_cgd.gradients.mixing import IndependenceCheck
from hf_cgd.gradients.recording import require_rows, require_separable_examples
from hf_cgd.gradients.structure import LossGraph, leaves_before
from hf_cgd.gradients.verification import tolerance_of
from hf_cgd.monitors import GroupRobustWarning

SCALING_NODES = frozenset(f"{name}Backward0" for name in ("Mul", "Div", "Pow", "Where", "MaskedFill"))
"""What no layer with a rule of its own leaves in the graph; sharding adds other nodes to it."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Tells what to do where the gradients cannot be had: there is no other engine for sharded parameters."""
    try:
        yield
    except NotExactError as error:
        raise ValueError(
            f"Group gradients by tensor hooks cannot be had: {error}. Choose other gradient_layers, or train "
            "without sharding (DDP), where gradient_engine='auto' has other ways."
        ) from error


class TensorHookEngine(GradientEngine):
    """Gradients of the groups' loss sums over the scope, from the backward pass of the weighted loss itself.

        with engine.recording():
            losses = ...                        # the forward pass
        engine.watch(losses)
        weighted_sum_of(losses).backward()
        engine.group_gradients(losses, group_ids, groups)

    Args:
        model: the network, before FSDP flattens its parameters.
        parameters: the gradient scope.
        sketch: whether to form sketches of the gradients in their place.
        device: where the step runs; None for where the parameters are.

    Raises:
        ValueError: the model is compiled or already wrapped by FSDP, or the scope holds parameters that no hook can
            tell the gradient of.
    """

    name = "tensor_hooks"
    timing = "after_backward"

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        sketch: bool = False,
        device: torch.device | None = None,
    ) -> None:
        refuse_flat_or_compiled(model)
        self._hooked = HookedCalls(model, parameters, device)
        self.parameters = self._hooked.parameters
        """Placeholders of the scope's parameters: their shapes, without values."""
        self._group_rows = (GroupSketches if sketch else GroupRows)(self.parameters, self._hooked.placeholders)
        self._independence = IndependenceCheck()
        self._unseen: list[nn.Module] = []
        self._coefficients: list[Tensor | None] = [None]

    @property
    def size(self) -> int:
        """P, the number of elements of the scope's parameters."""
        return self._group_rows.size

    def belongs_to(self, model: nn.Module) -> bool:
        """Whether all modules of the scope are (still) parts of the model."""
        return self._hooked.stand_ins.keys() <= set(model.modules())

    def recording(self) -> AbstractContextManager[object]:
        """Goes around the forward pass: within, every use of a module of the scope is noted."""
        self._coefficients = [None]
        return self._hooked.recording()

    def watch(self, losses: Tensor) -> None:
        """Announce the losses [B] that the coming backward pass weighs.

        Raises:
            ValueError: the recorded pass does not have the needed form.
        """
        with _refusing():
            calls = [call for call, _ in self._hooked.calls]
            require_separable_examples(calls, None, len(losses))
            graph = LossGraph(losses, calls, self._hooked.cut, self._hooked.places.keys())
            self._require_structure(graph, calls)
            # What shards the parameters has freed them by now, or takes any pass for the backward pass.
            if not torch.distributed.is_initialized():
                self._independence.require(graph, losses, calls, self._hooked.cut)
        losses.register_hook(partial(self._coefficients.__setitem__, 0))

    def _require_structure(self, graph: LossGraph, calls: list[LayerCall]) -> None:
        """Check what the graph of the losses shows whatever its numbers are."""
        graph.require_separate_rows()
        for edge, used_by in graph.uses:
            holders = self._hooked.places[edge]
            if used_by is None or used_by.module not in holders:
                raise NotExactError(f"{next(iter(holders.values()))} is used outside of the module that holds it")
        if graph.reduction is not None:
            raise NotExactError(f"examples are summed up ({graph.reduction}), so that they influence one another")
        for call in calls:
            if call.rule.nodes is not None and graph.nodes[call.number] & SCALING_NODES:
                raise NotExactError(f"{type(call.module).__name__} scales what it computes")
        if not self._hooked.follows_weights:
            return
        stand_ins, called = self._hooked.stand_ins, {call.module for call in calls}
        self._unseen = [module for module, twin in stand_ins.items() if twin not in called]
        if not self._unseen:
            return
        own = {module: {id(p) for p in module.parameters(recurse=False)} for module in stand_ins}
        # Where parameters are sharded, others stand in the graph.
        told_apart = any(graph.reached & ids for module, ids in own.items() if module not in self._unseen)
        cut = self._hooked.cut
        before = set() if cut is None else leaves_before(cut)
        for module in self._unseen:
            if not told_apart or before is None or (graph.reached | before) & own[module]:
                raise NotExactError(
                    f"{type(module).__name__} is in the gradient scope but was not called in the forward pass: the "
                    "model uses its weights in another way, or not at all"
                )

    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """Gradient of the sum of each listed group's losses [B], after the backward pass of the weighted loss.

        Args: as for `GradientEngine.group_gradients`. `groups` must be all that are present, in ascending order.

        Raises:
            RuntimeError: the backward pass has not run through what was recorded.
            ValueError: a group took part with weight 0, so that nothing of its gradient passed by, or an output of a
                module has no row for each example.
        """
        (weights,), calls = self._coefficients, self._hooked.calls
        if weights is None or all(gradient is None for _, gradients in calls for gradient in gradients):
            raise RuntimeError(
                "No gradient has passed the outputs of the scope's modules. Call backward() on the loss first; if "
                "that was done, the modules are compiled or re-entrantly checkpointed."
            )
        with torch.no_grad():
            order = GroupOrder.by_group(group_ids, groups, losses.device)
            of_groups = weights[order.first].to(losses.dtype)
            # On a device the division by 0 shows: the update is left out, and reported with the log.
            if is_on_host(of_groups) and bool((of_groups == 0).any()):
                silent = [group for group, weight in zip(groups, of_groups.tolist(), strict=True) if weight == 0]
                raise ValueError(
                    f"The groups number {silent} took part with weight 0, so that the backward pass holds nothing of "
                    "their gradients. Use an objective whose weights stay positive (min_weight > 0)."
                )
            step = BackwardPass(self.parameters, self._hooked.placeholders, calls, order, losses.device, losses.dtype)
            with _refusing():
                for call, gradients in calls:
                    require_rows(call, gradients, len(losses))
                weighted = self._group_rows.gradients_of(step).rows
            if self._hooked.follows_weights:
                self._check(weighted.sum(dim=0))
            self._hooked.forget()
            self._coefficients = [None]
            return GroupGradients(weighted / of_groups[:, None])

    def _check(self, total: Tensor) -> None:
        """Compare the weighted gradient of the scope, [P] or its sketch, with what arrived at the weights."""
        self._hooked.follows_weights = False
        if self._unseen:
            unseen = ", ".join(type(module).__name__ for module in self._unseen)
            warnings.warn(
                f"Modules of the gradient scope were not called in the forward pass: {unseen}. Their gradients count "
                "as zero. Leave them out of the scope: set gradient_layers to regular expressions that match the "
                "other parameters.",
                GroupRobustWarning,
                stacklevel=2,
            )
        expected = self._hooked.arriving.row(self.parameters)
        # Gradients that are zero but for rounding differ by their own size. A small path is found by the graph.
        error = self._group_rows.error_of_row(expected, total, 0.01)
        tolerance = tolerance_of(self._hooked.computed_in)
        if not error <= tolerance and bool(expected.isfinite().all()):
            raise ValueError(
                "The gradients that tensor hooks give do not add up to those of the weights: they differ by "
                f"{error:.1e}, {tolerance:.0e} allowed. A weight of the gradient scope is used elsewhere than in "
                "the module that holds it (tied weights?). Choose other gradient_layers, or train without sharding "
                "(DDP), where gradient_engine='per_group' is exact for any network."
            )
