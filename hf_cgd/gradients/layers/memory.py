"""Memory that outlives a step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class ReusedMemory:
    """Memory that is kept from step to step: fresh memory of the size of a layer costs as much as a layer."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def of_shape(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """A tensor of that shape and type, with any content; valid until the next call."""
        size = math.prod(shape)
        memory = self._memory
        if memory is None or len(memory) < size or memory.dtype != dtype or memory.device != device:
            self._memory = memory = torch.empty(size, device=device, dtype=dtype)
        return memory[:size].view(shape)
