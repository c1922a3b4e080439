"""A user's own metrics, over all examples and over each group: `f1`, `group_f1/<name>`, `worst_group_f1`."""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_cgd.metrics.group_rows import rows_of_groups
from hf_cgd.monitors import GroupRobustWarning

PAIRS = (("predictions", "references"), ("y_pred", "y_true"), ("predictions", "labels"))
"""Names of arguments by which a metric is called where it has them; another one gets (predictions, labels)."""
LOWER = ("loss", "mse", "mae", "rmse", "error", "fpr", "fnr", "ece", "brier", "perplexity")
"""Endings of the names of metrics that are better when lower."""
LOWER_WORDS = ("wer", "cer", "mer", "ter", "eer", "fdr", "nll", "mape", "smape", "mase", "msle", "rmsle")
"""The same where they are the last word of a name, behind a _ or nothing: "answer" ends in "wer" too."""


RESERVED = ("accuracy", "loss", "pearson", "count", "mse", "perplexity", "token_accuracy", "token_count", "span_f1",
            "span_exact_match")  # fmt: skip
"""Names of metrics of ours."""


class NotOneNumber(ValueError):
    """A metric gave something else than a number."""


@dataclass(frozen=True)
class GroupMetric:
    """A metric, and which direction is better.

    Attributes:
        compute: a function of predicted and true classes (or values), [N] each, or an `evaluate` metric. It returns a
            number, or a dict with one.
        greater_is_better: None for what the name says: see `LOWER` and `LOWER_WORDS`.
    """

    compute: Any
    greater_is_better: bool | None = None

    def __call__(self, name: str, predictions: np.ndarray, labels: np.ndarray, truth_first: bool = False) -> float:
        """The value; NaN where it is not defined (the metric raises, or gives None)."""
        try:
            return self.defined(name, predictions, labels, truth_first)
        except NotOneNumber:
            raise
        except (ValueError, ZeroDivisionError):
            return float("nan")

    def lower_is_better(self, name: str) -> bool:
        """Which direction is better, by what was declared, else by the name."""
        return lower_is_better_by_name(name) if self.greater_is_better is None else not self.greater_is_better

    def defined(self, name: str, predictions: np.ndarray, labels: np.ndarray, truth_first: bool = False) -> float:
        """The value; errors of the metric pass through.

        Args:
            name: of the metric, for a result that holds several.
            predictions, labels: what it compares.
            truth_first: in which order a function whose arguments have other names than `PAIRS` gets them.
        """
        function: Callable[..., Any] = getattr(self.compute, "compute", self.compute)
        value = _called(function, predictions, labels, function is not self.compute, truth_first)
        if isinstance(value, Mapping):
            value = value[name] if name in value else next(iter(value.values())) if len(value) == 1 else value
        if value is None:
            return float("nan")
        if isinstance(value, Mapping) or np.ndim(value) != 0:
            raise NotOneNumber(
                f"group_metrics[{name!r}] must give one number, got {value!r}. Name the one to be compared."
            )
        return float(value)


def as_group_metrics(given: Mapping[str, Any] | None) -> dict[str, GroupMetric]:
    """What the user gave, by name.

    Raises:
        ValueError: a name of ours or one that names cannot hold, or something that cannot be called.
    """
    found = {}
    for name, metric in (given or {}).items():
        if not re.fullmatch(r"\w+", name) or name in RESERVED:
            raise ValueError(
                f"group_metrics: expected a name of letters, digits and _ that is not ours, got {name!r}."
            )
        own = metric if isinstance(metric, GroupMetric) else GroupMetric(metric)
        if not callable(getattr(own.compute, "compute", own.compute)):
            raise ValueError(
                f"group_metrics[{name!r}] must be a function of (predictions, labels) or an `evaluate` metric, got "
                f"{metric!r}."
            )
        found[name] = own
    return found


def names_of(metrics: Mapping[str, GroupMetric], group_names: Sequence[str]) -> list[str]:
    """All names that `custom_group_metrics` may give."""
    return [
        found
        for name in metrics
        for found in (name, f"worst_group_{name}", *(f"group_{name}/{group}" for group in group_names))
    ]


def declared_directions(metrics: Mapping[str, GroupMetric]) -> dict[str, Any]:
    """The metrics that say themselves which direction is better, as a `GroupReport` has them."""
    return {
        field: tuple(name for name, metric in metrics.items() if metric.greater_is_better is greater)
        for field, greater in (("lower_is_better", False), ("higher_is_better", True))
    }


def direction_of(wanted: str, metrics: Mapping[str, GroupMetric]) -> bool | None:
    """Whether greater is better for a (possibly prefixed) metric, where one of these says so itself; else None."""
    own = wanted.split("/")[0]
    meant = [name for name in metrics if own == name or own.endswith(f"_{name}")]
    # "my_risk" is that metric, and not "risk" behind a prefix.
    return metrics[max(meant, key=len)].greater_is_better if meant else None


def lower_is_better_by_name(name: str) -> bool:
    """Whether the name of a metric ends like one that is better when lower."""
    return name.endswith(LOWER) or name.rpartition("_")[2] in LOWER_WORDS


def custom_group_metrics(
    metrics: Mapping[str, GroupMetric],
    predictions: np.ndarray,
    labels: np.ndarray,
    group_ids: np.ndarray,
    group_names: Sequence[str],
) -> dict[str, float]:
    """Each metric over all examples, over each group that has any, and that of the group where it is worst.

    Args:
        metrics: by name.
        predictions, labels, group_ids, group_names: see `hf_cgd.metrics.named_metrics`.

    Returns:
        plain floats. What is not defined or not finite is left out, with one warning; the worst group is then the
        worst of those where it is defined.
    """
    members = rows_of_groups(np.asarray(group_ids), len(group_names))
    found: dict[str, float] = {}
    undefined: list[str] = []
    for name, metric in metrics.items():
        values = {name: metric(name, predictions, labels)} if len(labels) else {}
        for group, rows in zip(group_names, members, strict=True):
            if len(rows):
                values[f"group_{name}/{group}"] = metric(name, predictions[rows], labels[rows])
        undefined += [key for key, value in values.items() if not np.isfinite(value)]
        values = {key: value for key, value in values.items() if np.isfinite(value)}
        of_groups = [value for key, value in values.items() if key != name]
        lower = metric.lower_is_better(name)
        if of_groups:
            values[f"worst_group_{name}"] = max(of_groups) if lower else min(of_groups)
        found |= values
    if undefined:
        warnings.warn(
            f"These metrics are not defined or not finite on this data and are left out: {undefined}.",
            GroupRobustWarning,
            stacklevel=2,
        )
    return found


def _called(
    function: Callable[..., Any],
    predictions: np.ndarray,
    labels: np.ndarray,
    is_evaluate: bool,
    truth_first: bool,
) -> Any:
    if is_evaluate:
        return function(predictions=predictions, references=labels)
    in_order = (labels, predictions) if truth_first else (predictions, labels)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function(*in_order)
    for first, second in PAIRS:
        if first in parameters and second in parameters:
            return function(**{first: predictions, second: labels})
    return function(*in_order)
