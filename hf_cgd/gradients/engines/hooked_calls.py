"""Calls of the scope's modules, noted on stand-ins where weights are whole within the forward pass only."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_cgd.gradients.autograd import Cut, owned_parameters
from hf_cgd.gradients.engines.stand_ins import (
    own_names,
    placeholder_of,
    require_trainable,
    set_parameters,
    stand_in_for,
)
from hf_cgd.gradients.layers.base import LayerCall, LayerRule, OutputGradients
from hf_cgd.gradients.layers.registry import rule_for
from hf_cgd.gradients.recording import BegunCall, least_precise
from hf_cgd.gradients.structure import Edge, edge_of
from hf_cgd.gradients.verification import ArrivingGradients
from hf_cgd.models.outputs import tensors_in


class HookedCalls:
    """Notes the calls of the scope's modules, and by hooks the gradients that arrive at their outputs later.

    Args:
        model: the network, before FSDP flattens its parameters.
        parameters: the gradient scope.
        device: where the step runs; None for where the parameters are.

    Attributes:
        parameters: placeholders of the scope's parameters: their shapes, without values.
        stand_ins: of each module of the scope one without weights, on which gradients are formed.
        placeholders: of each stand-in the parameters of the scope that it holds, by name.
        calls: of the last pass, each with the gradients of its outputs, which come in the backward pass.
        cut: what flows into the scope in the last pass.
        places: of each edge of the graph that a weight of the scope is, the stand-ins that hold it, with its name.
        computed_in: the least precise type among the outputs so far.
        arriving: what arrives at the weights in the backward pass, as long as `follows_weights`.

    Raises:
        ValueError: the scope holds parameters that no hook can tell the gradient of.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device | None) -> None:
        self.stand_ins: dict[nn.Module, nn.Module] = {}
        placeholders = {id(p): placeholder_of(p, device) for p in parameters}
        for module, own in owned_parameters(model, parameters, in_containers=False).items():
            composite = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
            if composite:
                raise ValueError(
                    f"{type(module).__name__} holds the parameters {list(own)} itself, beside those of its parts "
                    f"({', '.join(composite)}), and tensor hooks cannot tell their gradients. Leave them out of the "
                    "scope: set gradient_layers to regular expressions that match the other parameters."
                )
            self.stand_ins[module] = stand_in_for(module, {name: placeholders[id(p)] for name, p in own.items()})
        self.parameters = list(placeholders.values())
        self.placeholders = owned_parameters(nn.ModuleList(self.stand_ins.values()), self.parameters, False)
        self.computed_in: torch.dtype = torch.float64
        self.follows_weights = True
        """Until a first backward pass has been compared with what arrives."""
        self.arriving = ArrivingGradients()
        self._batch_norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        self._rules: dict[nn.Module, LayerRule] = {}
        self._whole: dict[nn.Module, dict[str, Tensor]] = {}
        self.forget()

    def forget(self) -> None:
        """Forget the pass: activations, gradients and copied weights."""
        self.calls: list[tuple[LayerCall, OutputGradients]] = []
        self.cut: Cut | None = None
        self.places: dict[Edge, dict[nn.Module, str]] = {}
        self._begun: dict[nn.Module, BegunCall] = {}
        for twin, own in self.placeholders.items():
            set_parameters(twin, own)
        self.arriving.stop()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass: within, every use of a module of the scope is noted."""
        self.forget()
        hooks = [norm.register_forward_pre_hook(self._refuse_batch_norm) for norm in self._batch_norms]
        for module in self.stand_ins:
            # Registered last, a pre-hook runs after those that gather the weights.
            hooks.append(module.register_forward_pre_hook(self._take_whole, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._note, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._whole = {}

    def _refuse_batch_norm(self, module: nn.Module, arguments: Any) -> None:
        if module.training and (self.calls or module in self.stand_ins):
            raise ValueError(
                f"{type(module).__name__} in training mode mixes the examples of a batch, in or behind the gradient "
                "scope, so that a row of the backward pass is no longer one example's. Tensor hooks cannot be used: "
                "train without sharding (DDP), where gradient_engine='per_group' is exact, or freeze its statistics "
                "(eval mode)."
            )

    def _take_whole(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        twin = self.stand_ins[module]
        twin.training = module.training
        require_trainable(module, list(self.placeholders[twin]))
        if self.cut is None and not self._begun and not self.calls:
            self.cut = Cut.of((arguments, keywords))
        rule = self._rules.get(module)
        number, may_run_again = len(self.calls) + len(self._begun), rule is None or rule.runs_again
        self._begun[module] = BegunCall(module, (arguments, keywords), number, None, may_run_again)
        for name, placeholder in self.placeholders[twin].items():
            weight = getattr(module, name)
            if torch.is_grad_enabled():
                self.places.setdefault(edge_of(weight), {})[twin] = f"{type(module).__name__}.{name}"
            if self.follows_weights:
                self.arriving.follow(weight, placeholder)
        if (rule is not None and not rule.needs_weights) or module in self._whole:
            return
        expected = {name: p.shape for name, p in self.placeholders[twin].items()}
        whole = {name: getattr(module, name).detach() for name in own_names(twin)}
        found = {name: whole[name].shape for name in expected}
        if found != expected:
            raise ValueError(
                f"Expected the weights of {type(module).__name__} whole in the forward pass, {expected}, got {found}. "
                "This kind of sharding is not supported with group gradients."
            )
        self._whole[module] = whole

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        twin = self.stand_ins[module]
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
                set_parameters(twin, self.placeholders[twin])
        begun = self._begun.pop(module)
        every = list(tensors_in(output))
        places = tuple(place for place, part in enumerate(every) if part.requires_grad)
        outputs = [every[place] for place in places]
        gradients: list[Tensor | None] = [None] * len(outputs)
        self.computed_in = least_precise(self.computed_in, outputs)
        for place, part in enumerate(outputs):
            part.register_hook(partial(gradients.__setitem__, place))
        edges = [get_gradient_edge(part) for part in outputs]
        call = LayerCall(twin, arguments, keywords, edges, self._rules[module], output_places=places)
        call.number, call.differentiable_inputs, call.versions = begun.number, begun.inputs, begun.versions
        call.repeats = begun.trace is not None and not begun.trace.is_left()
        self.calls.append((call, gradients))
