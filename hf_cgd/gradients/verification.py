"""How far one way to take gradients is from another, and how far it may be."""

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Largest error of a check, relative to the largest gradient; passes in other types get `LOW_TOLERANCE`."""
LOW_TOLERANCE = 5e-2
NOISE_FACTOR = 4
"""How many times the rounding noise of the ordinary backward pass is allowed, where that is more."""


def largest_error(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Largest error of any parameter's gradient, relative to its own largest entry.

    A hundredth of the largest entry of all is added to that, since gradients that are zero but for rounding (of
    attention's key biases) differ by their own size.
    """
    largest = _largest_entries(expected)
    floor = max(0.01 * max(largest), 1e-30)
    differences = _largest_entries([one - other for one, other in zip(expected, actual, strict=True)])
    return max(difference / (own + floor) for difference, own in zip(differences, largest, strict=True))


def _largest_entries(tensors: Sequence[Tensor]) -> list[float]:
    # Read at once: a device is waited for each time.
    return torch.stack([tensor.abs().max().double() for tensor in tensors]).tolist()
