"""What is noted in the forward pass: every call of a module of the scope, and what flows into the scope."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_cgd.gradients.autograd import Cut
from hf_cgd.gradients.base import NotExactError
from hf_cgd.gradients.compiled import as_hook
from hf_cgd.gradients.layers.base import LayerCall, LayerRule, version_of
from hf_cgd.gradients.layers.in_graph import InGraphRule
from hf_cgd.gradients.layers.registry import rule_for
from hf_cgd.gradients.layers.rerun import takes_one_tensor
from hf_cgd.gradients.layers.traces import Trace
from hf_cgd.models.outputs import first_tensor, tensors_in

IN_GRAPH = InGraphRule()


class CallRecorder:
    """Notes the calls of some modules in a forward pass.

    Args:
        modules: those of the scope.
        graph_is_kept: whether rules may take gradients through the graph of the forward pass. They do where a second
            run of a module would not be safe.
        followers: modules outside of the scope whose calls are noted as well, once the scope has been entered.
        around: modules around the first one, outer first; the cut is what flows into the first of them that has a
            gradient for its input, or else into the scope's first module.

    Attributes:
        rules: the rule of each module, chosen at its first call.
        computed_in: the least precise type among the modules' outputs in the last pass.
        calls, cut: of the last pass.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        graph_is_kept: bool = True,
        followers: Iterable[nn.Module] = (),
        around: Iterable[nn.Module] = (),
    ) -> None:
        self.rules: dict[nn.Module, LayerRule] = {}
        self.followers = dict.fromkeys(followers)
        self._modules = list(modules)
        self._around = list(around)
        self._graph_is_kept = graph_is_kept
        self._hooked: set[nn.Module] = set()
        self._hooks = as_hook(self._begin), as_hook(self._note)
        self._enter_hook = as_hook(self._enter)
        self._start_over()

    def _start_over(self) -> None:
        self.computed_in: torch.dtype = torch.float64
        self.calls: list[LayerCall] = []
        self.cut: Cut | None = None
        self._running: list[BegunCall] = []
        self._begun = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass."""
        self._start_over()
        modules = [*self._modules, *self.followers]
        self._hooked = {module for module in modules if module._forward_hooks or module._forward_pre_hooks}
        (begin, note), hooks = self._hooks, []
        try:
            for module in self._around:
                hooks.append(module.register_forward_pre_hook(self._enter_hook, with_kwargs=True))
            for module in modules:
                hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
                hooks.append(module.register_forward_hook(note, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._running = []

    def take(self) -> tuple[list[LayerCall], Cut | None]:
        """The calls and the cut of the last pass. They are given once, so that nothing keeps the graph alive."""
        calls, cut = self.calls, self.cut
        self.calls, self.cut = [], None
        return calls, cut

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.cut is None and not self._begun and torch.is_grad_enabled():
            self.cut = Cut.of((arguments, keywords))

    def _begin(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if not self._begun:
            if module in self.followers:
                return
            self.cut = self.cut or Cut.of((arguments, keywords))
        rule = self.rules.get(module)
        parent = self._running[-1].number if self._running else None
        may_run_again = rule is None or rule.runs_again
        self._running.append(BegunCall(module, (arguments, keywords), self._begun, parent, may_run_again))
        self._begun += 1

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # What began before the scope was entered has not been noted.
        if module in self.followers and all(begun.module is not module for begun in self._running):
            return
        begun = None
        while self._running and (begun is None or begun.module is not module):
            begun = self._running.pop()
        if begun is None or begun.module is not module:
            return
        known = self.rules.get(module)
        if known is None or not known.still_matches(module, arguments, keywords, output):
            self.rules[module] = rule_for(module, arguments, keywords, output)
        rule, repeats = self.rules[module], True
        if rule.runs_again:
            repeats = begun.trace is not None and not begun.trace.is_left()
            if self._graph_is_kept and not (repeats and self._is_plain(module, arguments, keywords)):
                rule = IN_GRAPH
        every = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        places = tuple([place for place, part in enumerate(every) if part.requires_grad])
        outputs = [every[place] for place in places]
        self.computed_in = least_precise(self.computed_in, outputs)
        # An edge is taken in place of the output itself, which an in-place activation may change.
        edges = [get_gradient_edge(part) for part in outputs]
        device = outputs[0].device.type if outputs else "cpu"
        cast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), device)
        call = LayerCall(module, arguments, keywords, edges, rule, cast, places, begun.number, begun.parent)
        call.differentiable_inputs, call.versions, call.repeats = begun.inputs, begun.versions, repeats
        self.calls.append(call)

    def _is_plain(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Whether a module is torch's own, as torch made it, so that a second run has no effect beside its output."""
        is_torchs = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
        return is_torchs and module not in self._hooked and takes_one_tensor(module, arguments, keywords)


class BegunCall:
    """A call that has begun."""

    def __init__(self, module: nn.Module, given: Any, number: int, parent: int | None, may_run_again: bool) -> None:
        tensors = list(tensors_in(given))
        self.module = module
        self.number = number
        self.parent = parent
        self.inputs = [(get_gradient_edge(tensor), tensor) for tensor in tensors if tensor.requires_grad]
        self.versions = [(tensor, version_of(tensor)) for tensor in tensors]
        self.trace = Trace(module, given) if may_run_again else None


def least_precise(dtype: torch.dtype, tensors: Iterable[Tensor]) -> torch.dtype:
    """The least precise type among `dtype` and those of the tensors."""
    for tensor in tensors:
        if tensor.dtype != dtype and torch.finfo(tensor.dtype).eps > torch.finfo(dtype).eps:
            dtype = tensor.dtype
    return dtype


def require_separable_examples(calls: list[LayerCall], cut: Cut | None, batch: int) -> None:
    """Check that each example has rows of its own in every call and at the cut.

    Raises:
        NotExactError: there are no calls, a BatchNorm mixes examples, a module would have to be run again that draws
            random numbers, an input was changed in place, or a tensor has no entry for each of the `batch` examples.
    """
    if not calls:
        raise NotExactError("no module of the scope was seen in the forward pass")
    for call in calls:
        kind = type(call.module).__name__
        if isinstance(call.module, nn.modules.batchnorm._BatchNorm) and call.module.training:
            raise NotExactError(f"{kind} in training mode mixes the examples of a batch")
        if call.rule.runs_again and not call.repeats:
            raise NotExactError(f"{kind} would have to be run again, but draws random numbers or changes its state")
        call.require_intact()
        first = first_tensor(call.arguments, call.keywords)
        if first is None or first.ndim == 0 or first.shape[0] != batch:
            raise NotExactError(f"an input of {kind} has no entry for each example")
    if cut is not None:
        cut.require_intact()
        if cut.tensor.ndim == 0 or len(cut.tensor) != batch:
            raise NotExactError("what flows into the scope has no entry for each example")


def require_rows(call: LayerCall, gradients: Iterable[Tensor | None], batch: int) -> None:
    """Raise a NotExactError unless the gradients of a call's outputs have one row for each of the `batch` examples."""
    for gradient in gradients:
        if gradient is not None and (gradient.ndim == 0 or len(gradient) != batch):
            raise NotExactError(f"an output of {type(call.module).__name__} has no entry for each example")


def require_single_uses(calls: list[LayerCall], owned: dict[nn.Module, dict[str, nn.Parameter]]) -> None:
    """Raise a NotExactError if a gradient taken through the graph would also hold that of another use."""
    if not any(call.rule.reads_graph for call in calls):
        return
    uses: dict[int, int] = {}
    for call in calls:
        for parameter in owned[call.module].values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for call in calls:
        if call.rule.reads_graph and any(uses[id(parameter)] > 1 for parameter in owned[call.module].values()):
            raise NotExactError(f"parameters of {type(call.module).__name__} are used several times")
