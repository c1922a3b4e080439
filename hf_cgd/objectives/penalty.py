"""What the objectives with a penalty on differences between groups have in common."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_cgd.objectives.base import GroupBatch, Objective, ObjectiveOutput, Statistic, mean_loss, require_at_least_zero


@dataclass(frozen=True)
class PenaltyObjective(Objective):
    """Base of PGI, IRM and CORAL: a mean loss plus `penalty_weight` times a penalty. No group weights.

    The penalty is that of a micro-batch over all processes, and the mean of those under gradient accumulation. With a
    single training group there is nothing to compare and no penalty.

    Args:
        penalty_weight: lambda >= 0.

    Raises:
        ValueError: a value outside its range.
    """

    penalty_weight: float

    has_weights: ClassVar[bool] = False
    mean_over_examples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_at_least_zero(penalty_weight=self.penalty_weight)

    def base_loss(self, batch: GroupBatch) -> Tensor:
        """This batch's part of the loss without the penalty: the mean over the examples."""
        return mean_loss(batch)

    def weight_at(self, step: int) -> float:
        """lambda in the optimizer step after `step` others."""
        return self.penalty_weight

    @property
    def statistics(self) -> frozenset[Statistic]:
        """None: there are no weights."""
        return frozenset()

    def expects_penalty(self, step: int, num_groups: int) -> bool:
        """With a weight on it, and groups to compare."""
        return self.weight_at(step) > 0 and num_groups > 1

    def penalty(self, batch: GroupBatch) -> Tensor | None:
        """The penalty of this micro-batch; None where it has nothing to compare."""
        raise NotImplementedError

    def loss(self, batch: GroupBatch) -> ObjectiveOutput:
        """Base loss and weighted penalty."""
        penalty = self.penalty(batch) if self.expects_penalty(batch.step, len(batch.counts)) else None
        weighted = None if penalty is None else self.weight_at(batch.step) * penalty
        return ObjectiveOutput(self.base_loss(batch), weighted)
