"""Tables as text: plain, Markdown and LaTeX. A table is a list of rows of cells, the head first."""

from collections.abc import Sequence

import numpy as np

Rows = Sequence[Sequence[str]]
"""Cells of a table, all rows of the same length."""


def mean_and_deviation(values: np.ndarray, decimals: int = 3) -> str:
    """Mean over runs [S] and, in brackets, their standard deviation; only what the number of runs allows."""
    spread = f" ({values.std(ddof=1):.{decimals}f})" if len(values) > 1 else ""
    return f"{values.mean():.{decimals}f}{spread}" if len(values) else ""


def in_units(values: np.ndarray, metric: str) -> str:
    """`mean_and_deviation` of a metric: accuracies in per cent with one decimal, others as they are with three."""
    return mean_and_deviation(100 * values, 1) if "accuracy" in metric else mean_and_deviation(values)


def plain(rows: Rows) -> str:
    """A table for the terminal: a line under the head, the first column on the left, the others on the right."""
    lines = ["  ".join(cells) for cells in _padded(rows)]
    return "\n".join([lines[0], "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])])


def markdown(rows: Rows) -> str:
    """A Markdown table, the first column on the left and the others on the right; pipes in cells are escaped."""
    # A ruler takes a dash, and a colon where the column is on the right.
    head, *body = _padded([[cell.replace("|", "\\|") for cell in row] for row in rows], (1, 2))
    ruler = ["-" * (len(cell) - 1) + ":" if column else "-" * len(cell) for column, cell in enumerate(head)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ruler, *body])


def latex(rows: Rows) -> str:
    """A LaTeX `tabular` with the rules of the booktabs package; special characters are escaped."""
    body = [" & ".join(map(_escaped, row)) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule",
                      r"\end{tabular}"])  # fmt: skip


def _padded(rows: Rows, narrowest: tuple[int, int] = (0, 0)) -> list[list[str]]:
    """The cells of each column filled up to one width, at least `narrowest` in the first and in the other columns."""
    widths = [max(narrowest[number > 0], *map(len, column)) for number, column in enumerate(zip(*rows, strict=True))]
    return [
        [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(
        special.get(character, f"\\{character}" if character in "&%$#_{}" else character) for character in text
    )
