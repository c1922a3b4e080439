"""Examples of a batch that do not count, because they have no label: their group number is `UNCOUNTED`."""

from typing import Any

import torch
from torch import Tensor

from hf_cgd.data.groups import UNCOUNTED


def counted(group_ids: Tensor) -> Tensor:
    """Which examples [B] count."""
    return group_ids != UNCOUNTED


def counted_by_group(group_ids: Tensor, num_groups: int) -> Tensor:
    """Number of counted examples of each group among the ids [B]: integers [K]."""
    zeros = torch.zeros(num_groups, dtype=torch.long, device=group_ids.device)
    return zeros.index_add(0, group_ids.clamp_min(0), counted(group_ids).long())


def drop_uncounted(losses: Tensor, group_ids: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Losses [B], ids [B] and tensors of a batch without the examples that do not count."""
    rows = counted(group_ids)
    kept = {name: part[rows.to(part.device)] if isinstance(part, Tensor) else part for name, part in given.items()}
    return losses[rows.to(losses.device)], group_ids[rows], kept


def silence_uncounted(losses: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [B], 0 without gradient for examples that do not count, and ids [B] that lump these with a group present.

    So every gradient of a sum over a group is right, and each row of an activation keeps its place.

    Raises:
        ValueError: no example of the batch counts.
    """
    rows = counted(group_ids)
    if not bool(rows.any()):
        raise ValueError(
            "No example of the batch has a label, so no group has a gradient. Use a larger batch, or leave examples "
            "without a label out of the training set."
        )
    return torch.where(rows.to(losses.device), losses, losses.new_zeros(())), with_stand_ins(group_ids)


def with_stand_ins(group_ids: Tensor) -> Tensor:
    """Ids [B] with that of the first counted example in the place of `UNCOUNTED`; no shape depends on a value."""
    rows = counted(group_ids)
    if not len(rows):
        return group_ids
    return torch.where(rows, group_ids, group_ids.index_select(0, rows.to(torch.uint8).argmax().view(1)))
