"""What an experiment comes to: the table of the paper's kind, all that was tried, and pictures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hf_cgd.experiments.grid import Grid, Setting, runs_of, setting_name, value_name
from hf_cgd.experiments.selection import LAST_EVALUATIONS, Choice, RunResult
from hf_cgd.metrics import GroupReport, GroupRow
from hf_cgd.metrics.intervals import wilson_of_share
from hf_cgd.metrics.tables import in_units
from hf_cgd.plots import comparison_figure, sweep_figure
from hf_cgd.visible_numbers import decimals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("accuracy", "worst_group_accuracy")
"""Average and worst group, as in the paper."""
COLLAPSED = "ONE CLASS"
"""Marks runs that predict one class for all examples: they have learned nothing, whatever their score."""

Published = Mapping[tuple[str, str], Sequence[str]]
"""The paper's cells by name of the condition and objective."""


def result_rows(
    choices: Sequence[Choice],
    columns: Sequence[str] = COLUMNS,
    published: Published | None = None,
    split: str = "test",
) -> list[list[str]]:
    """Cells of the table of results: a row for each objective, under it the paper's; for each condition the columns.

    Mean (standard deviation) over the seeds; accuracies in per cent. Then come the chosen values and how many seeds
    there are and, where the reports tell, how far the worst group can be trusted: see `standing`. Last comes the last
    of `columns`, its mean over the evaluations at the end of the runs, which nobody chose, where all have left them.

    Args:
        choices: what `choose` gives.
        columns: metrics to show.
        published: numbers to set beside.
        split: where the metrics are from.
    """
    conditions = list(dict.fromkeys(choice.condition for choice in choices))
    head = [f"{setting_name(condition)} {column}".strip() for condition in conditions for column in columns]
    last = f"{columns[-1]}, last {LAST_EVALUATIONS} evaluations on validation"
    rows = [["", *head, "chosen, seeds", "worst group", last]]
    for objective in dict.fromkeys(choice.objective for choice in choices):
        own, papers = [objective], [f"{objective}, paper"]
        notes: dict[str, str] = {}
        standings: dict[str, str] = {}
        ends: dict[str, str] = {}
        for condition in conditions:
            choice = next((c for c in choices if (c.condition, c.objective) == (condition, objective)), None)
            own += [_cell(choice, column, split) for column in columns]
            papers += (published or {}).get((setting_name(condition), objective), [""] * len(columns))
            if choice is not None:
                notes[setting_name(condition)] = _note(choice)
                standings[setting_name(condition)] = standing(choice.results, split)
                ends[setting_name(condition)] = _at_the_end(choice, columns[-1])
        rows.append([*own, *map(_by_condition, (notes, standings, ends))])
        if any(papers[1:]):
            rows.append([*papers, "", "", ""])
    return _without_empty_end(rows, 2)


def search_rows(
    grid: Grid, results: Sequence[RunResult], choices: Sequence[Choice], split: str = "test"
) -> list[list[str]]:
    """Cells of the table of all that was tried: the metric of the choice on validation and, for the record, on test.

    Means over the seeds of the choice. The chosen values are marked with an asterisk; those with unfinished runs say
    how many have finished. The last column is `standing` on validation.
    """
    known = {result.run: result for result in results}
    chosen = {(choice.condition, choice.objective, choice.point) for choice in choices}
    # Without a test split the numbers are those of validation anyway.
    splits = list(dict.fromkeys(("validation", split)))
    columns = [f"{name} {grid.metric}" for name in splits]
    rows = [["condition", "objective", "values", *columns, "seeds", "worst group on validation"]]
    for condition in grid.all_conditions():
        for objective in grid.objectives:
            for point in grid.points(objective):
                runs = runs_of(condition, objective, point, grid.chosen_on)
                finished = [known[run] for run in runs if run in known]
                mark = " *" if (condition, objective, point) in chosen and point else ""
                done = f"{len(finished)}" if len(finished) == len(runs) else f"{len(finished)} of {len(runs)}"
                cells = [_mean(finished, grid.metric, name) for name in splits]
                worst = standing(finished, "validation")
                rows.append([setting_name(condition), objective, setting_name(point) + mark, *cells, done, worst])
    rows = _without_empty_end(rows, 1)
    if not grid.conditions:
        rows = [row[1:] for row in rows]
    return rows


def standing(results: Sequence[RunResult], split: str) -> str:
    """How far the worst group of some runs can be trusted: `a: n = 27, 37.3-72.4`, in per cent.

    The group with the lowest mean accuracy over the runs, how many examples of it a run is judged by (the least, where
    runs differ), and the 95 % Wilson interval of that accuracy on so many. Before it stands a mark where runs
    predict one class for all examples. "" where the reports tell neither.
    """
    mark, worst, known = _standing(results, split)
    return "; ".join(filter(None, (mark, f"{worst}: {known}" if known else "")))


def _standing(results: Sequence[RunResult], split: str) -> tuple[str, str, str]:
    """The mark, the worst group, and what is known of it; each "" where it is not to be told."""
    mark = worst = known = ""
    collapsed = sum(result.collapsed(split) for result in results)
    if collapsed:
        mark = f"{COLLAPSED} in {collapsed} of {len(results)} run{'s' * (len(results) > 1)}"
    tables = [
        {row["name"]: (row["accuracy"], row["count"]) for row in result.groups.get(split, ())
         if row.get("accuracy") is not None and row.get("count")}
        for result in results
    ]  # fmt: skip
    shared = [name for name in (tables[0] if tables else ()) if all(name in table for table in tables)]
    if shared:
        means = {name: float(np.mean([table[name][0] for table in tables])) for name in shared}
        worst = min(shared, key=means.__getitem__)
        count = min(table[worst][1] for table in tables)
        low, high = wilson_of_share(means[worst], count)
        known = f"n = {count}, {'-'.join(decimals(100 * bound, 1, 100.0) for bound in (low, high))}"
    return mark, worst, known


def reported_split(results: Iterable[RunResult]) -> str:
    """The split that results are reported on: "test" where every run has one, else "validation"."""
    return "test" if all("test" in result.metrics for result in results) else "validation"


def accuracy_figure(choices: Sequence[Choice], condition: Setting, split: str = "test") -> "Figure":
    """Accuracies of the groups under each objective, of the chosen values, with their spread over the seeds.

    Over each panel stands what `standing` says of its worst group.
    """
    reports = {
        _panel_title(choice, split): [_report(result, split, choice.objective) for result in choice.results]
        for choice in choices
        if choice.condition == condition and choice.results
    }
    return comparison_figure(reports, title=setting_name(condition) or None)


def _panel_title(choice: Choice, split: str) -> str:
    mark, _, known = _standing(choice.results, split)
    return "\n".join(filter(None, (choice.objective, mark, known)))


def condition_figure(choices: Sequence[Choice], metric: str, split: str = "test") -> "Figure":
    """The metric against the one condition of the grid, a number: a line for each objective, bands of standard errors.

    The legend marks objectives whose runs predict one class, and says where.

    Raises:
        ValueError: no or several conditions, or one that is not a number.
    """
    curves: dict[str, dict[float, np.ndarray]] = {}
    marked: dict[str, list[str]] = {}
    names = set()
    for choice in choices:
        if len(choice.condition) != 1 or not isinstance(choice.condition[0][1], (int, float)):
            raise ValueError(f"Expected one condition that is a number, got {setting_name(choice.condition)!r}.")
        names.add(choice.condition[0][0])
        if choice.results:
            curves.setdefault(choice.objective, {})[choice.condition[0][1]] = choice.test_values(metric, split)
        if choice.collapsed(split):
            marked.setdefault(choice.objective, []).append(value_name(choice.condition[0][1]))
    for objective, where in marked.items():
        curves = {
            f"{name} ({COLLAPSED} at {', '.join(where)})" if name == objective else name: points
            for name, points in curves.items()
        }
    return sweep_figure(curves, xlabel=names.pop(), ylabel=metric.replace("_", " "))


def learning_figure(choices: Sequence[Choice], condition: Setting, metric: str) -> "Figure | None":
    """The metric on validation against the step, a line for each objective; None where runs have left no evaluations.

    A step counts where all runs of an objective were evaluated.
    """
    curves: dict[str, dict[float, np.ndarray]] = {}
    for choice in choices:
        runs = [{e["step"]: e[metric] for e in r.evaluations if metric in e} for r in choice.results]
        shared = [step for step in (runs[0] if runs else ()) if all(step in run for run in runs)]
        if choice.condition == condition and shared:
            curves[choice.objective] = {step: np.array([run[step] for run in runs]) for step in shared}
    if not curves:
        return None
    ylabel = f"{metric.replace('_', ' ')}, validation"
    return sweep_figure(curves, xlabel="step", ylabel=ylabel, title=setting_name(condition) or None)


def _by_condition(texts: Mapping[str, str]) -> str:
    """One text where it is the same under all conditions, else each behind the name of its condition."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{condition}: {text}" for condition, text in texts.items() if text)


def _at_the_end(choice: Choice, column: str) -> str:
    values = np.array([result.last_evaluations(column) for result in choice.results], dtype=float)
    return in_units(values, column) if len(values) and np.isfinite(values).all() else ""


def _without_empty_end(rows: list[list[str]], last: int) -> list[list[str]]:
    """The table without those of its last columns that are empty below the head."""
    first = len(rows[0]) - last
    kept = [place for place in range(len(rows[0])) if place < first or any(row[place] for row in rows[1:])]
    return [[row[place] for place in kept] for row in rows]


def _report(result: RunResult, split: str, objective: str) -> GroupReport:
    return GroupReport(tuple(GroupRow(**row) for row in result.groups[split]), result.metrics[split], objective)


def _cell(choice: Choice | None, column: str, split: str) -> str:
    """Of the split, or of another one where the column names it: "id_test:worst_group_pearson"."""
    other, _, metric = column.rpartition(":")
    split = other or split
    if choice is None or any(metric not in result.metrics.get(split, {}) for result in choice.results):
        return ""
    return in_units(choice.test_values(metric, split), metric)


def _mean(results: Sequence[RunResult], metric: str, split: str) -> str:
    values = [result.metrics.get(split, {}).get(metric, np.nan) for result in results]
    return in_units(np.array(values, dtype=float), metric)


def _note(choice: Choice) -> str:
    return ", ".join(part for part in (setting_name(choice.point), str(len(choice.results))) if part)
