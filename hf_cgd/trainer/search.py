"""What the trials of a hyperparameter search are compared by."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import Trainer, TrainingArguments

from hf_cgd.metrics.group_metrics import collapse_beside, lower_is_better
from hf_cgd.monitors import GroupRobustWarning

DIRECTIONS = ("minimize", "maximize")
"""Those of one number; of several there is a list."""


class WorstGroupSearch(Trainer):
    """A `Trainer` whose search compares trials by their worst group."""

    @property
    def _worst_group_metric(self) -> str:
        """What trials are compared by where no metric was named."""
        return "worst_group_accuracy"

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """See `Trainer.hyperparameter_search`; trials are compared by their worst group.

        Knobs of the objective can be searched like any other field of `GroupRobustConfig`. Without a
        `compute_objective`, the best `metric_for_best_model` of a trial counts (where there is none the worst group's
        accuracy, or its loss of a model of tokens), in its own direction. (The parent's default adds up all metrics,
        group counts among them.)
        """
        compute_objective, direction = comparison(
            self.args, compute_objective, direction, lambda: self.state.log_history, self._worst_group_metric
        )
        return super().hyperparameter_search(hp_space, compute_objective, n_trials, direction, *args, **kwargs)


def comparison(
    args: TrainingArguments,
    compute_objective: Callable[[dict[str, float]], float] | None,
    direction: str | list[str] | None,
    log_history: Callable[[], Sequence[Mapping[str, float]]],
    of_groups: str = "worst_group_accuracy",
) -> tuple[Callable[[dict[str, float]], float], str | list[str]]:
    """What trials are compared by, a function of the latest metrics, and which direction is better.

    Args:
        args: those of the Trainer. `metric_for_best_model` is the metric, without it `of_groups`.
        compute_objective: the user's own function; None for the best evaluation so far, by the metric.
        direction: the user's own; None for that of the metric, or for "minimize" with a function of one's own.
        log_history: gives the log of the trial so far.
        of_groups: the metric where none was named.

    Raises:
        ValueError: a direction that is not the metric's.
    """
    if compute_objective is not None:
        if direction is None:
            warnings.warn(
                "compute_objective is given without a direction, so that its lowest value wins, as in the Trainer. Of "
                "an accuracy that is the worst trial: pass direction='maximize'. Pass 'minimize' if it is meant.",
                GroupRobustWarning,
                stacklevel=3,
            )
        return compute_objective, direction or "minimize"
    name = args.metric_for_best_model or of_groups
    name = name if name.startswith("eval_") else f"eval_{name}"
    # A metric of the user's own has the direction that was declared, not that of its name.
    is_declared = args.metric_for_best_model is not None and args.greater_is_better is not None
    lower = not args.greater_is_better if is_declared else lower_is_better(name)
    if direction in DIRECTIONS and getattr(args, "direction_is_a_guess", False):
        lower = direction == "minimize"
    usual = "minimize" if lower else "maximize"
    if direction in DIRECTIONS and direction != usual:
        raise ValueError(
            f"direction={direction!r} would choose the worst trial: of {name!r} {'lower' if lower else 'higher'} "
            f"values are better. Leave direction out, set greater_is_better={lower} if they are not, or pass a "
            "compute_objective."
        )
    return lambda metrics: best_so_far(name, lower, metrics, log_history()), direction or usual


def best_so_far(
    name: str, lower: bool, metrics: Mapping[str, float], log_history: Sequence[Mapping[str, float]]
) -> float:
    """The metric of the best evaluation of a trial, the latest one included.

    By an accuracy of groups, models that gave one class count only where there is no other.

    Args:
        name: that of the metric.
        lower: whether a lower value is better.
        metrics: those of the latest evaluation.
        log_history: the trial's log so far.

    Raises:
        ValueError: there is no such metric, or it was never defined.
    """
    entries = [entry for entry in (metrics, *log_history) if name in entry]
    collapse = collapse_beside(name)
    learned = [entry for entry in entries if collapse is None or not entry.get(collapse)]
    values = [entry[name] for entry in learned or entries]
    # What is not defined is no best value, wherever it stands among the others.
    values = [value for value in values if not math.isnan(value)]
    if not values:
        raise ValueError(f"Expected the metric {name!r} to compare trials by, got {sorted(metrics)}.")
    return min(values) if lower else max(values)
