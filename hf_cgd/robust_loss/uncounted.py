"""Examples of a batch that do not count, because they have no label: their group number is `UNCOUNTED`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_cgd.arithmetic import moved
from hf_cgd.data.groups import UNCOUNTED


def counted(group_ids: Tensor) -> Tensor:
    """Which examples [B] count."""
    return group_ids != UNCOUNTED


def counted_by_group(group_ids: Tensor, num_groups: int) -> Tensor:
    """Number of counted examples of each group among the ids [B]: integers [K]."""
    zeros = torch.zeros(num_groups, dtype=torch.long, device=group_ids.device)
    return zeros.index_add(0, group_ids.clamp_min(0), counted(group_ids).long())


def rows_that_count(group_ids: Tensor) -> np.ndarray | None:
    """Places of the examples that count among ids [B] on the host; None where all do."""
    rows = group_ids.numpy() != UNCOUNTED
    return None if rows.all() else np.flatnonzero(rows)


def chosen_rows(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """The rows of a tensor [B, …] at these places, wherever it is."""
    return tensor.index_select(0, moved(torch.from_numpy(rows), tensor.device))


def drop_uncounted(losses: Tensor, given: dict[str, Any], rows: np.ndarray) -> tuple[Tensor, dict[str, Any]]:
    """Losses [B] and tensors of a batch at the places of the examples that count."""
    kept = {name: chosen_rows(part, rows) if isinstance(part, Tensor) else part for name, part in given.items()}
    return chosen_rows(losses, rows), kept


def silence_uncounted(losses: Tensor, group_ids: Tensor, may_look: bool) -> Tensor:
    """Losses [B], 0 without gradient for examples that do not count.

    With `with_stand_ins` every gradient of a sum over a group is right, and each row of an activation keeps its place.

    Args:
        losses: [B].
        group_ids: [B].
        may_look: whether the ids are on the host, to be read without a wait.

    Raises:
        ValueError: no example of the batch counts, where that may be looked at.
    """
    rows = counted(group_ids)
    if may_look and not bool(rows.any()):
        raise ValueError(
            "No example of the batch has a label, so no group has a gradient. Use a larger batch, or leave examples "
            "without a label out of the training set."
        )
    return torch.where(moved(rows, losses.device), losses, losses.new_zeros(()))


def with_stand_ins(group_ids: Tensor) -> Tensor:
    """Ids [B] with that of the first counted example in the place of `UNCOUNTED`; no shape depends on a value."""
    rows = counted(group_ids)
    if not len(rows):
        return group_ids
    return torch.where(rows, group_ids, group_ids.index_select(0, rows.to(torch.uint8).argmax().view(1)))
