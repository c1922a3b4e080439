"""Who of a micro-batch is in which group, known on the host: counts and slices then wait for no device."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic, moved
from hf_cgd.robust_loss.uncounted import counted, counted_by_group, rows_that_count, with_stand_ins


class BatchGroups:
    """The groups of a micro-batch on this process.

    Args:
        group_ids: [B] integers in [0, K), `UNCOUNTED` for an example that does not count.
        num_groups: K.
        arithmetic: under fixed shapes nothing is read, and all groups count as present.

    Attributes:
        ids: as given; on the host unless shapes are fixed.
        numbers: the same as an array on the host; None under fixed shapes.
        counts: examples that count, of each group: integers [K], where the ids are.
        present: numbers of the groups that have any, in ascending order.
        rows: places [R] of the examples that count, None where all do, or where that is not known.

    Raises:
        ValueError: a number that is none of these.
    """

    def __init__(self, group_ids: Tensor, num_groups: int, arithmetic: Arithmetic) -> None:
        self.ids = group_ids
        self.numbers: np.ndarray | None = None
        self.rows: np.ndarray | None = None
        self.present: Sequence[int]
        if arithmetic.fixed_shapes:
            self.counts = counted_by_group(moved(group_ids, arithmetic.device), num_groups)
            self.present = range(num_groups)
            return
        self.ids = group_ids.cpu()
        self.numbers = self.ids.numpy()
        numbers = self.numbers
        lowest = numbers.min(initial=0)
        if lowest < 0:
            self.rows = rows_that_count(self.ids)
            numbers = numbers if self.rows is None else numbers[self.rows]
            lowest = numbers.min(initial=0)
        counts = np.zeros(0) if lowest < 0 else np.bincount(numbers, minlength=num_groups)
        if len(counts) != num_groups:
            raise ValueError(
                f"Expected groups numbered 0 to {num_groups - 1}, got {lowest} to {numbers.max()}. The numbers are "
                "places in GroupInfo.names."
            )
        self.counts = torch.from_numpy(counts)
        self.present = counts.nonzero()[0].tolist()

    @property
    def all_count(self) -> bool:
        """Whether every example is known to count."""
        return self.numbers is not None and self.rows is None

    @cached_property
    def ids_in_groups(self) -> Tensor:
        """The ids [B], with that of an example that counts in the place of `UNCOUNTED` (see `with_stand_ins`)."""
        return self.ids if self.all_count else with_stand_ins(self.ids)

    def sums_of(self, losses: Tensor, arithmetic: Arithmetic) -> Tensor:
        """Sums [K] of the losses [B] of each group, examples that do not count left out, where the statistics are."""
        values = arithmetic.move(losses.detach())
        if self.numbers is not None and arithmetic.device.type == "cpu" and arithmetic.reads_values:
            weights, numbers = values.numpy(), self.numbers
            if self.rows is not None:
                weights, numbers = weights[self.rows], numbers[self.rows]
            return torch.from_numpy(np.bincount(numbers, weights=weights, minlength=len(self.counts)))
        ids = moved(self.ids, values.device)
        if self.all_count:
            return values.new_zeros(len(self.counts)).index_add(0, ids, values)
        values = values.where(counted(ids), 0.0)
        return values.new_zeros(len(self.counts)).index_add(0, ids.clamp_min(0), values)
