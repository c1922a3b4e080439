"""Inner products of the groups' gradients."""

import torch
from torch import Tensor

from hf_cgd.arithmetic import statistics_type

GRAM_COLUMNS = 1024
GRAM_ROWS = 12
"""Tile of the Gram matrix. A float32 sum over millions of columns in one go is wrong by up to 4e-4 of itself; sums
over a tile, added up in float64, are not, and are up to three times as fast on CPUs (docs/performance.md)."""
LEAST_SQUARE, GREATEST_SQUARE = 1e-30, 1e30
"""Squared norms between which float32 products are as good as any."""


def inner_products(rows: Tensor, reads_values: bool) -> Tensor:
    """Inner products [G, G] of the rows [G, P]: `gram_matrix`, or `gram_on_device` where no value may be read."""
    return gram_matrix(rows) if reads_values else gram_on_device(rows)


def gram_matrix(rows: Tensor) -> Tensor:
    """Inner products [G, G] of the rows [G, P], in float64 on the CPU.

    Rows whose squares would leave the range of float32 are scaled to a largest entry of 1 first; a zero row gives
    zeros.
    """
    gram = _by_tiles(rows, torch.float64).cpu()
    if all(LEAST_SQUARE < square < GREATEST_SQUARE for square in gram.diagonal().tolist()):
        return gram
    largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)
    scales = scale.to("cpu", torch.float64)
    return _by_tiles(rows / scale, torch.float64).cpu() * scales * scales.T


def gram_on_device(rows: Tensor) -> Tensor:
    """The same where nothing may wait for the device: on it, in float64 where it has that, else in the rows' type.

    Squares that leave the range of float32 are not made up for: a gradient shorter than 1e-19 counts as zero.
    """
    if rows.device.type == "xla":
        tiles, rest = _tiles(rows)
        return torch.bmm(tiles, tiles.transpose(1, 2)).sum(dim=0) + rest @ rest.T
    return _by_tiles(rows, statistics_type(rows.device))


def _tiles(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows [G, P] as tiles [T, G, C], and what is left of them."""
    tiled = rows.shape[1] - rows.shape[1] % GRAM_COLUMNS
    return rows[:, :tiled].unflatten(1, (-1, GRAM_COLUMNS)).transpose(0, 1), rows[:, tiled:]


def _by_tiles(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Inner products [G, G] where the rows are, tiles summed up in `dtype`."""
    groups = len(rows)
    if rows.shape[1] < GRAM_COLUMNS:
        return (rows @ rows.T).to(dtype)
    tiles, rest = _tiles(rows)
    gram = (rest @ rest.T).to(dtype)
    bounds = [(start, min(start + GRAM_ROWS, groups)) for start in range(0, groups, GRAM_ROWS)]
    for place, (top, bottom) in enumerate(bounds):
        for left, right in bounds[: place + 1]:
            products = torch.bmm(tiles[:, top:bottom], tiles[:, left:right].transpose(1, 2))
            block = products.sum(dim=0, dtype=dtype)
            gram[top:bottom, left:right] += block
            if left != top:
                gram[left:right, top:bottom] += block.T
    return gram
