"""Colours, line styles, legends and frames that all pictures share."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hf_cgd.visible_text import labels

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#661100")
"""Six colours of Okabe and Ito and two dark ones of Tol, told apart under the common colour vision deficiencies."""
DASHES: tuple[Any, ...] = ("solid", "dashed", "dashdot", (0, (1, 1)))
"""Line styles, used beside the colours so that lines differ in print as well."""
MARKERS = "ox^sDvP*"
"""Markers, used beside the colours for the same reason."""
MUTED = "#BDBDBD"
"""Colour of the groups that are not picked out; a darker grey is too near to the palette's green and pink."""
EXTREMES = "#000000"
"""Colour of the lowest and the highest weight, which is all that is logged of very many groups."""
WORST = "#000000"
"""Colour of the worst group's accuracy over training."""
PANELS_IN_A_ROW = 6
"""Figures of more panels than this go on in a further row."""


def group_colors(names: Sequence[str], highlight: Sequence[str] | None = None) -> dict[str, str]:
    """A colour for each group: its own for the highlighted ones, grey for the others.

    Args:
        names: all K groups.
        highlight: those to pick out, in the order of `PALETTE`; None for all if the colours last, else for none.

    Raises:
        ValueError: more highlights than colours, or one that is no group.
    """
    if highlight is None:
        highlight = names if len(names) <= len(PALETTE) else ()
    unknown = [name for name in highlight if name not in names]
    if unknown:
        raise ValueError(f"highlight holds {unknown}, which are not among the groups {list(names)[:20]}.")
    if len(highlight) > len(PALETTE):
        raise ValueError(f"At most {len(PALETTE)} groups can be told apart by colour, got {len(highlight)}.")
    return dict.fromkeys(names, MUTED) | dict(zip(highlight, PALETTE, strict=False))


def lowest_groups(tables: Sequence[Mapping[str, float]]) -> list[str]:
    """The groups with the lowest value of each table, once each and as many as there are colours.

    Every table has its first one before any has a second. A table of equal values has none.
    """
    lowest = [[name for name, value in table.items() if value == min(table.values())] for table in tables]
    tied = [names for names, table in zip(lowest, tables, strict=True) if len(names) < len(table)]
    return list(dict.fromkeys([names[0] for names in tied] + [name for names in tied for name in names]))[
        : len(PALETTE)
    ]


def tidy(axes: "Axes", grid: Literal["x", "y", "both"]) -> None:
    """Take the upper and right line of the frame away, and draw a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#E0E0E0", linewidth=0.6)


def label_edges(grid: np.ndarray, xlabel: str, ylabel: str) -> None:
    """Name the y axis on the left of a grid of axes, and the x axis under the lowest panel of each column."""
    for axes in grid.flat:
        axes.set(xlabel="", ylabel=ylabel if axes in grid[:, 0] else "")
    for column in grid.T:
        lowest = [axes for axes in column if axes.axison][-1]
        lowest.set_xlabel(xlabel)
        lowest.tick_params(labelbottom=True)


def legend_entries(panels: Sequence["Axes"], colors: Mapping[str, str]) -> dict[str, "Artist"]:
    """Lines by name: each one in colour, and one for all others."""
    lines: dict[str, Artist] = {str(line.get_label()): line for axes in panels for line in axes.get_lines()}
    others = [name for name in lines if colors.get(name, EXTREMES) == MUTED]
    entries = {name: line for name, line in lines.items() if name not in others}
    if others:
        entries["other groups" if entries else "groups"] = lines[others[0]]
    return entries


def add_legend(figure: "Figure", entries: Mapping[str, "Artist"]) -> None:
    """A legend below the panels in as many columns as fit; the figure grows by its height, and in width if need be."""
    for columns in range(min(len(entries), 8), 0, -1):
        legend = figure.legend(
            list(entries.values()), labels(list(entries)), loc="outside lower center", ncols=columns, handlelength=2.6,
            frameon=False,
        )  # fmt: skip
        for text in legend.get_texts():
            text.set_parse_math(False)
        box = legend.get_window_extent()
        if columns == 1 or box.width <= figure.bbox.width:
            break
        legend.remove()
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, box.width / figure.dpi), height + box.height / figure.dpi)


def add_title(figure: "Figure", title: str | None) -> None:
    """Write the title above the whole figure, where there is one."""
    if title:
        figure.suptitle(title, fontsize="medium")
