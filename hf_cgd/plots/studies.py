"""Pictures of studies: a result against a quantity, points of the plane."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hf_cgd.plots.lines import draw_band
from hf_cgd.plots.style import DASHES, MARKERS, PALETTE, PANELS_IN_A_ROW, add_legend, add_title, label_edges, tidy

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_SPAN = 20
"""Positive x that span more than this factor have a logarithmic axis."""


def sweep_figure(
    curves: Mapping[str, Mapping[float, Sequence[float] | np.ndarray]],
    *,
    xlabel: str,
    ylabel: str,
    title: str | None = None,
) -> "Figure":
    """How a result depends on a quantity x: one line for each method.

    Lines are the means over the seeds; a band of one standard error where there are several. The x axis is ticked at
    the measured x, and logarithmic where these are positive and span more than a factor `LOG_SPAN`.

        sweep_figure({"cgd": {0.01: of_some_runs, 0.1: of_others}}, xlabel="step size", ylabel="worst group accuracy")

    Args:
        curves: by method and x, the values [S] of its seeds; methods may have other x and another S.
        xlabel: name of x.
        ylabel: name of the values.
        title: of the figure.

    Raises:
        ValueError: no method, a method without any x, or an x without values or with one that is not finite.
    """
    from matplotlib.figure import Figure

    if not curves:
        raise ValueError("Expected the curve of at least one method, got none.")
    table: dict[str, dict[float, np.ndarray]] = {}
    for method, points in curves.items():
        if not points:
            raise ValueError(f"{method!r}: expected values at one x at least, got none.")
        table[method] = {float(x): np.asarray(points[x], dtype=float).reshape(-1) for x in sorted(points)}
        for x, values in table[method].items():
            if len(values) == 0 or not np.isfinite(values).all():
                raise ValueError(f"{method!r}, x = {x:g}: expected one finite value or more, got {values.tolist()}.")
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    lines: list[tuple[float, str, Artist]] = []
    for number, (method, measured) in enumerate(table.items()):
        means = np.array([values.mean() for values in measured.values()])
        errors = np.array([_standard_error(values) for values in measured.values()])
        # Dashes and markers are shifted at each turn of the palette, so that no two lines are alike.
        shifted = number + number // len(PALETTE)
        line = draw_band(
            axes, np.array(list(measured)), means, means - errors, means + errors, label=method, zorder=3,
            color=PALETTE[number % len(PALETTE)], linestyle=DASHES[shifted % len(DASHES)], linewidth=1.8,
            marker=MARKERS[shifted % len(MARKERS)], markersize=5,
        )  # fmt: skip
        lines.append((-float(means[-1]), method, line))
    ticks = sorted({x for measured in table.values() for x in measured})
    if ticks[0] > 0 and ticks[-1] / ticks[0] > LOG_SPAN:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    tidy(axes, "y")
    add_title(figure, title)
    # Entries in the order in which the lines end.
    lines.sort(key=lambda entry: entry[0])
    counts = sorted({len(values) for measured in table.values() for values in measured.values()})
    runs = f"{counts[-1]} runs" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"
    legend = figure.legend(
        [line for *_, line in lines], [method for _, method, _ in lines], loc="outside right upper", fontsize="small",
        title=f"mean and standard\nerror of {runs}" if counts[-1] > 1 else None, title_fontsize="small",
        alignment="left", handlelength=3.5, frameon=False,
    )  # fmt: skip
    width, height = figure.get_size_inches()
    box = legend.get_window_extent()
    figure.set_size_inches(width + box.width / figure.dpi, max(height, box.height / figure.dpi + 0.3))
    _write_ticks(figure, axes, ticks)
    return figure


def points_figure(
    panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]], *, title: str | None = None
) -> "Figure":
    """Points of the plane by their label: one row for each data set, in it a panel for each group.

    Args:
        panels: by data set and group, points [N, 2] and their labels [N], at most as many labels as there are colours.
        title: of the whole figure.

    Raises:
        ValueError: no panel.
    """
    from matplotlib.figure import Figure

    columns = max((len(groups) for groups in panels.values()), default=0)
    if columns == 0:
        raise ValueError("Expected the points of at least one group, got none.")
    columns = min(columns, PANELS_IN_A_ROW)
    rows = [
        (data_set, list(groups.items())[start : start + columns])
        for data_set, groups in panels.items()
        for start in range(0, len(groups), columns)
    ]
    figure = Figure(figsize=(2.4 * columns + 0.4, 2.4 * len(rows) + 0.4), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey=True)
    classes = np.unique(np.concatenate([labels for groups in panels.values() for _, labels in groups.values()]))
    styles = dict(zip(classes.tolist(), zip(PALETTE, MARKERS, strict=True), strict=False))
    lines: dict[str, Artist] = {}
    for row, (_, part) in zip(grid, rows, strict=True):
        for axes, (group, (points, labels)) in zip(row, part, strict=False):
            # So that the few points of a small group are seen and the many of a large one do not hide each other.
            size = 14 if len(points) > 50 else 36
            for label, (color, marker) in styles.items():
                chosen = points[labels == label]
                lines[f"label {label}"] = axes.scatter(
                    *chosen.T, s=size, color=color, marker=marker, alpha=0.7, linewidths=0.8 if marker == "x" else 0
                )
            axes.set_title(textwrap.fill(f"{group} ({len(points)})", 26), fontsize="medium")
            axes.set_aspect("equal")
            tidy(axes, "both")
        for axes in row[len(part) :]:
            axes.set_axis_off()
    label_edges(grid, "$x_1$", "")
    for row, (data_set, _) in zip(grid, rows, strict=True):
        row[0].set_ylabel(f"{data_set}\n$x_2$")
    add_legend(figure, lines)
    add_title(figure, title)
    return figure


def _standard_error(values: np.ndarray) -> float:
    """Of the mean of values [S]; NaN of a single one."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def _write_ticks(figure: "Figure", axes: "Axes", ticks: Sequence[float]) -> None:
    """Ticks on the x axis, with numbers where they do not run into the one before."""
    labels = [f"{x:g}" for x in ticks]
    axes.set_xticks(ticks, labels)
    figure.draw_without_rendering()
    free = -np.inf
    for number, tick in enumerate(axes.get_xticklabels()):
        box = tick.get_window_extent()
        if box.x0 < free:
            labels[number] = ""
        else:
            free = box.x1 + 0.06 * figure.dpi
    axes.set_xticks(ticks, labels)
