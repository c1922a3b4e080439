"""Batches and penalties by hand."""

import torch
from torch import Tensor

from hf_cgd import GroupInfo, GroupRobustLoss, Objective

F64 = torch.float64


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def groups_with(class_counts: list[list[int]]) -> GroupInfo:
    """Groups "0", "1", … of a training set with these counts."""
    counts = torch.tensor(class_counts).sum(0).tolist()
    return GroupInfo([str(group) for group in range(len(counts))], counts, class_counts=class_counts)


def penalty_of(objective: Objective, groups: GroupInfo, group_ids: Tensor, **batch: Tensor) -> Tensor:
    """The loss of one batch less that of the objective without its penalty."""
    losses = batch.pop("losses", None)
    if losses is None:
        losses = cross_entropy(batch["logits"], batch["labels"])
    plain = type(objective)(penalty_weight=0.0)
    return GroupRobustLoss(objective, groups)(losses, group_ids, **batch) - GroupRobustLoss(plain, groups)(
        losses, group_ids, **batch
    )


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)
