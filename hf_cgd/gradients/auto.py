"""Chooses the fastest engine that is exact for the model, and proves it on the first batch."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from hf_cgd.gradients.per_group import GroupGradients, PerGroupEngine
from hf_cgd.gradients.single_pass import NotSinglePassError, SinglePassEngine

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Largest error of a check, relative to the largest gradient of the parameter; other types get `LOW_TOLERANCE`."""
LOW_TOLERANCE = 5e-2


class AutoEngine:
    """The single-pass engine, once it has agreed with the per-group one on a whole step; the latter otherwise.

    The first step is computed both ways, the gradient of every trainable parameter included. That costs about as much
    as a step more; the outcome is logged in one line.

    Args:
        model: the network.
        parameters: the gradient scope.
        agree: tells whether all processes say yes; None for a single process.
        strict: whether to raise a ValueError on the first step where single_pass is not exact.
    """

    name = "auto"

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        agree: Callable[[bool], bool] | None = None,
        strict: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.chosen: SinglePassEngine | PerGroupEngine | None = None
        """The engine in use, None before the first step."""
        self.reason = ""
        """Why it was chosen, with the error that was measured."""
        self._model = model
        self._strict = strict
        self._agree = agree or (lambda yes: yes)
        self._exact = PerGroupEngine(self.parameters)
        self._fast = SinglePassEngine(model, self.parameters)

    def recording(self) -> AbstractContextManager[None]:
        """Goes around the forward pass."""
        return self._exact.recording() if self.chosen is self._exact else self._fast.recording()

    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """See `PerGroupEngine.group_gradients`."""
        if self.chosen is None:
            return self._first(losses, group_ids, groups)
        if self.chosen is self._fast:
            try:
                return self._fast.group_gradients(losses, group_ids, groups)
            except NotSinglePassError as error:
                logger.info("Group gradients of this step by per_group: %s.", error)
        return self._exact.group_gradients(losses, group_ids, groups)

    def _first(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        exact = self._exact.group_gradients(losses, group_ids, groups)
        fast = exact
        try:
            # A check must leave no trace in the random state, or a resumed run would not be the uninterrupted one.
            with torch.random.fork_rng(devices=[losses.device] if losses.is_cuda else []):
                fast = self._fast.group_gradients(losses, group_ids, groups, keep_graph=True)
                error = self._error(exact, fast, losses, group_ids, groups)
            tolerance = TOLERANCE.get(self._fast.computed_in, LOW_TOLERANCE)
            good = error <= tolerance
            self.reason = f"its gradients differ from per_group's by {error:.1e} (at most {tolerance:.0e} allowed)"
        except NotSinglePassError as reason:
            good = False
            self.reason = str(reason)
        everywhere = self._agree(good)
        if good and not everywhere:
            self.reason = "another process cannot use it"
        self.chosen = self._fast if everywhere else self._exact
        if self._strict and not everywhere:
            raise ValueError(
                f"gradient_engine='single_pass' cannot be used on {type(self._model).__name__}: {self.reason}. Use "
                "gradient_engine='auto', which then takes one backward pass for each group, or a narrower "
                "gradient_layers."
            )
        verdict = "" if everywhere else "single_pass is ruled out: "
        logger.info("  Gradient engine %s (%s%s)", self.chosen.name, verdict, self.reason)
        return fast if everywhere else exact

    def _error(
        self, exact: GroupGradients, fast: GroupGradients, losses: Tensor, group_ids: Tensor, groups: Sequence[int]
    ) -> float:
        """Largest difference of any gradient of the groups or of the whole model, relative to the largest entry."""
        # Unequal coefficients, so that a mix-up of the groups shows.
        by_group = torch.zeros(max(groups) + 1, device=losses.device, dtype=losses.dtype)
        for place, group in enumerate(groups):
            by_group[group] = (1 + place) / len(groups)
        coefficients = by_group[group_ids] / len(losses)
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        weighted = (coefficients * losses).sum()
        expected = torch.autograd.grad(weighted, trainable, retain_graph=True, allow_unused=True)
        actual = torch.autograd.grad(
            fast.scalar(weighted, coefficients), trainable, retain_graph=True, allow_unused=True
        )
        error = 0.0
        for place in range(len(groups)):
            error = max(error, _difference(exact.rows[place], fast.rows[place]))
        whole = max((float(g.abs().max()) for g in expected if g is not None), default=0.0)
        for one, other in zip(expected, actual, strict=True):
            if one is None and other is None:
                continue
            one = torch.zeros_like(other) if one is None else one
            other = torch.zeros_like(one) if other is None else other
            error = max(error, float((one - other).abs().max()) / max(whole, 1e-30))
        return error


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) / max(float(one.abs().max()), 1e-30)
