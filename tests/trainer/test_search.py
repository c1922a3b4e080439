"""`hyperparameter_search` compares trials by their worst group, each like a run of its own."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
from tiny import parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from transformers import TrainerCallback

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.history import read_group_history
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


def of_trials(built: GroupRobustTrainer, space: Callable[[Any], dict[str, Any]], grid: dict[str, list[Any]]) -> Any:
    """Settings, group weights and parameters at the end of each trial, and the best one."""
    found: list[tuple[dict[str, Any], Any, torch.Tensor]] = []

    class Note(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            weights = None if built.group_weights is None else built.group_weights.tolist()
            found.append((dict(state.trial_params or {}), weights, parameters_of(built.model)))

    built.add_callback(Note())
    size = math.prod(map(len, grid.values()))
    sampler = optuna.samplers.GridSampler(grid, seed=0)
    best = built.hyperparameter_search(space, n_trials=size, backend="optuna", sampler=sampler)
    return found, best


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("group_sampling", ["none", "balanced", "weights"]),
        ("class_weights", ["balanced", None]),
        ("per_device_train_batch_size", [4, 6]),
        ("objective", ["cgd", "erm", "group_dro"]),
    ],
)
def test_what_is_read_with_the_data_is_the_trials_own(searching: Build, name: str, values: list[Any]) -> None:
    """So are the settings that a script changes between two runs, as of the best trial."""

    def space(trial: Any) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, values)}

    parts = {"group_dro": {"step_size": 0.5}}
    built = searching(**({} if name == "objective" else parts["group_dro"]))
    found, best = of_trials(built, space, {name: values})
    alone = {}
    for value in values:
        run = searching(**({} if name == "objective" else parts["group_dro"]) | {name: value})
        run.train()
        alone[value] = (run.group_weights, parameters_of(run.model))
    assert len({tuple(parameters.tolist()) for _, parameters in alone.values()}) == len(values)
    assert len(found) == len(values)
    for settings, weights, parameters in found:
        expected, expected_parameters = alone[settings[name]]
        assert weights == (None if expected is None else expected.tolist()), settings
        assert torch.equal(parameters, expected_parameters), settings
    setattr(built.args, name, best.hyperparameters[name])
    built.train()
    assert torch.equal(parameters_of(built.model), alone[best.hyperparameters[name]][1])


def test_what_a_trial_does_not_set_is_not_left_over_from_another(searching: Build) -> None:
    """Knobs that only some trials have are the usual way to search over objectives."""

    def space(trial: Any) -> dict[str, Any]:
        if trial.suggest_categorical("which", ["cgd", "group_dro"]) == "cgd":
            return {"objective": "cgd", "exponent": 0.7, "weight_decay": 0.5, "learning_rate": 0.1}
        return {"objective": "group_dro"}

    built = searching()
    before = dict(vars(built.args))
    trials: list[tuple[str, torch.Tensor]] = []

    class Note(TrainerCallback):
        def on_train_end(self, *_: Any, **__: Any) -> None:
            trials.append((built.group_objective.name, parameters_of(built.model)))

    built.add_callback(Note())
    order = iter(["cgd", "group_dro", "cgd", "group_dro"])
    fixed = SimpleNamespace(suggest_categorical=lambda name, choices: next(order))
    built.hyperparameter_search(lambda trial: space(fixed), n_trials=4, backend="optuna")
    assert [name for name, _ in trials] == ["cgd", "group_dro", "cgd", "group_dro"]
    alone = searching()
    alone.train()
    assert torch.equal(trials[1][1], parameters_of(alone.model)) and torch.equal(trials[3][1], trials[1][1])
    assert torch.equal(trials[2][1], trials[0][1])
    assert {
        name: getattr(built.args, name) for name in ("objective", "exponent", "weight_decay", "learning_rate")
    } == {name: before[name] for name in ("objective", "exponent", "weight_decay", "learning_rate")}


def test_a_search_leaves_files_of_each_trial_and_no_table_of_the_last_one(searching: Build, tmp_path: Path) -> None:
    """A table of the last trial would be taken for that of the best, and the last trial may have been pruned."""

    class Pruner(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1

    built = searching(step_size=0.5)
    sampler = optuna.samplers.GridSampler({"step_size": list(STEP_SIZES)})
    built.hyperparameter_search(space, n_trials=2, backend="optuna", sampler=sampler, pruner=Pruner())
    out = Path(built.args.output_dir)
    assert {path.name for path in out.iterdir()} == {"run-0", "run-1"}
    for number, steps in ((0, 6), (1, 2)):
        history = read_group_history(out / f"run-{number}")
        assert history[-1]["step"] == steps and (out / f"run-{number}" / "metrics.json").is_file()
    for ask in (
        built.group_report, built.mixture, built.evaluate, built.run_record, built.create_model_card,
        built.diagnose_groups, lambda: built.predict(text_dataset(4)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"holds no model: hyperparameter_search .*call train\(\)"):
            ask()
    assert not built.is_in_train
    built.train()
    assert built.group_report().to_dict()["weights_step"] == 6
    assert (out / "group_history.jsonl").is_file() and (out / "metrics.json").is_file()


def test_the_untrained_model_is_no_value_of_a_trial() -> None:
    args = SimpleNamespace(metric_for_best_model="worst_group_accuracy", greater_is_better=True)
    logs = [{"eval_worst_group_accuracy": value, "step": step} for step, value in enumerate((0.9, 0.2, 0.4))]
    of, _ = comparison(args, None, None, lambda: logs)  # type: ignore[arg-type]
    assert of(logs[-1]) == 0.4


def test_several_directions_want_as_many_numbers() -> None:
    args = SimpleNamespace(metric_for_best_model=None, greater_is_better=None)
    with pytest.raises(ValueError, match="asks for several numbers of a trial"):
        comparison(args, None, ["maximize", "minimize"], list)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no effect on objective='erm'"):
        changed = GroupRobustConfig("out", use_cpu=True, report_to=[])
        changed.objective, changed.weight_timing = "erm", "next"
        changed.require_consistent()
