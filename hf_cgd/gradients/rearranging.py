"""Operations that may hand the rows of a batch to other examples: sorting, shuffling, picking.

The form of a graph does not tell in which order. It may be another in every batch, and none at all in the first one.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from hf_cgd.arithmetic import is_on_host

BY_NUMBER = ("Flip", "Roll", "Rot90", "Select", "Slice", "Split", "Unbind", "Unfold")
"""Beginnings of the names of nodes that take rows by numbers which are no tensors."""
BY_TENSOR = ("Embedding", "Gather", "Index", "MaskedS", "Scatter", "Sort", "Take", "Topk")
"""The same of nodes that take them by tensors."""


class Rows(Enum):
    """What is known of the rows of a batch behind an operation."""

    KEPT = "each row is its example's"
    MOVED = "they have changed places"
    UNCLEAR = "they may have"
    UNREAD = "they may have: a device knows, which is not waited for, or code that the graph does not show"


def rows_behind(node: Any, name: str, batch: int) -> Rows:
    """What a node does with the rows of a batch.

    Args:
        node: of the graph.
        name: its name.
        batch: number of examples, at least 2.
    """
    if not name.startswith(BY_NUMBER + BY_TENSOR):
        # A function of the user's own, or what a compiler made of a network.
        return Rows.UNREAD if isinstance(node, BackwardCFunction) else Rows.KEPT
    source, place = node.next_functions[0]
    if source is not None and hasattr(source, "variable"):
        # A table of weights.
        return Rows.KEPT
    shape: Sequence[int] = () if source is None else source._input_metadata[place].shape
    by_example = len(shape) > 0 and shape[0] >= batch and shape[0] % batch == 0
    if name.startswith(BY_NUMBER):
        elsewhere = not by_example or not _is_along_rows(node, len(shape)) or _is_whole(node, name, shape[0])
        return Rows.KEPT if elsewhere else Rows.UNCLEAR
    if not by_example:
        return Rows.UNCLEAR
    if name.startswith("IndexBackward"):
        chosen = next(iter(node._saved_indices))
        return Rows.KEPT if chosen is None else _rows_of(chosen, shape[0], batch)
    if not _is_along_rows(node, len(shape)):
        return Rows.KEPT
    by_place = name.startswith(("IndexSelect", "Gather"))
    return _rows_of(node._saved_index, shape[0], batch) if by_place else Rows.UNCLEAR


def _is_along_rows(node: Any, ndim: int) -> bool:
    """Whether a node works along the first dimension, or does not say along which."""
    dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", ()))
    # A negative number comes back as one near 2^64.
    return dims == () or bool({0, 2**64 - ndim, -ndim} & set(dims if isinstance(dims, Sequence) else (dims,)))


def _is_whole(node: Any, name: str, rows: int) -> bool:
    """Whether a slice takes all rows in order."""
    return name.startswith("Slice") and (node._saved_start, node._saved_step) == (0, 1) and node._saved_end >= rows


def _rows_of(chosen: Tensor, rows: int, batch: int) -> Rows:
    """Whether each example takes as many of its own rows as the others, in the order of the examples.

    Args:
        chosen: places among the rows, or a mark for each row that is taken.
        rows: their number, a multiple of `batch`.
    """
    if not is_on_host(chosen):
        return Rows.UNREAD
    if chosen.dtype in (torch.bool, torch.uint8):
        chosen = chosen.nonzero()[:, 0]
    if chosen.ndim == 0 or len(chosen) % batch:
        return Rows.UNCLEAR
    owners = torch.arange(batch).repeat_interleave(len(chosen) // batch)
    taken_from = chosen.detach().reshape(len(chosen), -1).remainder(rows) // (rows // batch)
    return Rows.KEPT if bool((taken_from == owners[:, None]).all()) else Rows.MOVED
