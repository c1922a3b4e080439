"""What the objectives with moving weights have in common."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from hf_cgd.functional import adjustment_terms
from hf_cgd.objectives.base import (
    GroupStatistics,
    Objective,
    require_at_least_zero,
    require_one_of,
)

AbsentGroups = Literal["frozen", "zero_loss"]
ABSENT_GROUPS: tuple[AbsentGroups, ...] = get_args(AbsentGroups)

MIN_WEIGHT_SHARE = 1e-5
"""Default floor of a group weight, as a share of the uniform weight 1/K."""


@dataclass(frozen=True)
class AdaptiveObjective(Objective):
    """Base of the objectives whose weights move by exponentiated steps: their common knobs.

    Args:
        step_size: eta_a >= 0; 0 keeps the weights where they start. Larger steps react faster and swing more.
        adjustment: C >= 0 of the group adjustment C / sqrt(n_i), which never enters the loss itself; 0 for none.
        absent_groups: "frozen": a group without examples in a step keeps its weight and the loss is the weighted mean
            over the others. "zero_loss": it counts with loss 0 (plus its adjustment under Group-DRO) and nothing is
            renormalised, the convention of older code.
        min_weight: floor of a weight, in [0, 1/K); None for 1e-5 / K.

    Raises:
        ValueError: a value outside its range.
    """

    step_size: float = 0.01
    adjustment: float = 0.0
    absent_groups: AbsentGroups = "frozen"
    min_weight: float | None = None

    def __post_init__(self) -> None:
        require_at_least_zero(step_size=self.step_size, adjustment=self.adjustment, min_weight=self.min_weight or 0.0)
        require_one_of("absent_groups", self.absent_groups, ABSENT_GROUPS)

    @property
    def needs_group_counts(self) -> bool:
        """Under an adjustment."""
        return self.adjustment > 0

    @property
    def keeps_weights_positive(self) -> bool:
        """Not under `min_weight=0`."""
        return self.min_weight != 0

    def initial_weights(self, group_counts: Tensor) -> Tensor:
        """Equal weights [K]."""
        if (self.min_weight or 0.0) * len(group_counts) >= 1:
            raise ValueError(
                f"min_weight must be below 1/K = {1 / len(group_counts):.4g} for {len(group_counts)} groups, "
                f"got {self.min_weight!r}."
            )
        return super().initial_weights(group_counts)

    def coefficients(self, alpha: Tensor, present: Tensor) -> Tensor:
        """Alpha over the present groups: renormalised, or as it is under `absent_groups="zero_loss"`."""
        if self.absent_groups == "zero_loss":
            return alpha.masked_fill(~present, 0.0)
        return super().coefficients(alpha, present)

    def _adjustments(self, statistics: GroupStatistics) -> Tensor | float:
        if self.adjustment == 0:
            return 0.0
        return adjustment_terms(statistics.group_counts, self.adjustment).to(statistics.losses)

    def _takes_part(self, statistics: GroupStatistics) -> Tensor | None:
        """[K] booleans, None for all."""
        return None if statistics.everyone or self.absent_groups == "zero_loss" else statistics.present

    def _floor(self, num_groups: int) -> float:
        return MIN_WEIGHT_SHARE / num_groups if self.min_weight is None else self.min_weight
