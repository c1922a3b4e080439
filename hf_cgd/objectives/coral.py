"""CORAL, correlation alignment: the features of all groups get the same mean and covariance."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_cgd.functional import group_counts_of
from hf_cgd.objectives.base import BatchPart, GroupBatch
from hf_cgd.objectives.penalty import PenaltyObjective
from hf_cgd.penalties import coral_distance


@dataclass(frozen=True)
class CORAL(PenaltyObjective):
    """Deep CORAL (Sun & Saenko 2016), between groups: mean loss + lambda mean over pairs of groups of the distance.

    The distance is that of `coral_distance` between the groups' means and unbiased covariances of the features (the
    input of the classification head). Groups with fewer than two examples in a micro-batch (on all processes) are in
    no pair.

    Args:
        penalty_weight: lambda >= 0.
    """

    penalty_weight: float = 0.1

    name: ClassVar[str] = "coral"
    reads: ClassVar[tuple[BatchPart, ...]] = ("features",)
    min_group_size: ClassVar[int] = 2

    def penalty(self, batch: GroupBatch) -> Tensor | None:
        """Mean distance over the pairs of groups with two or more examples."""
        assert batch.features is not None
        features = batch.features.flatten(1)
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        all_counts = batch.communication.total(group_counts_of(batch.group_ids, len(batch.counts)).to(batch.counts))
        compared = batch.groups(all_counts > 1)
        if len(compared) < 2:
            return None
        counts = all_counts[compared].to(features)[:, None]
        members = [batch.group_ids == group for group in compared.unbind()]
        sums = torch.stack([batch.arithmetic.rows(features, chosen).sum(dim=0) for chosen in members])
        means = batch.communication.total(sums) / counts.clamp_min(1)
        # Around the mean the sum of squares does not change with the centre to first order, so no gradient is lost;
        # one through the centre would be wrong on each of several processes.
        centred = [
            batch.arithmetic.rows(features - mean, chosen)
            for chosen, mean in zip(members, means.detach(), strict=True)
        ]
        with torch.autocast(features.device.type, enabled=False):
            squares = batch.communication.total(torch.stack([rows.T @ rows for rows in centred]))
        covariances = squares / (counts - 1).clamp_min(1)[:, :, None]
        return coral_distance(means, covariances, all_counts[compared] > 1)
