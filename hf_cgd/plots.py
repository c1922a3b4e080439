"""Pictures of finished runs: how each group fares, and where the weights went.

Nothing here touches matplotlib's global state or needs a display. Shapes: S runs (seeds), K groups, T log entries.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_cgd.metrics import GroupReport

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LogHistory = Sequence[Mapping[str, Any]]

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F6A00")
"""Okabe and Ito's colours, told apart under the common colour vision deficiencies; their yellow is darkened."""
DASHES: tuple[Any, ...] = ("solid", "dashed", "dashdot", (0, (1, 1)))
"""Line styles, used beside the colours so that lines differ in print as well."""
MUTED = "#8C8C8C"
"""Colour of the groups that are not picked out."""

EXTREMES = "#000000"
"""Colour of the lowest and the highest weight, which is all that is logged of very many groups."""

WEIGHT_KEY = "group_weight/"
LABELLED_GROUPS = 24
"""Panels of more groups than this show the worst ones only."""
WRITTEN_COSINES = 12
"""Groups up to which a matrix of interactions has its numbers written in."""


def weight_curves(log_history: LogHistory) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Group weights over training, read from `trainer.state.log_history`.

    Args:
        log_history: entries with "step" and, where the weights were logged, "group_weight/<name>".

    Returns:
        steps [T] and the weights [T] of each group by name, NaN where an entry lacks the group. Both are empty for a
        run without weights (ERM). Of more groups than the trainer logs by name, the extremes "min" and "max".
    """
    rows = []
    for entry in log_history:
        row = {k.removeprefix(WEIGHT_KEY): v for k, v in entry.items() if k.startswith(WEIGHT_KEY)}
        row |= {k.removeprefix("group_weight_"): v for k, v in entry.items() if k.startswith("group_weight_")}
        if row:
            rows.append((entry["step"], row))
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    steps = np.array([step for step, _ in rows], dtype=float)
    return steps, {name: np.array([row.get(name, np.nan) for _, row in rows], dtype=float) for name in names}


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


def draw_group_accuracies(
    axes: "Axes", reports: Sequence[GroupReport], colors: Mapping[str, str], order: Sequence[str] | None = None
) -> None:
    """Horizontal bars of the group accuracies of one method, first group on top, the worst one's number in bold.

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
    worst = int(means.argmin())
    for row, mean in enumerate(means):
        weight = "bold" if row == worst else "normal"
        # Inside the bar, or behind the whisker of a bar that is too short for it.
        place = 0.02 if mean - below[row] > 0.25 else mean + above[row] + 0.04
        axes.text(place, row, f"{mean:.2f}", va="center", fontsize="small", weight=weight)
    axes.set_yticks(rows, names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.02)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    spread = f"mean and deviation of {len(reports)} runs" if len(reports) > 1 else "95 % interval"
    axes.set_xlabel(f"accuracy\n{spread}", fontsize="small")
    _tidy(axes, "x")


def draw_group_weights(axes: "Axes", histories: Sequence[LogHistory], colors: Mapping[str, str]) -> None:
    """Group weights of one method over the optimizer steps.

    Lines are the means over the runs; with several runs a band spans from the lowest to the highest one (of many
    groups, for those in colour).

    Args:
        axes: what to draw on.
        histories: S times `trainer.state.log_history`, logged at the same steps.
        colors: colour of each group; the lines of groups in `MUTED` lie under the others.

    Raises:
        ValueError: no history, or runs that were logged at different steps.
    """
    if not histories:
        raise ValueError("Expected the log history of at least one run, got none.")
    curves = [weight_curves(history) for history in histories]
    steps, first = curves[0]
    if any(not np.array_equal(steps, other) for other, _ in curves[1:]):
        raise ValueError("The runs were logged at different steps; give them the same logging_steps and max_steps.")
    axes.set_xlabel("step")
    axes.set_ylabel("group weight")
    _tidy(axes, "y")
    if not first:
        axes.text(0.5, 0.5, "no group weights", transform=axes.transAxes, ha="center", va="center", color="#606060")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    picked = [name for name in first if colors.get(name, EXTREMES) != MUTED]
    for name in first:
        values = np.stack([weights[name] for _, weights in curves])
        color = colors.get(name, EXTREMES)
        style = DASHES[picked.index(name) % len(DASHES)] if name in picked else "solid"
        above, width = (3, 1.8) if name in picked else (2, 1.0)
        axes.plot(steps, values.mean(axis=0), color=color, linestyle=style, linewidth=width, zorder=above, label=name)
        if len(histories) > 1 and (name in picked or len(first) <= len(PALETTE)):
            axes.fill_between(
                steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.18, linewidth=0, zorder=above - 1
            )
    axes.set_ylim(bottom=0)
    axes.set_xlim(steps[0], steps[-1] if len(steps) > 1 else steps[0] + 1)


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

        figure = comparison_figure({"cgd": [trainer.group_report()]}, {"cgd": [trainer.state.log_history]})
        save_figure(figure, "groups.png")

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
        highlight = list(dict.fromkeys(names[int(mean.argmin())] for mean in means.values()))[: len(PALETTE)]
    colors = group_colors(names, highlight)
    many = len(names) > LABELLED_GROUPS
    shown = [names[row] for row in np.argsort(lowest, kind="stable")[:LABELLED_GROUPS]] if many else names

    bars_height = 0.9 + 0.24 * len(shown)
    heights = [bars_height] if histories is None else [bars_height, 2.1]
    longest = max(len(name) for name in shown)
    size = (max(5.0, 2.3 * len(reports) + 0.08 * longest + 0.3), sum(heights) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(heights), len(reports), squeeze=False, height_ratios=heights)
    for column, (method, runs) in enumerate(reports.items()):
        axes = grid[0, column]
        draw_group_accuracies(axes, runs, colors, shown)
        axes.set_title(f"{method}\nworst group {_worst(runs):.2f}", fontsize="medium")
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
            lines = {str(line.get_label()): line for line in with_lines[0].get_lines()}
            others = [name for name in lines if colors.get(name, EXTREMES) == MUTED]
            entries = {name: line for name, line in lines.items() if name not in others}
            if others:
                entries["other groups" if entries else "groups"] = lines[others[0]]
            figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False)
    note = f"the {len(shown)} of {len(names)} groups with the lowest accuracies" if many else None
    if title or note:
        figure.suptitle("\n".join(line for line in (title, note) if line), fontsize="medium")
    return figure


def weights_figure(
    histories: Mapping[str, Mapping[str, Sequence[LogHistory]]], *, unit: str = "step", title: str | None = None
) -> "Figure":
    """Group weights over training: one row for each method, in it a panel for each of its variants.

        weights_figure({"cgd": {"step size 0.1": [trainer.state.log_history]}})

    Args:
        histories: by method and variant, the log histories of the S runs; all runs have the same groups.
        unit: what a step is called.
        title: of the whole figure.

    Raises:
        ValueError: no panel, or histories without group weights or that were logged at different steps.
    """
    from matplotlib.figure import Figure

    columns = max((len(variants) for variants in histories.values()), default=0)
    if columns == 0:
        raise ValueError("Expected the log histories of at least one method, got none.")
    figure = Figure(figsize=(2.5 * columns + 0.6, 1.9 * len(histories) + 0.8), layout="constrained")
    grid = figure.subplots(len(histories), columns, squeeze=False, sharex=True, sharey=True)
    lines: dict[str, Artist] = {}
    for row, (method, variants) in zip(grid, histories.items(), strict=True):
        for axes, (variant, runs) in zip(row, variants.items(), strict=False):
            names = list(weight_curves(runs[0])[1]) if runs else []
            if not names:
                raise ValueError(f"{method!r}, {variant!r}: expected log histories with group weights, got none.")
            draw_group_weights(axes, runs, group_colors(names))
            axes.set_title(f"{method}, {variant}" if variant else method, fontsize="medium")
            lines |= {str(line.get_label()): line for line in axes.get_lines()}
        for axes in row[len(variants) :]:
            axes.set_axis_off()
    for axes in grid.flat:
        axes.set_ylim(0, 1)
        axes.set(xlabel="", ylabel="group weight" if axes in grid[:, 0] else "")
    for column in grid.T:
        lowest = [axes for axes in column if axes.axison][-1]
        lowest.set_xlabel(unit)
        lowest.tick_params(labelbottom=True)
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=4, frameon=False)
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def interactions_figure(cosines: Any, names: Sequence[str], *, title: str | None = None) -> "Figure":
    """The matrix of group interactions: whose training helps (blue) or harms (red) whom.

        interactions_figure(trainer.group_interactions, trainer.groups.names)

    Args:
        cosines: tensor or array [K, K] in [-1, 1], NaN where two groups never met (grey).
        names: K.
        title: of the figure.

    Raises:
        ValueError: another number of names than of rows.
    """
    from matplotlib.figure import Figure

    values = np.asarray(cosines, dtype=float)
    if values.shape != (len(names), len(names)):
        raise ValueError(f"Expected cosines [{len(names)}, {len(names)}] for {len(names)} names, got {values.shape}.")
    # Inches of the matrix and of the names beside it; points of the names, a little less than a row is high.
    side = min(max(0.45 * len(names), 2.2), 9.0)
    text = min(9.0, 0.7 * 72 * side / len(names))
    margin = 0.65 * text / 72 * max(len(name) for name in names)
    figure = Figure(figsize=(side + margin + 1.5, side + margin + 0.5), layout="compressed")
    axes = figure.subplots()
    axes.set_facecolor("#D9D9D9")
    image = axes.imshow(np.ma.masked_invalid(values), cmap="RdBu", vmin=-1, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=text)
    axes.set_yticks(range(len(names)), names, fontsize=text)
    axes.tick_params(length=0)
    if len(names) <= WRITTEN_COSINES:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "white" if abs(value) > 0.6 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=text)
    figure.colorbar(image, ax=axes, label="mean cosine of the gradients", fraction=0.046, pad=0.03)
    if title:
        figure.suptitle(title, fontsize="medium")
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
    figure = Figure(figsize=(2.4 * columns + 0.4, 2.4 * len(panels) + 0.7), layout="constrained")
    grid = figure.subplots(len(panels), columns, squeeze=False, sharex=True, sharey=True)
    classes = np.unique(np.concatenate([labels for groups in panels.values() for _, labels in groups.values()]))
    styles = dict(zip(classes.tolist(), zip(PALETTE, "ox^sDvP*", strict=True), strict=False))
    lines: dict[str, Artist] = {}
    for row, (data_set, groups) in zip(grid, panels.items(), strict=True):
        for axes, (group, (points, labels)) in zip(row, groups.items(), strict=False):
            # So that the few points of a small group are seen and the many of a large one do not hide each other.
            size = 14 if len(points) > 50 else 36
            for label, (color, marker) in styles.items():
                chosen = points[labels == label]
                lines[f"label {label}"] = axes.scatter(
                    *chosen.T, s=size, color=color, marker=marker, alpha=0.7, linewidths=0.8 if marker == "x" else 0
                )
            axes.set_title(f"{group} ({len(points)})", fontsize="medium")
            axes.set_aspect("equal")
            _tidy(axes, "both")
        row[0].set_ylabel(f"{data_set}\n$x_2$")
        for axes in row[len(groups) :]:
            axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("$x_1$")
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=len(lines), frameon=False)
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def save_figure(figure: "Figure", path: str | os.PathLike[str], *, vector: str | None = "svg") -> list[Path]:
    """Write the figure as `path` (its suffix says the format, 150 dots per inch) and as a vector graphic beside it.

    Args:
        figure: what to save.
        path: where to; missing folders are made.
        vector: format of the second file, "svg" or "pdf"; None for none.

    Returns:
        the files written.

    Raises:
        ValueError: a suffix that matplotlib cannot write.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path] if vector is None else list(dict.fromkeys([path, path.with_suffix(f".{vector}")]))
    for file in files:
        figure.savefig(file, dpi=150)
    return files


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


def _tidy(axes: "Axes", grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#E0E0E0", linewidth=0.6)  # type: ignore[arg-type]
