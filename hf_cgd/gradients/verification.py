"""Whether the gradients that an engine gives are right: what is compared, and how large an error may be."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_cgd.functional import cosine_gram
from hf_cgd.gradients.autograd import flatten, unflatten
from hf_cgd.gradients.base import FastEngine, GroupGradients, NotExactError
from hf_cgd.gradients.structure import LossGraph

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Largest error of a check, relative to a parameter's own gradient; passes in other types get `LOW_TOLERANCE`."""
LOW_TOLERANCE = 5e-2
NOISE_FACTOR = 8
"""How many times the rounding noise of the ordinary backward pass is allowed, where that is more."""
NOISE_SCALES = (3.0, 5.0, 0.7)
"""Factors of the losses under which the backward pass rounds differently; divided out, what differs is noise."""


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest error that is allowed where the least precise type of a pass is `dtype`."""
    return TOLERANCE.get(dtype, LOW_TOLERANCE)


def largest_error(
    expected: Sequence[Tensor], actual: Sequence[Tensor], allowances: Sequence[float] | None = None
) -> float:
    """Largest error of any gradient, relative to its own largest entry.

    Args:
        expected, actual: gradients.
        allowances: added to each one's largest entry, for gradients that are zero but for rounding (of attention's
            key biases), which differ by their own size; None for nothing.
    """
    largest = _largest_entries(expected)
    differences = _largest_entries([one - other for one, other in zip(expected, actual, strict=True)])
    floors = allowances or [0.0] * len(largest)
    return max(
        difference / max(own + floor, 1e-300)
        for difference, own, floor in zip(differences, largest, floors, strict=True)
    )


def row_error(
    expected: Tensor, actual: Tensor, parameters: Sequence[nn.Parameter], allowances: Sequence[float] | None = None
) -> float:
    """`largest_error` of a row [P]."""
    return largest_error(unflatten(expected, parameters), unflatten(actual, parameters), allowances)


def _largest_entries(tensors: Sequence[Tensor]) -> list[float]:
    # Read at once: a device is waited for each time.
    return torch.stack([tensor.abs().max().double() for tensor in tensors]).tolist()


@dataclass(frozen=True)
class Verdict:
    """What came of checking an engine.

    Attributes:
        exact: whether the engine can be used.
        reason: why, with the error that was measured.
        gradients: those that it found; None where it gave up.
    """

    exact: bool
    reason: str
    gradients: GroupGradients | None = None


class StepCheck:
    """Compares engines with the per-group one on a whole step.

    Engines look at the graph's structure themselves, and vouch that what lies beyond the cut is reached through it
    alone. So the rows, their cosines and the step's gradient in the scope and at the cut are all that numbers have to
    tell. The graph is kept.

    Args:
        parameters: the gradient scope.
        expected: the groups' gradients by the per-group engine.
        losses, group_ids, groups: what they were taken from.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        expected: GroupGradients,
        losses: Tensor,
        group_ids: Tensor,
        groups: Sequence[int],
    ) -> None:
        self._parameters = parameters
        self._expected = expected
        self._losses = losses
        self._group_ids = group_ids
        self._groups = groups
        # Unequal coefficients, so that a mix-up of the groups shows.
        by_group = torch.zeros(max(groups) + 1, device=losses.device, dtype=losses.dtype)
        for place, group in enumerate(groups):
            by_group[group] = (1 + place) / len(groups)
        self._coefficients = by_group[group_ids] / len(losses)
        self._weighted = (self._coefficients * losses).sum()

    def verdict_on(self, engine: FastEngine) -> Verdict:
        """Whether an engine that recorded the forward pass can be used."""
        cut = None if engine.cut is None else engine.cut.tensor
        devices = [self._losses.device] if self._losses.is_cuda else []
        try:
            # A check must leave no trace in the random state, or a resumed run would not be the uninterrupted one.
            with torch.random.fork_rng(devices=devices):
                found = engine.group_gradients(self._losses, self._group_ids, self._groups, keep_graph=True)
                # A copy is checked, so that the step does exactly what it would do unchecked.
                checked = copy.copy(found)
                gram = checked.gram()
                of_step = self._gradients(checked.scalar(self._weighted, self._coefficients), cut)
        except NotExactError as ruled_out:
            return Verdict(False, str(ruled_out))
        tolerance = tolerance_of(engine.computed_in or self._losses.dtype)
        cosine_errors = (cosine_gram(self._expected.gram()) - cosine_gram(gram)).abs()
        rows = None if engine.forms_sketches else checked.rows
        note = f", its cosines by {cosine_errors.square().mean().sqrt():.1e} rms" if engine.forms_sketches else ""
        cosine_error = 0.0 if engine.forms_sketches else float(cosine_errors.max())
        expected = self._gradients(self._weighted, cut)
        error = self._error(expected, of_step, rows)
        if tolerance < max(error, cosine_error):
            noise, of_all = self._rounding_noise(cut)
            error = self._error(expected, of_step, rows, [NOISE_FACTOR * part / tolerance for part in noise])
            if cosine_error <= min(LOW_TOLERANCE, NOISE_FACTOR * of_all):
                cosine_error = min(cosine_error, tolerance)
        error = max(error, cosine_error)
        reason = f"its gradients differ from per_group's by {error:.1e}, {tolerance:.0e} allowed{note}"
        return Verdict(error <= tolerance, reason, found)

    def is_blind(self) -> bool:
        """Whether a parameter that the losses depend on has a gradient of exactly zero, which tells nothing."""
        reached = LossGraph(self._losses, [], None).reached
        largest = _largest_entries(unflatten(self._expected.rows.abs().amax(dim=0), self._parameters))
        return any(
            not size and id(p) in reached and p.requires_grad
            for p, size in zip(self._parameters, largest, strict=True)
        )

    def _error(
        self,
        expected: Sequence[Tensor],
        actual: Sequence[Tensor],
        rows: Tensor | None,
        allowances: Sequence[float] | None = None,
    ) -> float:
        """Largest error of the step's gradients and of the rows [G, P]; allowances are for sums over the batch."""
        share = float(self._coefficients.abs().max())
        error = largest_error(expected, actual, allowances and [share * one for one in allowances])
        if rows is not None:
            in_scope = allowances and allowances[: len(self._parameters)]
            for row, other in zip(self._expected.rows, rows, strict=True):
                error = max(error, row_error(row, other, self._parameters, in_scope))
        return error

    def _rounding_noise(self, cut: Tensor | None) -> tuple[list[float], float]:
        """Errors of the ordinary backward pass against itself under other factors of the losses.

        Deep stacks of BatchNorm amplify rounding by far: 1e-4 in a ResNet-18 on 28 x 28 pixels (1e-13 in float64).

        Returns:
            the largest error of each gradient, and that of all together relative to their norm.
        """
        total = self._losses.sum()
        once = self._gradients(total, cut)
        worst, of_all = [0.0] * len(once), 0.0
        norm = max(_norm(once), 1e-300)
        for scale in NOISE_SCALES:
            again = self._gradients(total * scale, cut)
            noise = [one - other / scale for one, other in zip(once, again, strict=True)]
            worst = [max(old, new) for old, new in zip(worst, _largest_entries(noise), strict=True)]
            of_all = max(of_all, _norm(noise) / norm)
        return worst, of_all

    def _gradients(self, loss: Tensor, cut: Tensor | None) -> list[Tensor]:
        """The gradient in the scope and at the cut; zeros for what the loss does not depend on."""
        sources = [*self._parameters, *([] if cut is None else [cut])]
        places = [place for place, source in enumerate(sources) if source.requires_grad]
        gradients = [torch.zeros_like(source) for source in sources]
        if places:
            wanted = [sources[place] for place in places]
            found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
            for place, gradient in zip(places, found, strict=True):
                gradients[place] = gradients[place] if gradient is None else gradient
        return gradients


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())


class ArrivingGradients:
    """Sums the gradients that arrive at weights during a backward pass."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._followed: list[tuple[Tensor, RemovableHandle]] = []

    def follow(self, weight: Tensor, parameter: nn.Parameter) -> None:
        """Count what arrives at `weight` as the gradient of `parameter`; nothing changes if it is followed already."""
        if weight.requires_grad and all(weight is not known for known, _ in self._followed):
            self._followed.append((weight, weight.register_hook(partial(self._add, id(parameter)))))

    def row(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The sums [P] of these parameters, zeros where nothing arrived."""
        return flatten([self._sums.get(id(parameter)) for parameter in parameters], parameters)

    def stop(self) -> None:
        """Follow nothing, and forget the sums."""
        for _, handle in self._followed:
            handle.remove()
        self._sums, self._followed = {}, []

    def _add(self, place: int, gradient: Tensor) -> None:
        before = self._sums.get(place)
        self._sums[place] = gradient.detach().clone() if before is None else before + gradient
