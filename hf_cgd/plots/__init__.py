"""Pictures of finished runs: how each group fares, and where the weights went.

Nothing here touches matplotlib's global state or needs a display. Shapes: S runs (seeds), K groups, T log entries.
"""

import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_cgd.metrics import GroupReport

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LogHistory = Sequence[Mapping[str, Any]]

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

WEIGHT_KEY = "group_weight/"
SCORES = {"accuracy": 0.0, "pearson": -1.0}
"""Metrics of the groups, at most 1 and better when higher, with their lower bounds; the first one found is drawn."""
LABELLED_GROUPS = 24
"""Panels of more groups than this show the worst ones only."""
WRITTEN_COSINES = 12
"""Groups up to which a matrix of interactions has its numbers written in."""
MARKED_STEPS = 12
"""Steps up to which each point of a curve has a marker: few points, or a single one, make no line that is seen."""
PANELS_IN_A_ROW = 6
"""Figures of more panels than this go on in a further row."""
LOG_SPAN = 20
"""Positive x that span more than this factor have a logarithmic axis."""


class AccuracyCurves(NamedTuple):
    """How the groups fared at each evaluation of a run.

    Args:
        steps: [T].
        groups: [T] for each group by name, NaN where an evaluation lacks the group.
        worst: [T], the lowest of the groups, as logged.
        metric: "accuracy", or "pearson" of a regression.
    """

    steps: np.ndarray
    groups: dict[str, np.ndarray]
    worst: np.ndarray
    metric: str


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
    return _columns(rows)


def accuracy_curves(log_history: LogHistory, prefix: str = "eval") -> AccuracyCurves:
    """Group accuracies (correlations, for a regression) over training, read from `trainer.state.log_history`.

    Of several evaluations at one step the first counts: a later one may be of the best model, loaded at the end.

    Args:
        log_history: entries with "step" and, of evaluations, "<prefix>_group_accuracy/<name>" and
            "<prefix>_worst_group_accuracy", or the same with "pearson".
        prefix: of the evaluation's metrics; "eval_<name>" for one of several evaluation sets.

    Raises:
        ValueError: no evaluation by groups under this prefix.
    """
    for metric in SCORES:
        key, worst_key = f"{prefix}_group_{metric}/", f"{prefix}_worst_group_{metric}"
        rows: dict[float, dict[str, float]] = {}
        worst: dict[float, float] = {}
        for entry in log_history:
            row = {k.removeprefix(key): v for k, v in entry.items() if k.startswith(key)}
            if row and entry["step"] not in rows:
                rows[entry["step"]] = row
                worst[entry["step"]] = entry.get(worst_key, np.nan)
        if rows:
            steps, groups = _columns(list(rows.items()))
            return AccuracyCurves(steps, groups, np.array(list(worst.values()), dtype=float), metric)
    infixes = [f"_group_{metric}/" for metric in SCORES]
    found = sorted({k.split(infix)[0] for entry in log_history for k in entry for infix in infixes if infix in k})
    remedy = "set eval_strategy, and evaluate on data that has the group column"
    if found:
        remedy = f"its prefixes are {found}: pass one of them"
    raise ValueError(f"The log has no {prefix}_group_accuracy/<name> and no {prefix}_group_pearson/<name>; {remedy}.")


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
        ValueError: no history, runs that were logged at different steps, or with different groups.
    """
    steps, curves = _stack([weight_curves(history) for history in histories])
    axes.set_xlabel("step")
    axes.set_ylabel("group weight")
    _tidy(axes, "y")
    if not curves:
        axes.text(0.5, 0.5, "no group weights", transform=axes.transAxes, ha="center", va="center", color="#606060")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    _draw_curves(axes, steps, curves, colors)
    axes.set_ylim(bottom=0, auto=None)


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
        highlight = _ends(dict(zip(names, mean.tolist(), strict=True)) for mean in means.values())
    colors = group_colors(names, highlight)
    many = len(names) > LABELLED_GROUPS
    shown = [names[row] for row in np.argsort(lowest, kind="stable")[:LABELLED_GROUPS]] if many else names

    bars_height = 0.9 + 0.24 * len(shown)
    heights = [bars_height] if histories is None else [bars_height, 2.1]
    longest = max(len(name) for name in shown)
    size = (max(5.0, 2.3 * len(reports) + 0.08 * longest + 0.3), sum(heights) + 0.4)
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
            _add_legend(figure, _legend_entries(with_lines, colors))
    note = f"the {len(shown)} of {len(names)} groups with the lowest accuracies" if many else None
    if title or note:
        figure.suptitle("\n".join(line for line in (title, note) if line), fontsize="medium")
    return figure


def weights_figure(
    histories: Mapping[str, Mapping[str, Sequence[LogHistory]]],
    *,
    highlight: Sequence[str] | None = None,
    unit: str = "step",
    title: str | None = None,
) -> "Figure":
    """Group weights over training: one row for each method, in it a panel for each of its variants.

        weights_figure({"cgd": {"step size 0.1": [trainer.state.log_history]}})

    Args:
        histories: by method and variant, the log histories of the S runs; all runs have the same groups.
        highlight: groups to pick out by colour; None for all, or of many groups for those that weigh most at the end
            of each panel.
        unit: what a step is called.
        title: of the whole figure.

    Raises:
        ValueError: no panel, or histories without group weights, with other groups or logged at different steps.
    """
    from matplotlib.figure import Figure

    columns = max((len(variants) for variants in histories.values()), default=0)
    if columns == 0:
        raise ValueError("Expected the log histories of at least one method, got none.")
    last = {}
    for method, variants in histories.items():
        for variant, runs in variants.items():
            curves = _stack([weight_curves(history) for history in runs])[1] if runs else {}
            if not curves:
                raise ValueError(f"{method!r}, {variant!r}: expected log histories with group weights, got none.")
            last[method, variant] = _last(curves)
    names = list(dict.fromkeys(name for table in last.values() for name in table))
    many = len(names) > len(PALETTE)
    if highlight is None and many:
        highlight = _ends({name: -weight for name, weight in table.items()} for table in last.values())
    colors = group_colors(names, highlight)

    figure = Figure(figsize=(2.5 * columns + 0.6, 1.9 * len(histories) + 0.5), layout="constrained")
    grid = figure.subplots(len(histories), columns, squeeze=False, sharex=True, sharey=True)
    for row, (method, variants) in zip(grid, histories.items(), strict=True):
        for axes, (variant, runs) in zip(row, variants.items(), strict=False):
            draw_group_weights(axes, runs, colors)
            axes.set_title(f"{method}, {variant}" if variant else method, fontsize="medium")
        for axes in row[len(variants) :]:
            axes.set_axis_off()
    # The weights of many groups are too small to be seen on the whole range.
    grid[0, 0].set_ylim(0, None if many else 1)
    _label_edges(grid, unit, "group weight")
    _add_legend(figure, _legend_entries(list(grid.flat), colors))
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def accuracies_figure(
    histories: Mapping[str, Sequence[LogHistory]],
    *,
    prefix: str = "eval",
    highlight: Sequence[str] | None = None,
    unit: str = "step",
    title: str | None = None,
) -> "Figure":
    """Group accuracies over training, a panel for each method; correlations, for a regression.

    Lines are the means over the runs, with several runs a band spans from the lowest to the highest one (of many
    groups, for those in colour); the broad black line is the worst group, in each run and at each step its own. Points
    at which a run lacks the group are left out.

        accuracies_figure({"erm": [erm.state.log_history], "cgd": [cgd.state.log_history]})

    Args:
        histories: by method, the log histories of its S runs, evaluated at the same steps; all have the same groups.
        prefix: of the evaluation's metrics.
        highlight: groups to pick out by colour; None for all, or of many groups for the worst of each method at the
            end of training.
        unit: what a step is called.
        title: of the whole figure.

    Raises:
        ValueError: no method, no run, a log without evaluation by groups, runs of a method that were evaluated at
            different steps, or other groups or another metric in some run.
    """
    from matplotlib.figure import Figure

    if not histories:
        raise ValueError("Expected the log histories of at least one method, got none.")
    logs = {method: [accuracy_curves(history, prefix) for history in runs] for method, runs in histories.items()}
    curves = {method: _stack([(run.steps, run.groups) for run in runs]) for method, runs in logs.items()}
    names = list(next(iter(curves.values()))[1])
    metric = next(iter(logs.values()))[0].metric
    for method, (_, groups) in curves.items():
        if set(groups) != set(names):
            raise ValueError(f"{method!r} reports the groups {list(groups)[:20]}, the first method {names[:20]}.")
        if {run.metric for run in logs[method]} != {metric}:
            raise ValueError(f"{method!r} has another metric than the {metric} of the first method.")
    if highlight is None and len(names) > len(PALETTE):
        highlight = _ends(_last(groups) for _, groups in curves.values())
    colors = group_colors(names, highlight)

    columns = min(len(curves), PANELS_IN_A_ROW)
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(2.5 * columns + 0.6, 2.2 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, (method, (steps, groups)) in zip(grid.flat, curves.items(), strict=False):
        # Below the coloured lines, so that it frames the one that is worst.
        worst = np.stack([run.worst for run in logs[method]])
        _draw_runs(axes, steps, worst, color=WORST, linewidth=3.5, zorder=2.5, label="worst group")
        _draw_curves(axes, steps, groups, colors)
        axes.set_title(method, fontsize="medium")
        _tidy(axes, "y")
    for axes in grid.flat[len(curves) :]:
        axes.set_axis_off()
    low, high = grid[0, 0].get_ylim()
    grid[0, 0].set_ylim(max(low, SCORES[metric] - 0.02), min(high, 1.02))
    _label_edges(grid, unit, f"group {metric}")
    _add_legend(figure, _legend_entries(list(grid.flat), colors | {"worst group": WORST}))
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


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
        line = _draw_band(
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
    _tidy(axes, "y")
    if title:
        figure.suptitle(title, fontsize="medium")
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
    _set_ticks(figure, axes, ticks)
    return figure


def interactions_figure(cosines: Any, names: Sequence[str], *, title: str | None = None) -> "Figure":
    """The matrix of group interactions: whose training helps (blue) or harms (red) whom.

        interactions_figure(trainer.group_interactions, trainer.groups.names)

    Args:
        cosines: tensor or array [K, K] in [-1, 1], NaN where two groups never met (hatched).
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
    axes.patch.set(facecolor="#D9D9D9", edgecolor="#808080", hatch="////", linewidth=0)
    image = axes.imshow(np.ma.masked_invalid(values), cmap="RdBu", vmin=-1, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=text)
    axes.set_yticks(range(len(names)), names, fontsize=text)
    axes.tick_params(length=0)
    if len(names) <= WRITTEN_COSINES:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "white" if abs(value) > 0.6 else "black"
                axes.text(column, row, f"{value:z.2f}", ha="center", va="center", color=ink, fontsize=text)
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
            _tidy(axes, "both")
        for axes in row[len(part) :]:
            axes.set_axis_off()
    _label_edges(grid, "$x_1$", "")
    for row, (data_set, _) in zip(grid, rows, strict=True):
        row[0].set_ylabel(f"{data_set}\n$x_2$")
    _add_legend(figure, lines)
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


def _columns(rows: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps [T] and a column [T] for each name that some row has, NaN where a row lacks it."""
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    steps = np.array([step for step, _ in rows], dtype=float)
    return steps, {name: np.array([row.get(name, np.nan) for _, row in rows], dtype=float) for name in names}


def _stack(runs: Sequence[tuple[np.ndarray, dict[str, np.ndarray]]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps [T] and curves [S, T] by name, of S runs with the same steps and names."""
    if not runs:
        raise ValueError("Expected the log history of at least one run, got none.")
    steps, first = runs[0]
    for others, curves in runs[1:]:
        if not np.array_equal(steps, others):
            raise ValueError(
                f"The runs were logged at different steps, {_ellipsis(steps)} and {_ellipsis(others)}; give them the "
                "same max_steps and logging_steps (eval_steps, for evaluations)."
            )
        if set(first) != set(curves):
            raise ValueError(f"The runs have different groups, {list(first)[:20]} and {list(curves)[:20]}.")
    return steps, {name: np.stack([curves[name] for _, curves in runs]) for name in first}


def _ellipsis(steps: np.ndarray) -> str:
    return ", ".join(f"{step:g}" for step in steps[:5]) + (", ..." if len(steps) > 5 else "") or "none"


def _last(curves: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Mean over the runs at the last step at which all of them have the group; groups without any are left out."""
    means = {name: values.mean(axis=0) for name, values in curves.items()}
    return {name: float(mean[np.isfinite(mean)][-1]) for name, mean in means.items() if np.isfinite(mean).any()}


def _ends(tables: Iterable[Mapping[str, float]]) -> list[str]:
    """The lowest group of each table, once each and as many as there are colours."""
    lowest = [min(table, key=table.__getitem__) for table in tables if table]
    return list(dict.fromkeys(lowest))[: len(PALETTE)]


def _draw_curves(axes: "Axes", steps: np.ndarray, curves: Mapping[str, np.ndarray], colors: Mapping[str, str]) -> None:
    """Curves [S, T] of the groups: those in colour above the others and, of many groups, with bands they alone."""
    picked = [name for name in curves if colors.get(name, EXTREMES) != MUTED]
    for name, values in curves.items():
        style: dict[str, Any] = {"linestyle": "solid", "linewidth": 1.0, "zorder": 2}
        if name in picked:
            style = {"linestyle": DASHES[picked.index(name) % len(DASHES)], "linewidth": 1.8, "zorder": 3}
        band = name in picked or len(curves) <= len(PALETTE)
        _draw_runs(axes, steps, values, band=band, color=colors.get(name, EXTREMES), label=name, **style)


def _draw_runs(axes: "Axes", steps: np.ndarray, values: np.ndarray, *, band: bool = True, **style: Any) -> None:
    """Mean of the runs [S, T] with a band from the lowest to the highest one, where no run is NaN."""
    from matplotlib.ticker import MaxNLocator

    steps, values = steps[np.isfinite(values).all(axis=0)], values[:, np.isfinite(values).all(axis=0)]
    if len(steps) <= MARKED_STEPS:
        style |= {"marker": "o", "markersize": 2 * style["linewidth"]}
    low, high = (values.min(axis=0), values.max(axis=0)) if band and len(values) > 1 else (None, None)
    _draw_band(axes, steps, values.mean(axis=0), low, high, **style)
    axes.set_xmargin(0.03)
    # Narrow panels have room for a few numbers of six digits.
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 2.5, 5, 10], integer=True))


def _draw_band(
    axes: "Axes", x: np.ndarray, means: np.ndarray, low: np.ndarray | None, high: np.ndarray | None, **style: Any
) -> "Artist":
    """A line and, unless its bounds are None or NaN, a band below it; returns the line."""
    (line,) = axes.plot(x, means, **style)
    if low is not None and high is not None and np.isfinite(low).any():
        below = style["zorder"] - 1
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0, zorder=below)
    return line


def _standard_error(values: np.ndarray) -> float:
    """Of the mean of values [S]; NaN of a single one."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def _label_edges(grid: np.ndarray, xlabel: str, ylabel: str) -> None:
    """Name the y axis on the left of a grid of axes, and the x axis under the lowest panel of each column."""
    for axes in grid.flat:
        axes.set(xlabel="", ylabel=ylabel if axes in grid[:, 0] else "")
    for column in grid.T:
        lowest = [axes for axes in column if axes.axison][-1]
        lowest.set_xlabel(xlabel)
        lowest.tick_params(labelbottom=True)


def _legend_entries(panels: Sequence["Axes"], colors: Mapping[str, str]) -> dict[str, "Artist"]:
    """Lines by name: each one in colour, and one for all others."""
    lines: dict[str, Artist] = {str(line.get_label()): line for axes in panels for line in axes.get_lines()}
    others = [name for name in lines if colors.get(name, EXTREMES) == MUTED]
    entries = {name: line for name, line in lines.items() if name not in others}
    if others:
        entries["other groups" if entries else "groups"] = lines[others[0]]
    return entries


def _add_legend(figure: "Figure", entries: Mapping[str, "Artist"]) -> None:
    """A legend below the panels in as many columns as fit; the figure grows by its height, and in width if need be."""
    for columns in range(min(len(entries), 8), 0, -1):
        legend = figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=columns, handlelength=2.6,
            frameon=False,
        )  # fmt: skip
        box = legend.get_window_extent()
        if columns == 1 or box.width <= figure.bbox.width:
            break
        legend.remove()
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, box.width / figure.dpi), height + box.height / figure.dpi)


def _set_ticks(figure: "Figure", axes: "Axes", ticks: Sequence[float]) -> None:
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


def _tidy(axes: "Axes", grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#E0E0E0", linewidth=0.6)  # type: ignore[arg-type]
