"""Tables and the picture of the cosine study."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_cgd.experiments.studies.cosines.data import StudyTask
from hf_cgd.experiments.studies.cosines.estimators import Method
from hf_cgd.experiments.studies.cosines.training import FULL, Outcome, Results
from hf_cgd.metrics.tables import markdown, mean_and_deviation
from hf_cgd.plots import DASHES, PALETTE
from hf_cgd.plots.style import tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHOOSING = 5
"""The first seeds, which choose step sizes and betas; the others report."""
FIXED_STEP = 0.1


def name_of(method: Method, step_size: float | None = None) -> str:
    """The method with its beta and, where it is given, its step size."""
    beta = "" if method.beta is None else f", beta {method.beta:g}"
    return method.name + beta + ("" if step_size is None else f", step {step_size:g}")


def batch_name(size: int) -> str:
    """What tables call a batch size."""
    return "full" if size == FULL else str(size)


def watched_weight(task: StudyTask, outcome: Outcome) -> np.ndarray:
    """[S] weight of the watched groups, mean over the steps."""
    return outcome.weights[:, task.watched[0]].sum(axis=1)


def chosen(outcomes: Sequence[Outcome], name: str) -> Outcome:
    """Of a method, the step size and beta with the lowest validation loss, mean over the choosing seeds."""
    own = [outcome for outcome in outcomes if outcome.method.name == name and outcome.step_size > 0]
    return min(own, key=lambda outcome: outcome.validation[:CHOOSING].mean())


def cosine_table(results: Results) -> str:
    """How far the estimates are from the cosines on all training data, along the path of equal weights."""
    sizes = list(results)
    head = [f"{batch_name(size)} {part}" for size in sizes for part in ("rms", "mean", "self")]
    rows = [["", *head]]
    for place, outcome in enumerate(results[sizes[0]]):
        if outcome.step_size or outcome.method.estimate is None or outcome.method.full or outcome.method.late:
            continue
        row = [name_of(outcome.method)]
        for size in sizes:
            other = results[size][place]
            numbers = [values[CHOOSING:].mean() for values in (other.cross_error, other.cross_bias, other.self_bias)]
            row += [f"{numbers[0]:.2f}", f"{numbers[1]:+.2f}", f"{1 + numbers[2]:.2f}"]
        rows.append(row)
    return markdown(rows)


def score_of(outcome: Outcome, accuracy: bool) -> np.ndarray:
    """Of the worst test group, on the reporting seeds: its loss, or its accuracy in per cent."""
    return (100 * outcome.accuracy if accuracy else outcome.test)[CHOOSING:]


def fixed_table(task: StudyTask, results: Results, accuracy: bool) -> str:
    """Every method at the same step size: worst test group and weight of the watched ones, on the reporting seeds."""
    rows = [["", *(f"{batch_name(size)} {part}" for size in results for part in ("worst", "weight"))]]
    first = next(iter(results.values()))
    for place, outcome in enumerate(first):
        if outcome.step_size == FIXED_STEP:
            row = [name_of(outcome.method)]
            for outcomes in results.values():
                weight = watched_weight(task, outcomes[place])[CHOOSING:]
                row += [mean_and_deviation(score_of(outcomes[place], accuracy), 1 if accuracy else 3)]
                row += [f"{weight.mean():.2f}"]
            rows.append(row)
    return markdown(rows)


def chosen_table(results: Results, accuracy: bool) -> str:
    """Every method at its own best step size and beta; beside its score, that less the score of CGD, seed by seed.

    The last number of a cell says with how many seeds the method is the better one.
    """
    rows = [["", *(f"{batch_name(size)} {part}" for size in results for part in ("worst", "less cgd")), "chosen"]]
    decimals = 1 if accuracy else 3
    for name in dict.fromkeys(outcome.method.name for outcome in next(iter(results.values()))):
        row, values = [name], []
        for outcomes in results.values():
            best = chosen(outcomes, name)
            score = score_of(best, accuracy)
            difference = score - score_of(chosen(outcomes, "cgd"), accuracy)
            wins = ((difference > 0) if accuracy else (difference < 0)).sum()
            row += [mean_and_deviation(score, decimals)]
            row += [f"{mean_and_deviation(difference, decimals)}, {wins}/{len(difference)}" if name != "cgd" else ""]
            values.append(f"{best.step_size:g}" + ("" if best.method.beta is None else f" ({best.method.beta:g})"))
        rows.append([*row, "; ".join(values)])
    return markdown(rows)


DRAWN = {
    "equal weights": None, "group_dro": None, "cgd": None, "split-half self term": None, "last-step self term": None,
    "gradient average": 0.9, "full-data cosines": None,
}  # fmt: skip
"""Lines of the picture, with their beta."""


def picture(studies: Sequence[tuple[StudyTask, Results]]) -> "Figure":
    """Weight of the watched group and worst group loss against batch size, a line for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(studies) + 0.4, 5.6), layout="constrained")
    grid = figure.subplots(2, len(studies), squeeze=False, sharex="col")
    for column, (task, results) in enumerate(studies):
        labels = [batch_name(size) for size in results]
        for color, (number, (name, beta)) in zip(PALETTE, enumerate(DRAWN.items()), strict=False):
            lines = []
            for outcomes in results.values():
                own = [o for o in outcomes if (o.method.name, o.step_size) == (name, FIXED_STEP)]
                lines += [o for o in own if beta in (None, o.method.beta)][:1]
            if len(lines) < len(labels):
                continue
            style: Any = {
                "color": color, "linestyle": DASHES[number % len(DASHES)], "marker": "os^Dv<P"[number],
                "markersize": 4, "linewidth": 1.6, "label": name if beta is None else f"{name}, beta {beta:g}",
            }  # fmt: skip
            for axes, values in (
                (grid[0, column], [watched_weight(task, o)[CHOOSING:] for o in lines]),
                (grid[1, column], [o.test[CHOOSING:] for o in lines]),
            ):
                axes.plot(labels, [value.mean() for value in values], **style)
        grid[0, column].set_title(f"{task.title}\n({task.watched[1]})", fontsize="medium")
        grid[0, column].set_ylim(0, 1)
        grid[1, column].set_xlabel("batch size")
        for axes in grid[:, column]:
            tidy(axes, "y")
    grid[0, 0].set_ylabel("weight of that group")
    grid[1, 0].set_ylabel("loss of the worst group")
    handles, names = max((axes.get_legend_handles_labels() for axes in grid[0]), key=lambda pair: len(pair[0]))
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return figure
