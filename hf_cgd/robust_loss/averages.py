"""Running averages of the groups' gradients and losses over optimizer steps."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_cgd.distributed.communication import Communication
from hf_cgd.robust_loss.pooling import PooledRows


class RunningAverages:
    """For each group that has been present: an average of its mean gradient and of its mean loss.

    Args:
        num_groups: K.
        kept: how much of the old average is kept in a step in which the group is present, in [0, 1).
        communication: tells this process's columns.
    """

    def __init__(self, num_groups: int, kept: float, communication: Communication) -> None:
        self.kept = kept
        self._communication = communication
        self._row_size = 0
        self.rows: dict[int, Tensor] = {}
        """By group: this process's columns of the averaged gradient."""
        self.losses = torch.zeros(num_groups, dtype=torch.float64)

    def mix_into(self, rows: Tensor, present: Sequence[int]) -> None:
        """Turn the gradients of a step [G, c], of the groups that are present, into the averages they would give."""
        for row, group in zip(rows, present, strict=True):
            if group in self.rows:
                row.mul_(1 - self.kept).add_(self.rows[group], alpha=self.kept)

    def update(self, losses: Tensor, rows: Tensor, present: Sequence[int], row_size: int) -> Tensor:
        """Keep the averages.

        Args:
            losses: [K] mean losses of the step.
            rows: [G, c], averaged already (`mix_into`).
            present: the G groups.
            row_size: P, of the rows that these are columns of.

        Returns:
            averaged losses [K]; those of absent groups as they were given.
        """
        self._row_size = row_size
        losses = losses.clone()
        # A snapshot of the state may still hold the old one.
        self.losses = self.losses.clone()
        for row, group in zip(rows, present, strict=True):
            if group in self.rows:
                losses[group] = self.kept * self.losses[group] + (1 - self.kept) * losses[group]
            self.rows[group] = row.clone()
            self.losses[group] = losses[group]
        return losses

    def copy(self) -> "RunningAverages":
        """The averages as they are now, whatever becomes of these."""
        twin = RunningAverages(len(self.losses), self.kept, self._communication)
        twin.rows, twin.losses, twin._row_size = dict(self.rows), self.losses, self._row_size
        return twin

    def whole_rows(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Averaged gradients [P] on the CPU, by the names of their groups; a collective."""
        pooled = PooledRows(self._communication)
        return {names[group]: pooled.whole_row(row, self._row_size).cpu() for group, row in self.rows.items()}

    def load_rows(self, rows: Mapping[str, Tensor], names: Sequence[str], device: torch.device) -> None:
        """Inverse of `whole_rows`, for any number of processes; `device` is that of the gradients."""
        pooled = PooledRows(self._communication)
        for group, name in enumerate(names):
            if name in rows:
                self._row_size = len(rows[name])
                self.rows[group] = pooled.own_columns(rows[name]).to(device)
