"""Metrics of models of tokens against values formed by hand, and their place in reports."""

import math
from typing import Any

import numpy as np
import pytest

from hf_cgd.metrics import GroupReport, is_interval, lower_is_better
from hf_cgd.metrics.token_metrics import span_scores, token_metric_names, token_metrics
from hf_cgd.models.example_losses import NO_ANSWER

LOSSES, IDS = np.array([1.0, 3.0, 2.0, 9.0]), np.array([0, 0, 1, 1])
COUNTS, SUMS, RIGHT = np.array([3, 1, 4, 0]), np.array([3.0, 3.0, 8.0, 0.0]), np.array([3, 0, 1, 0])


def metrics_of(**changes: Any) -> dict[str, float]:
    given: dict[str, Any] = {"token_counts": COUNTS, "token_losses": SUMS, "tokens_right": RIGHT, "resamples": 0}
    return token_metrics(LOSSES, IDS, ["a", "b"], **{**given, **changes})


def test_perplexity_and_accuracy_are_over_tokens_and_losses_over_what_is_asked() -> None:
    found = metrics_of()
    # Group a: 6 nats over 4 tokens, 3 of them right; b: 8 over 4, 1 right; the last example has no label.
    assert found["group_perplexity/a"] == pytest.approx(math.exp(1.5))
    assert found["worst_group_perplexity"] == found["group_perplexity/b"] == pytest.approx(math.exp(2.0))
    assert found["perplexity"] == pytest.approx(math.exp(14 / 8))
    assert (found["token_accuracy"], found["worst_group_token_accuracy"]) == (0.5, 0.25)
    assert (found["group_loss/a"], found["group_loss/b"], found["worst_group_loss"]) == (2.0, 2.0, 2.0)
    assert (found["group_count/b"], found["group_token_count/a"]) == (1, 4)
    assert metrics_of(by_tokens=True)["group_loss/a"] == pytest.approx(1.5)
    assert set(found) <= set(token_metric_names(["perplexity", "token_accuracy"], ["a", "b"]))


def test_intervals_hold_the_value_and_shrink_with_more_examples() -> None:
    random = np.random.default_rng(0)
    widths = []
    for size in (40, 640):
        counts = random.integers(5, 20, size)
        sums = counts * random.normal(2.0, 0.3, size)
        found = token_metrics(
            sums / counts, np.zeros(size, dtype=int), ["a"], token_counts=counts, token_losses=sums,
            tokens_right=counts // 2,
        )  # fmt: skip
        low, high = found["group_perplexity_low/a"], found["group_perplexity_high/a"]
        assert low < found["group_perplexity/a"] < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
    assert is_interval("eval_group_perplexity_low/a") and not is_interval("eval_group_perplexity/a_low/")


def test_perplexity_is_better_when_lower_everywhere() -> None:
    names = ("eval_perplexity", "worst_group_perplexity", "group_perplexity/token_accuracy")
    assert all(lower_is_better(name) for name in names)
    assert not lower_is_better("eval_group_token_accuracy/perplexity")
    five = {"token_counts": COUNTS, "token_losses": SUMS, "tokens_right": RIGHT}
    found = token_metrics(
        np.tile(LOSSES, 3), np.tile(IDS, 3), ["a", "b"], resamples=50,
        **{name: np.tile(values, 3) for name, values in five.items()},
    )  # fmt: skip
    given = {f"eval_{name}": value for name, value in found.items()}
    report = GroupReport.from_metrics(given, "eval", ["a", "b"], "cgd")
    assert report.metric == "perplexity"
    assert [row.name for row in report.all_worst] == ["b"]
    assert report.overall["worst_group_perplexity"] == pytest.approx(math.exp(2.0))
    assert "token_count" not in str(report) and "perplexity_low" not in str(report)
    assert GroupReport.from_dict(report.to_dict()) == report
    assert report.rows[0].interval("perplexity") is not None


def test_spans_are_compared_by_their_places() -> None:
    labels = np.array([[2, 4], [2, 4], [2, 4], [2, 4], [-100, -100]])
    predictions = np.array([[2, 4], [3, 6], [5, 7], [4, 2], [0, 0]])
    found = span_scores(predictions, labels)
    assert found["span_exact_match"].tolist() == [1, 0, 0, 0, 0]
    # Two common tokens of 4 predicted and 3 true: 2 * 2 / 7.
    assert found["span_f1"] == pytest.approx([1, 4 / 7, 0, 0, 0])


def test_example_scores_take_the_place_of_perplexity() -> None:
    found = metrics_of(example_scores={"span_f1": np.array([1.0, 0.0, 0.25, 7.0])})
    assert (found["span_f1"], found["group_span_f1/a"], found["worst_group_span_f1"]) == (1.25 / 3, 0.5, 0.25)
    assert "perplexity" not in found


def test_entities_need_a_scheme_and_are_counted_whole() -> None:
    pytest.importorskip("seqeval")
    from hf_cgd.metrics.entities import entity_f1

    with pytest.raises(ValueError, match="Expected class names of a scheme"):
        entity_f1(["NOUN", "VERB"])
    metric = entity_f1(["O", "B-PER", "I-PER"])
    labels = np.array([[1, 2, 0, 1, -100], [0, 1, -100, -100, -100]])
    predictions = np.array([[1, 2, 0, 0, 1], [0, 1, 1, 1, 1]])
    # Two of three entities are found whole and nothing else: precision 1, recall 2/3.
    assert metric("entity_f1", predictions, labels) == pytest.approx(0.8)
    predictions[0, 1] = 0
    assert metric("entity_f1", predictions, labels) == pytest.approx(0.4)
    # Where scores are NaN nothing is found: -1 was taken for the last class, which is right here.
    predictions = np.where(labels == 2, NO_ANSWER, labels)
    assert metric("entity_f1", predictions, labels) == pytest.approx(2 / 3)
