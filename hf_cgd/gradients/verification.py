"""Whether the gradients that an engine gives are right: what is compared, and how large an error may be."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_cgd.functional import cosine_gram
from hf_cgd.gradients.autograd import flatten, unflatten, weighted_sum
from hf_cgd.gradients.base import GroupGradients, NotExactError
from hf_cgd.gradients.fast_engine import FastEngine
from hf_cgd.gradients.gram import inner_products
from hf_cgd.gradients.structure import LossGraph

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Largest error of a check, relative to a parameter's own gradient; passes in other types get `LOW_TOLERANCE`."""
LOW_TOLERANCE = 5e-2
MOST_AMPLIFIED = 1024.0
"""How many times the losses of a group with small gradients are multiplied at most, in half precision above all."""
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
    differences = _differences(expected, actual)
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


def _differences(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> list[float]:
    """Largest difference of each gradient."""
    return _largest_entries(one - other for one, other in zip(expected, actual, strict=True))


def _largest_entries(tensors: Iterable[Tensor]) -> list[float]:
    # Read at once, as a device is waited for each time; and one after the other in memory.
    return torch.stack([tensor.abs().max().double() for tensor in tensors]).tolist()


@dataclass(frozen=True)
class Verdict:
    """What came of checking an engine.

    Attributes:
        exact: whether the engine can be used.
        reason: why, with the error that was measured.
        gradients: those that it found; None where it gave up.
        is_finite: whether the numbers could be compared: not where they overflow under a loss scale.
    """

    exact: bool
    reason: str
    gradients: GroupGradients | None = None
    is_finite: bool = True


class StepCheck:
    """Compares engines with ordinary backward passes on a whole step.

    Engines look at the graph's structure themselves, and vouch that what lies beyond the cut is reached through it
    alone, but for the parameters that they name (`GroupGradients.others`). So the groups' gradients and the step's
    gradient in the scope, at those and at the cut are all that numbers have to tell. They are told by one pass
    whatever the number of groups: the groups' losses are summed with coefficients of which no two are alike and under
    which all groups' gradients are of one size. The gradient of that sum is compared with the same sum of the rows
    that an engine gives, and with the gradient of the scalar that it makes. An error in any row, or two groups that
    are taken for one another, shows in it. Sketches are linear: the sum of the sketches is compared with the sketch of
    the sum. The graph is kept.

    Args:
        parameters: the gradient scope.
        losses, group_ids, groups: of the step; the ids are where the losses are.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], losses: Tensor, group_ids: Tensor, groups: Sequence[int]
    ) -> None:
        self._parameters = parameters
        self._losses = losses
        self._group_ids = group_ids
        self._groups = groups
        self._sources: list[Tensor] = list(parameters)
        self._sizes: list[float] = []
        """Largest entry of each source's gradient in the pass that an engine was compared with."""

    def verdict_on(self, engine: FastEngine) -> Verdict:
        """Whether an engine that recorded the forward pass can be used."""
        cut = None if engine.cut is None else engine.cut.tensor
        devices = [self._losses.device] if self._losses.is_cuda else []
        in_scope = len(self._parameters)
        try:
            # A check must leave no trace in the random state, or a resumed run would not be the uninterrupted one.
            with torch.random.fork_rng(devices=devices):
                found = engine.group_gradients(self._losses, self._group_ids, self._groups, keep_graph=True)
                self._sources = [*self._parameters, *found.others]
                # Rows and inner products may share memory, and the step is to find the latter.
                rows = copy.copy(found).rows
                products = inner_products(rows, True)
                weights = self._weights_for(products)
                of_rows = weighted_sum(rows, weights)
                del rows
                gram = found.gram()
                exact_gram = found.exact_gram() if engine.forms_sketches else None
                coefficients = self._of_examples(weights)
                weighted = (coefficients * self._losses).sum()
                # Before the memory of those of the step is taken.
                expected = self._gradients(weighted, cut)
                of_step = self._gradients(found.scalar(weighted, coefficients), cut)
        except NotExactError as ruled_out:
            return Verdict(False, str(ruled_out))
        compared = list(_with_rows(engine, dict(enumerate(expected)), len(expected)).values())
        self._sizes = _largest_entries(compared)
        if found.others and cut is not None:
            # What reaches them through the cut may be far larger, and would hide an error in the rest.
            through = torch.autograd.grad(cut, list(found.others), expected[-1], retain_graph=True, allow_unused=True)
            whole = expected[in_scope : in_scope + len(through)]
            rest = [one if part is None else one - part for one, part in zip(whole, through, strict=True)]
            self._sizes[in_scope : in_scope + len(through)] = _largest_entries(rest)
        if not math.isfinite(sum(self._sizes)):
            return Verdict(False, "gradients are not finite", found, is_finite=False)
        if not bool(gram.isfinite().all() & products.isfinite().all()):
            return Verdict(False, "its gradients are not finite", found)
        tolerance = tolerance_of(engine.computed_in or self._losses.dtype)
        cosine_error = float((cosine_gram(products) - cosine_gram(gram)).abs().max())
        note = ""
        if exact_gram is not None:
            away = cosine_gram(exact_gram) - cosine_gram(gram)
            note = f", its cosines by {away.square().mean().sqrt():.1e} rms"
        pieces = of_rows.split([part.numel() for part in compared[len(expected) :]])
        differences = _differences(compared, [*of_step, *pieces])
        del of_step, of_rows, pieces
        noise, of_all = [0.0] * len(compared), 0.0
        errors, allowed = _errors(differences, self._sizes, noise, tolerance), tolerance
        # Each pass can only allow more, so there are no more of them than are needed.
        for scale in NOISE_SCALES:
            if max(errors) <= tolerance and cosine_error <= allowed:
                break
            wrong = [place for place, error in enumerate(errors) if error > tolerance or cosine_error > allowed]
            places = sorted({place % len(expected) for place in wrong})
            found_noise, share = self._noise_of(weighted, expected, cut, scale, places)
            found_noise, of_all = _with_rows(engine, found_noise, len(expected)), max(of_all, share)
            for place, size in zip(found_noise, _largest_entries(found_noise.values()), strict=True):
                noise[place] = max(noise[place], size)
            errors = _errors(differences, self._sizes, noise, tolerance)
            allowed = max(tolerance, min(LOW_TOLERANCE, NOISE_FACTOR * of_all))
        error = max(*errors, min(cosine_error, tolerance) if cosine_error <= allowed else cosine_error)
        reason = f"its gradients differ from per_group's by {error:.1e}, {tolerance:.0e} allowed{note}"
        return Verdict(error <= tolerance, reason, found)

    def is_blind(self) -> bool:
        """Whether a parameter that the losses depend on has a gradient of exactly zero, which tells nothing."""
        reached = LossGraph(self._losses, [], None).reached
        sizes = zip(self._sources, self._sizes, strict=False)
        return any(not size and id(p) in reached and p.requires_grad for p, size in sizes)

    def _weights_for(self, gram: Tensor) -> Tensor:
        """A coefficient [G] for each group: unequal, and larger for small gradients, so that their errors show too."""
        norms = gram.diagonal().clamp_min(0).sqrt().double().cpu()
        shares = (norms.max() / norms).nan_to_num(nan=1.0, posinf=1.0).clamp(1, MOST_AMPLIFIED)
        unequal = torch.arange(1, len(norms) + 1) / len(norms)
        return (unequal * shares / len(self._losses)).to(self._losses)

    def _of_examples(self, weights: Tensor) -> Tensor:
        """The coefficients [G] as those of the examples [B]."""
        by_group = torch.zeros(max(self._groups) + 1, device=weights.device, dtype=weights.dtype)
        by_group[list(self._groups)] = weights
        return by_group[self._group_ids]

    def _noise_of(
        self, weighted: Tensor, expected: Sequence[Tensor], cut: Tensor | None, scale: float, places: Sequence[int]
    ) -> tuple[dict[int, Tensor], float]:
        """Errors of the ordinary backward pass against itself when the losses are multiplied by `scale`.

        Deep stacks of BatchNorm amplify rounding by far: 1e-4 in a ResNet-18 on 28 x 28 pixels (1e-13 in float64).

        Args:
            weighted: the loss.
            expected: its gradients.
            cut: where the last of them is.
            scale: a factor under which rounding is another.
            places: of the gradients to look at.

        Returns:
            the errors of these gradients by place, and their norm relative to that of the gradients.
        """
        again = self._gradients(weighted * scale, cut, places)
        chosen = [expected[place] for place in places]
        noise = [one - other / scale for one, other in zip(chosen, again, strict=True)]
        return dict(zip(places, noise, strict=True)), _norm(noise) / max(_norm(chosen), 1e-300)

    def _gradients(self, loss: Tensor, cut: Tensor | None, places: Sequence[int] | None = None) -> list[Tensor]:
        """The gradients of parameters and at the cut (or of them those at these places); zeros where there is none."""
        sources = [*self._sources, *([] if cut is None else [cut])]
        sources = sources if places is None else [sources[place] for place in places]
        wanted = [source for source in sources if source.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True) if wanted else ())
        gradients = [next(found) if source.requires_grad else None for source in sources]
        pairs = zip(sources, gradients, strict=True)
        return [torch.zeros_like(source) if gradient is None else gradient for source, gradient in pairs]


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())


def _with_rows(engine: FastEngine, gradients: dict[int, Tensor], behind: int) -> dict[int, Tensor]:
    """Gradients by place, and those of the scope once more, at places from `behind` on, as they stand in a row."""
    in_scope = {place: gradient for place, gradient in gradients.items() if place < len(engine.parameters)}
    return gradients | {behind + place: engine.in_row(place, gradient) for place, gradient in in_scope.items()}


def _errors(
    differences: Sequence[float], sizes: Sequence[float], noise: Sequence[float], tolerance: float
) -> list[float]:
    """Errors of gradients relative to their largest entries, and as large as the tolerance where noise is allowed."""
    return [
        difference / max(size + NOISE_FACTOR * one / tolerance, 1e-300)
        for difference, size, one in zip(differences, sizes, noise, strict=True)
    ]


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
