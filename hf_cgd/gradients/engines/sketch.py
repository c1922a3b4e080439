"""Group gradients as small random sketches: for many groups, many processes, and running averages.

Cosines need inner products, not gradients. With two fixed random matrices per weight, S1 [r, out] and S2 [in, r] with
entries N(0, 1/r), the sketch S1 G S2 [r, r] of a weight gradient G keeps inner products on average:
E <S1 G S2, S1 H S2> = <G, H>. For a linear layer S1 (dO^T A) S2 = (dO S1^T)^T (A S2), so a sketch costs r (in + out)
operations per position where the gradient itself costs in x out. The weight gradient that the step needs is then
formed once, for all groups together, so that neither time nor memory grows with their number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_cgd.gradients.autograd import RowBlock
from hf_cgd.gradients.base import GroupGradients
from hf_cgd.gradients.engines.backward_pass import BackwardPass
from hf_cgd.gradients.engines.group_rows import GroupRows, vectors_of
from hf_cgd.gradients.engines.single_pass import SinglePassEngine
from hf_cgd.gradients.group_order import products_of_groups
from hf_cgd.gradients.verification import largest_error

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
    forms_sketches = True

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], size: int = SKETCH_SIZE, seed: int = 0
    ) -> None:
        super().__init__(model, parameters)
        self.group_rows: GroupSketches = GroupSketches(self.parameters, self.owned, size, seed)

    def in_row(self, place: int, gradient: Tensor) -> Tensor:
        """See `FastEngine.in_row`."""
        return self.group_rows.in_row(place, gradient)


class GroupSketches(GroupRows):
    """Forms the groups' gradients as sketches [G, S].

    Args:
        parameters, owned: see `GroupRows`.
        size, seed: see `SketchEngine`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owned: dict[nn.Module, dict[str, nn.Parameter]],
        size: int = SKETCH_SIZE,
        seed: int = 0,
    ) -> None:
        super().__init__(parameters, owned)
        self.projections: dict[int, tuple[Tensor, Tensor]] = {}
        """The random matrices of a parameter (by id) that is not kept whole."""
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
                self.projections[id(parameter)] = (left.to(parameter.device), right.to(parameter.device))
                length = size**2
            self._sketch_places[id(parameter)] = (start, start + length)
            start += length

    def sketch(self, row: Tensor) -> Tensor:
        """Sketch [S] of a gradient [P]."""
        pieces = [row[slice(*self.places[id(parameter)])] for parameter in self.parameters]
        return torch.cat([self.in_row(place, piece) for place, piece in enumerate(pieces)])

    def in_row(self, place: int, gradient: Tensor) -> Tensor:
        """How the gradient of parameter number `place` stands in a sketch [S]."""
        parameter = self.parameters[place]
        projections = self.projections.get(id(parameter))
        if projections is None:
            return gradient.flatten()
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        left, right = (matrix.to(gradient) for matrix in projections)
        return (left @ gradient.view(parameter.shape[0], -1) @ right).flatten()

    def gradients_of(self, step: BackwardPass) -> GroupGradients:
        """See `GroupRows.gradients_of`."""
        return _Sketches(self, step)

    def error_of_row(self, expected: Tensor, row: Tensor, floor: float = 0.0) -> float:
        """See `GroupRows.error_of_row`; the row is a sketch [S]."""
        return largest_error([self.sketch(expected)], [row])

    def rows_of(self, step: BackwardPass) -> Tensor:
        """Sketches [G, S] of the groups' gradients."""
        groups, vectors = len(step.order.bounds), vectors_of(step)
        pieces = {} if vectors is None else vectors.pieces()
        known = frozenset(pieces)
        factors: dict[int, list[tuple[int, Tensor, Tensor]]] = {}

        def piece(place: int) -> Tensor:
            if place not in pieces:
                start, end = self._sketch_places[place]
                pieces[place] = torch.zeros(groups, end - start, device=step.device, dtype=step.dtype)
            return pieces[place]

        for call, gradients in step.calls:
            targets = {}
            for name, parameter in self.owned[call.module].items():
                place = id(parameter)
                if place in known:
                    continue
                projections = self.projections.get(place)
                if projections is None:
                    targets[name] = piece(place)
                    continue
                pair = call.rule.projected(call, gradients, name, projections)
                if pair is None:
                    call.rule.add_projected(call, gradients, step.order, name, projections, piece(place))
                else:
                    factors.setdefault(pair[0].shape[1], []).append((place, *pair))
            if targets:
                call.rule.form_gradients(call, gradients, step.order, targets)
        # Layers with as many positions together: a product for each group, whatever their number.
        for alike in factors.values():
            places, lefts, rights = zip(*alike, strict=True)
            products = products_of_groups(lefts, rights, step.order, step.dtype)
            for place, product in zip(places, products.unbind(1), strict=True):
                pieces[place] = pieces[place] + product if place in pieces else product
        return torch.cat([piece(id(parameter)) for parameter in self.parameters], dim=1)

    def kept_whole(self, sketches: Tensor) -> RowBlock:
        """The gradients that stand in the sketches [G, S] as they are."""
        places = self._sketch_places.items()
        return RowBlock(sketches, {place: where for place, where in places if place not in self.projections})


class _Sketches(GroupGradients):
    reads_graph = False

    def __init__(self, former: GroupSketches, step: BackwardPass) -> None:
        super().__init__()
        self._former = former
        self._step = step
        self.others = step.others

    def _form_rows(self) -> Tensor:
        with torch.no_grad():
            return self._former.rows_of(self._step)

    def exact_gram(self) -> Tensor:
        # In memory for one module at a time, which is given back.
        return GroupRows(self._step.parameters, self._step.owned, memory_budget=0).gradients_of(self._step).gram()

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        return self._step.scalar(loss, coefficients, [self._former.kept_whole(self.rows)])
