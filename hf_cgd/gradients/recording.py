"""What is noted in the forward pass: every call of a module of the scope, and what flows into the scope."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_cgd.gradients.autograd import Cut
from hf_cgd.gradients.base import NotExactError
from hf_cgd.gradients.layers.base import LayerCall, LayerRule
from hf_cgd.gradients.layers.registry import rule_for
from hf_cgd.models.outputs import tensors_in


class CallRecorder:
    """Notes the calls of some modules in a forward pass.

    Attributes:
        rules: the rule of each module, chosen at its first call.
        computed_in: the least precise type among the modules' outputs in the last pass.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.rules: dict[nn.Module, LayerRule] = {}
        self.computed_in: torch.dtype = torch.float64
        self._modules = list(modules)
        self._calls: list[LayerCall] = []
        self._cut: Cut | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass."""
        self._calls, self._cut, self.computed_in = [], None, torch.float64
        hooks = [module.register_forward_hook(self._note, with_kwargs=True) for module in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> tuple[list[LayerCall], Cut | None]:
        """The calls and the cut of the last pass. They are given once, so that nothing keeps the graph alive."""
        calls, self._calls = self._calls, []
        cut, self._cut = self._cut, None
        return calls, cut

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not self._calls:
            self._cut = Cut.of((arguments, keywords))
        if module not in self.rules:
            self.rules[module] = rule_for(module, arguments, keywords, output)
        outputs = [part for part in tensors_in(output) if part.requires_grad]
        self.computed_in = least_precise(self.computed_in, outputs)
        # An edge is taken in place of the output itself, which an in-place activation may change.
        edges = [get_gradient_edge(part) for part in outputs]
        device = next((part.device.type for part in outputs), "cpu")
        cast = torch.autocast(device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))
        self._calls.append(LayerCall(module, arguments, keywords, edges, self.rules[module], cast))


def least_precise(dtype: torch.dtype, tensors: Iterable[Tensor]) -> torch.dtype:
    """The least precise type among `dtype` and those of the tensors."""
    return max((dtype, *(tensor.dtype for tensor in tensors)), key=lambda one: torch.finfo(one).eps)


def require_separable_examples(calls: list[LayerCall], cut: Cut | None, batch: int) -> None:
    """Check that each example has rows of its own in every call and at the cut.

    Raises:
        NotExactError: there are no calls, a BatchNorm mixes examples, or a tensor has no entry for each of the `batch`
            examples.
    """
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
