"""The paper's rule of choice (section 5.2): the values with the best worst group on validation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_cgd.experiments.grid import Grid, Run, Setting, runs_of
from hf_cgd.metrics import ONE_CLASS

LAST_EVALUATIONS = 3
"""How many evaluations at the end of a run are averaged, to set beside the best one."""


UNDEFINED_BESIDE = {"pearson": "mse", "worst_group_pearson": "mse", "worst_group_perplexity": "token_accuracy",
                    "worst_group_loss": "loss"}  # fmt: skip
"""Metrics that a model may leave undefined, and what tells that its run reports of that kind all the same."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run says of itself.

    Attributes:
        run: which one.
        metrics: by split ("validation", "test"): metrics over all groups, of the epoch that was best on validation.
        groups: by split: the rows of the table of groups (`GroupReport.to_dict()["groups"]`).
        seconds: from start to end, as far as this was not interrupted.
        evaluations: metrics of each evaluation on validation, in the order of the run, with its "step"; () where the
            run has left none.
    """

    run: Run
    metrics: Mapping[str, Mapping[str, float]]
    groups: Mapping[str, Sequence[Mapping[str, Any]]]
    seconds: float
    evaluations: Sequence[Mapping[str, float]] = ()

    def last_evaluations(self, metric: str) -> float:
        """Mean of a metric over the last `LAST_EVALUATIONS`, which nobody chose; NaN where there are fewer.

        So it is where one of them has not defined it: those before it would flatter the model.
        """
        entries = [entry for entry in self.evaluations if metric in entry or "runtime" in entry]
        found = [entry.get(metric, math.nan) for entry in entries[-LAST_EVALUATIONS:]]
        return float(np.mean(found)) if len(found) == LAST_EVALUATIONS else math.nan

    def collapsed(self, split: str) -> bool:
        """Whether the model predicts one class for all examples of a split (False for reports that do not say)."""
        return self.metrics.get(split, {}).get(ONE_CLASS, 0.0) > 0


@dataclass(frozen=True)
class Choice:
    """The values chosen for one objective under one condition, and the runs with them.

    Attributes:
        point: what was chosen, () where there was nothing to choose.
        score: mean of the metric on validation, over the seeds that it was chosen on.
        candidates: number of combinations that it was chosen among.
        results: finished runs of this point, one for each seed of the grid that has finished.
    """

    condition: Setting
    objective: str
    point: Setting
    score: float
    candidates: int
    results: tuple[RunResult, ...]

    def collapsed(self, split: str = "test") -> int:
        """Number of the reported runs that predict one class for all examples of a split."""
        return sum(result.collapsed(split) for result in self.results)

    def test_values(self, metric: str, split: str = "test") -> np.ndarray:
        """A metric of the reported runs, [S]."""
        return np.array([result.metrics[split][metric] for result in self.results], dtype=float)


def choose(grid: Grid, results: Sequence[RunResult]) -> list[Choice]:
    """The best values of each objective under each condition, by the mean of `grid.metric` on validation.

    Only points whose runs have finished with all the seeds of the choice, with a finite score, take part; among equal
    ones the first in the order of the grid wins. An objective without such a point has no choice. A point with a run
    that predicts one class for all validation examples is not chosen while there is a point with fewer such runs,
    whatever their scores: where labels are unbalanced within the groups, a collapse can have the better score.

    Args:
        grid: what was run.
        results: of its finished runs, in any order.

    Raises:
        ValueError: a result without a validation split or without the metric.
    """
    known = {result.run: result for result in results}
    choices = []
    for condition in grid.all_conditions():
        for objective in grid.objectives:
            scored = [
                (point, score)
                for point in grid.points(objective)
                if (score := _score(grid, condition, objective, point, known)) is not None
            ]
            if not scored:
                continue
            sign = -1 if grid.lower_is_better else 1
            point, score = max(
                scored,
                key=lambda pair: (-_collapsed(grid, condition, objective, pair[0], known), sign * pair[1]),
            )
            runs = runs_of(condition, objective, point, grid.seeds)
            own = tuple(known[run] for run in runs if run in known)
            choices.append(Choice(condition, objective, point, score, len(scored), own))
    return choices


def reported_runs(grid: Grid, choices: Sequence[Choice]) -> list[Run]:
    """What was chosen, with all seeds that are reported."""
    return [run for c in choices for run in runs_of(c.condition, c.objective, c.point, grid.seeds)]


def _score(
    grid: Grid, condition: Setting, objective: str, point: Setting, known: Mapping[Run, RunResult]
) -> float | None:
    """Mean over the seeds of the choice, None where a run is missing or its score is not finite."""
    runs = runs_of(condition, objective, point, grid.chosen_on)
    if any(run not in known for run in runs):
        return None
    scores = [validation_score(known[run], grid.metric) for run in runs]
    return float(np.mean(scores)) if all(map(math.isfinite, scores)) else None


def _collapsed(grid: Grid, condition: Setting, objective: str, point: Setting, known: Mapping[Run, RunResult]) -> int:
    """Number of the runs that a point is chosen by that predict one class on validation."""
    return sum(known[run].collapsed("validation") for run in runs_of(condition, objective, point, grid.chosen_on))


def validation_score(result: RunResult, metric: str) -> float:
    """The metric on validation; NaN where it is one that this split has not defined for the model.

    Raises:
        ValueError: the run has no validation split, or not this metric.
    """
    found = result.metrics.get("validation", {})
    if metric not in found and UNDEFINED_BESIDE.get(metric) in found:
        return math.nan
    if metric not in found:
        raise ValueError(
            f"{result.run.name}: expected {metric!r} of a validation split, got {sorted(found) or 'no such split'}. "
            "Values are chosen on validation: give the recipe a validation split, or set metric to one of these."
        )
    value: float | None = found[metric]
    return math.nan if value is None else value
