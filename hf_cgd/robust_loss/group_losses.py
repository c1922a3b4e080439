"""Mean training losses of the groups between two log entries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic, moved
from hf_cgd.distributed.communication import Communication
from hf_cgd.robust_loss.batch_groups import BatchGroups

MOST_LATER = 64
"""Batches that wait until they are counted together, which costs hardly more than counting one."""


class GroupLossLog:
    """Sums of losses and counts of each group, until somebody asks for the means.

    Args:
        names: of the K groups.
        arithmetic: where the sums are kept.
        communication: sums over the processes.
    """

    def __init__(self, names: Sequence[str], arithmetic: Arithmetic, communication: Communication) -> None:
        self._names = names
        self._arithmetic = arithmetic
        self._communication = communication
        self._forget()

    def _forget(self) -> None:
        self._sums = self._arithmetic.zeros(len(self._names))
        self._counts = self._arithmetic.zeros(len(self._names))
        self._later: list[tuple[Tensor, Tensor]] = []

    def add_later(self, losses: Tensor, group_ids: Tensor) -> None:
        """Count losses [B] of this process with their group ids [B], at the latest when the means are asked for."""
        self._later.append((losses.detach(), group_ids))
        if self._arithmetic.fixed_shapes or len(self._later) >= MOST_LATER:
            self._count_later()

    def _count_later(self) -> None:
        if self._later:
            losses, group_ids = (torch.cat(parts) for parts in zip(*self._later, strict=True))
            self._later = []
            self.add(losses, BatchGroups(group_ids, len(self._names), self._arithmetic))

    def add(self, losses: Tensor, groups: BatchGroups) -> Tensor:
        """Count losses [B] of this process; their sums by group, [K]."""
        sums = groups.sums_of(losses, self._arithmetic)
        self._sums += sums
        self._counts += moved(groups.counts, self._counts.device)
        return sums

    def drain(self) -> dict[str, float]:
        """Means since the last call, by name; groups without examples are left out. A collective."""
        self._count_later()
        sums, counts = self._communication.sum(torch.stack([self._sums, self._counts])).to("cpu", torch.float64)
        self._forget()
        return {
            name: (total / count).item()
            for name, total, count in zip(self._names, sums, counts, strict=True)
            if count > 0
        }
