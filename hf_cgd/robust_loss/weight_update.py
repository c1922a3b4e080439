"""One move of the group weights: by the statistics of a step, unless these are not finite."""

import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic
from hf_cgd.data.groups import GroupInfo
from hf_cgd.monitors import NonFinite, PresenceMonitor
from hf_cgd.objectives import GroupStatistics, Objective
from hf_cgd.robust_loss.checks import build_checks
from hf_cgd.robust_loss.estimators import LossEstimator, Scale
from hf_cgd.robust_loss.requirements import require_weights
from hf_cgd.robust_loss.state import LossState
from hf_cgd.robust_loss.window import StepWindow


class WeightUpdate:
    """Moves the weights of a state, and sees to it that a move can be judged and taken back.

    Args:
        objective: tells the next weights.
        groups: the K groups.
        state: what is moved. Without weights there is nothing to do.
        estimator: gives the statistics of a step.
        arithmetic, nonfinite: see `GroupRobustLoss`.
        of_excess: whether the statistics are of losses in excess of a reference, whose means count as 0 below it.
        may_be_undone: whether the state before an update is kept until the next one.
    """

    def __init__(
        self,
        objective: Objective,
        groups: GroupInfo,
        state: LossState,
        estimator: LossEstimator,
        arithmetic: Arithmetic,
        nonfinite: NonFinite,
        of_excess: bool,
        may_be_undone: bool,
    ) -> None:
        self._objective = objective
        self._groups = groups
        self._state = state
        self._estimator = estimator
        self._arithmetic = arithmetic
        self._of_excess = of_excess
        self._may_be_undone = may_be_undone
        self._checks = build_checks(groups, nonfinite, arithmetic)
        self._group_counts = arithmetic.move(groups.counts_tensor())
        self._all_groups = arithmetic.zeros(len(groups)) == 0
        self._before: LossState | None = None
        self._presence: PresenceMonitor | None = None
        if state.alpha is not None:
            require_weights(state.alpha, len(groups), objective, "initial_weights")
            self._presence = _watched_groups(objective, groups, state.alpha, arithmetic)

    def __call__(self, window: StepWindow, scale: Scale) -> None:
        """Move the weights by the statistics of a step that is complete; `scale` is that of its gradients."""
        state = self._state
        if state.alpha is None:
            return
        if self._presence is not None:
            self._presence.observe(len(window.present))
        estimate = self._estimator.estimate(window, scale)
        looks = self._arithmetic.reads_values
        bad = None if looks and estimate.is_finite() else estimate.not_finite()
        moves: Tensor | bool = True if bad is None else ~bad.any()
        self._before = None
        if isinstance(moves, bool) or self._arithmetic.read(moves, otherwise=True):
            self._before = state.copy() if self._may_be_undone else None
            losses = self._estimator.accept(estimate, None if looks else torch.as_tensor(moves))
            statistics = GroupStatistics(
                losses.clamp_min(0) if self._of_excess else losses,
                window.counts,
                self._group_counts,
                estimate.gram,
                self._groups.names,
                estimate.self_products,
                self._arithmetic,
                window.everyone,
            )
            weights = self._objective.next_weights(state.alpha, statistics)
            if looks:
                moves = require_weights(weights, len(self._groups), self._objective, "next_weights")
            else:
                moves = moves & weights.isfinite().all()
            if estimate.gram is not None and state.interactions is not None:
                took_part = self._all_groups if moves is True and statistics.everyone else statistics.present & moves
                state.interactions.observe(estimate.gram, took_part)
            if isinstance(moves, Tensor):
                state.alpha = torch.where(moves, weights, state.alpha)
            elif moves:
                state.alpha = weights
        state.updates += 1
        overflow: Tensor | bool = False
        if bad is not None and not (isinstance(scale, float) and scale == 1):
            overflow = (torch.as_tensor(scale) != 1) & estimate.losses.isfinite().all()
        self._checks.note(state, moves, bad, estimate.losses, overflow)

    def undo(self) -> None:
        """Take the last update back, if it moved the weights and may be undone."""
        if self._before is not None:
            self._state.take_back(self._before)
            self._checks.take_back()
            self._before = None

    def read_checks(self) -> None:
        """Look at what no step may look at; a wait for the device, where that is where the weights are."""
        if self._state.alpha is not None:
            # Losses in excess of a reference are never negative where the weights see them.
            self._checks.read(self._state, self._objective.refuses_negative_losses and not self._of_excess)


def _watched_groups(
    objective: Objective, groups: GroupInfo, alpha: Tensor, arithmetic: Arithmetic
) -> PresenceMonitor | None:
    """What watches how many groups the steps hold; None with one group, and where nobody may look."""
    if arithmetic.fixed_shapes or len(groups) < 2:
        return None
    alone = torch.arange(len(groups)) == 0
    cancels = objective.weighs_group_means and objective.coefficients(alpha.cpu(), alone)[0].item() == 1
    return PresenceMonitor(objective.name, len(groups), cancels, objective.groups_wanted(len(groups)))
