"""Numbers as a reader may see them: rounded, but never to a bound that they do not reach."""

from math import isfinite

NOISE = 1e-9
"""What arithmetic may leave between two numbers that are the same."""


def decimals(value: float | None, places: int = 3, top: float = 1.0) -> str:
    """A number with so many decimals; "" for None, "n/a" for one that is not finite.

    1,999 right answers of 2,000 are ">0.999", since "1.000" would say that none is wrong, and a difference that is
    there is "<0.001" and not "0.000".

    Args:
        value: the number.
        places: decimals.
        top: the highest value, which a perfect model has.
    """
    if value is None:
        return ""
    if not isfinite(value):
        return "n/a"
    text, step = f"{value:.{places}f}", 10.0**-places
    rounded = float(text)
    if rounded == top and value < top - NOISE:
        return f">{top - step:.{places}f}"
    if rounded == 0 and value > NOISE:
        return f"<{step:.{places}f}"
    return text.removeprefix("-") if rounded == 0 and value > -NOISE else text


def per_cent(share: float, places: int = 1) -> str:
    """A share in [0, 1] in per cent, likewise: 1 of 10,000 is "<0.1%"."""
    return f"{decimals(100 * share, places, 100.0)}%"
