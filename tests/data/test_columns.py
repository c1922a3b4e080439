"""Reading columns: own rows only, one numbering of classes, no random state moved, missing values counted."""

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Dataset
from torch.utils.data import ConcatDataset, Subset

from hf_cgd.data.columns import Column, column_names, read_columns, row_names
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.rows import undisturbed


class Rows(torch.utils.data.Dataset):
    """Row 5 cannot be read; every reading is noted and draws random numbers of five generators."""

    def __init__(self, size: int = 16) -> None:
        self.size, self.read = size, []  # type: ignore[var-annotated]
        self.own = np.random.default_rng(0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise OSError("truncated")
        self.read.append(index)
        return {"group": index % 3, "noise": torch.rand(1) + np.random.rand() + random.random() + self.own.random()}


def named(values: list[Any], names: list[str]) -> Dataset:
    return Dataset.from_dict({"group": values}).cast_column("group", ClassLabel(names=names))


def test_only_the_rows_of_a_subset_are_read() -> None:
    base = Rows()
    nested = Subset(ConcatDataset([Subset(base, [1, 3, 8]), Subset(base, [9, 15])]), [4, 0, 3])
    column = read_columns(nested, ["group"])["group"]
    assert column.values == [15 % 3, 1, 0]
    assert set(base.read) == {15, 1, 9} and len(base.read) == 3


@pytest.mark.parametrize("reader", [lambda d: read_columns(d, ["group"]), column_names, row_names])
def test_reading_moves_no_random_state(reader: Any) -> None:
    dataset = Subset(Rows(), [0, 1, 2])
    before = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    own = dataset.dataset.own.bit_generator.state
    reader(dataset)
    assert before == [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    assert dataset.dataset.own.bit_generator.state == own
    with pytest.raises(OSError, match="truncated"), undisturbed():
        torch.rand(3)
        Rows()[5]
    assert before[2] == torch.get_rng_state().tolist()


def test_parts_agree_on_a_class_by_its_name() -> None:
    first, second = named([0, 1, 1], ["land", "water"]), named([0, 1, 2], ["water", "land", "air"])
    strings = Dataset.from_dict({"group": ["air", "land"]})
    whole = ConcatDataset([first, second, strings])
    column = read_columns(whole, ["group"])["group"]
    names = ["land", "water", "water", "water", "land", "air", "air", "land"]
    assert [column.class_names[i] for i in column.values] == names and column.renumbered  # type: ignore[index]
    some = read_columns(Subset(whole, [6, 3]), ["group"])["group"]
    assert [some.class_names[i] for i in some.values] == ["air", "water"]  # type: ignore[index]
    assert not read_columns(ConcatDataset([first, first]), ["group"])["group"].renumbered


@pytest.mark.parametrize("kind", ["stored", "selected", "shuffled", "list"])
def test_groups_are_those_of_a_loop_over_the_rows(kind: str) -> None:
    rng = np.random.default_rng(1)
    rows = {"a": rng.choice(["x", "y", "ü"], 300).tolist(), "b": rng.integers(0, 12, 300).tolist()}
    dataset = Dataset.from_dict(rows)
    dataset = {"selected": lambda: dataset.select(range(7, 200)), "shuffled": lambda: dataset.shuffle(seed=1)}.get(
        kind, lambda: dataset
    )()
    columns = read_columns(dataset.to_list() if kind == "list" else dataset, ["a", "b"])
    pairs = sorted(set(zip(dataset["a"], dataset["b"], strict=True)))
    groups = GroupInfo.from_columns(columns)
    assert groups.names == tuple(f"a:{a} b:{b}" for a, b in pairs)
    ids = [pairs.index(pair) for pair in zip(dataset["a"], dataset["b"], strict=True)]
    assert groups.encode_columns(columns).tolist() == ids and groups.counts == tuple(np.bincount(ids).tolist())


def test_missing_values_are_counted_also_where_they_made_the_column_float() -> None:
    values = [0.0 if i % 4 else float("nan") for i in range(28)]
    for given in (values, [None if value != value else value for value in values]):
        for column in (Column(given), read_columns(Dataset.from_dict({"group": given}), ["group"])["group"]):
            with pytest.raises(ValueError, match=r"row 0: .*\(7 of 28 rows: 0, 4, 8, 12, 16, … lack it\)"):
                GroupInfo.from_columns({"group": column})


def test_rows_that_are_none_keep_the_numbers_of_the_others() -> None:
    column = read_columns([{"g": "a"}, None, {"g": None}], ["g"])["g"]
    assert column.values == ["a", None] and [column.row(i) for i in (0, 1)] == [0, 2]
    with pytest.raises(ValueError, match="'g', row 2"):
        GroupInfo.from_columns({"g": column})


def test_a_transform_decides_what_a_reader_gets() -> None:
    dataset = Dataset.from_dict({"image": [1, 2], "group": [0, 1]}).with_transform(lambda b: {"x": b["image"]})
    assert row_names(dataset) == row_names(Subset(dataset, [1])) == ["x"]
    assert column_names(dataset) == ["image", "group"]


def test_parts_of_one_type_are_joined_without_becoming_lists() -> None:
    first = Dataset.from_dict({"place": ["land", None, "water"]})
    second = Dataset.from_dict({"place": ["water", "sea"]}).shuffle(seed=0)
    whole = ConcatDataset([first, second])
    column = read_columns(whole, ["place"])["place"]
    assert column.values == [row["place"] for row in whole]
    assert isinstance(column._given, pa.ChunkedArray)
    chosen = Subset(whole, [4, 0, 3])
    assert read_columns(chosen, ["place"])["place"].values == [row["place"] for row in chosen]
