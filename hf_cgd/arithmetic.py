"""Where the statistics of a step are formed, and whether their values may be looked at."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

WITHOUT_FLOAT64 = ("mps", "xla")
"""Kinds of devices that have no float64, or only a slow one."""


def statistics_type(device: torch.device) -> torch.dtype:
    """The type that statistics have on a device: float64 where it has that."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def is_on_host(tensor: Tensor) -> bool:
    """Whether to look at the tensor takes no wait for a device."""
    return tensor.device.type == "cpu"


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on that device; what comes from the host is sent without a wait for the device."""
    if tensor.device == device and dtype in (None, tensor.dtype):
        return tensor
    # The host may use its copy at once: what is not pinned is staged before the call comes back. The other way round
    # nothing would say when the numbers have arrived.
    return tensor.to(device, dtype, non_blocking=tensor.device.type == "cpu")


class Arithmetic(ABC):
    """How losses, weights and inner products of the groups are kept and compared.

    A formula that is written with these methods serves both kinds: one looks at values and leaves out what is not
    there, the other computes all of it under a mask.

    Attributes:
        device: where the statistics are.
        dtype: their type.
        reads_values: whether a step may look at values that were computed on the device.
        fixed_shapes: whether a step takes the same shapes whoever is in its batch. Elsewhere it is known on the host
            which groups a batch holds, and only these are computed.
    """

    device: torch.device
    dtype: torch.dtype
    reads_values: bool
    fixed_shapes: bool

    @abstractmethod
    def places(self, wanted: Tensor) -> Tensor:
        """Indices to go through for a [N] mask: those that are True, or all N where no value may be looked at."""

    @abstractmethod
    def rows(self, values: Tensor, wanted: Tensor) -> Tensor:
        """The rows of `values` [N, …] that are `wanted` [N], or all N rows with zeros in place of the others."""

    @abstractmethod
    def read(self, condition: Tensor, otherwise: bool) -> bool:
        """The value of a condition; `otherwise` where no value may be looked at."""

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor where the statistics are, in their type."""
        return moved(tensor, self.device, self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros of that shape where the statistics are."""
        # Made elsewhere and moved: a constant would make another graph of a step that is compiled.
        return moved(torch.zeros(*shape, dtype=self.dtype), self.device)


class HostArithmetic(Arithmetic):
    """Float64 on the CPU; values are looked at, and only what is present is computed."""

    device = torch.device("cpu")
    dtype = torch.float64
    reads_values = True
    fixed_shapes = False

    def places(self, wanted: Tensor) -> Tensor:
        """Those that are True."""
        return wanted.nonzero().flatten()

    def rows(self, values: Tensor, wanted: Tensor) -> Tensor:
        """The wanted rows."""
        return values[wanted]

    def read(self, condition: Tensor, otherwise: bool) -> bool:
        """The value of the condition."""
        return bool(condition)


HOST = HostArithmetic()


class DeviceArithmetic(Arithmetic):
    """Numbers stay on a device, and no value is looked at: the host never waits for it.

    Args:
        device: where the statistics are.
        fixed_shapes: whether no shape may depend on who is in the batch, for devices that compile a step once (XLA):
            one graph then serves every batch. The type is float32 there; elsewhere float64 where the device has it.
    """

    reads_values = False

    def __init__(self, device: torch.device, fixed_shapes: bool = True) -> None:
        self.device = device
        self.fixed_shapes = fixed_shapes
        self.dtype = torch.float32 if fixed_shapes else statistics_type(device)

    def places(self, wanted: Tensor) -> Tensor:
        """All of them."""
        return torch.arange(len(wanted), device=wanted.device)

    def rows(self, values: Tensor, wanted: Tensor) -> Tensor:
        """All rows, the others zero."""
        return torch.where(wanted.view([-1] + [1] * (values.ndim - 1)), values, 0.0)

    def read(self, condition: Tensor, otherwise: bool) -> bool:
        """What was said for this case."""
        return otherwise
