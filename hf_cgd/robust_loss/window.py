"""One optimizer step: its micro-batches on this process, and how many examples of each group it holds on all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic
from hf_cgd.distributed.communication import Communication
from hf_cgd.robust_loss.uncounted import counted_by_group


class StepWindow:
    """Counts of a step that are known before its first micro-batch, and sums of losses that grow with each.

    Args:
        num_groups: K.
        arithmetic: where counts and sums are kept.
        communication: sums over the processes.
        numbers_examples: whether it has to be known how many examples of each group come before a process's own, for
            a make-up of halves that does not depend on the number of processes.
    """

    def __init__(
        self, num_groups: int, arithmetic: Arithmetic, communication: Communication, numbers_examples: bool = False
    ) -> None:
        self._num_groups = num_groups
        self._arithmetic = arithmetic
        self._communication = communication
        self._numbers_examples = numbers_examples
        self.close()

    def close(self) -> None:
        """The step is over, or broken off."""
        self.counts: Tensor = self._arithmetic.zeros(self._num_groups)
        """Examples of each group [K] in the whole step: all micro-batches, all processes."""
        self.earlier: Tensor = torch.zeros(self._num_groups, dtype=torch.long)
        """Examples of each group [K] before the next micro-batch, in the order of processes and micro-batches."""
        self.loss_sums: Tensor = self._arithmetic.zeros(self._num_groups)
        """Sums of each group's losses [K] on this process so far."""
        self.micro_batches = 0
        """Micro-batches of the step."""
        self.remaining = 0
        """Micro-batches still to come; 0 where no step is open."""

    def open(self, group_ids: Sequence[Tensor]) -> None:
        """Begin a step with the group ids [B] of all its micro-batches on this process; a collective."""
        self.close()
        own = [counted_by_group(ids.to(self._arithmetic.device), self._num_groups) for ids in group_ids]
        counts = self._arithmetic.move(torch.as_tensor(sum(own)))
        if self._numbers_examples:
            by_process = self._communication.stacked(counts)
            self.counts = by_process.sum(dim=0)
            self.earlier = self._communication.before(by_process).long()
        else:
            self.counts = self._communication.sum(counts)
        self.micro_batches = self.remaining = len(group_ids)

    @property
    def is_open(self) -> bool:
        """Whether micro-batches are still to come."""
        return self.remaining > 0

    def add(self, loss_sums: Tensor) -> None:
        """Count one micro-batch, whose sums of losses by group are [K]."""
        self.loss_sums += loss_sums
        self.remaining -= 1
