"""`hyperparameter_search` compares trials by their worst group, each like a run of its own."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from tiny import predicts_one_class, text_dataset, tiny_distilbert

from hf_cgd import GroupRobustTrainer
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.search import comparison

pytestmark = predicts_one_class

Build = Callable[..., GroupRobustTrainer]
STEP_SIZES = (0.01, 3.0)
ARGS: dict[str, Any] = {
    "objective": "group_dro", "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.05,
}  # fmt: skip


@pytest.fixture
def searching(trainer: Build, tmp_path: Path) -> Build:
    def build(**args: Any) -> GroupRobustTrainer:
        return trainer(
            ARGS | args,
            model_init=lambda trial=None: tiny_distilbert(),
            train_dataset=text_dataset(24, seed=0),
            eval_dataset=text_dataset(24, seed=5),
        )

    return build


def space(trial: Any) -> dict[str, Any]:
    return {"step_size": trial.suggest_categorical("step_size", list(STEP_SIZES))}


def search(built: GroupRobustTrainer, **options: Any) -> Any:
    sampler = optuna.samplers.GridSampler({"step_size": list(STEP_SIZES)})
    return built.hyperparameter_search(space, n_trials=2, backend="optuna", sampler=sampler, **options)


@pytest.mark.parametrize("metric", [None, "worst_group_loss"])
def test_trials_are_runs_of_their_own_and_their_best_evaluation_counts(searching: Build, metric: str | None) -> None:
    chosen = {} if metric is None else {"metric_for_best_model": metric}
    values, weights = {}, {}
    for step_size in STEP_SIZES:
        alone = searching(step_size=step_size, **chosen)
        alone.train()
        name = f"eval_{metric or 'worst_group_accuracy'}"
        logs = [entry for entry in alone.state.log_history if name in entry]
        assert len(logs) == 3
        if metric is None:
            logs = [entry for entry in logs if not entry["eval_one_class_predicted"]] or logs
        seen = [entry[name] for entry in logs]
        values[step_size] = max(seen) if metric is None else min(seen)
        weights[step_size] = alone.group_weights
    best = max(values, key=lambda step: values[step] if metric is None else -values[step])
    built = searching(**chosen)
    found = search(built)
    assert found.objective == values[best]
    assert built.group_objective.step_size in STEP_SIZES and built.objective in values.values()
    assert built.group_weights is not None
    assert built.group_weights.tolist() == weights[built.group_objective.step_size].tolist()


@pytest.mark.parametrize(
    ("metric", "greater", "values", "best", "direction"),
    [
        ("worst_group_fpr", False, [0.3, 0.1, 0.2], 0.1, "minimize"),
        ("gap_in_loss", True, [0.3, 0.1, 0.2], 0.3, "maximize"),
        ("worst_group_accuracy", None, [0.3, float("nan"), 0.6], 0.3, "maximize"),
        ("eval_loss", None, [0.3, 0.1, 0.6], 0.1, "minimize"),
    ],
)
def test_the_best_evaluation_by_the_declared_direction(
    metric: str, greater: bool | None, values: list[float], best: float, direction: str
) -> None:
    """The last evaluation is of a model that gives one class, which counts for no accuracy of groups."""
    args = SimpleNamespace(metric_for_best_model=metric, greater_is_better=greater)
    name = f"eval_{metric.removeprefix('eval_')}"
    logs = [{name: value, "eval_one_class_predicted": float(value == 0.6)} for value in values]
    of, found = comparison(args, None, None, lambda: logs[:-1])  # type: ignore[arg-type]
    assert (of(logs[-1]), found) == (best, direction)


def test_a_comparison_of_ones_own(searching: Build) -> None:
    """The last evaluation of a trial is passed to it."""
    last = []
    for step_size in STEP_SIZES:
        alone = searching(step_size=step_size)
        alone.train()
        last.append([entry["eval_accuracy"] for entry in alone.state.log_history if "eval_accuracy" in entry][-1])
    found = search(searching(), compute_objective=lambda metrics: 7 + metrics["eval_accuracy"], direction="maximize")
    assert found.objective == 7 + max(last)


def test_a_direction_that_would_choose_the_worst_trial_is_refused() -> None:
    """Unless nothing but the direction says what is meant: then the best evaluation of a trial follows it."""

    def args(metric: str, greater: bool | None = None, guess: bool = False) -> Any:
        return SimpleNamespace(metric_for_best_model=metric, greater_is_better=greater, direction_is_a_guess=guess)

    for metric, greater, wrong in [
        ("worst_group_accuracy", None, "minimize"), ("eval_loss", False, "maximize"), ("cost", False, "maximize"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"direction='{wrong}' would choose the worst trial"):
            comparison(args(metric, greater), None, wrong, list)
    logs = [{"eval_cost": value} for value in (3.0, 1.0, 2.0)]
    of, found = comparison(args("cost", True, guess=True), None, "minimize", lambda: logs)
    assert (of(logs[-1]), found) == (1.0, "minimize")
    with pytest.warns(GroupRobustWarning, match="without a direction, so that its lowest value wins"):
        assert comparison(args("cost", True), len, None, list)[1] == "minimize"  # type: ignore[arg-type]


def test_a_metric_that_is_not_there_is_named(searching: Build) -> None:
    with pytest.raises(ValueError, match="'eval_worst_group_pearson' to compare trials by, got .*eval_accuracy"):
        search(searching(metric_for_best_model="worst_group_pearson"))


def test_a_search_with_group_gradients(searching: Build) -> None:
    """The Trainer lets go of each trial's model, which must not be needed before there is the next one."""
    built = searching(objective="cgd")
    search(built)
    alone = searching(objective="cgd", step_size=built.group_objective.step_size)
    alone.train()
    assert built.robust_loss.updates == alone.robust_loss.updates == 6
    assert built.group_weights.tolist() == alone.group_weights.tolist()
