"""Group gradients out of the one ordinary backward pass: the engine for sharded parameters.

FSDP and DeepSpeed shard the parameters and take hold of the backward pass, so that neither a second one nor the
parameters' gradients are at hand in the middle of a step. Tensor hooks on what the scope's modules put out see the
gradients dO of the ordinary weighted loss pass by, whoever owns the weights. Row n of dO carries example n's own
coefficient and nothing else, so a group's weight gradient, divided by the group's coefficient, is that of its
unweighted loss. It is known only after the backward pass: the weights that come of it serve the next step.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.hooks import RemovableHandle

from hf_cgd.gradients.autograd import flatten, owned_parameters, unflatten
from hf_cgd.gradients.base import GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.engines.single_pass import BackwardPass, SinglePassEngine, require_form
from hf_cgd.gradients.engines.sketch import SketchEngine
from hf_cgd.gradients.layers.rules import Call, Members, kind_of
from hf_cgd.gradients.scope import whole_shape
from hf_cgd.gradients.verification import LOW_TOLERANCE, TOLERANCE, largest_error
from hf_cgd.models.outputs import tensors_in
from hf_cgd.monitors import GroupRobustWarning


class TensorHookEngine(GradientEngine):
    """Gradients of the groups' loss sums over the scope, from the backward pass of the weighted loss itself.

        with engine.recording():
            losses = ...                        # the forward pass
        engine.watch(losses)
        weighted_sum_of(losses).backward()
        engine.group_gradients(losses, group_ids, groups)

    Weights are looked at within the forward pass only, where they are whole; the weight gradients are formed on
    stand-ins of the scope's modules. A module whose weight gradient takes a second run of it (an embedding, an RMS
    norm; not linear layers, convolutions and layer norms) runs on a copy of its own weights, which lives until the end
    of the micro-batch.

    In the first micro-batch, what the groups' gradients add up to is held against the gradients that arrive at the
    weights themselves, which finds a weight that is used behind the hooks' back. Not to be noticed is what examples
    of a batch make of each other by other means than BatchNorm.

    Args:
        model: the network, before FSDP flattens its parameters.
        parameters: the gradient scope.
        sketch: form sketches of the gradients in place of the gradients.
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
        _refuse_flat_or_compiled(model)
        self._stand_ins: dict[nn.Module, nn.Module] = {}
        placeholders = {id(p): _placeholder(p, device) for p in parameters}
        for module, own in owned_parameters(model, parameters).items():
            composite = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
            if composite:
                raise ValueError(
                    f"{type(module).__name__} holds the parameters {list(own)} itself, beside those of its parts "
                    f"({', '.join(composite)}), and tensor hooks cannot tell their gradients. Leave them out of the "
                    "scope: set gradient_layers to regular expressions that match the other parameters."
                )
            self._stand_ins[module] = _stand_in(module, {name: placeholders[id(p)] for name, p in own.items()})
        self.parameters = list(placeholders.values())
        """Placeholders of the scope's parameters: their shapes, without values."""
        kind = SketchEngine if sketch else SinglePassEngine
        self._arithmetic = kind(nn.ModuleList(self._stand_ins.values()), self.parameters)
        self._placeholders = {twin: dict(own) for twin, own in self._arithmetic.owned.items()}
        self._batch_norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        self._kinds: dict[nn.Module, str] = {}
        self._whole: dict[nn.Module, dict[str, Tensor]] = {}
        self._computed_in: torch.dtype = torch.float64
        self._checked = False
        self._arrived: dict[int, Tensor] = {}
        self._followed: list[tuple[Tensor, RemovableHandle]] = []
        self._drop()

    @property
    def size(self) -> int:
        """P, the number of elements of the scope's parameters."""
        return self._arithmetic.size

    def belongs_to(self, model: nn.Module) -> bool:
        """Whether all modules of the scope are (still) parts of the model."""
        return self._stand_ins.keys() <= set(model.modules())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass: within, every use of a module of the scope is taken note of."""
        self._drop()
        hooks = [norm.register_forward_pre_hook(self._refuse_batch_norm) for norm in self._batch_norms]
        for module in self._stand_ins:
            # Registered last, a pre-hook runs after those that gather the weights.
            hooks.append(module.register_forward_pre_hook(self._take_whole))
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
            require_form([call for call, _ in self._calls], None, len(losses))
        except NotExactError as error:
            raise ValueError(
                f"Group gradients by tensor hooks cannot be had: {error}. Choose other gradient_layers, or train "
                "without sharding (DDP), where gradient_engine='auto' has other ways."
            ) from error
        losses.register_hook(partial(self._coefficients.__setitem__, 0))

    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """Gradient of the sum of each listed group's losses [B], after the backward pass of the weighted loss.

        Args: as for `PerGroupEngine.group_gradients`. `groups` must be all that are present, in ascending order.

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
            members = Members.of(group_ids, groups)
            of_groups = weights[members.first].to(losses.dtype)
            if bool((of_groups == 0).any()):
                silent = [group for group, weight in zip(groups, of_groups.tolist(), strict=True) if weight == 0]
                raise ValueError(
                    f"The groups number {silent} took part with weight 0, so that the backward pass holds nothing of "
                    "their gradients. Use an objective whose weights stay positive (min_weight > 0)."
                )
            step = BackwardPass(self._arithmetic, calls, members, None, None, losses.device, losses.dtype)
            weighted = self._arithmetic.gradients_of(step).rows
            if not self._checked:
                self._check(weighted.sum(dim=0))
            self._drop()
            return GroupGradients(weighted / of_groups[:, None])

    def _drop(self) -> None:
        """Forget the micro-batch: activations, gradients and copied weights."""
        self._calls: list[tuple[Call, Sequence[Tensor | None]]] = []
        self._coefficients: list[Tensor | None] = [None]
        for twin, own in self._placeholders.items():
            _set_parameters(twin, own)
        for _, handle in self._followed:
            handle.remove()
        self._arrived, self._followed = {}, []

    def _check(self, total: Tensor) -> None:
        """Hold the weighted gradient of the scope, [P] or its sketch, against what arrived at the weights."""
        self._checked = True
        seen = {call.module for call, _ in self._calls}
        unseen = [type(twin).__name__ for twin in self._placeholders if twin not in seen]
        if unseen:
            warnings.warn(
                f"Modules of the gradient scope were not called in the forward pass: {', '.join(unseen)}. Their "
                "gradients count as zero. If the model uses their weights in another way, leave them out of the "
                "scope: set gradient_layers to regular expressions that match the other parameters.",
                GroupRobustWarning,
                stacklevel=2,
            )
        expected = flatten([self._arrived.get(id(parameter)) for parameter in self.parameters], self.parameters)
        if isinstance(self._arithmetic, SketchEngine):
            error = largest_error([self._arithmetic.sketch(expected)], [total])
        else:
            error = largest_error(unflatten(expected, self.parameters), unflatten(total, self.parameters))
        tolerance = TOLERANCE.get(self._computed_in, LOW_TOLERANCE)
        if not error <= tolerance and bool(expected.isfinite().all()):
            raise ValueError(
                "The gradients that tensor hooks give do not add up to those of the weights: they differ by "
                f"{error:.1e}, {tolerance:.0e} allowed. A weight of the gradient scope is used elsewhere than in "
                "the module that holds it (tied weights?). Choose other gradient_layers, or train without sharding "
                "(DDP), where gradient_engine='per_group' is exact for any network."
            )

    def _follow(self, module: nn.Module) -> None:
        """Have the gradients that arrive at the module's weights noted."""
        for name, placeholder in self._placeholders[self._stand_ins[module]].items():
            weight = getattr(module, name)
            if weight.requires_grad and all(weight is not known for known, _ in self._followed):
                note = partial(self._note_arrival, id(placeholder))
                self._followed.append((weight, weight.register_hook(note)))

    def _note_arrival(self, place: int, gradient: Tensor) -> None:
        before = self._arrived.get(place)
        self._arrived[place] = gradient.detach().clone() if before is None else before + gradient

    def _refuse_batch_norm(self, module: nn.Module, arguments: Any) -> None:
        if module.training and (self._calls or module in self._stand_ins):
            raise ValueError(
                f"{type(module).__name__} in training mode mixes the examples of a batch, in or behind the gradient "
                "scope, so that a row of the backward pass is no longer one example's. Tensor hooks cannot be used: "
                "train without sharding (DDP), where gradient_engine='per_group' is exact, or freeze its statistics "
                "(eval mode)."
            )

    def _take_whole(self, module: nn.Module, arguments: Any) -> None:
        twin = self._stand_ins[module]
        twin.training = module.training
        if not self._checked:
            self._follow(module)
        kind = self._kinds.get(module)
        if (kind is not None and kind != "other") or module in self._whole:
            return
        expected = {name: p.shape for name, p in self._placeholders[twin].items()}
        whole = {name: getattr(module, name).detach() for name in _own_names(twin)}
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
            _set_parameters(twin, {name: nn.Parameter(p, requires_grad=False) for name, p in whole.items()})
            if module not in self._kinds:
                self._kinds[module] = kind_of(twin, arguments, keywords, output)
            if self._kinds[module] == "other":
                copies = {name: nn.Parameter(value.clone()) for name, value in whole.items()}
                _set_parameters(twin, copies)
            else:
                _set_parameters(twin, self._placeholders[twin])
        outputs = [part for part in tensors_in(output) if part.requires_grad]
        gradients: list[Tensor | None] = [None] * len(outputs)
        for place, part in enumerate(outputs):
            if torch.finfo(part.dtype).eps > torch.finfo(self._computed_in).eps:
                self._computed_in = part.dtype
            part.register_hook(partial(gradients.__setitem__, place))
        self._calls.append((Call(twin, arguments, keywords, [], self._kinds[module]), gradients))


def _placeholder(parameter: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    """A parameter of the whole shape in the memory of one element."""
    zero = torch.zeros((), device=parameter.device if device is None else device)
    return nn.Parameter(zero.expand(whole_shape(parameter)))


def _stand_in(module: nn.Module, placeholders: dict[str, nn.Parameter]) -> nn.Module:
    """A module that computes what `module` does, with no hooks, and with its own parameters."""
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    bare = set(vars(twin))
    vars(twin).update({name: value for name, value in vars(module).items() if name not in bare})
    for name, child in module.named_children():
        twin.add_module(name, child)
    for name, buffer in module.named_buffers(recurse=False):
        twin.register_buffer(name, buffer)
    for name, parameter in module._parameters.items():
        # A bias that is None has to be there as None.
        frozen = None if parameter is None else nn.Parameter(torch.zeros(()).expand(whole_shape(parameter)), False)
        twin.register_parameter(name, placeholders.get(name, frozen))
    return twin


def _own_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]


def _set_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)


def _refuse_flat_or_compiled(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, FullyShardedDataParallel):
            raise ValueError(
                "The model was wrapped by FSDP before the gradient scope was chosen, so that the parameters have lost "
                "their shapes. Pass the plain model (model=, not model_init=) and let the Trainer wrap it, or use "
                "FSDP2 (fsdp_version: 2)."
            )
        if isinstance(part, torch._dynamo.OptimizedModule) or part._compiled_call_impl is not None:
            raise ValueError(
                f"{type(part).__name__} is compiled, and tensor hooks on what a compiled module puts out never fire. "
                "Train without torch.compile, or without sharding (DDP)."
            )
