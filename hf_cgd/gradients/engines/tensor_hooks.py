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
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_cgd.arithmetic import is_on_host
from hf_cgd.gradients.autograd import Cut, owned_parameters
from hf_cgd.gradients.base import GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.engines.backward_pass import BackwardPass
from hf_cgd.gradients.engines.group_rows import GroupRows
from hf_cgd.gradients.engines.sketch import GroupSketches
from hf_cgd.gradients.engines.stand_ins import (
    own_names,
    placeholder_of,
    refuse_flat_or_compiled,
    require_trainable,
    set_parameters,
    stand_in_for,
)
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import LayerCall, LayerRule, OutputGradients
from hf_cgd.gradients.layers.registry import rule_for
from hf_cgd.gradients.mixing import IndependenceCheck
from hf_cgd.gradients.recording import BegunCall, least_precise, require_separable_examples
from hf_cgd.gradients.structure import Edge, LossGraph, edge_of
from hf_cgd.gradients.verification import ArrivingGradients, tolerance_of
from hf_cgd.models.outputs import tensors_in
from hf_cgd.monitors import GroupRobustWarning

SCALING_NODES = frozenset(f"{name}Backward0" for name in ("Mul", "Div", "Pow", "Where", "MaskedFill"))
"""What no layer with a rule of its own leaves in the graph; sharding adds other nodes to it."""


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
        self._stand_ins: dict[nn.Module, nn.Module] = {}
        placeholders = {id(p): placeholder_of(p, device) for p in parameters}
        for module, own in owned_parameters(model, parameters).items():
            composite = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
            if composite:
                raise ValueError(
                    f"{type(module).__name__} holds the parameters {list(own)} itself, beside those of its parts "
                    f"({', '.join(composite)}), and tensor hooks cannot tell their gradients. Leave them out of the "
                    "scope: set gradient_layers to regular expressions that match the other parameters."
                )
            self._stand_ins[module] = stand_in_for(module, {name: placeholders[id(p)] for name, p in own.items()})
        self.parameters = list(placeholders.values())
        """Placeholders of the scope's parameters: their shapes, without values."""
        self._placeholders = owned_parameters(nn.ModuleList(self._stand_ins.values()), self.parameters)
        self._group_rows = (GroupSketches if sketch else GroupRows)(self.parameters, self._placeholders)
        self._batch_norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        self._rules: dict[nn.Module, LayerRule] = {}
        self._whole: dict[nn.Module, dict[str, Tensor]] = {}
        self._independence = IndependenceCheck()
        self._computed_in: torch.dtype = torch.float64
        self._checked = False
        self._arriving = ArrivingGradients()
        self._cut: Cut | None
        self._begun: dict[nn.Module, BegunCall]
        self._unseen: list[nn.Module] = []
        self._forget_batch()

    @property
    def size(self) -> int:
        """P, the number of elements of the scope's parameters."""
        return self._group_rows.size

    def belongs_to(self, model: nn.Module) -> bool:
        """Whether all modules of the scope are (still) parts of the model."""
        return self._stand_ins.keys() <= set(model.modules())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass: within, every use of a module of the scope is noted."""
        self._forget_batch()
        hooks = [norm.register_forward_pre_hook(self._refuse_batch_norm) for norm in self._batch_norms]
        for module in self._stand_ins:
            # Registered last, a pre-hook runs after those that gather the weights.
            hooks.append(module.register_forward_pre_hook(self._take_whole, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._note, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._whole = {}

    def watch(self, losses: Tensor) -> None:
        """Announce the losses [B] that the coming backward pass weighs.

        Raises:
            ValueError: the recorded pass does not have the needed form.
        """
        try:
            calls = [call for call, _ in self._calls]
            require_separable_examples(calls, None, len(losses))
            graph = LossGraph(losses, calls, self._cut, self._places.keys())
            self._require_structure(graph, calls)
            # What shards the parameters has freed them by now, or takes any pass for the backward pass.
            if not torch.distributed.is_initialized():
                self._independence.require(graph, losses, calls, self._cut)
        except NotExactError as error:
            raise ValueError(
                f"Group gradients by tensor hooks cannot be had: {error}. Choose other gradient_layers, or train "
                "without sharding (DDP), where gradient_engine='auto' has other ways."
            ) from error
        losses.register_hook(partial(self._coefficients.__setitem__, 0))

    def _require_structure(self, graph: LossGraph, calls: list[LayerCall]) -> None:
        """Check what the graph of the losses shows whatever its numbers are."""
        graph.require_separate_rows()
        for edge, used_by in graph.uses:
            holders = self._places[edge]
            if used_by is None or used_by.module not in holders:
                raise NotExactError(f"{next(iter(holders.values()))} is used outside of the module that holds it")
        if graph.reduction is not None:
            raise NotExactError(f"examples are summed up ({graph.reduction}), so that they influence one another")
        for call in calls:
            if call.rule.nodes is not None and graph.nodes[call.number] & SCALING_NODES:
                raise NotExactError(f"{type(call.module).__name__} scales what it computes")
        if self._checked:
            return
        self._unseen = [module for module, twin in self._stand_ins.items() if all(c.module is not twin for c in calls)]
        own = {module: {id(p) for p in module.parameters(recurse=False)} for module in self._stand_ins}
        # Where parameters are sharded, others stand in the graph.
        told_apart = any(graph.reached & ids for module, ids in own.items() if module not in self._unseen)
        for module in self._unseen:
            if not told_apart or graph.reached & own[module]:
                raise NotExactError(
                    f"{type(module).__name__} is in the gradient scope but was not called in the forward pass: the "
                    "model uses its weights in another way, or not at all"
                )

    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """Gradient of the sum of each listed group's losses [B], after the backward pass of the weighted loss.

        Args: as for `GradientEngine.group_gradients`. `groups` must be all that are present, in ascending order.

        Raises:
            RuntimeError: the backward pass has not run through what was recorded.
            ValueError: a group took part with weight 0, so that nothing of its gradient passed by.
        """
        (weights,), calls = self._coefficients, self._calls
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
            step = BackwardPass(self.parameters, self._placeholders, calls, order, losses.device, losses.dtype)
            weighted = self._group_rows.gradients_of(step).rows
            if not self._checked:
                self._check(weighted.sum(dim=0))
            self._forget_batch()
            return GroupGradients(weighted / of_groups[:, None])

    def _forget_batch(self) -> None:
        """Forget the micro-batch: activations, gradients and copied weights."""
        self._calls: list[tuple[LayerCall, OutputGradients]] = []
        self._coefficients: list[Tensor | None] = [None]
        self._cut = None
        self._begun = {}
        self._places: dict[Edge, dict[nn.Module, str]] = {}
        for twin, own in self._placeholders.items():
            set_parameters(twin, own)
        self._arriving.stop()

    def _check(self, total: Tensor) -> None:
        """Compare the weighted gradient of the scope, [P] or its sketch, with what arrived at the weights."""
        self._checked = True
        if self._unseen:
            unseen = ", ".join(type(module).__name__ for module in self._unseen)
            warnings.warn(
                f"Modules of the gradient scope were not called in the forward pass: {unseen}. Their gradients count "
                "as zero. Leave them out of the scope: set gradient_layers to regular expressions that match the "
                "other parameters.",
                GroupRobustWarning,
                stacklevel=2,
            )
        expected = self._arriving.row(self.parameters)
        # Gradients that are zero but for rounding differ by their own size. A small path is found by the graph.
        error = self._group_rows.error_of_row(expected, total, 0.01)
        tolerance = tolerance_of(self._computed_in)
        if not error <= tolerance and bool(expected.isfinite().all()):
            raise ValueError(
                "The gradients that tensor hooks give do not add up to those of the weights: they differ by "
                f"{error:.1e}, {tolerance:.0e} allowed. A weight of the gradient scope is used elsewhere than in "
                "the module that holds it (tied weights?). Choose other gradient_layers, or train without sharding "
                "(DDP), where gradient_engine='per_group' is exact for any network."
            )

    def _refuse_batch_norm(self, module: nn.Module, arguments: Any) -> None:
        if module.training and (self._calls or module in self._stand_ins):
            raise ValueError(
                f"{type(module).__name__} in training mode mixes the examples of a batch, in or behind the gradient "
                "scope, so that a row of the backward pass is no longer one example's. Tensor hooks cannot be used: "
                "train without sharding (DDP), where gradient_engine='per_group' is exact, or freeze its statistics "
                "(eval mode)."
            )

    def _take_whole(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        twin = self._stand_ins[module]
        twin.training = module.training
        require_trainable(module, list(self._placeholders[twin]))
        if self._cut is None and not self._begun and not self._calls:
            self._cut = Cut.of((arguments, keywords))
        rule = self._rules.get(module)
        number, may_run_again = len(self._calls) + len(self._begun), rule is None or rule.runs_again
        self._begun[module] = BegunCall(module, (arguments, keywords), number, None, may_run_again)
        for name, placeholder in self._placeholders[twin].items():
            weight = getattr(module, name)
            if torch.is_grad_enabled():
                self._places.setdefault(edge_of(weight), {})[twin] = f"{type(module).__name__}.{name}"
            if not self._checked:
                self._arriving.follow(weight, placeholder)
        if (rule is not None and not rule.needs_weights) or module in self._whole:
            return
        expected = {name: p.shape for name, p in self._placeholders[twin].items()}
        whole = {name: getattr(module, name).detach() for name in own_names(twin)}
        found = {name: whole[name].shape for name in expected}
        if found != expected:
            raise ValueError(
                f"Expected the weights of {type(module).__name__} whole in the forward pass, {expected}, got {found}. "
                "This kind of sharding is not supported with group gradients."
            )
        self._whole[module] = whole

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        twin = self._stand_ins[module]
        if not torch.is_grad_enabled():
            raise ValueError(
                f"{type(module).__name__}, a module of the gradient scope, runs without a graph, so that tensor hooks "
                "on its output never fire. Use gradient_checkpointing_kwargs={'use_reentrant': False}, or run the "
                "module with gradients."
            )
        if module in self._whole:
            whole = self._whole.pop(module)
            set_parameters(twin, {name: nn.Parameter(p, requires_grad=False) for name, p in whole.items()})
            if module not in self._rules:
                self._rules[module] = rule_for(twin, arguments, keywords, output)
            if self._rules[module].needs_weights:
                copies = {name: nn.Parameter(value.clone()) for name, value in whole.items()}
                set_parameters(twin, copies)
            else:
                set_parameters(twin, self._placeholders[twin])
        begun = self._begun.pop(module)
        every = list(tensors_in(output))
        places = tuple(place for place, part in enumerate(every) if part.requires_grad)
        outputs = [every[place] for place in places]
        gradients: list[Tensor | None] = [None] * len(outputs)
        self._computed_in = least_precise(self._computed_in, outputs)
        for place, part in enumerate(outputs):
            part.register_hook(partial(gradients.__setitem__, place))
        edges = [get_gradient_edge(part) for part in outputs]
        call = LayerCall(twin, arguments, keywords, edges, self._rules[module], output_places=places)
        call.number, call.differentiable_inputs, call.versions = begun.number, begun.inputs, begun.versions
        call.repeats = begun.trace is not None and not begun.trace.is_left()
        self._calls.append((call, gradients))
