"""One optimizer step: its micro-batches on this process, and how many examples of each group it holds on all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic
from hf_cgd.distributed.communication import Communication
from hf_cgd.robust_loss.batch_groups import BatchGroups


class StepWindow:
    """Counts of a step that are known before its first micro-batch, and sums of losses that grow with each.

    Args:
        num_groups: K.
        arithmetic: where counts and sums are kept.
        communication: sums over the processes.
        numbers_examples: whether it has to be known how many examples of each group come before each micro-batch, for
            a make-up of halves that does not depend on the number of processes.
    """

    def __init__(
        self, num_groups: int, arithmetic: Arithmetic, communication: Communication, numbers_examples: bool = False
    ) -> None:
        self._num_groups = num_groups
        self._arithmetic = arithmetic
        self._communication = communication
        self._numbers_examples = numbers_examples
        self._none = arithmetic.zeros(num_groups)
        self.close()

    def close(self) -> None:
        """The step is over, or broken off."""
        self.groups: Sequence[BatchGroups] = ()
        """Of its micro-batches on this process."""
        self.counts: Tensor = self._none
        """Examples of each group [K] in the whole step: all micro-batches, all processes."""
        self.counts_on_host: Tensor | None = None
        """The same on the host; None under fixed shapes, where nobody looks."""
        self.present: Sequence[int] = ()
        """Numbers of the groups that have any; all of them under fixed shapes."""
        self._earlier: Tensor | None = None
        self.loss_sums: Tensor = self._none
        """Sums of each group's losses [K] on this process so far."""
        self.micro_batches = 0
        """Micro-batches of the step."""
        self.remaining = 0
        """Micro-batches still to come; 0 where no step is open."""

    def open(self, groups: Sequence[BatchGroups]) -> None:
        """Begin a step with the groups of all its micro-batches on this process; a collective."""
        self.close()
        self.groups = groups
        fixed = self._arithmetic.fixed_shapes
        if self._numbers_examples:
            counts, self._earlier = self._numbered(groups)
        else:
            none = torch.zeros(self._num_groups, dtype=torch.long)
            own = sum([part.counts for part in groups[1:]], groups[0].counts) if groups else none
            counts = self._communication.sum(self._arithmetic.move(own) if fixed else own.to(torch.float64))
        self.counts = self._arithmetic.move(counts)
        self.counts_on_host = None if fixed else counts
        self.present = range(self._num_groups) if fixed else counts.numpy().nonzero()[0].tolist()
        self.micro_batches = self.remaining = len(groups)

    def _numbered(self, groups: Sequence[BatchGroups]) -> tuple[Tensor, Tensor]:
        """Examples of each group in the step [K], and before each of this process's micro-batches [M, K].

        The first micro-batches of all processes come before the second ones, as the rows do that they are dealt.
        """
        # A loop of one's own may have more of them on one process than on another.
        most = int(self._communication.gather(torch.tensor([len(groups)])).max())
        own = torch.zeros(most, self._num_groups, dtype=torch.float64)
        for number, part in enumerate(groups):
            own[number] = part.counts
        by_process = self._communication.stacked(own)
        in_turn = by_process.sum(dim=0)
        in_former_turns = in_turn.cumsum(dim=0) - in_turn
        return in_turn.sum(dim=0), (in_former_turns + self._communication.before(by_process)).long()

    @property
    def everyone(self) -> bool:
        """Whether all groups are known to have examples in the step."""
        return self.counts_on_host is not None and len(self.present) == self._num_groups

    @property
    def divisors(self) -> Tensor:
        """The counts, with 1 for a group that has none."""
        return self.counts if self.everyone else self.counts.clamp_min(1)

    @property
    def earlier(self) -> Tensor:
        """Examples of each group [K] before the latest micro-batch, those of other processes among them."""
        assert self._earlier is not None
        return self._earlier[self.micro_batches - self.remaining - 1]

    @property
    def is_open(self) -> bool:
        """Whether micro-batches are still to come."""
        return self.remaining > 0

    def add(self, loss_sums: Tensor) -> None:
        """Count one micro-batch, whose sums of losses by group are [K]."""
        self.loss_sums = loss_sums if self.loss_sums is self._none else self.loss_sums + loss_sums
        self.remaining -= 1
