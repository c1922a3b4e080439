"""What is looked at when the weights have moved: at once, or with the log where a step may look at nothing."""

import logging
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic
from hf_cgd.data.groups import GroupInfo
from hf_cgd.functional import require_nonnegative
from hf_cgd.monitors import WINDOW, NonFinite, NonFiniteMonitor, WeightMonitor
from hf_cgd.robust_loss.state import LossState

logger = logging.getLogger(__name__)


class UpdateChecks(ABC):
    """Follows the weight updates of a run: counts the ones that were left out, reports, and warns.

    Args:
        groups: the K groups.
        nonfinite: see `NonFiniteMonitor`.
    """

    def __init__(self, groups: GroupInfo, nonfinite: NonFinite) -> None:
        self._names = groups.names
        self._weights = WeightMonitor(groups.names)
        self._nonfinite = NonFiniteMonitor(groups.names, nonfinite)

    @abstractmethod
    def note(
        self, state: LossState, moved: Tensor | bool, bad: Tensor | None, losses: Tensor, overflow: Tensor | bool
    ) -> None:
        """Take note of an update, which `state` has counted.

        Args:
            state: after it.
            moved: whether the weights were moved.
            bad: [K] groups whose loss or gradient is not finite; None where there are none.
            losses: [K] mean losses.
            overflow: whether a gradient that is not finite is how a `GradScaler` finds its scale, and no trouble.
        """

    @abstractmethod
    def take_back(self) -> None:
        """The update that was noted last is taken back, and counted so elsewhere."""

    @abstractmethod
    def read(self, state: LossState, refuse_negative: bool) -> None:
        """Look at what `note` could not look at. `refuse_negative`: whether negative losses are an error."""


class ImmediateChecks(UpdateChecks):
    """Looks at each update as it comes."""

    def note(
        self, state: LossState, moved: Tensor | bool, bad: Tensor | None, losses: Tensor, overflow: Tensor | bool
    ) -> None:
        """See `UpdateChecks.note`."""
        if bool(moved):
            assert state.alpha is not None
            self._weights.observe(state.alpha, state.updates)
            return
        state.leave_out(1)
        bad = torch.zeros(len(self._names), dtype=torch.bool) if bad is None else bad
        step = state.updates + state.skipped_updates
        if bool(overflow):
            names = self._nonfinite.names(bad)
            logger.info("Optimizer step %d: gradients of the group(s) %s overflow under the loss scale", step, names)
        else:
            self._nonfinite.report(f"In optimizer step {step}", bad)

    def take_back(self) -> None:
        """Only an update that moved the weights is taken back, and of those nothing is counted here."""

    def read(self, state: LossState, refuse_negative: bool) -> None:
        """Nothing is left to look at."""


class LateChecks(UpdateChecks):
    """Keeps on the device what it is told, until `read`, which waits for the device.

    Args:
        groups, nonfinite: see `UpdateChecks`.
        arithmetic: tells where the numbers are.
    """

    def __init__(self, groups: GroupInfo, nonfinite: NonFinite, arithmetic: Arithmetic) -> None:
        super().__init__(groups, nonfinite)
        self._zeros = arithmetic.zeros
        self._recent = self._zeros(WINDOW, len(groups))
        """The weights after each of the last updates; of one length at all times, so that a reading is the same graph
        after any number of steps."""
        self._forget()

    def _forget(self) -> None:
        self._skipped: Tensor = self._zeros(1)
        self._troubled: Tensor = self._zeros(1)
        self._bad: Tensor = self._zeros(len(self._names))
        self._lowest: Tensor = self._zeros(len(self._names))
        self._before = (self._skipped, self._troubled, self._bad)
        self._noted = 0

    def note(
        self, state: LossState, moved: Tensor | bool, bad: Tensor | None, losses: Tensor, overflow: Tensor | bool
    ) -> None:
        """See `UpdateChecks.note`."""
        assert state.alpha is not None and isinstance(moved, Tensor) and bad is not None
        self._before = (self._skipped, self._troubled, self._bad)
        trouble = ~moved if isinstance(overflow, bool) else ~moved & ~overflow
        self._skipped, self._troubled = self._skipped + ~moved, self._troubled + trouble
        self._bad = self._bad + (bad & trouble)
        self._lowest = torch.minimum(self._lowest, losses.nan_to_num())
        self._recent = torch.cat([self._recent[1:], state.alpha[None]])
        self._noted += 1

    def take_back(self) -> None:
        """See `UpdateChecks.take_back`."""
        if self._noted:
            self._skipped, self._troubled, self._bad = self._before

    def read(self, state: LossState, refuse_negative: bool) -> None:
        """See `UpdateChecks.read`."""
        counts = [count.expand_as(self._bad) for count in (self._skipped, self._troubled)]
        others = torch.stack([self._bad, self._lowest, *counts])
        bad, lowest, skipped, troubled, *recent = torch.cat([others, self._recent]).cpu()
        weights = recent[len(recent) - min(self._noted, WINDOW) :]
        self._forget()
        state.leave_out(int(skipped[0]))
        if refuse_negative:
            require_nonnegative(lowest, self._names)
        if troubled[0] > 0:
            step = state.updates + state.skipped_updates
            self._nonfinite.report(f"In {int(troubled[0])} optimizer step(s) up to number {step}", bad > 0)
        first = state.updates - len(weights) + 1
        for place, alpha in enumerate(weights):
            self._weights.observe(alpha, first + place)


def build_checks(groups: GroupInfo, nonfinite: NonFinite, arithmetic: Arithmetic) -> UpdateChecks:
    """At once where values may be looked at, late elsewhere."""
    if arithmetic.reads_values:
        return ImmediateChecks(groups, nonfinite)
    return LateChecks(groups, nonfinite, arithmetic)
