"""Layers of any other type: the module is run again, on the examples of each group where that is safe."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.gradients.autograd import held_parameters, require_dense
from hf_cgd.gradients.base import NotExactError
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import LayerCall, LayerRule, OutputGradients, others_zero
from hf_cgd.models.outputs import tensors_in


class RerunRule(LayerRule):
    """For any module that gives the same when it is run a second time, and draws no random numbers."""

    needs_weights = True
    reads_one_input = False
    runs_again = True

    def matches(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
        """Always."""
        return True

    def add_gradients(
        self, call: LayerCall, gradients: OutputGradients, order: GroupOrder, targets: dict[str, Tensor]
    ) -> None:
        """See `LayerRule.add_gradients`.

        Raises:
            NotExactError: the second run has other outputs than the first.
        """
        batch = order.bounds[-1][1]
        used = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
        if takes_one_tensor(call.module, call.arguments, call.keywords):
            for group in range(len(order.bounds)):
                chosen = order.examples_of(group)
                parts = {place: gradient.index_select(0, chosen) for place, gradient in used.items()}
                with torch.enable_grad():
                    outputs = _outputs_again(call, chosen, batch)
                    _add(call, outputs, parts, targets, group)
            return
        # Which of several inputs have a row for each example cannot be told from their lengths.
        with torch.enable_grad():
            outputs = _outputs_again(call, None, batch)
            for group in range(len(order.bounds)):
                chosen = order.examples_of(group)
                parts = {place: others_zero(gradient, chosen) for place, gradient in used.items()}
                _add(call, outputs, parts, targets, group)


def takes_one_tensor(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether a module without parts takes one tensor, so that its rows are the examples'."""
    return not module._modules and len(list(tensors_in((arguments, keywords)))) == 1


def _outputs_again(call: LayerCall, chosen: Tensor | None, batch: int) -> list[Tensor]:
    """The outputs of a second run, of all examples or of the chosen ones."""
    with call.as_cast():
        arguments, keywords = _rows(call.arguments, chosen, batch), _rows(call.keywords, chosen, batch)
        every = list(tensors_in(call.module(*arguments, **keywords)))
    if call.output_places and len(every) <= max(call.output_places):
        raise NotExactError(f"{type(call.module).__name__} gives fewer outputs when it is run again")
    return [every[place] for place in call.output_places]


def _add(
    call: LayerCall, outputs: list[Tensor], parts: dict[int, Tensor], targets: dict[str, Tensor], group: int
) -> None:
    parameters = held_parameters(call.module)
    # What a module hands through carries no gradient in a second run, and none of its parameters' either.
    used = {place: part for place, part in parts.items() if outputs[place].requires_grad}
    if not used:
        return
    found = torch.autograd.grad(
        [outputs[place] for place in used],
        [parameters[name] for name in targets],
        list(used.values()),
        retain_graph=True,
        allow_unused=True,
    )
    require_dense(found)
    for name, gradient in zip(targets, found, strict=True):
        if gradient is not None:
            targets[name][group] += gradient.flatten().to(targets[name].dtype)


def _rows(value: Any, chosen: Tensor | None, batch: int) -> Any:
    """The tensors in a value without their graphs, and of them the chosen rows where there is one for each example."""
    if isinstance(value, Tensor):
        rows = value.detach()
        return rows if chosen is None or rows.ndim == 0 or len(rows) != batch else rows.index_select(0, chosen)
    if isinstance(value, (tuple, list)):
        parts = [_rows(part, chosen, batch) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: _rows(part, chosen, batch) for name, part in value.items()}
    return value
