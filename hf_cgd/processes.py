"""From the statistics of one process to those of all, with gradients that add up."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """The processes that share a step.

    A nonlinear function f of sums over all examples is formed on every process from sums whose *value* is that of all
    processes and whose *gradient* is that of the process's own part. Then f has the same, global value everywhere, and
    its gradients on the processes add up to the gradient of f.

    Args:
        reduce: sums a tensor over the processes; every process must call it with the same shape.
        number: how many processes there are.
        index: which of them this is; None where nobody has said.
    """

    reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor
    number: int = 1
    index: int | None = None

    def total(self, part: Tensor) -> Tensor:
        """Sum over all processes, with the gradient of this one's part."""
        if self.number == 1:
            return part
        return self.reduce(part.detach()) + (part - part.detach())

    def stacked(self, part: Tensor) -> Tensor:
        """All processes' tensors in their order, [number, ...], with the gradient of this one's.

        Raises:
            ValueError: several processes, and nobody has said which this is.
        """
        if self.number == 1:
            return part[None]
        if self.index is None:
            raise ValueError(
                f"With num_processes={self.number} this objective has to know which process it runs on: pass "
                "process_index (torch.distributed.get_rank()) to GroupRobustLoss."
            )
        rows = part.new_zeros(self.number, *part.shape)
        rows[self.index] = part.detach()
        rows = self.reduce(rows)
        return torch.stack([part if row == self.index else rows[row] for row in range(self.number)])

    def before(self, stacked: Tensor) -> Tensor:
        """Sum of what `stacked` gave over the processes that come before this one."""
        return stacked[: self.index or 0].sum(dim=0)
