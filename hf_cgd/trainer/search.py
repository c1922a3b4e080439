"""What the trials of a hyperparameter search are compared by."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

from hf_cgd.metrics.group_metrics import collapse_beside, lower_is_better
from hf_cgd.monitors import GroupRobustWarning

DIRECTIONS = ("minimize", "maximize")
"""Those of one number; of several there is a list."""


class WorstGroupSearch(Trainer):
    """A `Trainer` whose search compares trials by their worst group, each trained by its own settings alone."""

    _settings_before: dict[str, Any] | None = None
    """Those of before the search in progress; None outside of one."""
    _trial_of_run: Any = None
    """That of the latest run; None for a run outside of a search."""

    @property
    def run_folder(self) -> str:
        """Where the files of the latest run go: those of a trial beside its checkpoints."""
        return str(self.args.output_dir if self._trial_of_run is None else self._get_output_dir(self._trial_of_run))

    def _begin_trial(self, trial: Any) -> None:
        """Before a run: what an earlier trial has set, and this one may not set, is as it was before the search."""
        self._trial_of_run = trial
        if trial is not None:
            self._restore_settings()

    def _restore_settings(self) -> None:
        for name, value in (self._settings_before or {}).items():
            setattr(self.args, name, value)

    def _forget_trials(self) -> None:
        """After a search, whose last trial is hardly the best one."""
        for name in ("model", "model_wrapped"):
            setattr(self, name, None)
        self.is_in_train = False
        self._trial_of_run = None

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

        Each trial begins with the settings of before the search, and these hold again afterwards. No model is left:
        set what the best trial had on `args`, and call `train()`.

        Raises:
            ValueError: a direction that is not the metric's, or several of them without a `compute_objective`.
        """
        compute_objective, direction = comparison(
            self.args, compute_objective, direction, lambda: self.state.log_history, self._worst_group_metric
        )
        self._settings_before = {option.name: getattr(self.args, option.name) for option in fields(self.args)}
        try:
            return super().hyperparameter_search(hp_space, compute_objective, n_trials, direction, *args, **kwargs)
        finally:
            self._restore_settings()
            self._settings_before = None
            self._forget_trials()


def require_model(model: nn.Module | None) -> nn.Module:
    """The model of a trainer; a ValueError where a search has let go of it."""
    if model is None:
        raise ValueError(
            "The trainer holds no model: hyperparameter_search lets go of that of each trial. Set what the best trial "
            "had (best.hyperparameters) on trainer.args and call train(), then ask again."
        )
    return model


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
        ValueError: a direction that is not the metric's, or several of them for one number.
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
    if direction is not None and not isinstance(direction, str):
        raise ValueError(
            f"direction={direction!r} asks for several numbers of a trial, and without a compute_objective there is "
            "one. Pass a compute_objective that returns as many, or leave direction out."
        )
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
    # An evaluation before the first step (eval_on_start) is one of a model that the trial has not trained.
    trained = (entry for entry in log_history if entry.get("step") != 0)
    entries = [entry for entry in (metrics, *trained) if name in entry]
    collapse = collapse_beside(name)
    learned = [entry for entry in entries if collapse is None or not entry.get(collapse)]
    values = [entry[name] for entry in learned or entries]
    # What is not defined is no best value, wherever it stands among the others.
    values = [value for value in values if not math.isnan(value)]
    if not values:
        raise ValueError(f"Expected the metric {name!r} to compare trials by, got {sorted(metrics)}.")
    return min(values) if lower else max(values)
