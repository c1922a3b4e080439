"""Group-DRO: weight goes to the groups with the highest loss."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_cgd.functional import group_dro_step
from hf_cgd.objectives.adaptive import AdaptiveObjective
from hf_cgd.objectives.base import GroupStatistics


@dataclass(frozen=True)
class GroupDRO(AdaptiveObjective):
    """Group-DRO (Sagawa et al., ICLR 2020): weights follow the group losses, alpha_i <- alpha_i exp(eta_a l_i).

    Knobs: see `AdaptiveObjective`.
    """

    name: ClassVar[str] = "group_dro"

    def next_weights(self, alpha: Tensor, statistics: GroupStatistics) -> Tensor:
        """Weights [K] after one exponentiated step on the (adjusted) losses."""
        return group_dro_step(
            alpha,
            statistics.losses,
            step_size=self.step_size,
            adjustments=self._adjustments(statistics),
            present=self._takes_part(statistics),
            min_weight=self._floor(len(alpha)),
        )
