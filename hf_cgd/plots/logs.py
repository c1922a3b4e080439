"""Group weights and accuracies over training, read from the log of a run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hf_cgd.metrics.custom_metrics import lower_is_better_by_name

LogHistory = Sequence[Mapping[str, Any]]
WEIGHT_KEY = "group_weight/"
SCORES = {"accuracy": (0.0, 1.0), "pearson": (-1.0, 1.0), "perplexity": (1.0, None), "span_f1": (0.0, 1.0)}
"""Metrics of the groups with the bounds of their values, None for none; the first one found is drawn."""


class AccuracyCurves(NamedTuple):
    """How the groups fared at each evaluation of a run.

    Args:
        steps: [T].
        groups: [T] for each group by name, NaN where an evaluation lacks the group.
        worst: [T], that of the worst group, as logged: the lowest, of perplexities the highest; NaN where it was not
            defined.
        metric: "accuracy"; "pearson" of a regression, "perplexity" of a language model, "span_f1" of found answers.
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
    """Group accuracies over training (correlations, perplexities: see `SCORES`), from `trainer.state.log_history`.

    Of several evaluations at one step the first counts: a later one may be of the best model, loaded at the end.

    Args:
        log_history: entries with "step" and, of evaluations, "<prefix>_group_accuracy/<name>" and
            "<prefix>_worst_group_accuracy", or the same with another of `SCORES`.
        prefix: of the evaluation's metrics; "eval_<name>" for one of several evaluation sets.

    Raises:
        ValueError: no evaluation by groups under this prefix.
    """
    for metric in SCORES:
        key, worst_key = f"{prefix}_group_{metric}/", f"{prefix}_worst_group_{metric}"
        rows: dict[float, dict[str, float]] = {}
        worst: dict[float, float] = {}
        # A log that has it elsewhere lacks it where it was not defined: the groups that are left would flatter.
        is_logged = any(worst_key in entry for entry in log_history)
        for entry in log_history:
            row = {k.removeprefix(key): v for k, v in entry.items() if k.startswith(key)}
            if row and entry["step"] not in rows:
                rows[entry["step"]] = row
                worst_of = max if lower_is_better_by_name(metric) else min
                unlogged = math.nan if is_logged else worst_of(row.values())
                worst[entry["step"]] = entry.get(worst_key, unlogged)
        if rows:
            steps, groups = _columns(list(rows.items()))
            return AccuracyCurves(steps, groups, np.array(list(worst.values()), dtype=float), metric)
    infixes = [f"_group_{metric}/" for metric in SCORES]
    found = sorted({k.split(infix)[0] for entry in log_history for k in entry for infix in infixes if infix in k})
    remedy = "set eval_strategy, and evaluate on data that has the group column"
    if found:
        remedy = f"its prefixes are {found}: pass one of them"
    raise ValueError(f"The log has {', '.join(f'no {prefix}_group_{metric}/<name>' for metric in SCORES)}; {remedy}.")


def stack_runs(runs: Sequence[tuple[np.ndarray, dict[str, np.ndarray]]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps [T] and curves [S, T] by name, of S runs with the same steps and names."""
    if not runs:
        raise ValueError("Expected the log history of at least one run, got none.")
    steps, first = runs[0]
    for others, curves in runs[1:]:
        if not np.array_equal(steps, others):
            raise ValueError(
                f"The runs were logged at different steps, {_first_steps(steps)} and {_first_steps(others)}; give "
                "them the same max_steps and logging_steps (eval_steps, for evaluations)."
            )
        if set(first) != set(curves):
            raise ValueError(f"The runs have different groups, {list(first)[:20]} and {list(curves)[:20]}.")
    return steps, {name: np.stack([curves[name] for _, curves in runs]) for name in first}


def final_values(curves: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Mean over the runs at the last step at which all of them have the group; groups without any are left out."""
    means = {name: values.mean(axis=0) for name, values in curves.items()}
    return {name: float(mean[np.isfinite(mean)][-1]) for name, mean in means.items() if np.isfinite(mean).any()}


def _columns(rows: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps [T] and a column [T] for each name that some row has, NaN where a row lacks it."""
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    steps = np.array([step for step, _ in rows], dtype=float)
    return steps, {name: np.array([row.get(name, np.nan) for _, row in rows], dtype=float) for name in names}


def _first_steps(steps: np.ndarray) -> str:
    return ", ".join(f"{step:g}" for step in steps[:5]) + (", ..." if len(steps) > 5 else "") or "none"
