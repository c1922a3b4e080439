"""Layers that multiply by a matrix: nn.Linear, and those that store the matrix transposed, as GPT-2's Conv1D does."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cgd.arithmetic import is_on_host
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import PLAIN_NODES, LayerCall, LayerRule, OutputGradients, ReusedMemory
from hf_cgd.models.outputs import tensors_in

AFFINE_NODES = PLAIN_NODES | {
    f"{name}Backward0"
    for name in ("Add", "Addmm", "Addmv", "Baddbmm", "Bmm", "Clone", "Linear", "MkldnnLinear", "Mm", "Mv", "T")
}  # fmt: skip
"""A product with a matrix, and a sum; nothing that scales, masks or bends."""


SMALL_WORK = 2**19
"""Products up to which all groups' gradients are formed at once."""
ROUNDING = {2: 0.1, 4: 1e-4, 8: 1e-10}
"""How far off the output of a layer may be, relative to itself, by the bytes of its numbers."""


class LinearRule(LayerRule):
    """For any module that computes x W^T + b with its parameters `weight` [out, in] and `bias`."""

    needs_weights = False
    keeps_example_gradients = False
    sums_vectors = True
    nodes = AFFINE_NODES

    def matches(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
        """Whether the module has given what the formula gives: its class does not tell."""
        inputs = next(tensors_in((arguments, keywords)), None)
        names = {name for name, _ in module.named_parameters()}
        # The weight of a parametrized layer is computed whenever it is read, with new noise or one more iteration.
        if not {"weight"} <= names <= {"weight", "bias"} or inputs is None or not isinstance(output, Tensor):
            return False
        weight, bias = module.weight, getattr(module, "bias", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or inputs.ndim < 2 or not inputs.is_floating_point():
            return False
        with torch.no_grad():
            matrix = self._matrix(weight)
            if matrix.shape != (output.shape[-1], inputs.shape[-1]):
                return False
            again = F.linear(inputs, matrix.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))
            return torch.allclose(again.to(output.dtype), output, rtol=1e-2, atol=1e-3)

    def still_matches(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> bool:
        """Whether the first position is what the formula gives, for a class with a `forward` of its own.

        Noise in its inputs, or dropout, may begin in mid-run, and would be no node of the graph.
        """
        inputs = next(tensors_in((arguments, keywords)))
        if type(module).forward is nn.Linear.forward or not is_on_host(inputs) or not inputs.numel():
            return True
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(weight, Tensor) or not isinstance(output, Tensor) or inputs.ndim < 2:
            return False
        with torch.no_grad():
            first, expected = inputs.flatten(0, -2)[:1], output.flatten(0, -2)[:1]
            again = F.linear(first.to(weight.dtype), self._matrix(weight), bias).to(expected.dtype)
            allowed = ROUNDING[expected.dtype.itemsize] * (1 + expected.abs().max())
            return bool((again - expected).abs().max() <= allowed)

    def add_gradients(
        self, call: LayerCall, gradients: OutputGradients, order: GroupOrder, targets: dict[str, Tensor]
    ) -> None:
        """See `LayerRule.add_gradients`."""
        gradient = gradients[0]
        assert gradient is not None
        self._add(call, gradient, order, targets, write_over=False)

    def form_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        targets: dict[str, Tensor],
        fresh: Collection[str] = (),
    ) -> None:
        """See `LayerRule.form_gradients`. A fresh weight is written in one pass, in place of zeroing and adding."""
        gradient = gradients[0]
        if gradient is None:
            super().form_gradients(call, gradients, order, targets, fresh)
            return
        for name in fresh:
            if name != "weight":
                targets[name].zero_()
        self._add(call, gradient, order, targets, write_over="weight" in fresh)

    def weighted_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        coefficients: Tensor,
        names: Sequence[str],
        dtype: torch.dtype,
        memory: ReusedMemory,
    ) -> dict[str, Tensor]:
        """See `LayerRule.weighted_gradients`. The smaller of inputs and gradient is scaled."""
        gradient = gradients[0]
        if gradient is None or "weight" not in names:
            return super().weighted_gradients(call, gradients, coefficients, names, dtype, memory)
        inputs = call.inputs.to(gradient.dtype)
        smaller = min(gradient, inputs, key=Tensor.numel)
        column = coefficients.view([-1] + [1] * (smaller.ndim - 1))
        scaled = torch.mul(smaller, column, out=memory.of_shape(smaller.shape, smaller.device, smaller.dtype))
        left, right = (scaled, inputs) if smaller is gradient else (gradient, scaled)
        left, right = left.flatten(0, -2), right.flatten(0, -2)
        found = {}
        if "bias" in names:
            of_positions = coefficients.repeat_interleave(len(left) // len(coefficients))
            bias = left.sum(dim=0, dtype=dtype) if smaller is gradient else left.T @ of_positions.to(left)
            found["bias"] = bias.to(dtype)
        rows, columns = self._by_dimension(left, right)
        return {"weight": (rows.T @ columns).flatten().to(dtype), **found}

    def projected(
        self, call: LayerCall, gradients: OutputGradients, name: str, projections: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """See `LayerRule.projected`. S1 and S2 shrink the layer's gradients and inputs before their product."""
        gradient = gradients[0]
        if gradient is None:
            return None
        left, right = (matrix.to(gradient) for matrix in projections)
        rows, columns = self._by_dimension(gradient, call.inputs.to(gradient.dtype))
        batch, rank = len(gradient), left.shape[0]
        return (rows @ left.T).reshape(batch, -1, rank), (columns @ right).reshape(batch, -1, rank)

    def example_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        names: Sequence[str],
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """See `LayerRule.example_gradients`."""
        gradient, batch = gradients[0], len(order.bounds)
        if gradient is None:
            return super().example_gradients(call, gradients, order, names, dtype)
        gradient = gradient.reshape(batch, -1, gradient.shape[-1])
        found = {}
        if "weight" in names:
            inputs = call.inputs.to(gradient.dtype)
            rows, columns = self._by_dimension(gradient, inputs.reshape(batch, -1, inputs.shape[-1]))
            found["weight"] = (rows.transpose(1, 2) @ columns).flatten(1).to(dtype)
        if "bias" in names:
            found["bias"] = gradient.sum(dim=1, dtype=dtype)
        return found

    def _matrix(self, weight: Tensor) -> Tensor:
        """The weight as [out, in]."""
        return weight

    def _by_dimension(self, gradient: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What runs along the rows of the stored weight, and what runs along its columns."""
        return gradient, inputs

    def _add(
        self, call: LayerCall, gradient: Tensor, order: GroupOrder, targets: dict[str, Tensor], write_over: bool
    ) -> None:
        if self._add_at_once(call, gradient, order, targets, write_over):
            return
        gradient = order.sorted(gradient)
        if "weight" in targets:
            weight: Any = call.module.weight
            matrices = targets["weight"].unflatten(1, weight.shape)
            # One pass over the target in place of three; it is as large as all the groups' gradients.
            same_type = matrices.dtype == gradient.dtype
            products = matrices if same_type else torch.empty_like(matrices, dtype=gradient.dtype)
            inputs = order.sorted(call.inputs.to(gradient.dtype))
            self._multiply(gradient, inputs, order, products, write_over or not same_type)
            if not same_type:
                matrices.copy_(products) if write_over else matrices.add_(products)
        if "bias" in targets:
            for target, part in zip(targets["bias"], order.parts(gradient), strict=True):
                target += part.flatten(0, -2).sum(dim=0, dtype=target.dtype)

    def _multiply(
        self, gradient: Tensor, inputs: Tensor, order: GroupOrder, products: Tensor, write_over: bool
    ) -> None:
        """The products [G, …] of gradient and inputs, both in the order of the groups: written, or added to."""
        if order.is_even and not is_on_host(gradient):
            # Where each call is a launch, one for all groups.
            left, right = (part.reshape(len(products), -1, part.shape[-1]) for part in (gradient, inputs))
            rows, columns = self._by_dimension(left, right)
            products.baddbmm_(rows.mT, columns, beta=0 if write_over else 1)
            return
        pairs = zip(order.parts(gradient), order.parts(inputs), strict=True)
        for product, (left, right) in zip(products, pairs, strict=True):
            rows, columns = self._by_dimension(left.flatten(0, -2), right.flatten(0, -2))
            if write_over:
                torch.mm(rows.T, columns, out=product)
            else:
                product.addmm_(rows.T, columns)

    def _add_at_once(
        self, call: LayerCall, gradient: Tensor, order: GroupOrder, targets: dict[str, Tensor], write_over: bool
    ) -> bool:
        """The same for all groups in one product over the whole batch, where that is so small that calls count."""
        inputs = call.inputs
        work = len(order.bounds) * gradient.numel() * inputs.shape[-1]
        dtype = next(iter(targets.values())).dtype
        if work > SMALL_WORK or len(order.bounds) < 2 or gradient.dtype != dtype or inputs.dtype != dtype:
            return False
        found = self._products_at_once(gradient, inputs, order, targets)
        for name, products in found.items():
            if write_over and name == "weight":
                targets[name].copy_(products)
            else:
                targets[name].add_(products)
        return True

    def small_gradients(
        self,
        call: LayerCall,
        gradients: OutputGradients,
        order: GroupOrder,
        names: Collection[str],
        dtype: torch.dtype,
    ) -> dict[str, Tensor] | None:
        """See `LayerRule.small_gradients`."""
        gradient, inputs = gradients[0], call.inputs
        if gradient is None or gradient.dtype != dtype or inputs.dtype != dtype:
            return None
        if len(order.bounds) * gradient.numel() * inputs.shape[-1] > SMALL_WORK:
            return None
        return self._products_at_once(gradient, inputs, order, names)

    def _products_at_once(
        self, gradient: Tensor, inputs: Tensor, order: GroupOrder, names: Collection[str]
    ) -> dict[str, Tensor]:
        """The gradients [G, numel] of all groups, in one product over the whole batch."""
        left, right = order.sorted(gradient), order.sorted(inputs)
        if left.ndim > 2:
            left, right = left.flatten(0, -2), right.flatten(0, -2)
        positions = left.shape[0]
        members, zero = order.members_of(positions), order.zero_of(left.dtype)
        # The others' rows become zero, not their products: what is not finite stays in its own group.
        own = torch.where(members, left[:, None], zero)
        found: dict[str, Tensor] = {}
        if "weight" in names:
            rows, columns = self._by_dimension(left, right)
            of_groups = own if rows is left else torch.where(members, rows[:, None], zero)
            products = torch.mm(of_groups.view(positions, -1).T, columns)
            found["weight"] = products.view(members.shape[1], -1)
        if "bias" in names:
            found["bias"] = own.sum(dim=0)
        return found


class TransposedLinearRule(LinearRule):
    """For any module that computes x W + b: its `weight` is [in, out]."""

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.T

    def _by_dimension(self, gradient: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, gradient
