"""Names of groups as a reader sees them, whatever characters they hold."""

import unicodedata

import pytest

from hf_cgd.cards import markdown as md
from hf_cgd.metrics import GroupReport, GroupRow
from hf_cgd.metrics.tables import plain
from hf_cgd.visible_text import LABEL, labels, quoted_name, visible, visible_name, width

HEBREW = "\u05e9\u05dc\u05d5\u05dd"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\r\nb\tc\u2028d", "a b c d"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("rtl \u202eoverride", "rtl \\u202eoverride"),
        ("woman\u200dhealth", "woman\u200dhealth"),  # Emoji and several scripts are written with joiners.
        ("Zürich, 中文 | <b>", "Zürich, 中文 | <b>"),
    ],
)
def test_what_hides_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown
    assert visible_name(text) == shown


def test_quotes_tell_where_a_name_ends() -> None:
    one, two = ["a, b", "c"], ["a", "b, c"]
    assert ", ".join(map(quoted_name, one)) == '"a, b", "c"'
    assert ", ".join(map(quoted_name, two)) == '"a", "b, c"'
    assert quoted_name('x", "y') == '"x\\", \\"y"'


def test_numbers_keep_their_order_beside_text_that_runs_leftwards() -> None:
    """An isolate ends before the next cell, even where the name tries to end it itself."""
    table = str(
        GroupReport((GroupRow(f"{HEBREW}\u2069x", train_count=4, weight=0.5), GroupRow("b", weight=0.5)), {}, "cgd")
    )
    row = next(line for line in table.splitlines() if HEBREW in line)
    isolated, _, numbers = row.partition("\u2069")
    assert isolated == f"\u2068{HEBREW}\\u2069x"
    assert numbers.split() == ["4", "0.500"]
    assert visible_name("Bern") == "Bern"


@pytest.mark.parametrize(("text", "columns"), [("abc", 3), ("中文", 4), ("e\u0301", 1), ("a\u200db", 2), ("", 0)])
def test_columns_of_a_terminal(text: str, columns: int) -> None:
    assert width(text) == columns


def test_columns_stand_under_one_another_whatever_the_script() -> None:
    rows = [["group", "n"], ["中文组名", "1"], ["e\u0301", "2"], [visible_name(HEBREW), "3"], ["plain", "4"]]
    assert {width(line) for line in plain(rows).splitlines()} == {11}


def test_labels_are_short_and_differ() -> None:
    first, second, third = labels(["x" * 199 + "A", "x" * 199 + "B", "Bern"])
    assert (first[-1], second[-1], third) == ("A", "B", "Bern")
    assert len(first) == len(second) == LABEL and "…" in first
    alike = ["x" * 100 + middle + "y" * 100 for middle in "AB"]
    assert labels(alike) == alike


def test_a_card_escapes_and_shows_at_once() -> None:
    assert md.text("a\u200b|\x1b*") == "a&#92;u200b&#124;&#92;x1b\\*"
    assert not any(unicodedata.category(one) == "Cc" for one in md.code("a\x1bb"))
