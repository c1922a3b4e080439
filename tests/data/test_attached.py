"""Rows that hold their group id, against the rows of the data set itself."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_cgd.data.attached import RowsWithGroups
from hf_cgd.data.collator import ROW_GROUP

IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype=np.int8)


def table(kind: str | None) -> Dataset:
    columns = {
        "x": [[float(row), row + 0.5] for row in range(8)],
        "labels": [row % 2 for row in range(8)],
        "ragged": [list(range(row)) for row in range(8)],
        "text": [f"row {row}" for row in range(8)],
    }
    return Dataset.from_dict(columns).with_format(kind)


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("kind", [None, "torch", "numpy", "pandas"])
@pytest.mark.parametrize("places", [[0, 1, 2], [2, 3, 4, 5, 6, 7], [5], [4, 3], [0, 2, 4], [-2, -1]])
def test_rows_of_a_table_are_its_own(kind: str | None, places: list[int], is_shuffled: bool) -> None:
    data = table(kind).shuffle(seed=1) if is_shuffled else table(kind)
    if is_shuffled and places[0] < 0:
        with pytest.raises(IndexError):
            data.__getitems__(places)
        return
    found = RowsWithGroups(data, IDS).__getitems__(places)
    assert [row.pop(ROW_GROUP) for row in found] == IDS[places].tolist()
    expected = data.__getitems__(places)
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert list(own) == list(other)
        for name, value in other.items():
            assert type(own[name]) is type(value), name
            if isinstance(value, torch.Tensor):
                assert own[name].dtype == value.dtype
            np.testing.assert_array_equal(own[name], value)


def test_rows_that_belong_to_another_stay_as_they_are() -> None:
    own: list[dict[str, Any]] = [{"x": 1}, {"x": 2}]
    assert RowsWithGroups(own, np.array([7, 8])).__getitems__([1, 0]) == [
        {"x": 2, ROW_GROUP: 8},
        {"x": 1, ROW_GROUP: 7},
    ]
    assert own == [{"x": 1}, {"x": 2}]
