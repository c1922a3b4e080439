"""`group_metrics` on plain arrays: numbers of fairlearn, intervals by hand, errors in words."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from fairlearn_numbers import METRICS, arrays
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    recall_score,
    roc_auc_score,
)

from hf_cgd import GroupMetric, GroupReport, GroupRobustWarning, group_metrics
from hf_cgd.metrics import GroupRow, named_metrics, wilson_interval
from hf_cgd.metrics.intervals import bootstrap_interval, class_strata, confidence_of_extremes, wilson_of_share
from hf_cgd.metrics.values import as_json

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "fairlearn_numbers.json").read_text())
TRUTH = [0, 1, 1, 0, 1, 1]
GIVEN = [0, 1, 0, 0, 0, 1]
GROUPS = ["a", "a", "a", "b", "b", "b"]


def test_numbers_are_those_of_fairlearn() -> None:
    """Recorded from MetricFrame by tests/support/fairlearn_numbers.py."""
    report = group_metrics(**arrays(), metrics=METRICS, resamples=0)
    for name, expected in RECORDED["metrics"].items():
        own = report.overall[name]
        assert own == pytest.approx(expected["overall"])
        assert {row.name: row.value(name) for row in report.rows} == pytest.approx(expected["by_group"])
        assert report.gap(name) == pytest.approx(expected["difference"])
        assert report.ratio(name) == pytest.approx(expected["ratio"])
        lowest = expected["group_max" if name == "mae" else "group_min"]
        assert report.overall[f"worst_group_{name}"] == pytest.approx(lowest)


def test_by_hand() -> None:
    report = group_metrics(
        TRUTH, GIVEN, GROUPS, metrics={"accuracy": accuracy_score, "recall": recall_score}, resamples=20
    )
    assert [row.name for row in report.rows] == ["a", "b"] and [row.count for row in report.rows] == [3, 3]
    assert [row.accuracy for row in report.rows] == [pytest.approx(2 / 3)] * 2
    assert report.rows[0].interval("accuracy") == wilson_interval(2, 3)
    assert [row.others["recall"] for row in report.rows] == [0.5, 0.5]
    assert report.overall == {
        "accuracy": pytest.approx(4 / 6), "worst_group_accuracy": pytest.approx(2 / 3),
        "mean_group_accuracy": pytest.approx(2 / 3), "recall": 0.5, "worst_group_recall": 0.5,
    }  # fmt: skip
    assert (report.gap(), report.ratio()) == (0.0, 1.0) and len(report.all_worst) == 2


def test_it_says_what_the_trainer_says() -> None:
    generator = np.random.default_rng(0)
    truth, given, ids = (generator.integers(0, 3, 200) for _ in range(3))
    ours = group_metrics(truth, given, ids)
    theirs = named_metrics(given, truth, ids, ["0", "1", "2"])
    assert ours.overall["worst_group_accuracy"] == theirs["worst_group_accuracy"]
    for row in ours.rows:
        assert row.accuracy == theirs[f"group_accuracy/{row.name}"]
        assert row.accuracy_low == theirs[f"group_accuracy_low/{row.name}"]


def test_bootstrap_covers_what_a_binomial_says() -> None:
    """The recall of 400 positives of which 300 are found: a proportion, whose deviation is known."""
    truth, given = np.ones(400, dtype=int), np.r_[np.ones(300, dtype=int), np.zeros(100, dtype=int)]
    recall = {"recall": lambda y_true, y_pred: float(y_pred[y_true == 1].mean())}
    report, again = (group_metrics(truth, given, ["a"] * 400, metrics=recall, resamples=2000) for _ in range(2))
    low, high = report.rows[0].intervals["recall"]
    deviation = np.sqrt(0.75 * 0.25 / 400)
    assert (low, high) == pytest.approx((0.75 - 1.96 * deviation, 0.75 + 1.96 * deviation), abs=0.006)
    assert again.rows[0].intervals == report.rows[0].intervals, "the seed decides"


@pytest.mark.parametrize(("size", "least"), [(5, 0.88), (20, 0.91)])
def test_intervals_of_few_examples_hold_the_true_mean(size: int, least: float) -> None:
    """Plain percentiles of the draws do in 82 and 90 % of these samples."""
    draw, held, plain = np.random.default_rng(1), [], []
    for _ in range(400):
        values = draw.normal(3.0, 1.0, size)
        means = values[draw.integers(size, size=(200, size))].mean(axis=1)
        bounds = [bootstrap_interval(lambda rows, own=values: own[rows].mean(), np.zeros(size), 200),
                  np.quantile(means, [0.025, 0.975])]  # fmt: skip
        for found, (low, high) in zip((held, plain), bounds, strict=True):
            found.append(low <= 3.0 <= high)
    assert np.mean(held) > least > np.mean(plain)


def test_draws_keep_the_size_of_each_stratum() -> None:
    strata, seen = np.repeat([0, 1, 2], [7, 5, 6]), []

    def value(rows: np.ndarray) -> float:
        seen.append(np.bincount(strata[rows]).tolist())
        return float(rows[0])

    bootstrap_interval(value, strata, 50)
    assert seen == [[7, 5, 6]] * 50
    assert bootstrap_interval(lambda rows: 1.0, strata, 50) is None, "no width tells nothing"
    assert bootstrap_interval(lambda rows: float("nan"), strata, 50) is None
    assert bootstrap_interval(value, strata[:-2], 50) is None, "too few to draw from"


def test_rare_classes_are_drawn_together() -> None:
    def sizes(*counts: int) -> list[int]:
        return sorted(
            np.unique(class_strata(np.repeat(np.arange(len(counts)), counts)), return_counts=True)[1].tolist()
        )

    assert sizes(5, 9) == [5, 9]
    assert sizes(9, 1, 2, 3) == [6, 9], "those below five are one stratum"
    assert sizes(9, 7, 1) == [8, 9], "a single one joins the smallest"
    assert sizes(50, 1) == [1, 50], "of two classes the metric may hang by it"
    assert sizes(*[1] * 40) == [40]
    texts = np.array(["b", "a", "a", "a", "a", "a", "b", "b", "b", "b"])
    assert sorted(np.unique(class_strata(texts), return_counts=True)[1].tolist()) == [5, 5]


def test_intervals_of_whole_numbers_that_are_values() -> None:
    """The mean error of 80 ages: its deviation is that of a mean. Draws within each age would have none to vary."""
    rng = np.random.default_rng(0)
    truth = rng.permutation(np.arange(80))
    errors = rng.exponential(5, 80)
    for given in (truth + errors, truth + np.round(errors).astype(int)):
        report = group_metrics(truth, given, ["a"] * 80, metrics={"mae": mean_absolute_error}, resamples=2000)
        low, high = report.rows[0].intervals["mae"]
        width = 2 * 1.96 * np.abs(given - truth).std() / np.sqrt(80)
        assert high - low == pytest.approx(width, rel=0.08)


def test_a_class_of_a_few_examples_has_no_interval() -> None:
    rng = np.random.default_rng(0)
    for positives, known in ((1, False), (4, False), (5, True)):
        truth = np.arange(40) < positives
        report = group_metrics(truth, rng.normal(size=40), ["a"] * 40, metrics={"auc": roc_auc_score}, resamples=50)
        assert (report.rows[0].interval("auc") is not None) is known


@pytest.mark.parametrize(
    "metrics", [None, {"mse": mean_squared_error}, {"mse": lambda y_true, y_pred: ((y_true - y_pred) ** 2).mean()}]
)
def test_a_table_of_one_column_is_a_column(metrics: Any) -> None:
    """numpy compares [N, 1] with [N] each with every other: an accuracy of .87 was told as 0."""
    frame = pd.DataFrame({"y": TRUTH, "p": GIVEN})
    expected = group_metrics(TRUTH, GIVEN, GROUPS, metrics=metrics, resamples=20)
    for y_true, y_pred in ((frame[["y"]], frame["p"]), (frame["y"], frame[["p"]]), (frame[["y"]], frame[["p"]])):
        assert group_metrics(y_true, y_pred, GROUPS, metrics=metrics, resamples=20) == expected


def test_arrow_and_torch_are_read_as_lists_are() -> None:
    expected = group_metrics(TRUTH, GIVEN, {"g": GROUPS})
    assert group_metrics(pa.array(TRUTH), pa.chunked_array([GIVEN]), pa.table({"g": GROUPS})) == expected
    halves = torch.tensor(GIVEN, dtype=torch.bfloat16)
    assert group_metrics(torch.tensor(TRUTH), halves, {"g": pa.array(GROUPS)}) == expected


def test_what_a_metric_warns_of_is_said_once_for_each_group() -> None:
    def grumbling(y_true: np.ndarray, y_pred: np.ndarray) -> float:
        warnings.warn(f"{len(y_true)} rows", UserWarning, stacklevel=1)
        return float((y_true == y_pred).mean())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group_metrics([0, 1, 0, 1, 0], [0, 1, 1, 1, 0], list("aabbb"), metrics={"share": grumbling})
    assert [str(one.message) for one in caught if one.category is UserWarning] == ["5 rows", "2 rows", "3 rows"]


def test_no_group_is_worst_where_all_are_alike() -> None:
    for groups in (["a", "a", "b", "b"], ["a"] * 4):
        report = group_metrics([0, 1, 0, 1], [0, 0, 0, 0], groups)
        assert report.gap() == 0 and "(worst)" not in str(report) + report._repr_html_()
    assert "b (worst)" in str(group_metrics([0, 1, 0, 1], [0, 1, 0, 0], ["a", "a", "b", "b"]))


def test_scores_values_columns_and_directions() -> None:
    frame = pd.DataFrame({"age": ["old", "old", "new", "new"] * 5, "sex": [0, 1] * 10})
    truth = np.tile([0, 1, 1, 0], 5)
    scores = np.linspace(0, 1, 20)
    report = group_metrics(truth, scores, frame["age"], metrics={"auc": roc_auc_score}, resamples=20)
    assert report.overall["auc"] == roc_auc_score(truth, scores) and report.metric == "auc"
    crossed = group_metrics(truth, truth, frame)
    assert [row.name for row in crossed.rows] == ["age:new sex:0", "age:new sex:1", "age:old sex:0", "age:old sex:1"]
    errors = group_metrics(
        scores, scores + (frame["sex"] == 1) * 0.5, frame["sex"],
        metrics={"mae": mean_absolute_error, "risk": GroupMetric(lambda y, p: float(np.mean(p - y)), False)},
        resamples=20,
    )  # fmt: skip
    assert errors.worst is not None and errors.worst.name == "1" and errors.overall["worst_group_mae"] == 0.5
    # A function whose arguments have names of their own gets the truth first, as in scikit-learn.
    assert errors.overall["worst_group_risk"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y_pred": [0, 1]}, "got the lengths"),
        ({"groups": ["a", None, "a", "b", "b", "b"]}, "row 1.*1 of 6 rows"),
        ({"groups": pd.Series(["a", pd.NA, "a", "b", "b", "b"])}, "row 1"),
        ({"groups": [0.5] * 6}, "float"),
        ({"y_true": [0, 1, None, 0, 1, 1]}, "y_true is missing"),
        ({"y_pred": [[0.1, 0.9]] * 6}, r"logits or probabilities. Pass y_pred.argmax\(axis=1\)"),
        ({"y_pred": [0.2, 0.9, 0.1, 0.3, 0.2, 0.8]}, "decimal numbers"),
        ({"y_pred": ["no"] * 6}, "text and numbers are never equal"),
        ({"y_pred": [0, 1, 2, 0, 1, 7], "classes": [0, 1]}, r"y_pred holds \[2, 7\], which are not among the classes"),
        ({"y_true": [0, 1, 2, 0, 1, 1], "metrics": {"f1": f1_score}}, "failed on all examples: Target is multiclass"),
        ({"metrics": {"both": GroupMetric(lambda y, p: {"a": 1, "b": 2}, True)}}, "must give one number"),
        ({"y_true": pd.Series(["x", pd.NA] * 3, dtype="string"), "y_pred": ["x"] * 6}, "y_true is missing.*3 of 6 rows"),
        ({"y_true": pd.Series([True, pd.NA] * 3, dtype="boolean"), "y_pred": [True] * 6}, "y_true is missing"),
        ({"y_true": pd.to_datetime(pd.Series(["2020", None] * 3))}, "y_true is missing"),
        ({"y_true": np.array([1, "1"] * 3, dtype=object)}, "y_true holds texts and numbers"),
        ({"y_true": [0, 1, -100, 0, 1, 1]}, "y_true is -100 in 1 of 6 rows: 2"),
        ({"y_true": [[0, 1, 1]] * 6, "y_pred": [[0, 1]] * 6}, r"y_true has the shape \(6, 3\), y_pred \(6, 2\)"),
        ({"y_true": pd.Series(TRUTH), "y_pred": pd.Series(GIVEN)[::-1]}, "same rows in different orders"),
        ({"y_true": pd.Series(TRUTH), "groups": pd.Series(GROUPS)[[1, 0, 2, 3, 4, 5]]}, "y_true and groups hold the same"),
        ({"y_true": [], "y_pred": [], "groups": []}, "y_true is empty"),
    ],
)  # fmt: skip
def test_errors_in_words(changes: dict[str, Any], words: str) -> None:
    given = {"y_true": TRUTH, "y_pred": GIVEN, "groups": GROUPS, **changes}
    with pytest.raises(ValueError, match=words):
        group_metrics(**given)


def test_what_is_right_but_odd_is_warned_of() -> None:
    with pytest.warns(GroupRobustWarning, match="is ever a true one"):
        assert group_metrics([0, 0], [1, 1], ["a", "b"]).overall["accuracy"] == 0.0
    with pytest.warns(GroupRobustWarning, match=r"not defined on these groups.*auc of b"):
        report = group_metrics(
            TRUTH, GIVEN, ["a", "a", "a", "a", "b", "b"], metrics={"auc": roc_auc_score}, resamples=0
        )
    assert "auc" not in report.rows[1].others


# ---- What notebooks show ------------------------------------------------------------------------------------------------


def a_report() -> GroupReport:
    groups = ["<b>x</b>", "<b>x</b>", "y", "y", "y", "y"]
    return group_metrics(TRUTH, GIVEN, groups, metrics={"accuracy": accuracy_score, "f1": f1_score}, resamples=50)


def test_a_report_comes_back_from_its_dict() -> None:
    report = a_report()
    assert GroupReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    lower = group_metrics(TRUTH, GIVEN, GROUPS, metrics={"risk": GroupMetric(lambda y, p: 0.5, False)})
    assert GroupReport.from_dict(lower.to_dict()).lower_is_better == ("risk",)
    with pytest.raises(ValueError, match="take one of them"):
        GroupReport.from_dict({"validation": report.to_dict()})


def test_html_escapes_names_and_marks_the_worst_group() -> None:
    report = a_report()
    page = report._repr_html_()
    assert "<b>x" not in page and "&lt;b&gt;x&lt;/b&gt;" in page
    assert report.worst is not None and report.worst.name == "y"
    bold = page.split("font-weight:bold")
    assert len(bold) == 2 and "y (worst)" in bold[1].split("</tr>")[0]
    # A bar as long as the accuracy, and a line over the interval.
    low, high = report.rows[1].interval("accuracy") or (0, 0)
    assert f"width:{100 * report.rows[1].accuracy:.1f}%" in page
    assert f"left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%" in page
    assert "accuracy gap 0.500" in page and "accuracy ratio 0.500" in page


def test_dataframe() -> None:
    table = a_report().to_dataframe()
    assert table.loc["y", "accuracy"] == 0.5 and table.loc["y", "count"] == 4
    assert {"f1", "accuracy_low", "accuracy_high"} <= set(table.columns) and "weight" not in table


def test_numbers_that_files_have_as_null_come_back_as_not_finite() -> None:
    report = GroupReport((GroupRow("a", count=3, accuracy=0.5),), {"accuracy": 0.5, "loss": float("nan")}, "erm")
    back = GroupReport.from_dict(json.loads(json.dumps(as_json(report.to_dict()))))
    assert str(back) == str(report) and str(report).endswith("accuracy 0.500  loss n/a")


@pytest.mark.parametrize("other", [balanced_accuracy_score, lambda y, p: 100 * accuracy_score(y, p)])
def test_an_interval_is_that_of_the_number_it_stands_beside(other: Any) -> None:
    """Under the name of the accuracy may stand another number; Wilson's interval was that of the share of right ones."""
    draw = np.random.default_rng(0)
    truth = (draw.random(400) < 0.2).astype(int)
    given = np.where(draw.random(400) < 0.9, truth, 0)
    report = group_metrics(truth, given, draw.choice(["a", "b"], 400), metrics={"accuracy": other}, resamples=100)
    for row in report.rows:
        low, high = row.interval("accuracy") or (np.nan, np.nan)
        assert row.accuracy is not None and low < row.accuracy < high
    plain = group_metrics(truth, given, ["a"] * 400, metrics={"accuracy": accuracy_score})
    assert plain.rows[0].interval("accuracy") == pytest.approx(wilson_interval(int((truth == given).sum()), 400))


@pytest.mark.parametrize("groups", [2, 5, 20, 40])
def test_extremes_of_equal_groups_are_apart_in_5_of_100_samples(groups: int) -> None:
    """Their 95 % intervals are so in 71 of 100 samples of 40 groups."""
    draw = np.random.default_rng(0)
    samples = np.sort(draw.binomial(400, 0.8, (500, groups)), axis=1)[:, [0, -1]] / 400
    confidence = confidence_of_extremes(groups)
    apart = [
        wilson_of_share(low, 400, confidence)[1] < wilson_of_share(high, 400, confidence)[0] for low, high in samples
    ]
    assert np.mean(apart) < 0.08
    usual = [wilson_of_share(low, 400)[1] < wilson_of_share(high, 400)[0] for low, high in samples]
    assert (np.mean(usual) > 0.3) == (groups >= 20) and (groups > 5 or confidence == pytest.approx(0.95))
