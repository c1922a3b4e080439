"""Chooses the fastest engine that is exact for the model, and proves it on the first batch."""

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn

from hf_cgd.functional import cosine_gram
from hf_cgd.gradients.autograd import unflatten
from hf_cgd.gradients.base import GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.engines.per_group import PerGroupCutEngine, PerGroupEngine
from hf_cgd.gradients.engines.single_pass import SinglePassEngine
from hf_cgd.gradients.engines.sketch import SketchEngine
from hf_cgd.gradients.engines.static_shapes import OneHotEngine
from hf_cgd.gradients.verification import LOW_TOLERANCE, NOISE_FACTOR, TOLERANCE, largest_error

logger = logging.getLogger(__name__)

ENGINES = ("auto", "single_pass", "sketch", "tensor_hooks", "per_group")
FastEngine = SinglePassEngine | PerGroupCutEngine


class AutoEngine(GradientEngine):
    """Group gradients by the first of several engines that agrees with the per-group one on a whole step.

    The first step is computed both ways, the gradient of every trainable parameter included. That costs about as much
    as a step or two more; the outcome is logged in one line. Where no engine agrees, the per-group one is used for
    good.

    Args:
        model: the network.
        parameters: the gradient scope.
        engine: "auto" tries the single pass, then one pass per group that stops at the cut. "single_pass" and "sketch"
            try that one only and raise a ValueError on the first step where it is not exact.
        agree: tells whether all processes say yes; None for a single process.
        seed: of the sketch's random matrices.
        static: whether all steps must have the same shapes (see `OneHotEngine`). Then `groups` are all K, and where
            the single pass is not exact the per-group engine takes one backward pass for each of them.
    """

    name = "auto"

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        engine: str = "auto",
        agree: Callable[[bool], bool] | None = None,
        seed: int = 0,
        static: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.chosen: FastEngine | PerGroupEngine | None = None
        """The engine in use, None before the first step."""
        self.reason = ""
        """Why it was chosen, with the errors that were measured."""
        self._model = model
        self._engine = engine
        self._agree = agree or (lambda yes: yes)
        self._exact = PerGroupEngine(self.parameters)
        self._candidates: list[FastEngine] = []
        if engine == "sketch":
            self._candidates.append(SketchEngine(model, self.parameters, seed=seed))
        else:
            self._candidates.append((OneHotEngine if static else SinglePassEngine)(model, self.parameters))
        if engine == "auto" and not static:
            self._candidates.append(PerGroupCutEngine(model, self.parameters))

    def recording(self) -> AbstractContextManager[object]:
        """Goes around the forward pass."""
        if self.chosen is not None:
            return self.chosen.recording()
        stack = ExitStack()
        for candidate in self._candidates:
            stack.enter_context(candidate.recording())
        return stack

    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """See `PerGroupEngine.group_gradients`."""
        if self.chosen is None:
            return self._first(losses, group_ids, groups)
        try:
            return self.chosen.group_gradients(losses, group_ids, groups)
        except NotExactError as error:
            if self._engine == "sketch":
                raise ValueError(
                    f"gradient_engine='sketch' cannot go on: {error}. Use gradient_engine='auto'."
                ) from error
            logger.info("Group gradients of this step by per_group: %s", error)
        return self._exact.group_gradients(losses, group_ids, groups)

    def _first(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        exact = self._exact.group_gradients(losses, group_ids, groups)
        # Overflows under a loss scale, or a loss that is not finite, tell nothing: the next step decides.
        if not self._agree(bool(exact.rows.isfinite().all())):
            return exact
        reasons = []
        for candidate in self._candidates:
            fast, good, reason = self._try(candidate, exact, losses, group_ids, groups)
            everywhere = self._agree(good)
            if good and not everywhere:
                reason = "another process cannot use it"
            reasons.append(f"{candidate.name}: {reason}")
            if everywhere:
                self._settle(candidate, reasons)
                return fast
        if self._engine != "auto":
            raise ValueError(
                f"gradient_engine={self._engine!r} cannot be used on {type(self._model).__name__} ({reasons[0]}). Use "
                "gradient_engine='auto', which then takes one backward pass for each group, or other gradient_layers."
            )
        self._settle(self._exact, reasons)
        return exact

    def _settle(self, engine: FastEngine | PerGroupEngine, reasons: list[str]) -> None:
        self.chosen = engine
        self.reason = "; ".join(reasons)
        self._candidates = []
        logger.info("  Gradient engine %s (%s)", engine.name, self.reason)

    def _try(
        self, candidate: FastEngine, exact: GroupGradients, losses: Tensor, group_ids: Tensor, groups: Sequence[int]
    ) -> tuple[GroupGradients, bool, str]:
        """What a candidate finds, whether it can be used, and why."""
        devices = [losses.device] if losses.is_cuda else []
        try:
            # A check must leave no trace in the random state, or a resumed run would not be the uninterrupted one.
            with torch.random.fork_rng(devices=devices):
                fast = candidate.group_gradients(losses, group_ids, groups, keep_graph=True)
                # A copy is checked, so that the step does exactly what it would do unchecked.
                checked = copy.copy(fast)
                gram = checked.gram()
                error = self._error_of_step(checked, losses, group_ids, groups)
        except NotExactError as ruled_out:
            return exact, False, str(ruled_out)
        note = ""
        cosine_errors = (cosine_gram(exact.gram()) - cosine_gram(gram)).abs()
        if isinstance(candidate, SketchEngine):
            note = f", its cosines by {cosine_errors.square().mean().sqrt():.1e} rms"
        else:
            error = max(error, float(cosine_errors.max()))
            for one, other in zip(exact.rows, checked.rows, strict=True):
                pieces = (unflatten(row, self.parameters) for row in (one, other))
                error = max(error, largest_error(*pieces))
        computed_in = getattr(candidate, "computed_in", losses.dtype)
        tolerance = TOLERANCE.get(computed_in, LOW_TOLERANCE)
        if tolerance < error <= LOW_TOLERANCE:
            tolerance = max(tolerance, NOISE_FACTOR * self._rounding_noise(losses))
        reason = f"its gradients differ from per_group's by {error:.1e}, {tolerance:.0e} allowed{note}"
        return fast, error <= tolerance, reason

    def _error_of_step(self, fast: GroupGradients, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> float:
        """Largest relative error in the gradient of any trainable parameter of the model."""
        # Unequal coefficients, so that a mix-up of the groups shows.
        by_group = torch.zeros(max(groups) + 1, device=losses.device, dtype=losses.dtype)
        for place, group in enumerate(groups):
            by_group[group] = (1 + place) / len(groups)
        coefficients = by_group[group_ids] / len(losses)
        weighted = (coefficients * losses).sum()
        return largest_error(self._full_gradient(weighted), self._full_gradient(fast.scalar(weighted, coefficients)))

    def _rounding_noise(self, losses: Tensor) -> float:
        """Error of the ordinary backward pass against itself on a third of the loss, which rounds differently.

        Deep stacks of BatchNorm amplify rounding by far: 1e-4 in a ResNet-18 on 28 x 28 pixels (1e-13 in float64).
        """
        third = [3 * gradient for gradient in self._full_gradient(losses.mean() / 3)]
        return largest_error(self._full_gradient(losses.mean()), third)

    def _full_gradient(self, loss: Tensor) -> list[Tensor]:
        """The gradient of every trainable parameter of the model; the graph is kept."""
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trainable, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(trainable, gradients, strict=True)]
