"""Inner products of the groups' gradients."""

import torch
from torch import Tensor


def gram_matrix(rows: Tensor) -> Tensor:
    """Inner products [G, G] of the rows [G, P], in float64 on the CPU.

    Rows whose squares would leave the range of float32 are scaled to a largest entry of 1 first; a zero row gives
    zeros.
    """
    gram = _inner_products(rows)
    squares = gram.diagonal()
    if bool(((squares > 1e-30) & (squares < 1e30)).all()):
        return gram
    largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)
    scales = scale.to("cpu", torch.float64)
    return _inner_products(rows / scale) * scales * scales.T


GRAM_COLUMNS = 1024
GRAM_ROWS = 12
"""Tile of the Gram matrix. A float32 sum over millions of columns in one go is wrong by up to 4e-4 of itself; sums
over a tile, added up in float64, are not, and are up to three times as fast on CPUs (docs/performance.md)."""


def gram_on_device(rows: Tensor) -> Tensor:
    """The same where nothing may wait for the device: in the type of the rows, and where they are.

    Squares that leave the range of that type are not made up for: a gradient shorter than 1e-19 counts as zero.
    """
    tiled = rows.shape[1] - rows.shape[1] % GRAM_COLUMNS
    tiles = rows[:, :tiled].unflatten(1, (-1, GRAM_COLUMNS)).transpose(0, 1)
    rest = rows[:, tiled:]
    return torch.bmm(tiles, tiles.transpose(1, 2)).sum(dim=0) + rest @ rest.T


def _inner_products(rows: Tensor) -> Tensor:
    groups, size = rows.shape
    tiled = size - size % GRAM_COLUMNS
    tiles = rows[:, :tiled].unflatten(1, (-1, GRAM_COLUMNS)).transpose(0, 1)
    rest = rows[:, tiled:]
    gram = (rest @ rest.T).to(torch.float64)
    if tiled:
        bounds = [(start, min(start + GRAM_ROWS, groups)) for start in range(0, groups, GRAM_ROWS)]
        for place, (top, bottom) in enumerate(bounds):
            for left, right in bounds[: place + 1]:
                products = torch.bmm(tiles[:, top:bottom], tiles[:, left:right].transpose(1, 2))
                block = products.sum(dim=0, dtype=torch.float64)
                gram[top:bottom, left:right] += block
                if left != top:
                    gram[left:right, top:bottom] += block.T
    return gram.cpu()
