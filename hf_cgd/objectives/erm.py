"""Empirical risk minimisation, plain and with fixed group weights."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_cgd.functional import upweights
from hf_cgd.objectives.base import (
    VARIANTS,
    GroupBatch,
    Objective,
    ObjectiveOutput,
    Statistic,
    Variant,
    mean_loss,
    require_at_least_zero,
    require_one_of,
)


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
        variant: "paper", or "reference" for the authors' released code: alpha_i = n_i / sum_j n_j. Of batches that
            hold all groups equally often, which that code demands, this makes plain ERM again, with less noise in the
            rare groups. It has no `adjustment`.

    Raises:
        ValueError: a value outside its range, or an `adjustment` that the reference does not have.
    """

    adjustment: float = 0.0
    variant: Variant = "paper"

    name: ClassVar[str] = "erm_uw"

    def __post_init__(self) -> None:
        require_at_least_zero(adjustment=self.adjustment)
        require_one_of("variant", self.variant, VARIANTS)
        if self.variant == "reference" and self.adjustment > 0:
            raise ValueError(
                f"variant='reference' of ERM-UW has no adjustment, got {self.adjustment!r}. Leave one of them unset."
            )

    @property
    def statistics(self) -> frozenset[Statistic]:
        """None: the weights are fixed."""
        return frozenset()

    @property
    def needs_group_counts(self) -> bool:
        """Under an adjustment, and for the reference's weights."""
        return self.adjustment > 0 or self.variant == "reference"

    def initial_weights(self, group_counts: Tensor) -> Tensor:
        """The weights of the whole run, [K]."""
        if self.variant == "reference":
            counts = group_counts.double()
            return counts / counts.sum()
        return upweights(group_counts, self.adjustment)
