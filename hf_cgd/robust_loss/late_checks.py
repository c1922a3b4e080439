"""What the steps on a device could not look at without waiting for it, kept there until somebody reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cgd.monitors import WINDOW


@dataclass(frozen=True)
class LateFindings:
    """What has come to light about the steps since the last reading.

    Attributes:
        skipped: weight updates that were left out.
        bad: [K] whether the group's loss or gradient was not finite in any of them.
        lowest: [K] lowest mean loss of each group in a step.
        weights: [N, K], the weights after each of the last N <= `WINDOW` updates.
    """

    skipped: int
    bad: Tensor
    lowest: Tensor
    weights: Tensor


class LateChecks:
    """Notes of weight updates whose numbers are still being computed.

    Args:
        num_groups: K.
        device: where the numbers are.
    """

    def __init__(self, num_groups: int, device: torch.device) -> None:
        self._num_groups = num_groups
        self._device = device
        self._weights = torch.zeros(WINDOW, num_groups).to(device)
        self._forget()

    def note(self, moved: Tensor, bad: Tensor, losses: Tensor, weights: Tensor) -> None:
        """Take note of an update.

        Args:
            moved: whether the weights were moved.
            bad: [K] whether the group's loss or gradient is not finite.
            losses: [K] mean losses.
            weights: [K] after it.
        """
        self._skipped += ~moved
        self._bad += bad
        self._lowest: Tensor = torch.minimum(self._lowest, losses.nan_to_num())
        # Of one length at all times, so that a reading is the same graph after any number of steps.
        self._weights = torch.cat([self._weights[1:], weights[None]])
        self._noted += 1

    def read(self) -> LateFindings:
        """All since the last call; waits for the device."""
        others = torch.stack([self._bad, self._lowest, self._skipped.expand_as(self._bad)])
        rows = torch.cat([others, self._weights]).cpu()
        new = min(self._noted, WINDOW)
        self._forget()
        return LateFindings(int(rows[2, 0]), rows[0] > 0, rows[1], rows[len(rows) - new :])

    def _forget(self) -> None:
        # Made elsewhere and moved: constants would make another graph of the step after a reading.
        self._skipped = torch.zeros(1).to(self._device)
        self._bad = torch.zeros(self._num_groups).to(self._device)
        self._lowest = torch.zeros(self._num_groups).to(self._device)
        self._noted = 0
