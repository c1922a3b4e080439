"""Metrics of one's own over groups, and what a report says of them, of ties and of its weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error
from tiny import predicts_one_class, text_dataset, tiny_distilbert

from hf_cgd import GroupMetric, GroupReport, GroupRobustConfig, GroupRobustTrainer
from hf_cgd.metrics import lower_is_better
from hf_cgd.metrics.custom_metrics import (
    as_group_metrics,
    custom_group_metrics,
    direction_of,
    lower_is_better_by_name,
)
from hf_cgd.metrics.on_arrays import group_metrics
from hf_cgd.monitors import GroupRobustWarning

LABELS = np.array([1, 1, 0, 0, 1, 0, 1, 1])
PREDICTED = np.array([1, 0, 1, 0, 1, 0, 0, 1])
GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1])


def precision(y_true: np.ndarray, y_pred: np.ndarray) -> float:
    """As scikit-learn orders its arguments; not the same when they are swapped."""
    return float(((y_pred == 1) & (y_true == 1)).sum() / (y_pred == 1).sum())


def fpr(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(((predictions == 1) & (labels == 0)).sum() / (labels == 0).sum())


class Recall:
    """Like a metric of the `evaluate` library."""

    def compute(self, *, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        return {"recall": float(((predictions == 1) & (references == 1)).sum() / (references == 1).sum())}


@pytest.mark.parametrize("membership", [False, True])
def test_each_group_gets_the_value_of_its_own_rows(membership: bool) -> None:
    given = as_group_metrics(
        {"precision": precision, "fpr": fpr, "recall": Recall(), "worse": GroupMetric(fpr, False)}
    )
    ids = GROUPS[:, None] == np.arange(3)[None, :] if membership else GROUPS
    found = custom_group_metrics(given, PREDICTED, LABELS, ids, ["a", "b", "empty"])
    assert found == pytest.approx({
        "precision": 3 / 4, "group_precision/a": 1 / 2, "group_precision/b": 1.0, "worst_group_precision": 1 / 2,
        "fpr": 1 / 3, "group_fpr/a": 1 / 2, "group_fpr/b": 0.0, "worst_group_fpr": 1 / 2,
        "recall": 3 / 5, "group_recall/a": 1 / 2, "group_recall/b": 2 / 3, "worst_group_recall": 1 / 2,
        "worse": 1 / 3, "group_worse/a": 1 / 2, "group_worse/b": 0.0, "worst_group_worse": 1 / 2,
    })  # fmt: skip


def test_what_is_not_defined_is_left_out_with_a_warning() -> None:
    def only_both(predictions: np.ndarray, labels: np.ndarray) -> float:
        if len(set(labels.tolist())) < 2:
            raise ValueError("Only one class is present.")
        return 0.25

    labels = np.where(GROUPS == 1, 1, LABELS)
    with pytest.warns(GroupRobustWarning, match="group_auc/b"):
        found = custom_group_metrics(as_group_metrics({"auc": only_both}), PREDICTED, labels, GROUPS, ["a", "b"])
    assert found == {"auc": 0.25, "group_auc/a": 0.25, "worst_group_auc": 0.25}


@pytest.mark.parametrize(("given", "message"), [({"f1": "f1"}, "a function"), ({"accuracy": fpr}, "that is not ours"),
                                                ({"a/b": fpr}, "letters")])  # fmt: skip
def test_metrics_that_cannot_be_had_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_group_metrics(given)


def test_a_metric_of_many_numbers_is_refused() -> None:
    given = as_group_metrics({"both": GroupMetric(lambda predictions, labels: {"one": 1.0, "two": 2.0}, True)})
    with pytest.raises(ValueError, match="must give one number"):
        custom_group_metrics(given, PREDICTED, LABELS, GROUPS, ["a", "b"])


def three_steps_evaluated(folder: Path, wanted: str) -> GroupRobustConfig:
    """Three steps, an evaluation after each, and the best model by the metric that is wanted."""
    return GroupRobustConfig(
        str(folder), objective="group_dro", group_column="group", max_steps=3, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, metric_for_best_model=wanted, load_best_model_at_end=True, use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip


@predicts_one_class
@pytest.mark.parametrize("wanted", ["worst_group_share", "worst_group_fpr", "share"])
def test_the_best_model_is_chosen_by_them_and_the_report_shows_them(tmp_path: Path, wanted: str) -> None:
    values = {"share": iter([0.2, 0.9, 0.4, 0.9, 0.9]), "fpr": iter([0.8, 0.1, 0.5, 0.1, 0.1])}

    def scripted(name: str) -> Any:
        seen: dict[str, float] = {}

        def metric(predictions: np.ndarray, labels: np.ndarray) -> float:
            if len(labels) == 16:
                seen["now"] = next(values[name])
            return seen["now"]

        return metric

    data = text_dataset(16)
    args = three_steps_evaluated(tmp_path, wanted)
    own = {"share": GroupMetric(scripted("share"), True), "fpr": scripted("fpr")}
    trainer = GroupRobustTrainer(
        model=tiny_distilbert(), args=args, train_dataset=data, eval_dataset=data, group_metrics=own
    )
    trainer.train()
    assert trainer.state.best_global_step == 2
    report = trainer.group_report()
    head, first = str(report).splitlines()[:2]
    assert "weights after step 2" in head and "share" in first and "fpr" in first
    written = json.loads(json.dumps(report.to_dict()))
    assert written["weights_step"] == 2 and written["overall"]["worst_group_share"] == 0.9
    assert written["groups"][0]["others"] == {"share": 0.9, "fpr": 0.1}


@predicts_one_class
@pytest.mark.parametrize("wanted", ["worst_group_auc", "auc", "group_auc/1"])
def test_a_model_whose_metric_is_not_defined_is_not_the_best_and_the_run_goes_on(tmp_path: Path, wanted: str) -> None:
    calls = iter(range(100))

    def auc(y_true: np.ndarray, y_pred: np.ndarray) -> float:
        # Three calls an evaluation: all rows, two groups. The first and the last evaluation define nothing.
        return 0.6 if 3 <= next(calls) < 6 else float("nan")

    data = text_dataset(16)
    args = three_steps_evaluated(tmp_path, wanted)
    trainer = GroupRobustTrainer(
        model=tiny_distilbert(), args=args, train_dataset=data, eval_dataset=data, group_metrics={"auc": auc}
    )
    with pytest.warns(GroupRobustWarning, match="not defined or not finite"):
        trainer.train()
    assert trainer.state.best_global_step == 2 and trainer.state.best_metric == 0.6


def test_a_declared_direction_decides_which_model_is_the_best(tmp_path: Path) -> None:
    args = GroupRobustConfig(
        str(tmp_path), objective="group_dro", group_column="group", eval_strategy="epoch", save_strategy="epoch",
        metric_for_best_model="worst_group_gap", load_best_model_at_end=True, use_cpu=True, report_to=[],
    )  # fmt: skip
    data = text_dataset(16)
    trainer = GroupRobustTrainer(
        model=tiny_distilbert(), args=args, train_dataset=data, eval_dataset=data,
        group_metrics={"gap": GroupMetric(fpr, greater_is_better=False)},
    )  # fmt: skip
    assert trainer.args.greater_is_better is False


def test_a_report_marks_all_groups_that_tie_for_the_worst() -> None:
    metrics = {"eval_group_accuracy/a": 0.5, "eval_group_accuracy/b": 0.75, "eval_group_accuracy/c": 0.5}
    weights = {"a": 0.2, "b": 0.2, "c": 0.6}
    report = GroupReport.from_metrics(metrics, "eval", ["a", "b", "c"], "cgd", weights=weights, weights_step=7)
    assert [row.name for row in report.all_worst] == ["a", "c"]
    assert [row[0] for row in report.cells()[1:]] == ["a (worst)", "b", "c (worst)"]
    assert str(report).startswith("objective: cgd (weights after step 7)\n")
    without = GroupReport.from_metrics(metrics, "eval", ["a", "b", "c"], "erm", weights_step=7)
    assert str(without).startswith("objective: erm\n")


def _farthest(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(np.abs(predictions - labels).max())


def _mean(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(labels.mean())


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("wer", True), ("my_cer", True), ("log_loss", True), ("error_rate", True), ("false_positive_rate", True),
        ("my_false_negative_rate", True), ("miss_rate", True), ("brier_score", True), ("kl_divergence", True),
        ("negative_log_likelihood", True), ("neg_mean_squared_error", False), ("neg_log_loss", False), ("f1_macro", False),
        ("r2_score", False), ("roc_auc", False), ("accuracy_at_5", False), ("true_negative_rate", False),
    ],
)  # fmt: skip
def test_the_direction_is_known_by_the_last_words(name: str, lower: bool) -> None:
    assert lower_is_better_by_name(name) is lower_is_better(f"eval_worst_group_{name}") is lower
    ids, labels = np.array([0, 0, 1, 1]), np.array([1, 1, 3, 3])
    found = custom_group_metrics(as_group_metrics({name: _mean}), labels, labels, ids, ["a", "b"])
    assert found[f"worst_group_{name}"] == (3.0 if lower else 1.0)


@pytest.mark.parametrize("name", ["answer", "soccer", "better", "selection_rate", "accuracy_gap", "negative_share"])
def test_a_direction_that_nothing_tells_is_warned_of(name: str) -> None:
    ids, labels = np.array([0, 0, 1, 1]), np.array([1, 1, 3, 3])
    assert not lower_is_better_by_name(name)
    with pytest.warns(GroupRobustWarning, match=f"Nothing says whether higher or lower values of '{name}'"):
        given = as_group_metrics({name: _mean})
    assert custom_group_metrics(given, labels, labels, ids, ["a", "b"])[f"worst_group_{name}"] == 1.0
    with pytest.warns(GroupRobustWarning, match="Nothing says"):
        group_metrics(labels, labels, ids, metrics={name: _mean}, resamples=0)


def test_a_function_tells_the_direction_where_its_name_in_the_table_does_not() -> None:
    truth, given = np.array([1.0, 1, 3, 3]), np.array([1.0, 1, 5, 5])
    report = group_metrics(truth, given, ["a", "a", "b", "b"], metrics={"off_by": mean_absolute_error}, resamples=0)
    assert report.overall["worst_group_off_by"] == 2.0 and report.worst is not None and report.worst.name == "b"
    found = as_group_metrics({"off_by": mean_absolute_error, "spread": GroupMetric(mean_absolute_error, True)})
    assert direction_of("eval_worst_group_off_by", found) is False and direction_of("spread", found) is True


def test_groups_that_are_left_do_not_stand_for_one_that_the_model_failed_in() -> None:
    """An infinite value, or one that is not defined because of the answers, is worse than the worst of the rest."""
    labels, ids = np.array([1.0, 2, 3, 4]), np.array([0, 0, 1, 1])
    own = as_group_metrics({"mae": mean_absolute_error, "max_error": _farthest})
    for wrong in (np.inf, np.nan):
        with pytest.warns(GroupRobustWarning, match="worst_group_mae"):
            found = custom_group_metrics(own, np.array([1.0, 2, 3, wrong]), labels, ids, ["a", "b"])
        assert found == {"group_mae/a": 0.0, "group_max_error/a": 0.0}
    with pytest.warns(GroupRobustWarning, match="max_error of 1"):
        report = group_metrics(labels, [1.0, 2, 3, np.inf], ids, metrics={"max_error": _farthest}, resamples=0)
    assert "worst_group_max_error" not in report.overall
    assert report.worst is None and report.gap() is None and report.ratio() is None
    assert 'The worst group is not known: no finite max_error of "1".' in str(report) and "(worst)" not in str(report)


def test_a_metric_whose_name_ends_in_that_of_another_has_its_own_direction() -> None:
    with pytest.warns(GroupRobustWarning, match="values of 'x_risk'"):
        metrics = as_group_metrics(
            {"risk": GroupMetric(fpr, False), "no_risk": GroupMetric(fpr, True), "x_risk": _mean}
        )
    for prefix in ("", "eval_", "eval_worst_group_"):
        assert [direction_of(prefix + name, metrics) for name in ("risk", "no_risk", "x_risk")] == [False, True, None]
    assert direction_of("eval_group_no_risk/a_risk", metrics) is True
    assert direction_of("eval_accuracy", metrics) is None


def test_a_report_goes_by_the_declared_direction_whatever_the_name_says() -> None:
    truth, answers, groups = np.array([1, 1, 0, 0]), np.array([1, 1, 0, 1]), ["a", "a", "b", "b"]
    right = GroupMetric(lambda y, p: float((y == p).mean()), greater_is_better=True)
    report = group_metrics(truth, answers, groups, metrics={"no_error": right})
    assert report.overall["worst_group_no_error"] == 0.5
    back = GroupReport.from_dict(json.loads(json.dumps(report.to_dict())))
    for one in (report, back):
        assert one.worst is not None and one.worst.name == "b" and [row.name for row in one.ranked] == ["b", "a"]
