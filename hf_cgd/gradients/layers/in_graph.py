"""Layers of any other type, where the graph of the forward pass is at hand: the gradient is taken through it."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.gradients.autograd import held_parameters, require_dense
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import LayerCall, LayerRule, OutputGradients


class InGraphRule(LayerRule):
    """For any module, whatever it takes, gives or draws: nothing is run again. One pass through it for each group."""

    reads_graph = True

    def matches(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
        """Always."""
        return True

    def add_gradients(
        self, call: LayerCall, gradients: OutputGradients, order: GroupOrder, targets: dict[str, Tensor]
    ) -> None:
        """See `LayerRule.add_gradients`."""
        parameters = held_parameters(call.module)
        own = [parameters[name] for name in targets]
        used = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
        edges: Any = [call.outputs[place] for place in used]
        for group in range(len(order.bounds)):
            chosen = order.examples_of(group)
            parts = [
                torch.zeros_like(one).index_copy_(0, chosen, one.index_select(0, chosen)) for one in used.values()
            ]
            found = torch.autograd.grad(edges, own, parts, retain_graph=True, allow_unused=True)
            require_dense(found)
            for name, gradient in zip(targets, found, strict=True):
                if gradient is not None:
                    targets[name][group] += gradient.flatten().to(targets[name].dtype)
