"""The groups' gradients of an optimizer step, summed over micro-batches and laid out to be summed over processes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cgd.distributed.communication import Communication


class PooledRows:
    """Sums of rows [P] by group, cut into R parts of c = ceil(P / R) columns; zeros fill up the last ones.

    Args:
        communication: sums over the R processes.
    """

    def __init__(self, communication: Communication) -> None:
        self._communication = communication
        self._memory: Tensor | None = None
        self._columns: Tensor | None = None
        self.row_size = 0
        """P of the rows that were added last, 0 before."""
        self._present: list[int] = []
        self._filled: set[int] = set()

    def add(self, present: Sequence[int], groups: Sequence[int], rows: Tensor) -> None:
        """Add a micro-batch of this process.

        Args:
            present: the G groups that any micro-batch on any process holds.
            groups: those of this one.
            rows: [len(groups), P].
        """
        self.row_size = rows.shape[1]
        if self._columns is None:
            self._columns = self._open(len(present), rows)
            self._present, self._filled = list(present), set()
        for group, row in zip(groups, rows, strict=True):
            target = self._columns[:, self._present.index(group)]
            if group in self._filled:
                _add(target, row)
            else:
                _write(target, row)
                self._filled.add(group)

    def close(self) -> Tensor:
        """This process's columns [G, c] of the sums over all processes; the memory is used again by the next step."""
        assert self._columns is not None
        columns, self._columns = self._columns, None
        for place, group in enumerate(self._present):
            if group not in self._filled:
                columns[:, place] = 0
        return self._communication.sum_scattered(columns)

    def discard(self) -> None:
        """Forget a step that was broken off."""
        self._columns = None

    def own_columns(self, row: Tensor) -> Tensor:
        """This process's columns [c] of a whole row [P]."""
        columns = row.new_empty(self._communication.num_processes, self._width(len(row)))
        _write(columns, row)
        return columns[self._communication.rank].clone()

    def whole_row(self, columns: Tensor, size: int) -> Tensor:
        """The row [P] of which every process holds its columns [c]; a collective, to be called by all."""
        return self._communication.gather(columns)[:size]

    def _width(self, size: int) -> int:
        return -(-size // self._communication.num_processes)

    def _open(self, groups: int, rows: Tensor) -> Tensor:
        shape = (self._communication.num_processes, groups, self._width(rows.shape[1]))
        size = shape[0] * shape[1] * shape[2]
        memory = self._memory
        # Kept from step to step: fresh memory of this size costs as much as a layer.
        if memory is None or len(memory) < size or (memory.dtype, memory.device) != (rows.dtype, rows.device):
            self._memory = memory = torch.empty(size, device=rows.device, dtype=rows.dtype)
        return memory[:size].view(shape)


def _write(columns: Tensor, row: Tensor) -> None:
    """A row [P] into [R, c], written over what is there."""
    whole = len(row) // columns.shape[1]
    body, rest = row[: whole * columns.shape[1]], row[whole * columns.shape[1] :]
    columns[:whole] = body.view(whole, -1)
    columns[whole:] = 0
    if len(rest):
        columns[whole, : len(rest)] = rest


def _add(columns: Tensor, row: Tensor) -> None:
    """A row [P] added to [R, c]."""
    whole = len(row) // columns.shape[1]
    body, rest = row[: whole * columns.shape[1]], row[whole * columns.shape[1] :]
    columns[:whole] += body.view(whole, -1)
    if len(rest):
        columns[whole, : len(rest)] += rest
