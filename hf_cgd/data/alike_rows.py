"""Which rows of a batch hold the values of which rows that went into it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

SAMPLED_VALUES = 512
"""Values of a row that are compared at first; all of them only where these leave a doubt."""


def array_of(value: Any) -> np.ndarray | None:
    """A batch's or a row's value as an array of numbers, None for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array if array.dtype.kind in "biuf" else None


def is_joined(labels: Any, own: Sequence[Any]) -> bool:
    """Whether the labels of a batch are as many numbers as those of all rows together."""
    whole, parts = array_of(labels), [array_of(value) for value in own if value is not None]
    sizes = [part.size for part in parts if part is not None and part.ndim]
    return whole is not None and len(sizes) > 1 and whole.size == sum(sizes)


def single(value: Any) -> Any:
    """The one number in a value of shape [] or [1]; anything else as it is."""
    array = array_of(value)
    return array.reshape(-1)[0] if array is not None and array.size == 1 else value


def same(labels: Any, own: Sequence[Any]) -> bool:
    """Whether the labels of a batch are those of the rows, in their order; True where they cannot be compared."""
    found = agreement(own, labels)
    return found is None or bool(found.diagonal().all())


def agreement(own: Sequence[Any], labels: Any) -> np.ndarray | None:
    """Which labels [size] could be those of which rows [B]; None where they cannot be compared."""
    whole = array_of(labels)
    if whole is None or whole.ndim == 0 or whole.size == 0:
        return None
    whole = whole.reshape(len(whole), -1)
    values = [None if value is None else array_of(value) for value in own]
    if any(v is None and o is not None for v, o in zip(values, own, strict=True)) or all(v is None for v in values):
        return None
    if whole.shape[1] > 1 and all(v is None or v.size == 1 for v in values):
        whole = whole.argmax(axis=1)[:, None]
    same = None if any(v is not None and v.size != whole.shape[1] for v in values) else alike(whole, values)
    return same if same is not None and same.any(axis=1).all() else None


def alike(whole: np.ndarray, values: Sequence[np.ndarray | None]) -> np.ndarray:
    """Which rows of a batch [size, W] hold which values, padded to W on either side, or cut; bool [size, B]."""
    width = whole.shape[1]
    flat = [None if value is None else value.reshape(-1)[:width].astype(whole.dtype) for value in values]
    alike = np.zeros((len(whole), len(values)), dtype=bool)
    lengths = sorted({len(value) for value in flat if value is not None})
    for length in lengths:
        own = {place: value for place, value in enumerate(flat) if value is not None and len(value) == length}
        if length == width:
            alike[:, list(own)] = _equal(whole, np.stack(list(own.values())))
            continue
        values_of_length = np.stack(list(own.values())) if length else np.zeros((len(own), 0), whole.dtype)
        for part, rest in ((whole[:, :length], whole[:, length:]), (whole[:, -length or width :], whole[:, :-length])):
            padded = (rest == rest[:, :1]).all(axis=1) if rest.shape[1] else np.ones(len(whole), dtype=bool)
            alike[:, list(own)] |= padded[:, None] & _equal(part, values_of_length)
    # A longer row wins: the end of it may look like padding of a shorter one.
    sizes = np.asarray([-1 if value is None else len(value) for value in flat])
    longest = np.where(alike, sizes, -1).max(axis=1, initial=-1)
    return alike & (sizes[None, :] == longest[:, None])


def _equal(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Which rows of two arrays [m, W] and [n, W] are equal: bool [m, n]."""
    width = left.shape[1]
    if width > SAMPLED_VALUES:
        chosen = np.linspace(0, width - 1, SAMPLED_VALUES).astype(np.int64)
        sampled = right[:, chosen]
        if len(np.unique(sampled, axis=0)) == len(right):
            left, right = left[:, chosen], sampled
    places: dict[bytes, list[int]] = {}
    for place, row in enumerate(np.ascontiguousarray(right)):
        places.setdefault(row.tobytes(), []).append(place)
    equal = np.zeros((len(left), len(right)), dtype=bool)
    for j, row in enumerate(np.ascontiguousarray(left)):
        equal[j, places.get(row.tobytes(), [])] = True
    return equal


def in_turn(possible: np.ndarray) -> np.ndarray:
    """One of the possible rows for each row of the batch, those that are alike in turn."""
    taken = np.zeros(possible.shape[1], dtype=np.int64)
    places = np.empty(len(possible), dtype=np.int64)
    for j, row in enumerate(possible):
        choices = np.flatnonzero(row)
        places[j] = choices[taken[choices].argmin()]
        taken[places[j]] += 1
    return places
