"""What the trials of a hyperparameter search are compared by."""

import math
from collections.abc import Callable, Mapping, Sequence

from transformers import TrainingArguments

from hf_cgd.metrics import lower_is_better


def comparison(
    args: TrainingArguments,
    compute_objective: Callable[[dict[str, float]], float] | None,
    direction: str | list[str] | None,
    log_history: Callable[[], Sequence[Mapping[str, float]]],
) -> tuple[Callable[[dict[str, float]], float], str | list[str]]:
    """What trials are compared by, a function of the latest metrics, and which direction is better.

    Args:
        args: those of the Trainer. `metric_for_best_model` is the metric, without it the accuracy of the worst group.
        compute_objective: the user's own function; None for the best evaluation so far, by the metric.
        direction: the user's own; None for that of the metric, or for "minimize" with a function of one's own.
        log_history: gives the log of the trial so far.
    """
    if compute_objective is not None:
        return compute_objective, direction or "minimize"
    name = args.metric_for_best_model or "worst_group_accuracy"
    name = name if name.startswith("eval_") else f"eval_{name}"
    usual = "minimize" if lower_is_better(name) else "maximize"
    return lambda metrics: best_so_far(name, metrics, log_history()), direction or usual


def best_so_far(name: str, metrics: Mapping[str, float], log_history: Sequence[Mapping[str, float]]) -> float:
    """The metric of the best evaluation of a trial, the latest one included.

    Args:
        name: that of the metric.
        metrics: those of the latest evaluation.
        log_history: the trial's log so far.

    Raises:
        ValueError: there is no such metric.
    """
    if name not in metrics:
        raise ValueError(f"Expected the metric {name!r} to compare trials by, got {sorted(metrics)}.")
    values = [metrics[name], *(entry[name] for entry in log_history if name in entry)]
    # What is not defined is no best value, wherever it stands among the others.
    values = [value for value in values if not math.isnan(value)] or values
    return min(values) if lower_is_better(name) else max(values)
