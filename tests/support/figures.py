"""Made reports and logs, and what can be read back from a figure."""

import itertools

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_cgd.metrics import GroupReport
from hf_cgd.plots import MUTED, PALETTE

NAMES = ["land", "water"]

COLORS = {"land": PALETTE[0], "water": MUTED}

LONG = "label:1 negation:0 hospital:University Medical Center"


def report(accuracies: dict[str, float]) -> GroupReport:
    metrics = {}
    for name, accuracy in accuracies.items():
        metrics[f"eval_group_accuracy/{name}"] = accuracy
        metrics[f"eval_group_accuracy_low/{name}"] = accuracy - 0.1
        metrics[f"eval_group_accuracy_high/{name}"] = accuracy + 0.05
    return GroupReport.from_metrics(metrics, "eval", list(accuracies), "cgd")


def history(weights: dict[str, list[float]], every: int = 10) -> list[dict[str, float]]:
    """A Trainer's log: training entries with weights, an evaluation between them, a summary last."""
    entries: list[dict[str, float]] = []
    for number, row in enumerate(zip(*weights.values(), strict=True), start=1):
        logged = {f"group_weight/{name}": value for name, value in zip(weights, row, strict=True)}
        entries.append({"loss": 1.0, "group_loss/land": 0.4, "step": number * every} | logged)
        entries.append({"eval_accuracy": 0.9, "step": number * every})
    return [*entries, {"train_runtime": 1.0, "step": 99}]


def evaluated(
    accuracies: dict[str, list[float | None]], every: int = 50, prefix: str = "eval", metric: str = "accuracy"
) -> list[dict[str, float]]:
    """A Trainer's log with an evaluation at every so many steps, None where it lacks the group."""
    entries: list[dict[str, float]] = []
    for number, row in enumerate(zip(*accuracies.values(), strict=True), start=1):
        named = {name: value for name, value in zip(accuracies, row, strict=True) if value is not None}
        entries.append({"loss": 1.0, "group_loss/land": 0.4, "step": number * every})
        logged = {f"{prefix}_group_{metric}/{name}": value for name, value in named.items()}
        logged[f"{prefix}_worst_group_{metric}"] = (max if metric == "perplexity" else min)(named.values())
        entries.append(logged | {f"{prefix}_loss": 1.0, "step": number * every})
    return [*entries, {"train_runtime": 1.0, "step": number * every}]


def lines_of(axes: Axes) -> dict[str, list[list[float]]]:
    return {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axes.get_lines()}


def bands(axes: Axes) -> list[dict[float, tuple[float, float]]]:
    """Lower and upper bound by x of each band, in the order in which they were drawn."""
    found = []
    for collection in axes.collections:
        bounds: dict[float, set[float]] = {}
        for x, y in collection.get_paths()[0].vertices:
            bounds.setdefault(round(float(x), 6), set()).add(round(float(y), 6))
        found.append({x: (min(ys), max(ys)) for x, ys in bounds.items()})
    return found


def assert_fits(figure: Figure) -> None:
    """Nothing is cut off, nothing lies on something else, and no panel is squashed."""
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.axison]
    boxes = [axes.get_tightbbox() for axes in panels]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    boxes += [text.get_window_extent() for text in figure.texts]
    for number, box in enumerate(boxes):
        assert figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1
        assert figure.bbox.y0 - 1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1
        assert not any(box.shrunk(0.99, 0.99).overlaps(other) for other in boxes[:number])
    for axes in panels:
        assert axes.bbox.height > 0.5 * figure.dpi
        labels = [label for label in axes.get_xticklabels() if label.get_text() and label.get_visible()]
        ticks = [label.get_window_extent() for label in labels if axes.xaxis.get_tick_params()["labelbottom"]]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(ticks, 2))


def axes_of(figure: Figure) -> Axes:
    return figure.subplots()


def bars(axes: Axes) -> dict[str, float]:
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    return {label: patch.get_width() for label, patch in zip(labels, axes.patches, strict=True)}


def whiskers(axes: Axes) -> list[list[float]]:
    """Lower and upper end of each whisker, from the top."""
    (lines,) = axes.containers[1].lines[2]
    return [segment[:, 0].tolist() for segment in lines.get_segments()]
