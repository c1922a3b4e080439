"""A user's own metrics, over all examples and over each group: `f1`, `group_f1/<name>`, `worst_group_f1`."""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_cgd.metrics.group_rows import rows_of_groups
from hf_cgd.monitors import GroupRobustWarning

PAIRS = (("predictions", "references"), ("y_pred", "y_true"), ("predictions", "labels"))
"""Names of arguments by which a metric is called where it has them; another one gets (predictions, labels)."""
LOWER = ("loss", "mse", "mae", "rmse", "error", "errors", "fpr", "fnr", "ece", "brier", "perplexity", "deviance",
         "divergence", "distance")  # fmt: skip
"""Endings of the names of metrics that are better when lower."""
LOWER_WORDS = ("wer", "cer", "mer", "ter", "eer", "fdr", "nll", "mape", "smape", "mase", "msle", "rmsle", "err",
               "hter", "frr", "crps", "mistakes")  # fmt: skip
"""The same where they are the last word of a name, behind a _ or nothing: "answer" ends in "wer" too."""
LOWER_PHRASES = re.compile(
    r"(?:^|_)(?:(?:error|err|miss|mistake|misclassification|failure)_(?:rate|ratio|share|fraction|count|percentage)"
    r"|false_(?:positive|negative|discovery|omission|alarm|acceptance|rejection|match)s?(?:_(?:rate|ratio|share|count))?"
    r"|brier_score|neg(?:ative)?_log_likelihood)$"
)
"""The same of several words: "error_rate", "false_negative_rate"."""
HIGHER = re.compile(
    r"(?:^|_)(?:accuracy|acc|f1|f2|fbeta|precision|recall|sensitivity|specificity|tpr|tnr|ppv|npv|auc|auroc|auprc|score"
    r"|iou|dice|jaccard|kappa|mcc|matthews|corr|corrcoef|correlation|pearsonr?|spearmanr?|kendalltau|r2|ndcg|map|mrr"
    r"|bleu|sacrebleu|rouge[12l]?|meteor|chrf|match|em|agreement|likelihood|true_(?:positive|negative)_rate"
    r"|(?:positive|negative)_predictive_value)(?:_(?:macro|micro|weighted|binary|samples|at|k|\d+))*$",
    re.IGNORECASE,
)
"""Ends of names that say as clearly that higher is better."""
NEGATED = re.compile(r"(?:^|_)(?<!false_)(?<!true_)neg(?:ative)?_(.+)$")
"""scikit-learn turns what is better when lower around: "neg_mean_squared_error"."""


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
        greater_is_better: None for what the name says: see `LOWER`, `LOWER_WORDS` and `LOWER_PHRASES`.
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

    def worst_of(self, name: str, values: Sequence[float], all_answered: bool = True) -> float | None:
        """The worst of the groups' values, those that are not defined (NaN) left out; None where none is.

        NaN where a value is infinite, or not defined because answers of the model are not finite: the groups that
        are left would flatter it.
        """
        defined = [value for value in values if not np.isnan(value)]
        if not defined:
            return None
        if not np.isfinite(defined).all() or (len(defined) < len(values) and not all_answered):
            return float("nan")
        return max(defined) if self.lower_is_better(name) else min(defined)

    def named(self, name: str) -> "GroupMetric":
        """The same under that name; where it does not say which direction is better, that of the function may."""
        own = getattr(self.compute, "name", None) or getattr(self.compute, "__name__", None)
        if self.greater_is_better is not None or says_direction(name) or not isinstance(own, str):
            return self
        return replace(self, greater_is_better=not lower_is_better_by_name(own)) if says_direction(own) else self

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
        found[name] = own.named(name)
    warn_of_unknown_directions(found)
    return found


def warn_of_unknown_directions(metrics: Mapping[str, GroupMetric]) -> None:
    """Warn of metrics of which nothing says which direction is better, so that their worst group is a guess."""
    unknown = [name for name, one in metrics.items() if one.greater_is_better is None and not says_direction(name)]
    if unknown:
        warnings.warn(
            f"Nothing says whether higher or lower values of {', '.join(map(repr, unknown))} are better; higher ones "
            "are taken to be, for the worst group and the best model. Say it: "
            "GroupMetric(…, greater_is_better=False).",
            GroupRobustWarning,
            stacklevel=3,
        )


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
    meant = metric_meant(wanted, metrics)
    return None if meant is None else meant.greater_is_better


def metric_meant(wanted: str, metrics: Mapping[str, GroupMetric]) -> GroupMetric | None:
    """Which of the metrics a (possibly prefixed) name is of; None for none of them."""
    own = wanted.split("/")[0]
    meant = [name for name in metrics if own == name or own.endswith(f"_{name}")]
    # "my_risk" is that metric, and not "risk" behind a prefix.
    return metrics[max(meant, key=len)] if meant else None


def lower_is_better_by_name(name: str) -> bool:
    """Whether the name of a metric ends like one that is better when lower."""
    return bool(LOWER_PHRASES.search(name)) or (_ends_low(name) and not _is_negated(name))


def says_direction(name: str) -> bool:
    """Whether the name of a metric tells which direction is better."""
    return lower_is_better_by_name(name) or _is_negated(name) or HIGHER.search(name) is not None


def _ends_low(name: str) -> bool:
    return name.endswith(LOWER) or name.rpartition("_")[2] in LOWER_WORDS


def _is_negated(name: str) -> bool:
    turned = NEGATED.search(name)
    return turned is not None and _ends_low(turned[1])


def is_finite(predictions: np.ndarray) -> bool:
    """Whether the model has given all answers."""
    return predictions.dtype.kind not in "fc" or bool(np.isfinite(predictions).all())


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
        worst of those where it is defined, unless the model's answers are why it is not (see `worst_of`).
    """
    members = rows_of_groups(np.asarray(group_ids), len(group_names))
    found: dict[str, float] = {}
    undefined: list[str] = []
    for name, metric in metrics.items():
        values = {name: metric(name, predictions, labels)} if len(labels) else {}
        for group, rows in zip(group_names, members, strict=True):
            if len(rows):
                values[f"group_{name}/{group}"] = metric(name, predictions[rows], labels[rows])
        worst = metric.worst_of(
            name,
            [value for key, value in values.items() if key != name],
            all_answered=is_finite(predictions[np.unique(np.concatenate(members))] if members else predictions),
        )
        if worst is not None:
            values[f"worst_group_{name}"] = worst
        undefined += [key for key, value in values.items() if not np.isfinite(value)]
        found |= {key: value for key, value in values.items() if np.isfinite(value)}
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
