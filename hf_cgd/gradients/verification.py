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

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Largest error of a check, relative to the largest gradient; passes in other types get `LOW_TOLERANCE`."""
LOW_TOLERANCE = 5e-2
NOISE_FACTOR = 4
"""How many times the rounding noise of the ordinary backward pass is allowed, where that is more."""


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest error that is allowed where the least precise type of a pass is `dtype`."""
    return TOLERANCE.get(dtype, LOW_TOLERANCE)


def largest_error(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Largest error of any parameter's gradient, relative to its own largest entry.

    A hundredth of the largest entry of all is added to that, since gradients that are zero but for rounding (of
    attention's key biases) differ by their own size.
    """
    largest = _largest_entries(expected)
    floor = max(0.01 * max(largest), 1e-30)
    differences = _largest_entries([one - other for one, other in zip(expected, actual, strict=True)])
    return max(difference / (own + floor) for difference, own in zip(differences, largest, strict=True))


def row_error(expected: Tensor, actual: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    """`largest_error` of a row [P]."""
    return largest_error(unflatten(expected, parameters), unflatten(actual, parameters))


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

    Compared are the rows, their cosines, and the step's gradient of every trainable parameter of the model. The graph
    is kept.

    Args:
        model: the network.
        parameters: the gradient scope.
        expected: the groups' gradients by the per-group engine.
        losses, group_ids, groups: what they were taken from.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        expected: GroupGradients,
        losses: Tensor,
        group_ids: Tensor,
        groups: Sequence[int],
    ) -> None:
        self._parameters = parameters
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._expected = expected
        self._losses = losses
        self._group_ids = group_ids
        self._groups = groups

    def verdict_on(self, engine: FastEngine) -> Verdict:
        """Whether an engine that recorded the forward pass can be used.

        A check of the graph's structure, which sees what numbers of one batch cannot show, belongs before the
        comparison in this method.
        """
        devices = [self._losses.device] if self._losses.is_cuda else []
        try:
            # A check must leave no trace in the random state, or a resumed run would not be the uninterrupted one.
            with torch.random.fork_rng(devices=devices):
                found = engine.group_gradients(self._losses, self._group_ids, self._groups, keep_graph=True)
                # A copy is checked, so that the step does exactly what it would do unchecked.
                checked = copy.copy(found)
                gram = checked.gram()
                error = self._error_of_step(checked)
        except NotExactError as ruled_out:
            return Verdict(False, str(ruled_out))
        note = ""
        cosine_errors = (cosine_gram(self._expected.gram()) - cosine_gram(gram)).abs()
        if engine.forms_sketches:
            note = f", its cosines by {cosine_errors.square().mean().sqrt():.1e} rms"
        else:
            error = max(error, float(cosine_errors.max()))
            for row, other in zip(self._expected.rows, checked.rows, strict=True):
                error = max(error, row_error(row, other, self._parameters))
        tolerance = tolerance_of(engine.computed_in or self._losses.dtype)
        if tolerance < error <= LOW_TOLERANCE:
            tolerance = max(tolerance, NOISE_FACTOR * self._rounding_noise())
        reason = f"its gradients differ from per_group's by {error:.1e}, {tolerance:.0e} allowed{note}"
        return Verdict(error <= tolerance, reason, found)

    def _error_of_step(self, found: GroupGradients) -> float:
        """Largest relative error in the step's gradient of any trainable parameter of the model."""
        # Unequal coefficients, so that a mix-up of the groups shows.
        losses, groups = self._losses, self._groups
        by_group = torch.zeros(max(groups) + 1, device=losses.device, dtype=losses.dtype)
        for place, group in enumerate(groups):
            by_group[group] = (1 + place) / len(groups)
        coefficients = by_group[self._group_ids] / len(losses)
        weighted = (coefficients * losses).sum()
        return largest_error(self._full_gradient(weighted), self._full_gradient(found.scalar(weighted, coefficients)))

    def _rounding_noise(self) -> float:
        """Error of the ordinary backward pass against itself on a third of the loss, which rounds differently.

        Deep stacks of BatchNorm amplify rounding by far: 1e-4 in a ResNet-18 on 28 x 28 pixels (1e-13 in float64).
        """
        mean = self._losses.mean()
        third = [3 * gradient for gradient in self._full_gradient(mean / 3)]
        return largest_error(self._full_gradient(mean), third)

    def _full_gradient(self, loss: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad(loss, self._trainable, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self._trainable, gradients, strict=True)]


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
