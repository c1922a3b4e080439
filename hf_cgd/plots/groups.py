"""Pictures of the groups at the end of training: a column of bars for each method."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hf_cgd.metrics import GroupReport
from hf_cgd.plots.curves import draw_group_weights
from hf_cgd.plots.logs import LogHistory
from hf_cgd.plots.style import PALETTE, add_legend, group_colors, legend_entries, lowest_groups, tidy
from hf_cgd.visible_numbers import decimals
from hf_cgd.visible_text import labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELLED_GROUPS = 24
"""Panels of more groups than this show the worst ones only."""


def draw_group_accuracies(
    axes: "Axes", reports: Sequence[GroupReport], colors: Mapping[str, str], order: Sequence[str] | None = None
) -> None:
    """Horizontal bars of the group accuracies of one method, first group on top, the lowest numbers in bold.

    One report: bars with its 95 % intervals. Several (seeds): bars of the means, whiskers of one standard deviation
    over the reports, and a dot for each.

    Args:
        axes: what to draw on.
        reports: S reports of the same groups, with accuracies in [0, 1].
        colors: colour of each group.
        order: groups to show, from top to bottom; None for all, in the order of the reports.

    Raises:
        ValueError: no report, or one without the accuracy of a group in `order`.
    """
    accuracies, names = _accuracies(reports, order)
    means = accuracies.mean(axis=0)
    rows = np.arange(len(names))
    axes.barh(rows, means, height=0.72, color=[colors[name] for name in names], alpha=0.55)
    if len(reports) > 1:
        below = above = accuracies.std(axis=0, ddof=1)
        # Apart from one another, so that equal values stay visible.
        offsets = np.linspace(-0.2, 0.2, len(reports))[:, None]
        axes.scatter(accuracies, rows + offsets, s=7, color="white", edgecolors="black", linewidths=0.6, zorder=3)
    else:
        below, above = np.array([_interval(reports[0], name) for name in names]).T
    axes.errorbar(means, rows, xerr=[below, above], fmt="none", ecolor="black", elinewidth=1, capsize=2)
    worst = means.min()
    for row, mean in enumerate(means):
        weight = "bold" if mean == worst else "normal"
        # Inside the bar, or behind the whisker of a bar that is too short for it.
        place = 0.02 if mean - below[row] > 0.25 else mean + above[row] + 0.04
        axes.text(place, row, decimals(mean, 2), va="center", fontsize="small", weight=weight)
    axes.set_yticks(rows, labels(names), parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    spread = f"mean and deviation of {len(reports)} runs" if len(reports) > 1 else "95 % interval"
    axes.set_xlabel(f"accuracy\n{spread}", fontsize="small")
    tidy(axes, "x")


def comparison_figure(
    reports: Mapping[str, Sequence[GroupReport]],
    histories: Mapping[str, Sequence[LogHistory]] | None = None,
    *,
    highlight: Sequence[str] | None = None,
    title: str | None = None,
) -> "Figure":
    """One column for each method: accuracies of the groups above, their weights over training below.

    A group has the same place and colour everywhere. Of more than `LABELLED_GROUPS` groups, those that are worst under
    some method are shown, and a line says so.

        comparison_figure({"cgd": [trainer.group_report()]}, {"cgd": [trainer.state.log_history]})

    Args:
        reports: by method, the reports of its S runs.
        histories: by method, the log histories of its runs; None leaves the lower row out.
        highlight: groups to pick out by colour; None for all, or of many groups for the worst of each method.
        title: of the whole figure.

    Raises:
        ValueError: no method, no report, methods that report different groups, or histories of another method.
    """
    from matplotlib.figure import Figure

    if not reports:
        raise ValueError("Expected the reports of at least one method, got none.")
    strangers = set(histories or ()) - set(reports)
    if strangers:
        raise ValueError(f"There are histories of {sorted(strangers)}, but no reports of them.")
    tables = {method: _accuracies(runs, None) for method, runs in reports.items()}
    names = next(iter(tables.values()))[1]
    for method, (_, others) in tables.items():
        if others != names:
            raise ValueError(f"{method!r} reports the groups {others[:20]}, the first method {names[:20]}.")
    means = {method: accuracies.mean(axis=0) for method, (accuracies, _) in tables.items()}
    lowest = np.stack(list(means.values())).min(axis=0)
    if highlight is None and len(names) > len(PALETTE):
        highlight = lowest_groups([dict(zip(names, mean.tolist(), strict=True)) for mean in means.values()])
    colors = group_colors(names, highlight)
    many = len(names) > LABELLED_GROUPS
    shown = [names[row] for row in np.argsort(lowest, kind="stable")[:LABELLED_GROUPS]] if many else names

    bars_height = 0.9 + 0.24 * len(shown)
    heights = [bars_height] if histories is None else [bars_height, 2.1]
    longest = max(map(len, labels(shown)))
    size = (max(5.0, 2.3 * len(reports) + 0.08 * longest + 0.3), sum(heights) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(heights), len(reports), squeeze=False, height_ratios=heights)
    for column, (method, runs) in enumerate(reports.items()):
        axes = grid[0, column]
        draw_group_accuracies(axes, runs, colors, shown)
        axes.set_title(f"{method}\nworst group {decimals(_worst(runs), 2)}", fontsize="medium")
        if column:
            axes.tick_params(labelleft=False)
    if histories is not None:
        drawn = [grid[1, column] for column in range(len(reports))]
        for axes, method in zip(drawn, reports, strict=True):
            draw_group_weights(axes, histories.get(method, [[]]), colors)
        with_lines = [axes for axes in drawn if axes.lines]
        top = max((axes.get_ylim()[1] for axes in with_lines), default=1.0)
        for axes in with_lines:
            axes.set_ylim(0, top)
        for axes in drawn[1:]:
            axes.set_ylabel("")
        if with_lines:
            add_legend(figure, legend_entries(with_lines, colors))
    note = f"the {len(shown)} of {len(names)} groups with the lowest accuracies" if many else None
    if title or note:
        figure.suptitle("\n".join(line for line in (title, note) if line), fontsize="medium")
    return figure


def _accuracies(reports: Sequence[GroupReport], order: Sequence[str] | None) -> tuple[np.ndarray, list[str]]:
    """Accuracies [S, K] and the K names; without `order`, those of all groups that were evaluated."""
    if not reports:
        raise ValueError("Expected the report of at least one run, got none.")
    tables = [{row.name: row.accuracy for row in report.rows if row.accuracy is not None} for report in reports]
    names = list(tables[0] if order is None else order)
    if not names:
        raise ValueError("The report has no group accuracies: evaluate on data that has the group column first.")
    for table in tables:
        missing = [name for name in names if name not in table]
        if missing:
            raise ValueError(f"A report lacks the accuracy of the group(s) {missing[:20]}; it has {list(table)[:20]}.")
    return np.array([[table[name] for name in names] for table in tables]), names


def _worst(reports: Sequence[GroupReport]) -> float:
    """Worst group's accuracy, mean over the runs, each with its own worst group."""
    return float(_accuracies(reports, None)[0].min(axis=1).mean())


def _interval(report: GroupReport, name: str) -> tuple[float, float]:
    """How far the 95 % interval reaches below and above the accuracy; 0 where the report holds none."""
    row = next(row for row in report.rows if row.name == name)
    if row.accuracy is None or row.accuracy_low is None or row.accuracy_high is None:
        return 0.0, 0.0
    return row.accuracy - row.accuracy_low, row.accuracy_high - row.accuracy
