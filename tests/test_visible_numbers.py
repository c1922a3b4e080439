"""Numbers as a reader sees them: rounded, and true of the number that they stand for."""

import math
import random

import pytest

from hf_cgd.visible_numbers import decimals, per_cent


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (math.nan, "n/a"), (math.inf, "n/a"), (0.0, "0.000"), (1.0, "1.000"), (0.9164, "0.916"),
     (1999 / 2000, ">0.999"), (0.9994, "0.999"), (1 - 1e-12, "1.000"), (1e-12, "0.000"), (-1e-12, "0.000"),
     (0.0004, "<0.001"), (0.0006, "0.001"), (-0.0004, "-0.000"), (1.0002, "1.000"), (12.3456, "12.346")],
)  # fmt: skip
def test_by_hand(value: float | None, text: str) -> None:
    assert decimals(value) == text


def test_shares_in_per_cent() -> None:
    found = [per_cent(share) for share in (0, 1, 0.5, 1 / 10_000, 0.9999, 0.123456)]
    assert found == ["0.0%", "100.0%", "50.0%", "<0.1%", ">99.9%", "12.3%"]


def test_what_is_written_is_true() -> None:
    """A number within half of the last decimal, or a bound that holds; a perfect score for a perfect score alone."""
    draw = random.Random(0)
    for _ in range(3000):
        total = draw.choice([1, 7, 50, 3000, 10**6])
        right = draw.choice([0, 1, total - 1, total, draw.randrange(total + 1)])
        value, text = right / total, decimals(right / total)
        bound = float(text.strip("<>"))
        if text[0] in "<>":
            assert 0 < value < bound if text[0] == "<" else bound < value < 1
        else:
            assert abs(bound - value) <= 0.0005 + 1e-12
        assert (text == "1.000") == (right == total) and (text == "0.000") == (right == 0)
