"""Tables as text: plain, Markdown and LaTeX. A table is a list of rows of cells, the head first."""

from collections.abc import Sequence
from math import inf

import numpy as np

from hf_cgd.html import Html, interval_bar, tag
from hf_cgd.visible_numbers import decimals
from hf_cgd.visible_text import visible, width

Rows = Sequence[Sequence[str]]
"""Cells of a table, all rows of the same length."""


def mean_and_deviation(values: np.ndarray, places: int = 3, top: float = inf) -> str:
    """Mean over runs [S] and, in brackets, their standard deviation; only what the number of runs allows.

    `places` is the number of decimals, `top` the highest mean there can be (see `decimals`).
    """
    if not len(values):
        return ""
    spread = f" ({decimals(values.std(ddof=1), places, inf)})" if len(values) > 1 else ""
    return f"{decimals(values.mean(), places, top)}{spread}"


def in_units(values: np.ndarray, metric: str) -> str:
    """`mean_and_deviation` of a metric: accuracies in per cent with one decimal, others as they are with three."""
    return mean_and_deviation(100 * values, 1, 100.0) if "accuracy" in metric else mean_and_deviation(values, top=1.0)


def plain(rows: Rows) -> str:
    """A table for the terminal: a line under the head, the first column on the left, the others on the right.

    Line ends in cells are spaces, and hidden characters are written out.
    """
    lines = ["  ".join(cells) for cells in _padded([list(map(visible, row)) for row in rows])]
    return "\n".join([lines[0], "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])])


def markdown(rows: Rows) -> str:
    """A Markdown table, the first column on the left and the others on the right.

    Pipes in cells are escaped, and line ends are spaces.
    """
    # A ruler takes a dash, and a colon where the column is on the right.
    head, *body = _padded([[visible(cell).replace("|", "\\|") for cell in row] for row in rows], (1, 2))
    ruler = ["-" * (len(cell) - 1) + ":" if column else "-" * len(cell) for column, cell in enumerate(head)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ruler, *body])


def latex(rows: Rows) -> str:
    """A LaTeX `tabular` with the rules of the booktabs package; special characters are escaped."""
    body = [" & ".join(map(_escaped, row)) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule",
                      r"\end{tabular}"])  # fmt: skip


def html(
    rows: Rows,
    title: str,
    below: Sequence[str] = (),
    bars: Sequence[tuple[float, tuple[float, float] | None] | None] = (),
    marked: Sequence[bool] = (),
) -> Html:
    """An HTML table for notebooks; styles stand in the elements, and all text is escaped.

    Args:
        rows: the head first.
        title: above the table.
        below: lines below it.
        bars: for each row but the head a value in [0, 1] and its interval, drawn in a last column; () for none.
        marked: for each row but the head whether it is set in bold; () for none.
    """
    with_bars = any(bar is not None for bar in bars)
    head, *body = rows
    cell, left = "padding:2px 8px;text-align:right;", "padding:2px 8px;text-align:left;"
    lines = [tag("tr", [tag("th", text, style=cell if n else left) for n, text in enumerate(head)],
                 tag("th", "") if with_bars else None)]  # fmt: skip
    for number, row in enumerate(body):
        cells = [tag("td", text, style=cell if n else left) for n, text in enumerate(row)]
        if with_bars:
            bar = bars[number]
            drawn = None if bar is None else interval_bar(bar[0], *(bar[1] or (None, None)))
            cells.append(tag("td", drawn, style=left))
        strong = "font-weight:bold;" if number < len(marked) and marked[number] else None
        lines.append(tag("tr", cells, style=strong))
    table = tag("table", tag("thead", lines[0]), tag("tbody", lines[1:]), style="border-collapse:collapse;")
    return tag("div", tag("div", title), table, [tag("div", line) for line in below], style="overflow-x:auto;")


def _padded(rows: Rows, narrowest: tuple[int, int] = (0, 0)) -> list[list[str]]:
    """The cells of each column filled up to one width, at least `narrowest` in the first and in the other columns."""
    widths = [max(narrowest[number > 0], *map(width, column)) for number, column in enumerate(zip(*rows, strict=True))]
    return [
        [
            " " * (room - width(cell)) + cell if column else cell + " " * (room - width(cell))
            for column, (cell, room) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"<": "$<$", ">": "$>$"}
    text = visible(text)
    return "".join(
        special.get(character, f"\\{character}" if character in "&%$#_{}" else character) for character in text
    )
