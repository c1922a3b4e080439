"""What a table tells of its groups, from one reading of it."""

from collections import Counter
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Image

from hf_cgd.cli import data_check
from hf_cgd.cli.group_facts import facts_of


def table() -> Dataset:
    rows = {
        "label": [0, 1, 1, -1] * 5, "place": ["in", "out", None, "out"] * 5, "site": [1, 2] * 10, "id": range(20),
        "photo": ["none.png"] * 20,
    }  # fmt: skip
    features = {"label": ClassLabel(names=["cat", "dog"]), "photo": Image()}
    data = Dataset.from_dict(rows)
    for column, feature in features.items():
        data = data.cast_column(column, feature)
    return data


@pytest.mark.parametrize("groups", [None, ["place"], ["label", "place"]])
def test_each_column_is_read_once(groups: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    own = data_check.read_columns

    def counted(rows: Any, names: Any) -> Any:
        names = list(names)
        read.update(names)
        return own(rows, names)

    monkeypatch.setattr(data_check, "read_columns", counted)
    facts = facts_of(table(), "train", "label", groups, lambda split, rows: "")
    assert set(read.values()) == {1}
    assert set(read) == ({"label", "place", "site", "id"} if groups is None else {"label", "place"})
    by_hand = {None: {}, "place": {"in": 5, "out": 10}, "label": {"label:cat place:in": 5, "label:dog place:out": 5}}
    assert {group.name: group.count for group in facts.groups} == by_hand[groups and groups[0]]
    assert facts.missing == (10 if groups else 0)
    if groups is None:
        assert {one.column for one in facts.correlations} == {"place", "site"}
        cells = next(one.table for one in facts.correlations if one.column == "site")
        assert cells == {"1": {"cat": 5, "dog": 5}, "2": {"cat": 0, "dog": 5}}


@pytest.mark.parametrize(("label", "groups"), [("photo", ["place"]), ("label", ["photo"])])
def test_images_are_no_names(label: str, groups: list[str]) -> None:
    """Before, the first of them was opened."""
    with pytest.raises(ValueError, match="_column: expected a column of names or numbers, 'photo' holds images"):
        facts_of(table(), "train", label, groups, lambda split, rows: "")
