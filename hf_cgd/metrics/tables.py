"""Tables of numbers as text: Markdown and LaTeX."""

from collections.abc import Sequence

import numpy as np


def mean_and_deviation(values: np.ndarray, decimals: int = 3) -> str:
    """Mean over runs [S] and, in brackets, their standard deviation; only what the number of runs allows."""
    spread = f" ({values.std(ddof=1):.{decimals}f})" if len(values) > 1 else ""
    return f"{values.mean():.{decimals}f}{spread}" if len(values) else ""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, head first, numbers to the right of a left first column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = [
        [
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    ruler = [("-" * width if not column else "-" * (width - 1) + ":") for column, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [cells[0], ruler, *cells[1:]])


def latex(rows: Sequence[Sequence[str]]) -> str:
    """The same as a LaTeX `tabular` with the rules of the booktabs package; special characters are escaped."""
    body = [" & ".join(map(_escaped, row)) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule",
                      r"\end{tabular}"])  # fmt: skip


def _escaped(text: str) -> str:
    plain = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(
        plain.get(character, f"\\{character}" if character in "&%$#_{}" else character) for character in text
    )
