"""Mean training losses of the groups between two log entries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic
from hf_cgd.distributed.communication import Communication
from hf_cgd.robust_loss.uncounted import counted


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
        self._sums = arithmetic.zeros(2, len(names))

    def add(self, losses: Tensor, group_ids: Tensor) -> Tensor:
        """Count losses [B] of this process; their sums and counts by group, [2, K]."""
        values, ids = self._arithmetic.move(losses.detach()), group_ids.to(self._arithmetic.device)
        rows = counted(ids)
        both = torch.stack([values.where(rows, 0.0), rows.to(values)])
        sums = both.new_zeros(2, len(self._names)).index_add(1, ids.clamp_min(0), both)
        self._sums += sums
        return sums

    def drain(self) -> dict[str, float]:
        """Means since the last call, by name; groups without examples are left out. A collective."""
        sums, counts = self._communication.sum(self._sums).to("cpu", torch.float64)
        self._sums = self._arithmetic.zeros(2, len(self._names))
        return {
            name: (total / count).item()
            for name, total, count in zip(self._names, sums, counts, strict=True)
            if count > 0
        }
