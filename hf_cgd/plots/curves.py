"""Pictures of a run over its steps: group weights, group accuracies."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hf_cgd.metrics.custom_metrics import lower_is_better_by_name
from hf_cgd.plots.lines import draw_curves, draw_runs
from hf_cgd.plots.logs import SCORES, LogHistory, accuracy_curves, final_values, stack_runs, weight_curves
from hf_cgd.plots.style import (
    PALETTE,
    PANELS_IN_A_ROW,
    WORST,
    add_legend,
    add_title,
    group_colors,
    label_edges,
    legend_entries,
    lowest_groups,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    steps, curves = stack_runs([weight_curves(history) for history in histories])
    axes.set_xlabel("step")
    axes.set_ylabel("group weight")
    tidy(axes, "y")
    if not curves:
        axes.text(0.5, 0.5, "no group weights", transform=axes.transAxes, ha="center", va="center", color="#606060")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    draw_curves(axes, steps, curves, colors)
    axes.set_ylim(bottom=0, auto=None)


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
            of each panel (none where all weigh alike).
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
            curves = stack_runs([weight_curves(history) for history in runs])[1] if runs else {}
            if not curves:
                raise ValueError(f"{method!r}, {variant!r}: expected log histories with group weights, got none.")
            last[method, variant] = final_values(curves)
    names = list(dict.fromkeys(name for table in last.values() for name in table))
    if highlight is None and len(names) > len(PALETTE):
        highlight = lowest_groups([{name: -weight for name, weight in table.items()} for table in last.values()])
    colors = group_colors(names, highlight)

    figure = Figure(figsize=(2.5 * columns + 0.6, 1.9 * len(histories) + 0.5), layout="constrained")
    grid = figure.subplots(len(histories), columns, squeeze=False, sharex=True, sharey=True)
    for row, (method, variants) in zip(grid, histories.items(), strict=True):
        for axes, (variant, runs) in zip(row, variants.items(), strict=False):
            draw_group_weights(axes, runs, colors)
            axes.set_title(f"{method}, {variant}" if variant else method, fontsize="medium")
        for axes in row[len(variants) :]:
            axes.set_axis_off()
    # On the whole range the weights of several groups are hard to tell apart while none of them has half of the mass.
    highest = max(np.max(line.get_ydata()) for axes in grid.flat for line in axes.get_lines())
    grid[0, 0].set_ylim(0, 1 if highest >= 0.5 else None)
    label_edges(grid, unit, "group weight")
    add_legend(figure, legend_entries(list(grid.flat), colors))
    add_title(figure, title)
    return figure


def accuracies_figure(
    histories: Mapping[str, Sequence[LogHistory]],
    *,
    prefix: str = "eval",
    highlight: Sequence[str] | None = None,
    unit: str = "step",
    title: str | None = None,
) -> "Figure":
    """Group accuracies over training, a panel for each method; correlations of a regression, perplexities of a
    language model (on a logarithmic axis where they span a power of ten).

    Lines are the means over the runs, a band spans from the lowest to the highest one (of many groups, for those in
    colour). The broad black line is the worst group, in each run and at each step its own.

    Args:
        histories: by method, the log histories of its S runs, evaluated at the same steps; all have the same groups.
        prefix: of the evaluation's metrics.
        highlight: groups to pick out by colour; None for all, or of many for the worst of each method at the end.
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
    curves = {method: stack_runs([(run.steps, run.groups) for run in runs]) for method, runs in logs.items()}
    names = list(next(iter(curves.values()))[1])
    metric = next(iter(logs.values()))[0].metric
    for method, (_, groups) in curves.items():
        if set(groups) != set(names):
            raise ValueError(f"{method!r} reports the groups {list(groups)[:20]}, the first method {names[:20]}.")
        if {run.metric for run in logs[method]} != {metric}:
            raise ValueError(f"{method!r} has another metric than the {metric} of the first method.")
    if highlight is None and len(names) > len(PALETTE):
        sign = -1 if lower_is_better_by_name(metric) else 1
        highlight = lowest_groups(
            [{name: sign * value for name, value in final_values(groups).items()} for _, groups in curves.values()]
        )
    colors = group_colors(names, highlight)

    columns = min(len(curves), PANELS_IN_A_ROW)
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(2.5 * columns + 0.6, 2.2 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, (method, (steps, groups)) in zip(grid.flat, curves.items(), strict=False):
        # Below the coloured lines, so that it frames the one that is worst.
        worst = np.stack([run.worst for run in logs[method]])
        draw_runs(axes, steps, worst, color=WORST, linewidth=3.5, zorder=2.5, label="worst group")
        draw_curves(axes, steps, groups, colors)
        axes.set_title(method, fontsize="medium")
        tidy(axes, "y")
    for axes in grid.flat[len(curves) :]:
        axes.set_axis_off()
    drawn = np.concatenate([values.ravel() for _, groups in curves.values() for values in groups.values()])
    _bound(grid[0, 0], metric, drawn[np.isfinite(drawn)])
    label_edges(grid, unit, f"group {metric}")
    add_legend(figure, legend_entries(list(grid.flat), colors | {"worst group": WORST}))
    add_title(figure, title)
    return figure


def _bound(axes: "Axes", metric: str, drawn: np.ndarray) -> None:
    """Keep the axis within what the metric can be, and in powers of ten where it has no upper bound and spans them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    (lowest, highest), (low, high) = SCORES[metric], axes.get_ylim()
    if highest is not None:
        axes.set_ylim(max(low, lowest - 0.02), min(high, highest + 0.02))
        return
    if len(drawn) == 0 or drawn.max() < 10 * drawn.min():
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if drawn.max() < 1e3 * drawn.min() else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    # Powers would be written as formulas, which cards switch off.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
