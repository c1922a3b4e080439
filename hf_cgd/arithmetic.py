"""Where the statistics of a step are formed, and whether their values may be looked at."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Arithmetic(ABC):
    """How losses, weights and inner products of the groups are kept and compared.

    A formula that is written with these methods serves both kinds: one looks at values and leaves out what is not
    there, the other computes all of it under a mask.

    Attributes:
        device: where the statistics are.
        dtype: their type.
        reads_values: whether a step may look at values, and take shapes that depend on them.
    """

    device: torch.device
    dtype: torch.dtype
    reads_values: bool

    @abstractmethod
    def places(self, wanted: Tensor) -> Tensor:
        """Indices to go through for a [N] mask: those that are True, or all N where no value may be looked at."""

    @abstractmethod
    def present(self, counts: Tensor) -> list[int]:
        """Numbers of the groups to ask for, by how many examples [K] they have: those with any, or all K."""

    @abstractmethod
    def rows(self, values: Tensor, wanted: Tensor) -> Tensor:
        """The rows of `values` [N, …] that are `wanted` [N], or all N rows with zeros in place of the others."""

    @abstractmethod
    def read(self, condition: Tensor, otherwise: bool) -> bool:
        """The value of a condition; `otherwise` where no value may be looked at."""

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor where the statistics are, in their type."""
        return tensor.to(self.device, self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros of that shape where the statistics are."""
        # Made elsewhere and moved: a constant would make another graph of a step that is compiled.
        return torch.zeros(*shape, dtype=self.dtype).to(self.device)


class HostArithmetic(Arithmetic):
    """Float64 on the CPU; values are looked at, and only what is present is computed."""

    device = torch.device("cpu")
    dtype = torch.float64
    reads_values = True

    def places(self, wanted: Tensor) -> Tensor:
        """Those that are True."""
        return wanted.nonzero().flatten()

    def present(self, counts: Tensor) -> list[int]:
        """Those that have examples."""
        return counts.nonzero().flatten().tolist()

    def rows(self, values: Tensor, wanted: Tensor) -> Tensor:
        """The wanted rows."""
        return values[wanted]

    def read(self, condition: Tensor, otherwise: bool) -> bool:
        """The value of the condition."""
        return bool(condition)


HOST = HostArithmetic()


class DeviceArithmetic(Arithmetic):
    """Float32 on a device; no value is looked at and no shape depends on one.

    For devices that compile a step once and run it without a wait (XLA): one graph then serves every batch.

    Args:
        device: where the statistics are.
    """

    dtype = torch.float32
    reads_values = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def places(self, wanted: Tensor) -> Tensor:
        """All of them."""
        return torch.arange(len(wanted), device=wanted.device)

    def present(self, counts: Tensor) -> list[int]:
        """All of them."""
        return list(range(len(counts)))

    def rows(self, values: Tensor, wanted: Tensor) -> Tensor:
        """All rows, the others zero."""
        return torch.where(wanted.view([-1] + [1] * (values.ndim - 1)), values, 0.0)

    def read(self, condition: Tensor, otherwise: bool) -> bool:
        """What was said for this case."""
        return otherwise
