"""IRM, invariant risk minimisation: one scale of the predictions has to be best in every group."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_cgd.functional import alternating_halves, group_counts_of
from hf_cgd.objectives.base import BatchPart, GroupBatch, require_at_least_zero, weighted_group_losses
from hf_cgd.objectives.penalty import PenaltyObjective
from hf_cgd.penalties import irm_penalty, scale_gradients


@dataclass(frozen=True)
class IRM(PenaltyObjective):
    """Invariant Risk Minimisation (Arjovsky et al. 2019, IRMv1): mean of group mean losses + lambda gradient penalty.

    The penalty is the mean over groups of (d l_i / d w)^2 at w = 1, where w multiplies the logits. It is estimated
    without bias, and so may be negative, by the product of the derivatives on two halves of a group's examples, which
    are taken by turns in the order of the batch (and of the processes). A group with a single example in a
    micro-batch (on all processes) has no halves and adds nothing to that penalty.

    Args:
        penalty_weight: lambda >= 0.
        penalty_anneal_steps: optimizer steps in which lambda is min(1, `penalty_weight`), before it becomes
            `penalty_weight`; 0 for none.

    Raises:
        ValueError: a value outside its range.
    """

    penalty_weight: float = 1.0
    penalty_anneal_steps: int = 0

    name: ClassVar[str] = "irm"
    reads: ClassVar[tuple[BatchPart, ...]] = ("logits",)
    min_group_size: ClassVar[int] = 2
    mean_over_examples: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least_zero(penalty_anneal_steps=self.penalty_anneal_steps)

    def base_loss(self, batch: GroupBatch) -> Tensor:
        """This batch's part of the mean of the group mean losses."""
        equal = self.initial_weights(batch.counts).to(batch.counts)
        return weighted_group_losses(batch, self.coefficients(equal, batch.counts > 0))

    def weight_at(self, step: int) -> float:
        """lambda, low for the first `penalty_anneal_steps`."""
        return self.penalty_weight if step >= self.penalty_anneal_steps else min(1.0, self.penalty_weight)

    def penalty(self, batch: GroupBatch) -> Tensor | None:
        """Mean over the groups with two or more examples of their squared derivative."""
        assert batch.logits is not None
        num_groups = len(batch.counts)
        own_counts = group_counts_of(batch.group_ids, num_groups).to(batch.counts)
        by_process = batch.communication.stacked(own_counts)
        counts = by_process.sum(dim=0)
        if not batch.arithmetic.read((counts > 1).any(), otherwise=True):
            return None
        derivatives = scale_gradients(batch.losses, batch.logits)
        halves = alternating_halves(batch.group_ids, batch.communication.before(by_process).long())
        sums = derivatives.new_zeros(2 * num_groups).index_add(0, halves * num_groups + batch.group_ids, derivatives)
        half_counts = torch.stack([(counts / 2).ceil(), (counts / 2).floor()])
        return irm_penalty(batch.communication.total(sums).view(2, num_groups), half_counts)
