"""nn.LayerNorm."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import PLAIN_NODES, LayerCall, LayerRule, OutputGradients


class LayerNormRule(LayerRule):
    """For nn.LayerNorm itself, not its subclasses, which may compute something else."""

    needs_weights = False
    sums_vectors = True
    nodes = PLAIN_NODES | {"NativeLayerNormBackward0"}

    def matches(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
        """See `LayerRule.matches`."""
        return type(module) is nn.LayerNorm

    def add_gradients(
        self, call: LayerCall, gradients: OutputGradients, order: GroupOrder, targets: dict[str, Tensor]
    ) -> None:
        """See `LayerRule.add_gradients`."""
        module, (gradient,) = call.module, gradients
        assert isinstance(module, nn.LayerNorm) and gradient is not None
        shape = list(module.normalized_shape)
        dtype = next(iter(targets.values())).dtype
        inputs, gradient = order.sorted(call.inputs).to(dtype), order.sorted(gradient).to(dtype)
        _, mean, scale = torch.native_layer_norm(inputs, shape, None, None, module.eps)
        wanted = [False, "weight" in targets, "bias" in targets]
        # A network that is kept in half precision has such weights; their values play no part.
        own = [None if one is None else one.to(dtype) for one in (module.weight, module.bias)]
        for group, (start, end) in enumerate(order.bounds):
            part = slice(start, end)
            _, weight, bias = torch.ops.aten.native_layer_norm_backward(
                gradient[part], inputs[part], shape, mean[part], scale[part], *own, wanted
            )
            for name, found in (("weight", weight), ("bias", bias)):
                if name in targets:
                    targets[name][group] += found.flatten().to(dtype)

    def example_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        names: Sequence[str],
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """See `LayerRule.example_gradients`."""
        module, gradient, batch = call.module, gradients[0], len(order.bounds)
        if gradient is None:
            return super().example_gradients(call, gradients, order, names, dtype)
        assert isinstance(module, nn.LayerNorm)
        size, found = module.weight.numel(), {}
        if "weight" in names:
            normal = F.layer_norm(call.inputs.to(dtype), module.normalized_shape, eps=module.eps)
            found["weight"] = (gradient.to(dtype) * normal).reshape(batch, -1, size).sum(dim=1)
        if "bias" in names:
            found["bias"] = gradient.reshape(batch, -1, size).sum(dim=1, dtype=dtype)
        return found
