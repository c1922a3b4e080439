"""Layers of any other type: the module is run again on the examples of each group."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.gradients.layers.base import GroupOrder, LayerCall, LayerRule, OutputGradients
from hf_cgd.models.outputs import tensors_in


class RerunRule(LayerRule):
    """For any module. It is right where a second run gives what the first gave."""

    needs_weights = True

    def matches(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
        """Always."""
        return True

    def add_gradients(
        self, call: LayerCall, gradients: OutputGradients, order: GroupOrder, targets: dict[str, Tensor]
    ) -> None:
        """See `LayerRule.add_gradients`."""
        batch = order.bounds[-1][1]
        parameters = dict(call.module.named_parameters(recurse=False))
        own = [parameters[name] for name in targets]
        used = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
        for group in range(len(order.bounds)):
            chosen = order.examples_of(group)
            with torch.enable_grad(), call.autocast:
                arguments, keywords = _rows(call.arguments, chosen, batch), _rows(call.keywords, chosen, batch)
                output = call.module(*arguments, **keywords)
                outputs = [part for part in tensors_in(output) if part.requires_grad]
                found = torch.autograd.grad(
                    [outputs[place] for place in used],
                    own,
                    [gradient.index_select(0, chosen) for gradient in used.values()],
                    allow_unused=True,
                )
            for name, gradient in zip(targets, found, strict=True):
                if gradient is not None:
                    targets[name][group] += gradient.flatten().to(targets[name].dtype)


def _rows(value: Any, chosen: Tensor, batch: int) -> Any:
    """The chosen rows of every tensor that has one for each example."""
    if isinstance(value, Tensor):
        rows = value.detach()
        return rows.index_select(0, chosen) if rows.ndim > 0 and len(rows) == batch else rows
    if isinstance(value, (tuple, list)):
        return type(value)(_rows(part, chosen, batch) for part in value)
    if isinstance(value, dict):
        return {name: _rows(part, chosen, batch) for name, part in value.items()}
    return value
