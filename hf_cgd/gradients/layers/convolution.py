"""nn.Conv2d."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from hf_cgd.gradients.layers.base import PLAIN_NODES, GroupOrder, LayerCall, LayerRule, OutputGradients, add_products


class Conv2dRule(LayerRule):
    """For nn.Conv2d itself with a number of zeros for padding. Other convolutions are run again."""

    needs_weights = False
    nodes = PLAIN_NODES | {"ConvolutionBackward0"}

    def matches(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
        """See `LayerRule.matches`."""
        return type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str)

    def add_gradients(
        self, call: LayerCall, gradients: OutputGradients, order: GroupOrder, targets: dict[str, Tensor]
    ) -> None:
        """See `LayerRule.add_gradients`."""
        module, (gradient,) = call.module, gradients
        assert isinstance(module, nn.Conv2d) and gradient is not None
        form = (module.stride, module.padding, module.dilation, module.groups)
        pairs = zip(order.split(call.inputs.to(gradient.dtype)), order.split(gradient), strict=True)
        for group, (inputs, part) in enumerate(pairs):
            if "weight" in targets:
                full = conv2d_weight(inputs, module.weight.shape, part, *form)
                targets["weight"][group] += full.flatten().to(targets["weight"].dtype)
            if "bias" in targets:
                targets["bias"][group] += part.sum(dim=(0, 2, 3), dtype=targets["bias"].dtype)

    def add_projected(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        name: str,
        projections: tuple[Tensor, Tensor],
        target: Tensor,
    ) -> None:
        """See `LayerRule.add_projected`. S2 is a convolution with r output channels."""
        module, (gradient,) = call.module, gradients
        assert isinstance(module, nn.Conv2d)
        if gradient is None or module.groups != 1:
            super().add_projected(call, gradients, order, name, projections, target)
            return
        left, right = (matrix.to(gradient) for matrix in projections)
        inputs = call.inputs.to(gradient.dtype)
        kernel = right.T.reshape(len(left), *module.weight.shape[1:])
        projected = F.conv2d(inputs, kernel, None, module.stride, module.padding, module.dilation)
        narrow_inputs = projected.flatten(2).transpose(1, 2)
        add_products(gradient.flatten(2).transpose(1, 2) @ left.T, narrow_inputs, order, target)
