"""Group gradients as small random sketches: for many groups, many processes, and running averages.

Cosines need inner products, not gradients. With two fixed random matrices per weight, S1 [r, out] and S2 [in, r] with
entries N(0, 1/r), the sketch S1 G S2 [r, r] of a weight gradient G keeps inner products on average:
E <S1 G S2, S1 H S2> = <G, H>. For a linear layer S1 (dO^T A) S2 = (dO S1^T)^T (A S2), so a sketch costs r (in + out)
operations per position where the gradient itself costs in x out. The weight gradient that the step needs is then
formed once, for all groups together, so that neither time nor memory grows with their number.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cgd.gradients.base import GroupGradients
from hf_cgd.gradients.engines.single_pass import BackwardPass, SinglePassEngine
from hf_cgd.gradients.layers.rules import Call, Members, add_gradients

SKETCH_SIZE = 32
"""Default r."""


class SketchEngine(SinglePassEngine):
    """Sketches of the groups' gradients; the parameter gradient of the step itself stays exact.

    Args:
        model: the network that runs the forward pass, or what it wraps.
        parameters: the gradient scope. A parameter of at most r^2 elements, or without two dimensions, is kept whole.
        size: r.
        seed: fixes the random matrices, on every process and after a resume.
    """

    name = "sketch"

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], size: int = SKETCH_SIZE, seed: int = 0
    ) -> None:
        super().__init__(model, parameters)
        self._rank = size
        self._projections: dict[int, tuple[Tensor, Tensor]] = {}
        self._sketch_places: dict[int, tuple[int, int]] = {}
        start = 0
        for place, parameter in enumerate(self.parameters):
            length = parameter.numel()
            if parameter.ndim >= 2 and length > size**2:
                # Drawn on the CPU, so that every device has the same.
                generator = torch.Generator().manual_seed(seed * 1_000_003 + place)
                outputs, inputs = parameter.shape[0], length // parameter.shape[0]
                left = torch.randn(size, outputs, generator=generator) / size**0.5
                right = torch.randn(inputs, size, generator=generator) / size**0.5
                self._projections[id(parameter)] = (left.to(parameter.device), right.to(parameter.device))
                length = size**2
            self._sketch_places[id(parameter)] = (start, start + length)
            start += length
        self._sketch_size = start

    def sketch(self, row: Tensor) -> Tensor:
        """Sketch [S] of a gradient [P]."""
        parts = []
        for parameter in self.parameters:
            piece = row[slice(*self.places[id(parameter)])]
            if id(parameter) in self._projections:
                left, right = (matrix.to(row) for matrix in self._projections[id(parameter)])
                piece = (left @ piece.view(parameter.shape[0], -1) @ right).flatten()
            parts.append(piece)
        return torch.cat(parts)

    def gradients_of(self, step: BackwardPass) -> GroupGradients:
        """See `SinglePassEngine.gradients_of`."""
        return _SketchGradients(step)

    def sketches_of(self, step: BackwardPass) -> Tensor:
        """Sketches [G, S] of the groups' gradients."""
        sketches = torch.zeros(len(step.members.bounds), self._sketch_size, device=step.device, dtype=step.dtype)
        for call, gradients in step.calls:
            self._add_sketches(call, gradients, step.members, sketches)
        return sketches

    def kept_whole(self, sketches: Tensor) -> dict[int, Tensor]:
        """The gradients [G, numel], by id of the parameter, that stand in the sketches as they are."""
        return {
            parameter: sketches[:, slice(*place)]
            for parameter, place in self._sketch_places.items()
            if parameter not in self._projections
        }

    def _add_sketches(
        self, call: Call, gradients: Sequence[Tensor | None], members: Members, sketches: Tensor
    ) -> None:
        targets = {}
        for name, parameter in self.owned[call.module].items():
            target = sketches[:, slice(*self._sketch_places[id(parameter)])]
            projections = self._projections.get(id(parameter))
            if projections is None:
                targets[name] = target
            elif not self._add_projected(call, gradients, members, projections, target):
                # No short way for this kind of module: the whole gradient first, then its sketch.
                whole = sketches.new_zeros(len(members.bounds), parameter.numel())
                add_gradients(call, gradients, members, {name: whole})
                left, right = (matrix.to(whole) for matrix in projections)
                target += (left @ whole.view(len(whole), parameter.shape[0], -1) @ right).flatten(1)
        if targets:
            add_gradients(call, gradients, members, targets)

    def _add_projected(
        self,
        call: Call,
        gradients: Sequence[Tensor | None],
        members: Members,
        projections: tuple[Tensor, Tensor],
        target: Tensor,
    ) -> bool:
        """Add the sketches of a linear layer's or a convolution's weight; False for any other module."""
        if call.kind == "other":
            return False
        (gradient,) = gradients
        if gradient is None:
            return True
        left, right = (matrix.to(gradient) for matrix in projections)
        inputs = call.inputs.to(gradient.dtype)
        module = call.module
        if call.kind == "conv2d":
            assert isinstance(module, nn.Conv2d)
            if module.groups != 1:
                return False
            kernel = right.T.reshape(self._rank, *module.weight.shape[1:])
            projected = F.conv2d(inputs, kernel, None, module.stride, module.padding, module.dilation)
            narrow_inputs = projected.flatten(2).transpose(1, 2)
            narrow = gradient.flatten(2).transpose(1, 2) @ left.T
        elif call.kind == "transposed":
            # The weight is [in, out], so that S1 meets the inputs.
            narrow, narrow_inputs = (inputs @ left.T).flatten(1, -2), (gradient @ right).flatten(1, -2)
        else:
            narrow, narrow_inputs = (gradient @ left.T), (inputs @ right)
        narrow = members.sorted(narrow.reshape(len(narrow), -1, self._rank))
        narrow_inputs = members.sorted(narrow_inputs.reshape(len(narrow_inputs), -1, self._rank))
        for row, (start, end) in zip(target, members.bounds, strict=True):
            product = narrow[start:end].flatten(0, 1).T @ narrow_inputs[start:end].flatten(0, 1)
            row += product.flatten().to(row.dtype)
        return True


class _SketchGradients(GroupGradients):
    def __init__(self, step: BackwardPass) -> None:
        super().__init__()
        self._step = step

    def _form_rows(self) -> Tensor:
        assert isinstance(self._step.engine, SketchEngine)
        with torch.no_grad():
            return self._step.engine.sketches_of(self._step)

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        assert isinstance(self._step.engine, SketchEngine)
        return self._step.scalar(loss, coefficients, self._step.engine.kept_whole(self.rows))
