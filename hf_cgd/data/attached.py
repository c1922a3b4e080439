"""Rows that hold their group id by their place in the dataset, where what a reader gets does not tell it."""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
import torch.utils.data

from hf_cgd.data.collator import ROW_GROUP
from hf_cgd.data.columns import Column, first_row, has_transform
from hf_cgd.data.groups import UNKNOWN_GROUP
from hf_cgd.data.rows import has_value, value_of, with_values


class RowsWithGroups(torch.utils.data.Dataset):
    """A dataset whose rows hold a group id (or a membership) besides, under `ROW_GROUP`.

    Args:
        dataset: map-style.
        ids: one per row, [N] or [N, K].
    """

    def __init__(self, dataset: Any, ids: Any) -> None:
        self.dataset = dataset
        self.ids = ids
        own = getattr(type(dataset), "__getitems__", None) is datasets.Dataset.__getitems__
        self._is_table = own and reads_columns(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return _with_id(self.dataset[index], self.ids[index].tolist())

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The rows of a batch, read together where the dataset can do so."""
        numbers = self.ids[indices].tolist()
        if self._is_table:
            rows = _rows_of(self.dataset, indices)
            for row, number in zip(rows, numbers, strict=True):
                row[ROW_GROUP] = number
            return rows
        read = getattr(self.dataset, "__getitems__", None)
        rows = read(indices) if callable(read) else [self.dataset[index] for index in indices]
        return [_with_id(row, number) for row, number in zip(rows, numbers, strict=True)]


def _rows_of(dataset: datasets.Dataset, indices: list[int]) -> list[dict[str, Any]]:
    """What `dataset.__getitems__` gives, in less than half of its time for rows that follow one another."""
    first = int(indices[0])
    follow = first >= 0 and indices == list(range(first, first + len(indices)))
    read = dataset[first : first + len(indices)] if follow else dataset[indices]
    columns = {name: _entries(values) for name, values in read.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _entries(values: Any) -> Any:
    """The entries of a column as `values[place]` gives them; of arrays all at once."""
    at_once = isinstance(values, (list, np.ndarray, torch.Tensor))
    return values if at_once else [values[place] for place in range(len(values))]


def _with_id(row: Any, number: Any) -> Any:
    return None if row is None else with_values(row, {ROW_GROUP: number})


def reads_columns(dataset: Any) -> bool:
    """Whether a dataset reads what columns of a row it is left with, so that each one less saves time."""
    return isinstance(dataset, datasets.Dataset) and not has_transform(dataset)


def rows_tell(dataset: Any, read: Mapping[str, Column], columns: Sequence[str]) -> bool:
    """Whether a reader's rows hold what the columns hold: no transform drops or changes them.

    Args:
        dataset: map-style, not empty.
        read: its columns.
        columns: those that are asked about.
    """
    if any(read[name].renumbered for name in columns):
        return False
    if not any(has_transform(part) for part in parts_of(dataset)):
        return True
    row = first_row(dataset)
    return all(has_value(row, name) and _equal(value_of(row, name), read[name].values[0]) for name in columns)


def ids_by_row(ids: np.ndarray, column: Column, size: int) -> np.ndarray:
    """Ids of the rows of a dataset, of which those that are None have none.

    Args:
        ids: [n] or [n, K] of the rows that `column` was read from.
        column: tells which rows these are.
        size: rows of the dataset.
    """
    if column.rows is None:
        return ids
    whole = np.full((size, *ids.shape[1:]), UNKNOWN_GROUP if ids.ndim == 1 else 0, dtype=np.int64)
    whole[column.rows] = ids
    return whole


def parts_of(dataset: Any) -> list[Any]:
    """The datasets inside `Subset`s and `ConcatDataset`s; the dataset itself where it is neither."""
    if isinstance(dataset, torch.utils.data.Subset):
        return parts_of(dataset.dataset)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return [inner for part in dataset.datasets for inner in parts_of(part)]
    return [dataset]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        left = left.tolist()
    return type(left) is type(right) and bool(left == right)
