"""Group metrics against hand values, scikit-learn and scipy; the table of groups."""

import json
import math
import re
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score

from hf_cgd import GroupReport, GroupRobustWarning
from hf_cgd.metrics import is_interval, lower_is_better, named_metrics, wilson_interval
from hf_cgd.metrics.group_rows import rows_of_groups
from hf_cgd.metrics.intervals import wilson_of_share
from hf_cgd.metrics.tables import latex, markdown, plain
from hf_cgd.models.example_losses import MULTI_LABEL, REGRESSION


def test_by_hand() -> None:
    predictions, labels = np.array([0, 1, 1, 0, 1, 1]), np.array([0, 1, 0, 0, 0, 0])
    metrics = named_metrics(
        predictions,
        labels,
        np.array([0, 0, 0, 0, 1, 1]),
        ["land", "sea"],
        losses=np.array([1, 1, 1, 1, 2, 4.0]),
        train_counts={"land": 90, "sea": 10},
    )
    low, high = wilson_interval(3, 4)
    assert metrics == pytest.approx(
        {
            "accuracy": 0.5,
            "one_class_predicted": 0.0,
            "worst_group_accuracy": 0.0,
            "mean_group_accuracy": 0.375,
            "adjusted_accuracy": 0.675,
            "group_accuracy/land": 0.75,
            "group_accuracy_low/land": low,
            "group_accuracy_high/land": high,
            "group_accuracy/sea": 0.0,
            "group_accuracy_low/sea": 0.0,
            "group_accuracy_high/sea": wilson_interval(0, 2)[1],
            "group_loss/land": 1.0,
            "group_loss/sea": 3.0,
            "worst_group_loss": 3.0,
            "group_count/land": 4,
            "group_count/sea": 2,
        }
    )


@given(st.lists(st.integers(-1, 5), max_size=30))
def test_rows_of_groups_are_those_that_masks_choose(ids: list[int]) -> None:
    group_ids = np.asarray(ids, dtype=np.int64)
    masks = group_ids[:, None] == np.arange(4)
    for given_as in (group_ids, masks, masks.astype(int)):
        found = rows_of_groups(given_as, 4)
        assert [rows.tolist() for rows in found] == [np.flatnonzero(mask).tolist() for mask in masks.T]


def test_average_weighted_by_training_shares() -> None:
    """Group accuracies .9, .6, .5, .95 on balanced test groups; training counts of Waterbirds."""
    accuracies, counts = [0.9, 0.6, 0.5, 0.95], [3498, 184, 56, 1057]
    correct = np.concatenate([np.arange(100) < 100 * accuracy for accuracy in accuracies])
    metrics = named_metrics(
        correct.astype(int),
        np.ones(400, dtype=int),
        np.repeat(np.arange(4), 100),
        list("abcd"),
        train_counts=dict(zip("abcd", counts, strict=True)),
    )
    assert metrics["adjusted_accuracy"] == pytest.approx(0.894838, abs=1e-6)
    assert metrics["mean_group_accuracy"] == metrics["accuracy"] == pytest.approx(0.7375)


@pytest.mark.parametrize("correct,total", [(8, 10), (0, 10), (10, 10), (1, 2)])
def test_wilson_interval_of_a_share_that_no_count_gives(correct: int, total: int) -> None:
    """Of counts it is scipy's; between two counts it lies between theirs. Of .8 on 2 that of 2 is no answer."""
    for confidence in (0.8, 0.95):
        expected = tuple(binomtest(correct, total).proportion_ci(confidence, method="wilson"))
        assert wilson_interval(correct, total, confidence) == pytest.approx(expected, abs=1e-12)
        assert wilson_of_share(correct / total, total, confidence) == pytest.approx(expected, abs=1e-12)
    if correct < total:
        between = wilson_of_share((correct + 0.5) / total, total)
        assert wilson_interval(correct, total) < between < wilson_interval(correct + 1, total)
    # z = 1.96: (.8 + z²/4) / (1 + z²/2) = .6027, and z √(.08 + z²/16) / (1 + z²/2) = .3797.
    assert wilson_of_share(0.8, 2) == pytest.approx((0.2231, 0.9824), abs=1e-4)


@pytest.mark.parametrize("correct,total", [(3, 2), (-1, 2), (0, 0)])
def test_wilson_interval_refuses_counts_that_are_none(correct: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"Expected 0 <= correct <= total and total >= 1, got {correct} of {total}"):
        wilson_interval(correct, total)


@pytest.mark.parametrize(
    "correct,total,low,high", [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1)]
)
def test_wilson_interval_by_hand(correct: int, total: int, low: float, high: float) -> None:
    z, share = 1.959964, correct / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    assert wilson_interval(correct, total) == pytest.approx((max(centre - half, 0), min(centre + half, 1)), abs=1e-6)
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=60))
def test_against_scikit_learn_and_in_any_order(rows: list[tuple[int, int, int]]) -> None:
    predictions, labels, group_ids = (np.array(column) for column in zip(*rows, strict=True))
    names = list("abcd")
    absent = [name for k, name in enumerate(names) if k not in group_ids]
    if absent:
        with pytest.warns(GroupRobustWarning, match="No examples of the group"):
            metrics = named_metrics(predictions, labels, group_ids, names)
    else:
        metrics = named_metrics(predictions, labels, group_ids, names)
    accuracies = []
    for group in np.unique(group_ids):
        rows_of = group_ids == group
        accuracies.append(accuracy_score(labels[rows_of], predictions[rows_of]))
        assert metrics[f"group_accuracy/{names[group]}"] == pytest.approx(accuracies[-1])
        assert metrics[f"group_count/{names[group]}"] == rows_of.sum()
    assert metrics["worst_group_accuracy"] == pytest.approx(min(accuracies))
    assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, predictions))
    assert not [name for name in metrics if name.partition("/")[2] in absent]
    order = np.random.default_rng(0).permutation(len(labels))
    present = [name for name in names if name not in absent]
    ids = np.searchsorted(np.unique(group_ids), group_ids)
    assert named_metrics(predictions[order], labels[order], ids[order], present) == pytest.approx(metrics)


def test_overlapping_subgroups_and_unknown_groups() -> None:
    predictions, labels = np.array([0, 1, 0]), np.array([0, 1, 1])
    members = np.array([[1, 0], [1, 1], [0, 1]])
    metrics = named_metrics(predictions, labels, members, ["x", "y"])
    assert (metrics["group_accuracy/x"], metrics["group_accuracy/y"]) == (1.0, 0.5)
    assert (metrics["group_count/x"], metrics["group_count/y"]) == (2, 2)
    unknown = named_metrics(predictions, labels, np.array([-1, -1, -1]), ["x", "y"])
    assert unknown == {"accuracy": pytest.approx(2 / 3)}


def test_multi_label_rows_are_right_when_all_labels_are() -> None:
    metrics = named_metrics(
        np.array([[1, 0], [1, 1]]), np.array([[1, 0], [0, 1]]), np.array([0, 0]), ["a"], problem_type=MULTI_LABEL
    )
    assert metrics["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("predictions", "labels", "expected"),
    [
        ([1, 1, 1], [0, 1, 1], 1.0),
        ([1, 0, 1], [0, 1, 1], 0.0),
        ([1, 1, 1], [1, 1, 1], 0.0),  # there is a single class
        ([0, 0, 0], [1, 1, 1], 0.0),
        ([[0, 1], [0, 1]], [[0, 1], [1, 1]], 1.0),
        ([[0, 1], [0, 0]], [[0, 1], [1, 1]], 0.0),
    ],
)
def test_a_model_that_predicts_one_class_is_told(predictions: list[Any], labels: list[Any], expected: float) -> None:
    problem = MULTI_LABEL if isinstance(labels[0], list) else "single_label_classification"
    ids = np.zeros(len(labels), dtype=int)
    metrics = named_metrics(np.array(predictions), np.array(labels), ids, ["a"], problem_type=problem)
    assert metrics["one_class_predicted"] == expected
    report = GroupReport.from_metrics({f"eval_{name}": v for name, v in metrics.items()}, "eval", ["a"], "cgd")
    assert report.one_class == (expected == 1.0) == ("All examples are given the same class" in str(report))
    assert report.to_dict()["overall"]["one_class_predicted"] == expected


def test_regression() -> None:
    rng = np.random.default_rng(0)
    labels = rng.normal(size=40)
    predictions = labels + rng.normal(size=40)
    group_ids = np.arange(40) % 2
    metrics = named_metrics(predictions, labels, group_ids, ["a", "b"], problem_type=REGRESSION)
    expected = [np.corrcoef(predictions[group_ids == g], labels[group_ids == g])[0, 1] for g in (0, 1)]
    assert metrics["group_pearson/a"] == pytest.approx(expected[0])
    assert metrics["worst_group_pearson"] == pytest.approx(min(expected))
    assert metrics["mse"] == pytest.approx(((predictions - labels) ** 2).mean())
    assert "accuracy" not in metrics


def test_the_correlation_of_several_outputs_is_the_mean_of_theirs() -> None:
    """Two outputs of different scales: a model that knows nothing but the scales correlates over all numbers."""
    rng = np.random.default_rng(0)
    labels = rng.normal([0.0, 1000.0], size=(200, 2))
    predictions = rng.normal([0.0, 1000.0], size=(200, 2))
    metrics = named_metrics(predictions, labels, np.arange(200) % 2, ["a", "b"], problem_type=REGRESSION)
    expected = np.mean([np.corrcoef(predictions[:, place], labels[:, place])[0, 1] for place in (0, 1)])
    assert metrics["pearson"] == pytest.approx(expected) and abs(expected) < 0.2
    assert np.corrcoef(predictions.ravel(), labels.ravel())[0, 1] > 0.99


def test_a_group_of_constant_predictions_leaves_the_worst_correlation_open() -> None:
    labels, ids = np.array([1.0, 2, 4, 5, 6, 9]), np.array([0, 0, 0, 1, 1, 1])
    given = {"group_ids": ids, "group_names": ["a", "b"], "problem_type": REGRESSION}
    with pytest.warns(GroupRobustWarning, match=r"worst_group_pearson.*group_pearson/b"):
        metrics = named_metrics(np.array([1.0, 2, 3, 3, 3, 3]), labels, **given)
    report = GroupReport.from_metrics({f"eval_{k}": v for k, v in metrics.items()}, "eval", ["a", "b"], "erm")
    assert "worst_group_pearson" not in report.overall and report.worst is None and report.gap() is None
    assert 'not known: no finite pearson of "b"' in str(report)
    # Labels that are all the same say nothing of the model: there the other groups decide.
    with pytest.warns(GroupRobustWarning, match="group_pearson/b"):
        metrics = named_metrics(np.array([1.0, 2, 3, 1, 2, 3]), np.array([1.0, 2, 4, 5, 5, 5]), **given)
    assert metrics["worst_group_pearson"] == pytest.approx(np.corrcoef([1, 2, 3], [1, 2, 4])[0, 1])
    report = GroupReport.from_metrics({f"eval_{k}": v for k, v in metrics.items()}, "eval", ["a", "b"], "erm")
    assert report.worst is not None and report.worst.name == "a"


def test_numbers_that_are_not_defined_are_left_out_with_one_warning() -> None:
    with pytest.warns(GroupRobustWarning, match=r"not defined or not finite.*group_pearson/b") as caught:
        metrics = named_metrics(
            np.array([1.0, 2, 3, 3]),
            np.array([1.0, 2, 5, 5]),
            np.array([0, 0, 1, 1]),
            ["a", "b"],
            losses=np.array([1, 1, np.nan, 1]),
            problem_type=REGRESSION,
        )
    assert len(caught) == 1
    assert metrics["worst_group_pearson"] == pytest.approx(1.0)
    assert not {"group_pearson/b", "group_loss/b", "worst_group_loss"} & set(metrics)
    json.dumps(metrics, allow_nan=False)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"one entry per example, got lengths 3, 2, 3, -"):
        named_metrics(np.zeros(3), np.zeros(2), np.zeros(3, dtype=int), ["a"])
    for shape in ((3, 1), (3, 2)):
        # numpy would compare each prediction with every label.
        with pytest.raises(ValueError, match=r"must have one shape, got \(3,\)"):
            named_metrics(np.zeros(3), np.zeros(shape), np.zeros(3, dtype=int), ["a"])


def test_names_of_metrics() -> None:
    assert is_interval("eval_group_accuracy_low/a") and not is_interval("eval_group_accuracy/a")
    for name in ("eval_loss", "worst_group_loss", "eval_group_loss/x", "mse"):
        assert lower_is_better(name)
    for name in ("accuracy", "eval_worst_group_accuracy", "worst_group_pearson"):
        assert not lower_is_better(name)


# ---- The table --------------------------------------------------------------------------------------------------------


def report() -> GroupReport:
    metrics = {
        "eval_accuracy": 0.8,
        "eval_group_accuracy/land|1": 0.9,
        "eval_group_accuracy_low/land|1": 0.85,
        "eval_group_accuracy_high/land|1": 0.93,
        "eval_group_count/land|1": 1200,
        "eval_group_accuracy/sea": 0.5,
        "eval_group_count/sea": 8,
        "eval_a_accuracy": 0.1,
    }
    return GroupReport.from_metrics(
        metrics,
        "eval",
        ["land|1", "sea", "sky"],
        "cgd",
        train_counts={"land|1": 3},
        weights={"land|1": 0.25, "sea": 0.75},
    )


def test_report_rows() -> None:
    assert report().worst is not None and report().worst.name == "sea"
    assert report().overall == {"accuracy": 0.8}
    assert report().to_dict()["groups"][0] == {
        "name": "land|1", "train_count": 3, "weight": 0.25, "count": 1200, "accuracy": 0.9, "accuracy_low": 0.85,
        "accuracy_high": 0.93, "pearson": None, "loss": None,
    }  # fmt: skip


def test_a_metric_is_a_bound_only_beside_the_other_bound() -> None:
    names = ("x", "x_low", "y", "y_low", "y_high")
    metrics = {f"eval_group_{name}/a": place / 10 for place, name in enumerate(names)}
    row = GroupReport.from_metrics(metrics, "eval", ["a"], "cgd").rows[0]
    assert row.others == {"x": 0.0, "x_low": 0.1, "y": 0.2} and row.interval("y") == (0.3, 0.4)


def test_report_as_text() -> None:
    lines = str(report()).splitlines()
    assert lines[1].split() == ["group", "train", "weight", "eval", "accuracy", "95", "%", "interval"]
    assert lines[3].split() == ["land|1", "3", "0.250", "1,200", "0.900", "0.850-0.930"]
    assert lines[4].split() == ["sea", "(worst)", "0.750", "8", "0.500"]
    assert len({len(line) for line in lines[1:4]}) == 1


def test_report_as_markdown_keeps_its_columns() -> None:
    lines = report().to_markdown().splitlines()
    assert all(line.replace("\\|", "").count("|") == 7 for line in lines)
    assert "land\\|1" in lines[2]


@given(st.lists(st.lists(st.text("ab| \\", max_size=4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_markdown_table_can_be_read_back(rows: list[list[str]]) -> None:
    """By the rule of GitHub: a cell ends at a pipe without a backslash before it, blanks around it do not count."""
    rows = [[cell.replace("\\", "").strip() for cell in row] for row in rows]
    lines = markdown(rows).splitlines()
    read = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert [read[0], *read[2:]] == rows
    assert len({len(line) for line in lines}) == 1, "columns are aligned"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\v", "\f", "\x85", "\u2028", "\n\n"])
def test_a_cell_with_line_ends_stays_on_the_line_of_its_row(end: str) -> None:
    rows = [["group", "loss"], [f"first{end}second", "1"], ["third", "2"]]
    for table, lines in ((plain, 4), (markdown, 4), (latex, 8)):
        found = table(rows).splitlines()
        assert len(found) == lines, table.__name__
        assert sum("first" in line and "second" in line and "1" in line for line in found) == 1
