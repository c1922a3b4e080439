"""Classes of a copy on the Hub are matched by their names, in whatever order it numbers them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_layouts as raw
from datasets import ClassLabel, Dataset, Features, load_dataset

from hf_cgd import GroupRobustWarning
from hf_cgd.tasks import load_task
from hf_cgd.tasks.hub_source import in_our_classes

BIRDS = ["land bird", "water bird"]


def column(values: list[Any], names: list[str] | None = None) -> Dataset:
    features = None if names is None else Features(c=ClassLabel(names=names))
    return Dataset.from_dict({"c": values}, features=features)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (column([0, 1, 1]), [0, 1, 1]),
        (column([False, True]), [0, 1]),
        (column(["Waterbird", "land-bird"]), [1, 0]),
        (column(["1", "0"]), [1, 0]),
        (column([0, 1, 1], ["landbird", "waterbird"]), [0, 1, 1]),
        (column([0, 1, 1], ["Water_Bird", "Land_Bird"]), [1, 0, 0]),
        (column([0, 1, 1], ["1", "0"]), [1, 0, 0]),
    ],
)
def test_by_names_and_by_numbers(rows: Dataset, expected: list[int]) -> None:
    found = in_our_classes(rows, "c", BIRDS, "here")
    assert found.tolist() == expected and found.dtype == np.int64
    # A part of the rows, in another order.
    order = list(range(len(rows)))[::-1]
    assert in_our_classes(rows.select(order), "c", BIRDS, "here").tolist() == [expected[row] for row in order]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (column([0, 2]), "got 2 in row 1"),
        (column([-1, 0]), "got -1 in row 0"),
        (column([0, None]), "got None in row 1"),
        (column(["landbird", "eagle"]), "got 'eagle' in row 1"),
        (column([0, -1], BIRDS), "got -1 in row 1"),
        (column([0, 1], ["landbird", "eagle"]), r"got \['landbird', 'eagle'\]. It is another data set"),
        (column([0, 1], ["a", "b", "c"]), r"got \['a', 'b', 'c'\]"),
        (column([0, 1], ["landbird", "land bird"]), "It is another data set"),
    ],
)
def test_what_is_none_of_ours(rows: Dataset, message: str) -> None:
    with pytest.raises(ValueError, match=f"here: column 'c': expected .*{message}"):
        in_our_classes(rows, "c", BIRDS, "here")


def test_names_that_tell_nothing_are_said_to_be_taken_in_their_order() -> None:
    with pytest.warns(GroupRobustWarning, match=r"called \['terrestre', 'aquatique'\]. They are taken for"):
        assert in_our_classes(column([1, 0], ["terrestre", "aquatique"]), "c", BIRDS, "here").tolist() == [1, 0]


def renumbered(folder: Path, names: dict[str, list[str]]) -> None:
    """The tables below a folder with these classes, in this order, of the same rows."""
    for path in sorted(folder.rglob("*.parquet")):
        rows = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(folder.parent / "cache"))
        for name, theirs in names.items():
            own = sorted(theirs) if name != "label" or len(theirs) != 3 else ["entailment", "neutral", "contradiction"]
            codes = [theirs.index(own[value]) for value in rows[name][:]]
            rows = rows.remove_columns([name]).add_column(name, codes, feature=ClassLabel(names=theirs))
        rows.to_parquet(path)


@pytest.mark.filterwarnings("ignore:The (training groups|splits) of")
def test_waterbirds_whose_classes_are_numbered_the_other_way_round(tmp_path: Path) -> None:
    """By number all four groups would change places, and every label be wrong."""
    raw.hub_waterbirds(tmp_path / "hub", raw.write_waterbirds(tmp_path / "own"))
    before, _ = load_task("waterbirds", "hub", tmp_path / "hub")
    renumbered(tmp_path / "hub", {"label": ["waterbird", "landbird"], "place": ["water", "land"]})
    after, _ = load_task("waterbirds", "hub", tmp_path / "hub")
    assert after["train"].features["place"].names == ["land", "water"]
    for split in before:
        for name in ("label", "place"):
            assert after[split][name][:] == before[split][name][:] and len(set(before[split][name][:])) == 2


@pytest.mark.filterwarnings("ignore:The splits of")
def test_multinli_whose_classes_are_numbered_as_group_dro_does(tmp_path: Path) -> None:
    raw.hub_multinli(tmp_path / "hub", raw.write_multinli(tmp_path / "own"))
    before, _ = load_task("multinli", "hub", tmp_path / "hub", split="genres")
    renumbered(tmp_path / "hub", {"label": ["contradiction", "entailment", "neutral"]})
    after, _ = load_task("multinli", "hub", tmp_path / "hub", split="genres")
    for split in before:
        assert after[split].to_dict() == before[split].to_dict() and len(set(before[split]["label"][:])) == 3
