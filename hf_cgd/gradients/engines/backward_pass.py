"""What one backward pass through the scope leaves, and the scalar that finishes the step from it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_cgd.gradients.autograd import Cut, RowBlock, scalar_with_gradients, unflatten, weighted_sum
from hf_cgd.gradients.group_order import GroupOrder
from hf_cgd.gradients.layers.base import LayerCall, OutputGradients, ReusedMemory, scaled_by_example


@dataclass(frozen=True)
class BackwardPass:
    """The calls of the scope's modules with the gradients of their outputs.

    Attributes:
        parameters: the gradient scope.
        owned: of each module the parameters of the scope that it holds, by name.
        calls: each with the gradients of its outputs.
        order: the groups.
        device, dtype: of the losses.
        reached: ids of the parameters that the losses depend on. Others get no gradient, as in an ordinary backward
            pass: an optimizer leaves them alone, and DDP has counted them as unused. (Rows alone do not need it.)
        cut: where the body flows into the scope; None where nothing does.
        at_cut: the gradient there.
        others: parameters outside of the scope that the losses depend on behind the cut.
        outside: of each module the trainable parameters outside of the scope that it holds, by name.
        calls_of_others: the calls that use them, as `calls`.
        memory: for a copy that lives within a call of a rule.
    """

    parameters: Sequence[nn.Parameter]
    owned: dict[nn.Module, dict[str, nn.Parameter]]
    calls: list[tuple[LayerCall, OutputGradients]]
    order: GroupOrder
    device: torch.device
    dtype: torch.dtype
    reached: Collection[int] = frozenset()
    cut: Cut | None = None
    at_cut: Tensor | None = None
    others: Sequence[nn.Parameter] = ()
    outside: dict[nn.Module, dict[str, nn.Parameter]] = field(default_factory=dict)
    calls_of_others: Sequence[tuple[LayerCall, OutputGradients]] = ()
    memory: ReusedMemory = field(default_factory=ReusedMemory)

    def scalar(self, loss: Tensor, coefficients: Tensor, known: Sequence[RowBlock]) -> Tensor:
        """The scalar that finishes the step.

        Args:
            loss: its value.
            coefficients: [B].
            known: gradients of the groups. Those of parameters in none of these blocks are formed.
        """
        with torch.no_grad():
            of_groups = coefficients[self.order.first]
            found: dict[int, Tensor] = {}
            for block in known:
                found |= block.weighted_sums(of_groups)
            self._add_missing(found, coefficients, self.calls, self.owned)
        return self._finish(loss, coefficients, _shaped(found, self._used))

    def scalar_of_rows(self, loss: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
        """The same where the groups' gradients [G, P] over all parameters are known."""
        gradients = unflatten(weighted_sum(rows, coefficients.index_select(0, self.order.first)), self.parameters)
        pairs = zip(self.parameters, gradients, strict=True)
        return self._finish(loss, coefficients, [gradient for p, gradient in pairs if id(p) in self.reached])

    @property
    def _used(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters if id(parameter) in self.reached]

    def _finish(self, loss: Tensor, coefficients: Tensor, gradients: list[Tensor]) -> Tensor:
        tensors: list[Tensor] = [*self._used, *self.others]
        if self.others:
            found: dict[int, Tensor] = {}
            with torch.no_grad():
                self._add_missing(found, coefficients, self.calls_of_others, self.outside)
            gradients += _shaped(found, self.others)
        if self.cut is not None and self.at_cut is not None:
            tensors.append(self.cut.tensor)
            gradients.append(scaled_by_example(self.at_cut, coefficients))
        return scalar_with_gradients(loss, tensors, gradients)

    def _add_missing(
        self,
        found: dict[int, Tensor],
        coefficients: Tensor,
        calls: Sequence[tuple[LayerCall, OutputGradients]],
        held: dict[nn.Module, dict[str, nn.Parameter]],
    ) -> None:
        """Add weighted gradients [numel] of the parameters that are not in `found`, straight from the activations."""
        given = set(found)
        for call, gradients in calls:
            missing = {name: id(p) for name, p in held[call.module].items() if id(p) not in given}
            if missing:
                names = list(missing)
                weighted = call.rule.weighted_gradients(call, gradients, coefficients, names, self.dtype, self.memory)
                for name, gradient in weighted.items():
                    old = found.get(missing[name])
                    found[missing[name]] = gradient if old is None else old + gradient


def _shaped(found: dict[int, Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Gradients [numel], by id of the parameter, in the parameters' shapes and types; zeros where there is none."""
    return [found[id(p)].view_as(p).to(p.dtype) if id(p) in found else torch.zeros_like(p) for p in parameters]
