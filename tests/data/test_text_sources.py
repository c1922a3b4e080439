"""Texts of several sources: how they are read, held out and cut into rows."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from made_files import write_jsonl

from hf_cgd.data.text_sources import SOURCE, demo_sources, held_out, read_sources, rows_of


def test_files_folders_and_tables_are_sources(tmp_path: Path) -> None:
    (tmp_path / "news.txt").write_bytes("one\n\ntwo\u2028more\r\nthree\n".encode())
    folder = tmp_path / "code" / "inner"
    folder.mkdir(parents=True)
    (folder / "b.py").write_text("x = 1\ny = 2\n", encoding="utf-8")
    (tmp_path / "code" / "a.py").write_text("größe = 3\n", encoding="utf-8")
    (tmp_path / "code" / "picture.bin").write_bytes(b"\xff\xfe\x00\xd8")
    table = write_jsonl(tmp_path / "chats.jsonl", {"said": ["hello", None, "bye"]})
    found = read_sources([f"news={tmp_path}/news.txt", f"code={tmp_path}/code", f"chats={table}"], "said")
    assert found == {
        "news": ["one", "two\u2028more", "three"],
        "code": ["größe = 3\n", "x = 1\ny = 2\n"],
        "chats": ["hello", "bye"],
    }


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["news"], "expected name=path for each.*got 'news'"),
        (["a=one.txt", "a=two.txt"], "'a' comes twice"),
        (["a=one.txt"], "expected at least two"),
        (["a=one.txt", "b=nothing.txt"], "there is none at nothing.txt"),
        (["a=one.txt", "b=empty.txt"], "no text in empty.txt"),
        (["a=one.txt", "b=table.csv"], "expected the column 'text'.*got .'words'"),
    ],
)
def test_what_is_no_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("one", "a"), ("two", "b"), ("empty", " \n")):
        Path(f"{name}.txt").write_text(text, encoding="utf-8")
    Path("table.csv").write_text("words\nx\n", encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_sources(wanted, "text")


@given(st.integers(2, 50), st.floats(0.01, 0.99))
def test_what_is_held_out_is_a_share_and_the_same_each_time(size: int, share: float) -> None:
    documents = [str(number) for number in range(size)]
    train, validation = held_out(documents, share)
    assert sorted([*train, *validation]) == sorted(documents) and train and validation
    assert abs(len(validation) - share * size) <= 1
    assert held_out(documents, share) == (train, validation)


@given(st.lists(st.text("ab", max_size=9), min_size=1, max_size=6), st.integers(2, 5))
def test_rows_are_the_text_in_order_and_hold_one_source(texts: list[str], length: int) -> None:
    documents = {"x": texts, "y": ["ba" * length]}
    rows = rows_of({"x": [*texts, "a" * length], "y": documents["y"]}, lambda text: [ord(c) for c in text], 0, length)
    stream = [ord(c) for text in [*texts, "a" * length] for c in [*text, "\0"]]
    own = [row for row in rows if row[SOURCE] == "x"]
    joined = [token for row in own for token in row["input_ids"]]
    assert joined == stream[: len(joined)] and 0 <= len(stream) - len(joined) < length
    assert all(len(row["input_ids"]) == length and row["labels"] == row["input_ids"] for row in rows)
    assert sum(row[SOURCE] == "y" for row in rows) == (2 * length + 1) // length


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="'x' has 3 tokens in a split, fewer than a row of 4"):
        rows_of({"x": ["ab"]}, lambda text: [1] * len(text), 0, 4)
    with pytest.raises(ValueError, match="at least two documents"):
        held_out(["one"], 0.1)


def test_the_demo_has_text_in_three_sizes() -> None:
    sizes = {name: sum(map(len, texts)) for name, texts in demo_sources().items()}
    assert 150_000 < sizes["docstrings"] < 170_000
    assert 50_000 < sizes["code"] < 70_000
    assert 10_000 < sizes["licences"] < 20_000
