"""Empirical risk minimisation, plain and with fixed group weights."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_cgd.functional import upweights
from hf_cgd.objectives.base import GroupBatch, Objective, ObjectiveOutput, Statistic, mean_loss, require_at_least_zero


@dataclass(frozen=True)
class ERM(Objective):
    """Mean loss over the examples: what `transformers.Trainer` minimises, bit for bit. No group weights."""

    name: ClassVar[str] = "erm"
    has_weights: ClassVar[bool] = False
    linear_in_losses: ClassVar[bool] = True
    mean_over_examples: ClassVar[bool] = True
    plain_mean: ClassVar[bool] = True

    @property
    def statistics(self) -> frozenset[Statistic]:
        """None: there are no weights."""
        return frozenset()

    def loss(self, batch: GroupBatch) -> ObjectiveOutput:
        """This batch's part of the mean loss over all examples of the step."""
        return ObjectiveOutput(mean_loss(batch))


@dataclass(frozen=True)
class ERMUW(Objective):
    """Up-weighted ERM: fixed weights alpha_i proportional to exp(C / sqrt(n_i)) on the group mean losses (sec. 5.2).

    Args:
        adjustment: C >= 0; 0 weighs all groups alike, whatever their size.
    """

    adjustment: float = 0.0

    name: ClassVar[str] = "erm_uw"

    def __post_init__(self) -> None:
        require_at_least_zero(adjustment=self.adjustment)

    @property
    def statistics(self) -> frozenset[Statistic]:
        """None: the weights are fixed."""
        return frozenset()

    @property
    def needs_group_counts(self) -> bool:
        """Under an adjustment."""
        return self.adjustment > 0

    def initial_weights(self, group_counts: Tensor) -> Tensor:
        """The weights of the whole run, [K]."""
        return upweights(group_counts, self.adjustment)
