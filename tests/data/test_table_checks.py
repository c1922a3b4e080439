"""Faults of a table, each with its place; clean tables have none."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, load_dataset
from made_files import write_jsonl

from hf_cgd.cli.data_check import load_checked, table_of
from hf_cgd.data.table_checks import Problem, Table, missing_files, problems_of
from hf_cgd.data.table_places import line_numbers, listed, places_in_files
from hf_cgd.trainer.config import GroupRobustConfig


def rows_of(split: str, rows: Sequence[int]) -> str:
    return f"{split} {list(rows)}"


def check(
    train: Mapping[str, Sequence[Any]], groups: Sequence[str] = ("g",), texts: Sequence[str] = (), **splits: Any
) -> list[Problem]:
    names = splits.pop("class_names", {})
    return problems_of(Table({"train": train, **splits}, rows_of, names), "y", list(groups), texts)


def clean(size: int = 40) -> dict[str, list[Any]]:
    return {"y": ["a", "b"] * (size // 2), "g": ["x", "x", "z", "z"] * (size // 4), "t": ["some words"] * size}


def changed(column: str, **values: Any) -> dict[str, list[Any]]:
    """The clean table with other values, `_3="v"` in row 3."""
    table = clean()
    for row, value in values.items():
        table[column][int(row[1:])] = value
    return table


def test_a_clean_table() -> None:
    assert check(clean(), ["y", "g"], ["t"], validation=clean(8), test={"y": [None] * 4, "g": ["x"] * 4}) == []
    numbers = {"y": [0, 1] * 20, "g": [True, True, False, False] * 10}
    assert check(numbers, ["g"]) == check(numbers, ["absent"]) == []


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("a", "a ", "spaces only"),
        ("a", " a", "spaces only"),
        ("new york", "new  york", "spaces only"),
        ("a", "A", "capitals only"),
        ("Straße", "STRASSE", "capitals only"),
        ("caf\u00e9", "cafe\u0301", "the form of characters (unicode) only"),
        ("a", "a\u200b", "the form of characters (unicode) only"),
        ("a b", "a\u00a0b", "only"),
        ("\uff41", "a", "the form of characters (unicode) only"),
    ],
)
@pytest.mark.parametrize("column", ["y", "g"])
def test_names_that_read_alike(one: str, other: str, said: str, column: str) -> None:
    table = clean()
    table[column] = [one if value in ("a", "x") else "zz" for value in table[column]]
    rows = [row for row, value in enumerate(table[column]) if value == one][3:5]
    for row in rows:
        table[column][row] = other
    (found,) = [problem for problem in check(table) if "differ in" in problem.text]
    assert found.stops and said in found.text and f"{other!r} (train {rows})" in found.text
    assert found.text.startswith("label_column 'y'" if column == "y" else "group_column 'g'")


@pytest.mark.parametrize(("one", "other"), [(1, "1"), (7, "007"), (True, "True")])
def test_numbers_in_one_file_and_texts_in_another(one: Any, other: Any) -> None:
    train = clean() | {"g": [one, one, "z", "z"] * 10}
    (found,) = check(train, validation=clean(8) | {"g": [other, other, "z", "z"] * 2})
    assert "being a number or a text only" in found.text and "validation [0, 1, 4, 5]" in found.text


def test_names_that_differ() -> None:
    for values in (["a1", "a2"], ["é", "e"], ["a-b", "a b"], [1, -1], ["x", "xx"]):
        assert check({"y": ["u", "v"] * 10, "g": [value for value in values for _ in range(10)]}) == []


def test_codes_that_differ_in_zeros_and_words_for_nothing_are_told() -> None:
    (found,) = check(clean() | {"g": ["01", "1", "01", "2"] * 10})
    assert (
        not found.stops and "'01' (20 rows), '1' (train [1, 5, 9" in found.text and "leading zeros only" in found.text
    )
    (found,) = [problem for problem in check(changed("g", _3="NaN", _9="n/a")) if " say " in problem.text]
    assert not found.stops and "2 of 40 rows say 'NaN', 'n/a' (train [3, 9])" in found.text
    assert check(clean() | {"g": ["NA", "None", "nano", "zero"] * 10}) == []


def test_a_class_that_training_lacks_is_told() -> None:
    """It would be an output that nothing trains: the worst group of a crossing with the label is then at 0."""
    (found,) = check(clean(), test=clean(8) | {"y": ["a", "b", "new", "c"] * 2})
    assert (
        not found.stops and "of 'new', 'c', which 4 of 8 rows of the test split are (test [2, 3, 6, 7])" in found.text
    )
    numbers = clean() | {"y": ["0", "1"] * 20}
    assert not [one for one in check(numbers, test=clean(8) | {"y": [0, 1] * 4}) if "no training row" in one.text]
    assert check(clean() | {"y": [0, 1] * 20}, test=clean(4) | {"y": [-1] * 4}, class_names={"y": ["p", "q"]}) == []


def test_names_of_classes_are_looked_at_and_not_their_numbers() -> None:
    (found,) = check(clean() | {"y": [0, 1] * 20}, ["g"], class_names={"y": ["sad", "Sad"]})
    assert "'sad'" in found.text and "capitals only" in found.text


@pytest.mark.parametrize("value", [None, float("nan"), "", "  "])
def test_missing_values_are_counted(value: Any) -> None:
    (found,) = check(changed("g", _3=value, _9=value))
    assert found.stops and "2 of 40 rows have no value (train [3, 9])" in found.text
    (found,) = check(changed("y", _5=value))
    assert found.stops and found.text.startswith("label_column 'y': 1 of 40 rows")
    # Groups are needed to train; where evaluation lacks some it is told.
    (found,) = check(clean(), validation=changed("g", _1=value))
    assert not found.stops and "validation [1]" in found.text
    (found,) = check(clean(), validation=changed("y", _1=value))
    assert found.stops


def test_a_missing_value_that_made_the_column_decimal_is_named_as_missing() -> None:
    (found,) = check(clean() | {"g": [0.0, 0.0, 1.0, 1.0] * 9 + [0.0, 1.0, 0.0, float("nan")]})
    assert "1 of 40 rows have no value (train [39])" in found.text


def test_minus_one_is_no_class_where_classes_are_known() -> None:
    names = {"class_names": {"y": ["no", "yes"]}}
    (found,) = check(clean() | {"y": [0, 1] * 19 + [-1, 1]}, **names)
    assert "1 of 40 rows have no value" in found.text
    assert check(clean() | {"y": [0, 1] * 20}, test={"y": [-1, -1]}, **names) == []


@pytest.mark.parametrize("value", [0.5, [1, 2], {"a": 1}])
def test_values_that_are_no_names(value: Any) -> None:
    (found,) = check(changed("g", _2=value))
    assert found.stops and "1 of 40 values are no integers, texts or bools" in found.text and "[2]" in found.text


def test_ids_and_texts_as_groups_are_told_once_and_cut() -> None:
    ids = clean() | {"g": [f"patient-{row}" for row in range(40)]}
    (found,) = check(ids)
    assert (
        "40 different values in 40 rows, 'patient-0', 'patient-1', 'patient-2' and 37 more. These look like ids"
        in found.text
    )
    texts = clean(120) | {"g": [f"{row % 30} once upon a time there was a very small house" for row in range(120)]}
    (found,) = check(texts)
    assert "These look like texts" in found.text and len(found.text) < 400
    (found,) = check(clean() | {"y": list(range(40))})
    assert found.text.startswith("label_column 'y': 40 different values")
    countries = clean(400) | {"g": [f"country {row % 40}" for row in range(400)]}
    assert check(countries) == []


def test_small_groups() -> None:
    table = clean() | {"g": ["x"] * 34 + ["rare"] + ["few"] * 5}
    stop, note = check(table)
    assert stop.stops and "1 of 3 groups have fewer than 2" in stop.text and "rare (n = 1)" in stop.text
    assert not note.stops and "few (n = 5)" in note.text
    crossed = [problem.text for problem in check(table, ["y", "g"])]
    assert any("y:a g:rare (n = 1)" in text for text in crossed) and any(
        "y:b g:few (n = 3)" in text for text in crossed
    )


def test_texts() -> None:
    wrong, blank = check(changed("t", _1=None, _4=3, _6=" "), texts=["t"])
    assert wrong.stops and "2 of 40 rows hold no text, such as None (train [1, 4])" in wrong.text
    assert not blank.stops and "1 of 40 texts are empty (train [6])" in blank.text


def test_everything_at_once() -> None:
    table = changed("g", _0=None, _4="X") | {"y": ["a", "a "] + ["a", "b"] * 19}
    assert len([problem for problem in check(table, ["g"], ["t"]) if problem.stops]) == 3 + 1  # one X is too few


def test_files_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "here.png").touch()
    table = Table({"train": {"image": ["here.png", "there.png", "here.png", "gone.png"]}}, rows_of)
    (found,) = missing_files(table, "image", tmp_path)
    assert "2 of 4 files" in found.text and "'there.png' (train [1, 3])" in found.text
    (found,) = missing_files(Table({"train": {"image": ["here.png", None, " "]}}, rows_of), "image", tmp_path)
    assert found.stops and "2 of 3 rows name no file (train [1, 2])" in found.text


# ---- Places ---------------------------------------------------------------------------------------------------------

CSV = 'text,g\n"two\nlines",x\n\nplain,y\n"a ""quote"", and a comma",z\nlast,x\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("d.csv", CSV, [2, 5, 6, 7]),
        ("d.csv", "\ufeff" + CSV.replace("\n", "\r\n"), [2, 5, 6, 7]),
        ("d.tsv", "text\tg\na, b\tx\nc\ty\n", [2, 3]),
        ("d.jsonl", '{"g": 1}\n\n{"g": 2}\n', [1, 3]),
    ],
)
def test_lines_of_rows(name: str, content: str, expected: list[int], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode())
    assert line_numbers(path) == expected
    reader = "json" if path.suffix == ".jsonl" else "csv"
    options = {"sep": "\t"} if path.suffix == ".tsv" else {}
    rows = load_dataset(reader, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"), **options)
    where = places_in_files({"train": path}, {"train": len(rows)})
    assert where("train", [1]) == f"{name}, line {expected[1]}"
    assert where("train", range(2)) == f"{name}, lines {expected[0]}, {expected[1]}"
    assert places_in_files({"train": path}, {"train": 99})("train", [1]) == "train split, row 1"


def test_rows_without_lines() -> None:
    where = places_in_files({"train": Path("d.parquet")}, {"train": 3})
    assert where("train", [2]) == "train split, row 2" and where("test", [0, 1]) == "test split, rows 0, 1"
    assert listed(list("abcdefg"), 3) == "a, b, c and 4 more" and listed(["a"]) == "a"


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ([0.0, 1.0], "Write them as whole numbers (1 for 1.0)"),
        ([0.5, 1.0], "Cut numbers into classes"),
        ([{"name": "a"}, {"name": "b"}], "what is nested"),
        ([[0, 1], [1, 0]], "or a list, into columns of single values"),
        ([date(2020, 1, 1), date(2021, 1, 1)], "Write them as texts"),
    ],
)
@pytest.mark.parametrize("column", ["y", "g"])
def test_what_cannot_name_a_class_or_group_is_told_with_what_to_do(
    values: list[Any], remedy: str, column: str
) -> None:
    (found,) = check(clean() | {column: values * 20})
    assert found.stops and "40 of 40 values are no integers, texts or bools" in found.text and remedy in found.text


def test_a_label_that_is_nested_is_told_and_does_not_end_in_a_traceback(tmp_path: Path) -> None:
    rows = {"label": [{"name": "a"}, {"name": "b"}] * 10, "place": ["x", "z"] * 10, "tags": [["x"], ["z"]] * 10}
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    for column, groups in (("label", ["place"]), ("place", ["tags"])):
        with pytest.raises(ValueError, match=r"20 of 20 values are no integers, texts or bools.*d.jsonl, lines 1, 2"):
            load_checked(str(path), None, {"label_column": column}, GroupRobustConfig("out", group_column=groups))


def test_splits_that_number_their_classes_differently_are_compared_by_name() -> None:
    rows = {"g": ["x", "z"] * 20, "t": ["words"] * 40}
    one = Dataset.from_dict({**rows, "y": [0, 1] * 20}).cast_column("y", ClassLabel(names=["a", "b"]))
    two = Dataset.from_dict({**rows, "y": [1, 0] * 19 + [-1, 2]}).cast_column("y", ClassLabel(names=["b", "a", "c"]))
    table = table_of({"train": one, "test": two}, ["y", "g"], rows_of)
    assert table.splits["test"]["y"][:2] == ["a", "b"] and table.splits["train"]["y"][:2] == ["a", "b"]
    missing, new = problems_of(table, "y", ["g"])
    assert "1 of 40 rows have no value (test [38])" in missing.text
    assert "no training row is of 'c', which 1 of 40 rows of the test split are (test [39])" in new.text
