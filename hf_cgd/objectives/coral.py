"""CORAL, correlation alignment: the features of all groups get the same mean and covariance."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_cgd.functional import coral_distance, group_counts_of
from hf_cgd.objectives.base import GroupBatch
from hf_cgd.objectives.penalty import PenaltyObjective


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
    needs: ClassVar[tuple[str, ...]] = ("features",)
    min_group_size: ClassVar[int] = 2

    def penalty(self, batch: GroupBatch) -> Tensor | None:
        """Mean distance over the pairs of groups with two or more examples."""
        assert batch.features is not None
        features = batch.features.flatten(1)
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        all_counts = batch.communication.total(group_counts_of(batch.group_ids, len(batch.counts)).to(batch.counts))
        if not batch.validate:
            return self._over_all_groups(batch, features, all_counts)
        compared = (all_counts > 1).nonzero().flatten()
        if len(compared) < 2:
            return None
        counts = all_counts[compared].to(features)[:, None]
        members = [features[batch.group_ids == group] for group in compared.tolist()]
        means = batch.communication.total(torch.stack([rows.sum(dim=0) for rows in members])) / counts
        # Around the mean the sum of squares does not change with the centre to first order, so no gradient is lost;
        # one through the centre would be wrong on each of several processes.
        centred = [rows - mean for rows, mean in zip(members, means.detach(), strict=True)]
        with torch.autocast(features.device.type, enabled=False):
            squares = batch.communication.total(torch.stack([rows.T @ rows for rows in centred]))
        return coral_distance(means, squares / (counts - 1)[:, :, None])

    def _over_all_groups(self, batch: GroupBatch, features: Tensor, all_counts: Tensor) -> Tensor:
        """The same with shapes that do not depend on who is in which group; 0 where there is nothing to compare."""
        ids, counts = batch.group_ids, all_counts.to(features)[:, None]
        sums = features.new_zeros(len(counts), features.shape[1]).index_add(0, ids, features)
        means = batch.communication.total(sums) / counts.clamp_min(1)
        centred = features - means.detach()[ids]
        members = torch.arange(len(counts), device=ids.device)[:, None] == ids
        with torch.autocast(features.device.type, enabled=False):
            by_group = torch.where(members[:, :, None], centred, 0.0)
            squares = batch.communication.total(by_group.transpose(1, 2) @ centred)
        covariances = squares / (counts - 1).clamp_min(1)[:, :, None]
        return coral_distance(means, covariances, all_counts > 1)
