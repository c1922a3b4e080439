"""Chooses the fastest engine that is exact for the model, and proves it on the first batch."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Literal, get_args

from torch import Tensor, nn

from hf_cgd.gradients.base import FastEngine, GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.engines.per_group import PerGroupCutEngine, PerGroupEngine
from hf_cgd.gradients.engines.single_pass import SinglePassEngine
from hf_cgd.gradients.engines.sketch import SketchEngine
from hf_cgd.gradients.engines.static_shapes import StaticShapesEngine
from hf_cgd.gradients.verification import StepCheck

logger = logging.getLogger(__name__)

Engine = Literal["auto", "single_pass", "sketch", "tensor_hooks", "per_group"]
"""What a user can ask for."""
ENGINES: tuple[Engine, ...] = get_args(Engine)
CheckedEngine = Literal["auto", "single_pass", "sketch"]
"""Those of them that `AutoEngine` checks on the first step."""


class AutoEngine(GradientEngine):
    """Group gradients by the first of several engines that agrees with the per-group one on a whole step.

    The first step is computed both ways, the gradient of every trainable parameter included. The outcome is logged in
    one line. Where no engine agrees, the per-group one is used from then on.

    Args:
        model: the network.
        parameters: the gradient scope.
        engine: "auto" tries the single pass, then one pass per group that stops at the cut. "single_pass" and "sketch"
            try that one only and raise a ValueError on the first step where it is not exact.
        agree: tells whether all processes say yes; None for a single process.
        seed: of the sketch's random matrices.
        static: whether all steps must have the same shapes (see `StaticShapesEngine`). Then `groups` are all K. Where
            the single pass is not exact, the per-group engine takes one backward pass for each of them.

    Raises:
        ValueError: another engine is asked for.
    """

    name = "auto"

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        engine: CheckedEngine = "auto",
        agree: Callable[[bool], bool] | None = None,
        seed: int = 0,
        static: bool = False,
    ) -> None:
        if engine not in get_args(CheckedEngine):
            raise ValueError(
                f"AutoEngine checks one of {', '.join(get_args(CheckedEngine))}, got {engine!r}. For others build "
                "PerGroupEngine or TensorHookEngine."
            )
        self.parameters = list(parameters)
        self.chosen: GradientEngine | None = None
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
            self._candidates.append((StaticShapesEngine if static else SinglePassEngine)(model, self.parameters))
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
        """See `GradientEngine.group_gradients`."""
        if self.chosen is None:
            return self._choose(losses, group_ids, groups)
        try:
            return self.chosen.group_gradients(losses, group_ids, groups)
        except NotExactError as error:
            if self._engine == "sketch":
                raise ValueError(
                    f"gradient_engine='sketch' cannot go on: {error}. Use gradient_engine='auto'."
                ) from error
            logger.info("Group gradients of this step by per_group: %s", error)
        return self._exact.group_gradients(losses, group_ids, groups)

    def _choose(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        exact = self._exact.group_gradients(losses, group_ids, groups)
        # Overflows under a loss scale, or a loss that is not finite, tell nothing: the next step decides.
        if not self._agree(bool(exact.rows.isfinite().all())):
            return exact
        check = StepCheck(self._model, self.parameters, exact, losses, group_ids, groups)
        reasons = []
        for candidate in self._candidates:
            verdict = check.verdict_on(candidate)
            everywhere = self._agree(verdict.exact)
            reason = "another process cannot use it" if verdict.exact and not everywhere else verdict.reason
            reasons.append(f"{candidate.name}: {reason}")
            if everywhere and verdict.gradients is not None:
                self._use(candidate, reasons)
                return verdict.gradients
        if self._engine != "auto":
            raise ValueError(
                f"gradient_engine={self._engine!r} cannot be used on {type(self._model).__name__} ({reasons[0]}). Use "
                "gradient_engine='auto', which then takes one backward pass for each group, or other gradient_layers."
            )
        self._use(self._exact, reasons)
        return exact

    def _use(self, engine: GradientEngine, reasons: list[str]) -> None:
        self.chosen = engine
        self.reason = "; ".join(reasons)
        self._candidates = []
        logger.info("  Gradient engine %s (%s)", engine.name, self.reason)
