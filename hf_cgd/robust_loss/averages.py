"""Running averages of the groups' gradients and losses over optimizer steps."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_cgd.arithmetic import HOST, Arithmetic
from hf_cgd.distributed.communication import Communication
from hf_cgd.robust_loss.pooling import PooledRows


class RunningAverages:
    """For each group that has been present: an average of its mean gradient and of its mean loss.

    Args:
        num_groups: K.
        kept: how much of the old average is kept in a step in which the group is present, in [0, 1).
        communication: tells this process's columns.
        arithmetic: where the averaged losses are.
    """

    def __init__(
        self, num_groups: int, kept: float, communication: Communication, arithmetic: Arithmetic = HOST
    ) -> None:
        self.kept = kept
        self._communication = communication
        self._arithmetic = arithmetic
        self._row_size = 0
        self.rows: dict[int, Tensor] = {}
        """By group: this process's columns of the averaged gradient."""
        self.losses = arithmetic.zeros(num_groups)
        self._have_begun = arithmetic.zeros(num_groups)
        """[K] 1 where a row stands for an average; a first gradient that is not finite is left out without a look."""

    def mix_into(self, rows: Tensor, present: Sequence[int]) -> None:
        """Turn the gradients of a step [G, c], of the groups that are present, into the averages they would give."""
        for row, group in zip(rows, present, strict=True):
            if group in self.rows:
                if self._arithmetic.reads_values:
                    row.mul_(1 - self.kept).add_(self.rows[group], alpha=self.kept)
                else:
                    kept = (self.kept * self._have_begun[group]).to(row)
                    row.mul_(1 - kept).add_(self.rows[group] * kept)

    def update(
        self, losses: Tensor, rows: Tensor, present: Sequence[int], row_size: int, moves: Tensor | None = None
    ) -> Tensor:
        """Keep the averages.

        Args:
            losses: [K] mean losses of the step.
            rows: [G, c], averaged already (`mix_into`).
            present: the G groups.
            row_size: P, of the rows that these are columns of.
            moves: whether the step counts; None where it is known to.

        Returns:
            averaged losses [K]; those of absent groups as they were given.
        """
        self._row_size = row_size
        losses = losses.clone()
        # A snapshot of the state may still hold the old ones.
        self.losses, self._have_begun = self.losses.clone(), self._have_begun.clone()
        for row, group in zip(rows, present, strict=True):
            if group in self.rows:
                kept = self.kept * self._have_begun[group]
                losses[group] = kept * self.losses[group] + (1 - kept) * losses[group]
            if moves is None:
                self.rows[group], self.losses[group] = row.clone(), losses[group]
            else:
                old = self.rows[group] if group in self.rows else torch.zeros_like(row)
                self.rows[group] = torch.where(moves, row, old)
                self.losses[group] = torch.where(moves, losses[group], self.losses[group])
            begun = 1.0 if moves is None else torch.where(moves, 1.0, self._have_begun[group])
            self._have_begun[group] = begun
        return losses

    def copy(self) -> "RunningAverages":
        """The averages as they are now, whatever becomes of these."""
        twin = RunningAverages(len(self.losses), self.kept, self._communication, self._arithmetic)
        twin.take_back(self)
        return twin

    def take_back(self, before: "RunningAverages") -> None:
        """Stand as `before` did."""
        self.rows, self.losses, self._row_size = dict(before.rows), before.losses, before._row_size
        self._have_begun = before._have_begun

    def whole_rows(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Averaged gradients [P] on the CPU, by the names of their groups; a collective."""
        pooled = PooledRows(self._communication)
        begun = self._have_begun.tolist()
        rows = {group: row for group, row in self.rows.items() if begun[group]}
        return {names[group]: pooled.whole_row(row, self._row_size).cpu() for group, row in rows.items()}

    def load_rows(self, rows: Mapping[str, Tensor], names: Sequence[str], device: torch.device) -> None:
        """Inverse of `whole_rows`, for any number of processes; `device` is that of the gradients."""
        pooled = PooledRows(self._communication)
        for group, name in enumerate(names):
            if name in rows:
                self._row_size = len(rows[name])
                self.rows[group] = pooled.own_columns(rows[name]).to(device)
                self._have_begun[group] = 1.0
