"""What the names of metrics say, and what is said about wrong ones."""

import pytest

from hf_cgd.metrics import is_interval, lower_is_better
from hf_cgd.metrics.group_metrics import metric_names
from hf_cgd.metrics.names import require_known_metric


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("loss", True),
        ("eval_loss", True),
        ("mse", True),
        ("worst_group_loss", True),
        ("eval_val_worst_group_loss", True),
        ("group_loss/a", True),
        ("eval_group_loss/accuracy", True),
        ("group_accuracy/loss", False),
        ("eval_group_accuracy/hair loss", False),
        ("eval_group_pearson/rmse", False),
        ("group_accuracy/group_loss/x", False),
        ("eval_loss_set_worst_group_accuracy", False),
        ("worst_group_accuracy", False),
        ("eval_x/y_worst_group_loss", True),
    ],
)
def test_the_direction_is_that_of_the_metric_and_not_of_the_group(metric: str, lower: bool) -> None:
    assert lower_is_better(metric) is lower


def test_intervals_are_known_by_the_metric_as_well() -> None:
    assert is_interval("eval_group_accuracy_low/a") and is_interval("group_accuracy_high/loss")
    assert not is_interval("eval_group_accuracy/group_accuracy_low/x")


def test_wrong_names_are_refused_with_the_one_that_was_meant() -> None:
    names = metric_names("single_label_classification", ["a", "b"])
    for good in ("worst_group_accuracy", "eval_loss", "group_accuracy/a", "eval_group_loss/b", "runtime"):
        require_known_metric(good, {"": names}, True)
    with pytest.raises(ValueError, match="Did you mean 'worst_group_accuracy'"):
        require_known_metric("worst_group_acc", {"": names}, False)
    with pytest.raises(ValueError, match="'group_accuracy/a'"):
        require_known_metric("group_accuracy/c", {"": names}, False)
    # Something else may be a metric of the user's, until training begins.
    require_known_metric("f1", {"": names}, False)
    with pytest.raises(ValueError, match="'f1' is none of the metrics"):
        require_known_metric("f1", {"": names}, True)
    with pytest.raises(ValueError, match="Did you mean 'val_worst_group_accuracy' or 'ood_worst_group_accuracy'"):
        require_known_metric("worst_group_accuracy", {"val": names, "ood": names}, False)
    with pytest.raises(ValueError, match="'worst_group_accuracy' is none"):
        require_known_metric("worst_group_accuracy", {"": metric_names("regression", ["a"])}, False)
    with pytest.raises(ValueError, match="is none"):
        require_known_metric("worst_group_accuracy", {"": metric_names(None, [])}, False)
