"""nn.Conv2d."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import PLAIN_NODES, LayerCall, LayerRule, OutputGradients


class Conv2dRule(LayerRule):
    """For nn.Conv2d itself with a number of zeros for padding. Other convolutions are run again."""

    needs_weights = False
    sums_vectors = True
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

    def example_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        names: Sequence[str],
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """See `LayerRule.example_gradients`."""
        gradient = gradients[0]
        if gradient is None or "bias" not in names:
            return super().example_gradients(call, gradients, order, names, dtype)
        rest = [name for name in names if name != "bias"]
        found = super().example_gradients(call, gradients, order, rest, dtype) if rest else {}
        return {**found, "bias": gradient.sum(dim=(2, 3), dtype=dtype)}

    def projected(
        self, call: LayerCall, gradients: OutputGradients, name: str, projections: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """See `LayerRule.projected`. S2 is a convolution with r output channels."""
        module, (gradient,) = call.module, gradients
        assert isinstance(module, nn.Conv2d)
        if gradient is None or module.groups != 1:
            return None
        left, right = (matrix.to(gradient) for matrix in projections)
        kernel = right.T.reshape(len(left), *module.weight.shape[1:])
        inputs = call.inputs.to(gradient.dtype)
        narrow = F.conv2d(inputs, kernel, None, module.stride, module.padding, module.dilation)
        return gradient.flatten(2).transpose(1, 2) @ left.T, narrow.flatten(2).transpose(1, 2)
