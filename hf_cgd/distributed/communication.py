"""What the statistics of a step need of other processes: few collectives, of the same sizes on all of them.

R processes. Sums of small tensors are all-reduced. The groups' gradients are not needed whole anywhere: each process
gets the sum of its own R-th of the columns, forms the inner products over these, and the [G, G] parts are all-reduced.
"""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)


class Communication:
    """A single process; or several, through a function that sums a tensor over them and nothing else.

    Args:
        sum_over_processes: returns the sum of a tensor over all processes, on all of them; None for a single process.
        num_processes: R.
        rank: number of this process, in [0, R); it has to be given where there are several.

    Raises:
        ValueError: several processes, and no number of this one.
    """

    def __init__(
        self,
        sum_over_processes: Callable[[Tensor], Tensor] | None = None,
        num_processes: int = 1,
        rank: int | None = None,
    ) -> None:
        if rank is None and num_processes > 1:
            raise ValueError(
                f"With num_processes={num_processes} it has to be known which process this is: pass rank "
                "(torch.distributed.get_rank()) to Communication."
            )
        rank = rank or 0
        self.num_processes = num_processes
        self.rank = rank
        self._sum = sum_over_processes or (lambda tensor: tensor)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes of a tensor that has the same shape on all."""
        return self._sum(tensor)

    def sum_scattered(self, parts: Tensor) -> Tensor:
        """Of [R, …], one part for each process: the sum over the processes of this one's part."""
        return self.sum(parts)[self.rank]

    def gather(self, part: Tensor) -> Tensor:
        """The parts [c] of all processes, one after the other: [R c]."""
        parts = part.new_zeros(self.num_processes, len(part))
        parts[self.rank] = part
        return self.sum(parts).flatten()

    def texts(self, own: str) -> list[str]:
        """The texts of all processes, in their order; all of them have to call."""
        data = own.encode()
        lengths = self.gather(torch.tensor([len(data)])).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.long)
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.long)
        rows = self.gather(padded).view(self.num_processes, -1).tolist()
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]

    def total(self, part: Tensor) -> Tensor:
        """Sum over the processes, with the gradient of this one's part.

        A nonlinear function f of such sums has the same, global value on all processes, and its gradients there add up
        to the gradient of f.
        """
        if self.num_processes == 1:
            return part
        return self.sum(part.detach()) + (part - part.detach())

    def stacked(self, part: Tensor) -> Tensor:
        """All processes' tensors in their order, [R, …], with the gradient of this one's."""
        if self.num_processes == 1:
            return part[None]
        rows = part.new_zeros(self.num_processes, *part.shape)
        rows[self.rank] = part.detach()
        rows = self.sum(rows)
        return torch.stack([part if row == self.rank else rows[row] for row in range(self.num_processes)])

    def before(self, stacked: Tensor) -> Tensor:
        """Sum of what `stacked` gave over the processes that come before this one."""
        return stacked[: self.rank].sum(dim=0)

    def all_agree(self, yes: bool) -> bool:
        """Whether all processes say yes."""
        return bool(self.sum(torch.tensor([float(yes)])).item() == self.num_processes)


class ProcessGroupCommunication(Communication):
    """Processes of `torch.distributed`, whose default group has been set up.

    Args:
        device: where the backend wants tensors to be; results come back to where the arguments were.
        timeout: how long hosts wait for one another, where they are a group of their own; None for the backend's.
    """

    def __init__(self, device: torch.device, timeout: timedelta | None = None) -> None:
        super().__init__(self._all_reduce, dist.get_world_size(), dist.get_rank())
        self._device = device
        self._scatters = True
        # gloo's own reduce-scatter is an all-reduce inside, and takes longer than one.
        self._exchange = self._all_to_all if dist.get_backend() == "gloo" else self._reduce_scatter
        self._memory: Tensor | None = None
        self._host_group: Any = None
        self._timeout = timeout

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        if self._stays_on_host(tensor):
            summed = tensor.clone()
            dist.all_reduce(summed, group=self._hosts())
            return summed
        moved = tensor.to(self._device, copy=True)
        dist.all_reduce(moved)
        return moved.to(tensor.device)

    def _stays_on_host(self, tensor: Tensor) -> bool:
        """Whether it goes from host to host: what is known there would wait for the devices elsewhere."""
        return self._device.type not in ("cpu", "xla") and tensor.device.type == "cpu"

    def _hosts(self) -> Any:
        """The processes as a group of hosts."""
        if self._host_group is None:
            self._host_group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._host_group

    def sum_scattered(self, parts: Tensor) -> Tensor:
        """See `Communication.sum_scattered`: a reduce-scatter, or an all-reduce where the backend has none."""
        if self._scatters:
            try:
                return self._exchange(parts.to(self._device).contiguous()).to(parts.device)
            except RuntimeError as error:
                # Raised alike by all processes, before anything was sent.
                if "support" not in str(error):
                    raise
                logger.info("Group gradients are all-reduced: %s", error)
                self._scatters = False
        return super().sum_scattered(parts)

    def _reduce_scatter(self, parts: Tensor) -> Tensor:
        own = torch.empty_like(parts[0])
        # Older versions of torch have it by its former name only.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(own.view(-1), parts.view(-1))
        return own

    def _all_to_all(self, parts: Tensor) -> Tensor:
        memory = self._memory
        # Kept from step to step: fresh memory of this size costs as much as a layer.
        if memory is None or len(memory) < parts.numel() or memory.dtype != parts.dtype:
            self._memory = memory = torch.empty_like(parts).view(-1)
        received = memory[: parts.numel()]
        dist.all_to_all_single(received, parts.view(-1))
        return received.view_as(parts).sum(dim=0)

    def gather(self, part: Tensor) -> Tensor:
        """See `Communication.gather`."""
        if self._stays_on_host(part):
            parts = [torch.empty_like(part) for _ in range(self.num_processes)]
            dist.all_gather(parts, part.contiguous(), group=self._hosts())
            return torch.cat(parts)
        moved = part.to(self._device).contiguous()
        parts = [torch.empty_like(moved) for _ in range(self.num_processes)]
        dist.all_gather(parts, moved)
        return torch.cat(parts).to(part.device)
