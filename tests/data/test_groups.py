"""From a column's values to group names, counts and ids; and every value that is refused."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from hypothesis import given

from hf_cgd.data.columns import Column, read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.monitors import GroupRobustWarning


def groups_of(**columns: list) -> GroupInfo:
    return GroupInfo.from_columns({name: Column(values) for name, values in columns.items()})


def test_strings_sort() -> None:
    groups = groups_of(place=["water", "land", "water"])
    assert (groups.names, groups.counts) == (("land", "water"), (1, 2))


def test_integers_sort_as_numbers() -> None:
    groups = groups_of(group=[10, 2, 10, np.int32(2), torch.tensor(0)])
    assert (groups.names, groups.counts) == (("0", "2", "10"), (1, 2, 2))


def test_names_that_look_alike_are_warned_of() -> None:
    with pytest.warns(GroupRobustWarning, match=r"'a' and 'a ' look alike"):
        assert groups_of(group=["a", "a ", "b"]).names == ("a", "a ", "b")
    with pytest.warns(GroupRobustWarning, match="'Bern' and 'bern' look alike"):
        assert groups_of(group=["Bern", "Oslo"]).extended(["bern"]).names == ("Bern", "Oslo", "bern")
    with pytest.warns(GroupRobustWarning, match="holds 1 and '1', which are taken for one group '1'"):
        assert groups_of(group=[1, "1", 2]).names == ("1", "2")
    assert groups_of(group=[1, np.int64(1), True]).counts == (2, 1), "numbers and bools are no look-alikes"


def test_bools() -> None:
    assert groups_of(flag=[True, False, np.True_]).names == ("False", "True")


def test_class_labels_keep_their_order_and_drop_classes_without_examples() -> None:
    groups = GroupInfo.from_columns({"g": Column([2, 0, 2], ("water", "air", "land"))})
    assert (groups.names, groups.counts) == (("water", "land"), (1, 2))
    assert groups.encode([[0], [2]]).tolist() == [0, 1]


def test_crossed_columns_hold_the_combinations_that_occur() -> None:
    groups = groups_of(label=[0, 1, 1, 0], place=["sea", "land", "sea", "sea"])
    assert groups.names == ("label:0 place:sea", "label:1 place:land", "label:1 place:sea")
    assert groups.counts == (2, 1, 1)
    assert groups.encode([(1, "sea"), (0, "sea")]).tolist() == [2, 0]


def test_a_datasets_own_class_names_win_over_those_of_training() -> None:
    groups = GroupInfo(["land", "water"], [1, 1], ["place"], {"place": ("land", "water")})
    plain, swapped = Column([0, 1]), Column([0, 1], ("water", "land"))
    assert groups.encode_columns({"place": plain}).tolist() == [0, 1]
    assert groups.encode_columns({"place": swapped}).tolist() == [1, 0]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["ä", "b|c", "d:e"])), min_size=1, max_size=50))
def test_round_trip(rows: list[tuple[int, str]]) -> None:
    groups = groups_of(first=[row[0] for row in rows], second=[row[1] for row in rows])
    restored = GroupInfo.from_dict(groups.to_dict())
    assert restored == groups
    ids = restored.encode(rows)
    assert [groups.names[i] for i in ids] == [groups.name_of(row) for row in rows]
    assert np.bincount(ids, minlength=len(groups)).tolist() == list(groups.counts or ())


@pytest.mark.parametrize(
    "value,message",
    [
        (None, r"'group', row 1: expected an integer.*got None.*fill in"),
        (float("nan"), r"row 1: expected an integer.*got nan"),
        (" ", r"row 1: expected an integer.*got ' '.*fill in"),
        (1.0, r"row 1: expected an integer.*float 1.0.*cast_column"),
        (-1, r"row 1: expected integers >= 0, got -1"),
        ([0, 1], r"row 1: expected one integer.*got list.*several columns to cross"),
        ({"a": 1}, r"got dict"),
        (np.array([1, 2]), r"got ndarray"),
    ],
)
def test_values_that_cannot_name_a_group(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_of(group=[0, value])


def test_class_outside_its_names() -> None:
    with pytest.raises(ValueError, match=r"class in 0\.\.1.*got 2"):
        GroupInfo.from_columns({"g": Column([0, 2], ("a", "b"))})


def test_no_rows() -> None:
    with pytest.raises(ValueError, match="dataset is empty"):
        groups_of(group=[])


def test_unknown_group() -> None:
    with pytest.raises(ValueError, match=r"Row 0 belongs to group '7'.*\['0', '1'\]"):
        GroupInfo(["0", "1"]).encode([[7]])


def test_counts_of_classes() -> None:
    groups = GroupInfo(["a", "b"], [3, 4], class_counts=[[1, 4], [2, 0]])
    assert groups.class_counts == ((1, 4), (2, 0))
    assert GroupInfo.from_dict(json.loads(json.dumps(groups.to_dict()))) == groups
    assert groups.extended(["c"]).class_counts is None
    assert GroupInfo(["a", "b"], None, class_counts=[[1, 4], [0, 0]]).class_counts == ((1, 4), (0, 0))


@pytest.mark.parametrize("class_counts", [[], [[1, 2, 3]], [[3, 4], [1]], [[4, 4], [-1, 0]], [[2, 4], [2, 0]]])
def test_counts_of_classes_that_do_not_fit(class_counts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"class_counts with one row of 2 numbers >= 0 per class.*counts \[3, 4\]"):
        GroupInfo(["a", "b"], [3, 4], class_counts=class_counts)


@pytest.mark.parametrize(
    "names,counts,message",
    [
        ([], None, "at least one group"),
        (["a", " "], None, r"visible name for every group, got \['a', ' '\]"),
        (["a", "a"], None, r"\['a'\] stand more than once"),
        (["a", "b"], [1], "one positive count"),
        (["a", "b"], [1, 0], "one positive count"),
    ],
)
def test_invalid_group_info(names: list[str], counts: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupInfo(names, counts)


def test_columns_are_read_without_decoding_the_rest() -> None:
    features = Features({"group": ClassLabel(names=["a", "b"]), "costly": Value("int64")})
    dataset = Dataset.from_dict({"group": [0, 1, 1], "costly": [1, 2, 3]}, features=features)

    def fail(batch: dict) -> dict:
        raise AssertionError("the transform must not run")

    for reader in (dataset.with_transform(fail), dataset.with_format("torch")):
        column = read_columns(reader, ["group"])["group"]
        assert (column.values, column.class_names) == ([0, 1, 1], ("a", "b"))
    subset = torch.utils.data.Subset(dataset, [2, 0])
    assert read_columns(subset, ["group"])["group"].values == [1, 0]
    both = torch.utils.data.ConcatDataset([subset, dataset])
    assert read_columns(both, ["group"])["group"].values == [1, 0, 0, 1, 1]
