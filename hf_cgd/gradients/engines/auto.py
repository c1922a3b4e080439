"""Chooses the fastest engine that is exact for the model, proves it, and looks again when the model changes."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Literal, get_args

from torch import Tensor, nn

from hf_cgd.gradients.base import GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.compiled import engines_for
from hf_cgd.gradients.engines.per_group import PerGroupCutEngine, PerGroupEngine
from hf_cgd.gradients.engines.single_pass import SinglePassEngine
from hf_cgd.gradients.engines.sketch import SketchEngine
from hf_cgd.gradients.engines.static_shapes import StaticShapesEngine
from hf_cgd.gradients.fast_engine import FastEngine
from hf_cgd.gradients.signature import ScopeSignature
from hf_cgd.gradients.verification import StepCheck

logger = logging.getLogger(__name__)

Engine = Literal["auto", "single_pass", "sketch", "tensor_hooks", "per_group"]
"""What a user can ask for."""
ENGINES: tuple[Engine, ...] = get_args(Engine)
CheckedEngine = Literal["auto", "single_pass", "sketch"]
"""Those of them that `AutoEngine` checks on the first step."""

LAST_CHECK = 64
"""Steps up to which gradients of exactly zero lead to further checks, at steps 2, 4, 8, …"""


class AutoEngine(GradientEngine):
    """Group gradients by the first of several engines that agrees with the per-group one on a whole step.

    Every step an engine looks at the graph of the losses: it gives up where a parameter is used past the engine's
    sight, and that step is computed by the per-group one. The first step is computed both ways, and the outcome is
    logged in one line. It is confirmed once two groups have met in a batch, and while gradients are still exactly
    zero. It is taken anew when the trainable parameters or the modules of the scope change. Where no engine agrees,
    the per-group one is used.

    Args:
        model: the network.
        parameters: the gradient scope.
        engine: "auto" tries the single pass, then one pass per group that stops at the cut. "single_pass" and "sketch"
            try that one only and raise a ValueError on the first step where it is not exact.
        agree: tells whether all processes say yes; None for a single process.
        seed: of the sketch's random matrices.
        static: whether all steps must have the same shapes (see `StaticShapesEngine`). Then `groups` are all K. Where
            the single pass is not exact, the per-group engine takes one backward pass for each of them.
        compiled: whether `torch.compile` compiles the network (see `prepare_for_compiled_networks`).

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
        compiled: bool = False,
    ) -> None:
        if engine not in get_args(CheckedEngine):
            raise ValueError(
                f"AutoEngine checks one of {', '.join(get_args(CheckedEngine))}, got {engine!r}. For others build "
                "PerGroupEngine or TensorHookEngine."
            )
        self.parameters = list(parameters)
        self.chosen: GradientEngine | None = None
        """The engine in use, None before the first step."""
        self._is_first = True
        self.reason = ""
        """Why it was chosen, with the errors that were measured."""
        self._model = model
        self._engine = engine
        self._agree = agree or (lambda yes: yes)
        self._seed = seed
        self._static = static
        self._compiled = compiled
        self._exact = PerGroupEngine(self.parameters)
        self._signature = ScopeSignature(model, self.parameters)
        self._start_over()

    def _start_over(self) -> None:
        """Build the engines for the model as it is, and forget what was found."""
        self._made_for = self._signature.now()
        self._verdicts: Verdicts | None = Verdicts()
        self._ruled_out: list[str] = []
        with engines_for(self._compiled):
            self._candidates = self._candidates_of()

    def _candidates_of(self) -> list[FastEngine]:
        if self._engine == "sketch":
            return [SketchEngine(self._model, self.parameters, seed=self._seed)]
        if self._static:
            return [StaticShapesEngine(self._model, self.parameters)]
        found: list[FastEngine] = [SinglePassEngine(self._model, self.parameters)]
        if self._engine == "auto":
            found.append(PerGroupCutEngine(self._model, self.parameters))
        return found

    def recording(self) -> AbstractContextManager[object]:
        """Goes around the forward pass."""
        if self._signature.now() != self._made_for:
            self._signature = ScopeSignature(self._model, self.parameters)
            self._start_over()
            self._is_first = False
        if self._verdicts is None and self.chosen is not None:
            return self.chosen.recording()
        stack = ExitStack()
        for engine in self._candidates:
            stack.enter_context(engine.recording())
        return stack

    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """See `GradientEngine.group_gradients`."""
        if self._verdicts is not None:
            # Steps with static shapes read nothing after the first one, so that one has to do.
            present = max(len(groups), 2) if self._static else len(groups)
            if self._verdicts.is_due(present):
                return self._choose(losses, group_ids, groups, present)
        assert self.chosen is not None
        try:
            return self.chosen.group_gradients(losses, group_ids, groups)
        except NotExactError as error:
            if self._engine == "sketch":
                raise ValueError(
                    f"gradient_engine='sketch' cannot go on: {error}. Use gradient_engine='auto'."
                ) from error
            logger.info("Group gradients of this step by per_group: %s", error)
        return self._exact.group_gradients(losses, group_ids, groups)

    def _choose(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int], present: int) -> GroupGradients:
        assert self._verdicts is not None
        self._exact.require_visible(losses)
        check = StepCheck(self.parameters, losses, group_ids.to(losses.device), groups)
        reasons = self._ruled_out.copy()
        for place, candidate in enumerate(self._candidates):
            verdict = check.verdict_on(candidate)
            # Overflows under a loss scale, or a loss that is not finite, tell nothing: the next step decides.
            if not self._everywhere(verdict.is_finite):
                return self._exact.group_gradients(losses, group_ids, groups)
            everywhere = self._everywhere(verdict.exact)
            reason = "another process cannot use it" if verdict.exact and not everywhere else verdict.reason
            reasons.append(f"{candidate.name}: {reason}")
            if everywhere and verdict.gradients is not None:
                del self._candidates[:place]
                self._ruled_out = reasons[:-1]
                self._verdicts.note(present, not self._static and check.is_blind())
                self._use(candidate, reasons)
                return verdict.gradients
        if self._engine != "auto":
            raise ValueError(
                f"gradient_engine={self._engine!r} cannot be used on {type(self._model).__name__} ({reasons[0]}). Use "
                "gradient_engine='auto', which then takes one backward pass for each group, or other gradient_layers."
            )
        exact = self._exact.group_gradients(losses, group_ids, groups)
        if not self._everywhere(bool(exact.rows.isfinite().all())):
            return exact
        self._candidates = []
        self._use(self._exact, reasons)
        return exact

    def _everywhere(self, yes: bool) -> bool:
        """Whether all processes say yes to the first verdict. Later ones need no agreement, and no process waits."""
        return self._agree(yes) if self._is_first else yes

    def _use(self, engine: GradientEngine, reasons: list[str]) -> None:
        is_news = engine is not self.chosen
        self._is_first = False
        self.chosen = engine
        self.reason = "; ".join(reasons)
        if not self._candidates or (self._verdicts is not None and self._verdicts.are_settled):
            self._candidates, self._verdicts = [], None
        if is_news:
            logger.info("  Gradient engine %s (%s)", engine.name, self.reason)


class Verdicts:
    """When a step is computed both ways: at first, when groups first meet, and while gradients are exactly zero."""

    def __init__(self) -> None:
        self._steps = 0
        self._next: float = 1
        self._groups_met = False
        self.are_settled = False

    def is_due(self, present: int) -> bool:
        """Count a step whose batch holds so many groups, and say whether it is to be checked."""
        self._steps += 1
        return self._steps >= self._next or (present > 1 and not self._groups_met)

    def note(self, present: int, blind: bool) -> None:
        """Take note of a check that found an exact engine; `blind` where gradients of zero left something open."""
        self._groups_met = self._groups_met or present > 1
        self.are_settled = self._groups_met and (not blind or self._steps >= LAST_CHECK)
        self._next = 2 * self._steps if blind and self._steps < LAST_CHECK else math.inf
