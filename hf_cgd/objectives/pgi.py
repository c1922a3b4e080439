"""PGI, predictive group invariance: within a class, every group's mean prediction is drawn to the largest group's."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cgd.functional import group_counts_of
from hf_cgd.objectives.base import BatchPart, GroupBatch
from hf_cgd.objectives.penalty import PenaltyObjective
from hf_cgd.penalties import log_sums_by_group, pgi_divergence


@dataclass(frozen=True)
class PGI(PenaltyObjective):
    """Predictive Group Invariance (Ahmed et al., ICLR 2021): mean loss + lambda sum_c KL(Q^c || P^c).

    P^c and Q^c are mean predicted probability vectors over class c's examples, P^c in the class's largest group and
    Q^c in a smaller one; the mean over the smaller groups is taken. Training counts decide which group is a class's
    largest, the first of several. Of these, what a micro-batch (on all processes) has no example of is left out.
    For single-label classification only.

    Args:
        penalty_weight: lambda >= 0; the paper chooses among 1, 0.1, 0.01 and 0.001.
    """

    penalty_weight: float = 0.1

    name: ClassVar[str] = "pgi"
    reads: ClassVar[tuple[BatchPart, ...]] = ("logits", "labels", "class_counts")

    def penalty(self, batch: GroupBatch) -> Tensor | None:
        """Sum over the classes of the mean divergence of their smaller groups."""
        assert batch.logits is not None and batch.labels is not None and batch.class_counts is not None
        logits, labels = batch.logits, batch.labels
        if logits.ndim != 2 or logits.shape[1] < 2 or labels.is_floating_point() or labels.numel() != len(logits):
            raise ValueError(
                "PGI compares predicted probabilities of classes: expected logits [B, C] with C >= 2 and integer "
                f"labels [B], got logits {tuple(logits.shape)} and labels {tuple(labels.shape)} ({labels.dtype}). Use "
                "another objective for regression and multi-label problems."
            )
        num_classes, num_groups = logits.shape[1], len(batch.counts)
        cells = labels.long().view(-1) * num_groups + batch.group_ids
        counts = batch.communication.total(group_counts_of(cells, num_classes * num_groups).to(batch.counts))
        met = batch.arithmetic.places(counts > 0)
        classes, groups = met // num_groups, met % num_groups
        if batch.arithmetic.read(classes.max() >= len(batch.class_counts), otherwise=False):
            raise ValueError(
                f"Expected classes in 0..{len(batch.class_counts) - 1}, for which there are training counts, got "
                f"{int(classes.max())}. Give class_counts a row for every class."
            )
        # More rows than counts only where values are not read: classes of the model that no training example has.
        unknown = max(num_classes - len(batch.class_counts), 0)
        of_classes = F.pad(batch.class_counts, (0, 0, 0, unknown))[classes]
        largest = (groups == of_classes.argmax(dim=1)) & (of_classes.amax(dim=1) > 0) & (counts[met] > 0)
        with_largest = counts.new_zeros(num_classes).index_add(0, classes, largest.to(counts))
        to_compare = ~largest & (with_largest[classes] > 0) & (counts[met] > 0)
        if not batch.arithmetic.read(to_compare.any(), otherwise=True):
            return None
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # A logit of -inf (a class that is ruled out) would make 0 * inf of a divergence.
        lowest = torch.finfo(precise.dtype).min / 4
        log_probabilities = precise.log_softmax(dim=1).clamp_min(lowest)
        place = torch.zeros_like(counts, dtype=torch.long)
        place[met] = torch.arange(len(met), device=met.device)
        # No row of -inf: XLA makes it NaN in logsumexp.
        log_sums = log_sums_by_group(log_probabilities, place[cells], len(met)).clamp_min(lowest)
        log_sums = torch.logsumexp(batch.communication.stacked(log_sums), dim=0)
        log_means = log_sums - counts[met].clamp_min(1).log().to(log_sums)[:, None]
        log_means = log_means.masked_fill((counts[met] == 0)[:, None], float("-inf"))
        return pgi_divergence(log_means, classes, largest)
