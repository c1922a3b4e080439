"""Group metrics on arrays, and what their names say of them.

Classification: `accuracy`, `worst_group_accuracy`, `mean_group_accuracy`, `adjusted_accuracy`, `group_accuracy/<name>`
with the bounds of its 95 % Wilson interval `group_accuracy_low/<name>` and `group_accuracy_high/<name>`. Regression:
`mse`, `pearson`, `worst_group_pearson`, `group_pearson/<name>`. Both: `worst_group_loss`, `group_loss/<name>`,
`group_count/<name>`. `one_class_predicted`: see `ONE_CLASS`.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr

from hf_cgd.data.training_groups import IGNORED, SHOWN_GROUPS
from hf_cgd.metrics.custom_metrics import lower_is_better_by_name, says_direction
from hf_cgd.metrics.group_rows import rows_of_groups
from hf_cgd.metrics.intervals import wilson_interval
from hf_cgd.models.example_losses import CLASSIFICATION, REGRESSION
from hf_cgd.monitors import GroupRobustWarning

ONE_CLASS = "one_class_predicted"
"""1.0 where all examples are given the same class (or set of labels) although there are several, else 0.0."""
WITH_INTERVALS = ("accuracy", "perplexity", "token_accuracy", "span_exact_match", "span_f1")
"""Metrics of groups that have 95 % intervals."""
LOWER_BOUND, UPPER_BOUND = "group_accuracy_low/", "group_accuracy_high/"
"""Names of the bounds of the interval of a group's accuracy, before the name of the group."""


def is_interval(metric: str) -> bool:
    """Whether a (possibly prefixed) metric name is a bound of an interval, which is kept out of the log line."""
    return re.search(rf"group_({'|'.join(WITH_INTERVALS)})_(low|high)/$", own_name(metric)) is not None


def lower_is_better(metric: str) -> bool:
    """Whether a (possibly prefixed) metric is one to minimise: losses, errors and the like (`LOWER`)."""
    return lower_is_better_by_name(_telling_part(metric))


def tells_direction(metric: str) -> bool:
    """Whether a (possibly prefixed) metric name says which direction is better."""
    return says_direction(_telling_part(metric))


def _telling_part(metric: str) -> str:
    """The part of a metric's name that says which direction is better: not its group, nor which bound it is."""
    own = own_name(metric).rstrip("/")
    return re.sub(r"_(low|high)$", "", own) if is_interval(metric) else own


def is_group_metric(metric: str) -> bool:
    """Whether a (possibly prefixed) metric name is one that only `named_metrics` gives."""
    own = own_name(metric)
    return own.endswith("/") or own.endswith(
        (
            "worst_group_accuracy",
            "worst_group_pearson",
            "worst_group_loss",
            "mse",
            "worst_group_perplexity",
            "worst_group_token_accuracy",
            "worst_group_span_f1",
            "worst_group_span_exact_match",
        )
    )


def collapse_beside(metric: str) -> str | None:
    """Name of the `ONE_CLASS` of the evaluation that a (possibly prefixed) accuracy of groups is of; None for others.

    Where labels are unbalanced within the groups, a model that gives one class can have the best of these accuracies.
    """
    own = own_name(metric)
    for name in ("worst_group_accuracy", "mean_group_accuracy", "adjusted_accuracy", "group_accuracy/"):
        if own.endswith(name):
            return own.removesuffix(name) + ONE_CLASS
    return None


def own_name(metric: str) -> str:
    """A metric's name up to the name of the group, which may look like anything: "eval_group_loss/", "eval_loss"."""
    found = re.match(r".*?group_[^/]*/", metric, flags=re.DOTALL)
    return metric if found is None else found.group()


def metric_names(problem_type: str | None, group_names: Sequence[str]) -> list[str]:
    """All names that `named_metrics` may give, the most useful first; those of any problem for None."""
    overall: list[str] = []
    by_group: list[str] = []
    if problem_type != REGRESSION:
        overall += ["worst_group_accuracy", "accuracy", "mean_group_accuracy", "adjusted_accuracy"]
        by_group += ["group_accuracy/", LOWER_BOUND, UPPER_BOUND]
    if problem_type in (REGRESSION, None):
        overall += ["worst_group_pearson", "pearson", "mse"]
        by_group += ["group_pearson/"]
    names = (
        [*overall, "worst_group_loss"]
        if group_names
        else [name for name in overall if "group" not in name and name != "adjusted_accuracy"]
    )
    return [
        *names,
        "loss",
        *(kind + name for kind in [*by_group, "group_loss/", "group_count/"] for name in group_names),
    ]


def named_metrics(
    predictions: np.ndarray,
    labels: np.ndarray,
    group_ids: np.ndarray,
    group_names: Sequence[str],
    *,
    losses: np.ndarray | None = None,
    train_counts: Mapping[str, int] | None = None,
    problem_type: str = CLASSIFICATION,
) -> dict[str, float]:
    """Metrics over all examples and over each group.

    Args:
        predictions: [N] classes, [N, L] zeros and ones of a multi-label problem (right when all L are), or [N] /
            [N, L] values of a regression.
        labels: of the same shape. Examples of the class `IGNORED` (-100) are left out of everything.
        group_ids: [N] integers below K, negative for an example of no known group; or [N, K] booleans, where an
            example may belong to several groups.
        group_names: K names.
        losses: [N], for `group_loss/<name>` and `worst_group_loss`; None leaves these out.
        train_counts: training examples by group name, for `adjusted_accuracy`: the group accuracies weighted by the
            groups' shares of the training set. None leaves it out, and so does a training group that was not
            evaluated.
        problem_type: one of `hf_cgd.models.example_losses.PROBLEM_TYPES`.

    Returns:
        plain floats by the names above. A group without examples is left out, and so is a number that is not defined
        (a correlation of constants) or not finite, each kind with one warning. `worst_group_pearson` is not defined
        where the predictions of a group with different labels are all the same: the other groups would flatter the
        model.

    Raises:
        ValueError: arrays of different lengths or shapes.
    """
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    group_ids = np.asarray(group_ids)
    lengths = {len(predictions), len(labels), len(group_ids)} | ({len(losses)} if losses is not None else set())
    if len(lengths) > 1:
        raise ValueError(
            f"predictions, labels, group_ids and losses must have one entry per example, got lengths "
            f"{len(predictions)}, {len(labels)}, {len(group_ids)}, {'-' if losses is None else len(losses)}."
        )
    if predictions.shape != labels.shape:
        # numpy would compare each prediction with every label.
        raise ValueError(
            f"predictions and labels must have one shape, got {predictions.shape} and {labels.shape}. Reshape one of "
            "them; of logits take the argmax."
        )
    if problem_type == CLASSIFICATION and labels.ndim == 1 and bool((labels == IGNORED).any()):
        labelled = labels != IGNORED
        predictions, labels, group_ids = predictions[labelled], labels[labelled], group_ids[labelled]
        losses = None if losses is None else losses[labelled]
    members = rows_of_groups(group_ids, len(group_names))
    present = {name: rows for name, rows in zip(group_names, members, strict=True) if len(rows)}
    warn_of_empty(group_names, present)

    metrics: dict[str, float] = {}
    if problem_type == REGRESSION:
        metrics |= _regression_metrics(predictions, labels, present)
    else:
        metrics |= _accuracy_metrics(predictions, labels, present, train_counts)
    if losses is not None and present:
        group_losses = {name: float(np.mean(losses[rows])) for name, rows in present.items()}
        metrics |= {f"group_loss/{name}": loss for name, loss in group_losses.items()}
        metrics["worst_group_loss"] = max(group_losses.values(), key=lambda loss: (np.isnan(loss), loss))
    metrics |= {f"group_count/{name}": len(rows) for name, rows in present.items()}

    return require_finite(metrics)


def warn_of_empty(group_names: Sequence[str], present: Mapping[str, Any]) -> None:
    """Warn of groups without evaluated examples, where others have some."""
    empty = [name for name in group_names if name not in present]
    if present and empty:
        shown = f"{list(present)[:SHOWN_GROUPS]}"[:-1] + (", …]" if len(present) > SHOWN_GROUPS else "]")
        _warn(
            f"No examples of the group(s) {empty} were evaluated; they are left out of the group metrics. Those that "
            f"were: {shown}."
        )


def require_finite(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that are finite, with a warning of those that are not."""
    undefined = [name for name, value in metrics.items() if not np.isfinite(value)]
    if undefined:
        _warn(f"These metrics are not defined or not finite on this data and are left out: {undefined}.")
    return {name: value for name, value in metrics.items() if name not in undefined}


def _accuracy_metrics(
    predictions: np.ndarray,
    labels: np.ndarray,
    present: Mapping[str, np.ndarray],
    train_counts: Mapping[str, int] | None,
) -> dict[str, float]:
    correct = predictions == labels
    correct = correct.all(axis=tuple(range(1, correct.ndim)))
    metrics = {"accuracy": float(correct.mean()) if len(correct) else float("nan")}
    if not present:
        return metrics
    if len(correct) > 1:
        given, right = (len(np.unique(rows, axis=0)) for rows in (predictions, labels))
        metrics[ONE_CLASS] = float(given == 1 < right)
    accuracies = {name: float(correct[rows].mean()) for name, rows in present.items()}
    metrics["worst_group_accuracy"] = min(accuracies.values())
    metrics["mean_group_accuracy"] = float(np.mean(list(accuracies.values())))
    shares = {name: (train_counts or {}).get(name, 0) for name in accuracies}
    if train_counts and all(name in accuracies for name in train_counts):
        metrics["adjusted_accuracy"] = float(np.average(list(accuracies.values()), weights=list(shares.values())))
    for name, rows in present.items():
        low, high = wilson_interval(int(correct[rows].sum()), len(rows))
        metrics[f"group_accuracy/{name}"] = accuracies[name]
        metrics[f"{LOWER_BOUND}{name}"] = low
        metrics[f"{UPPER_BOUND}{name}"] = high
    return metrics


def _regression_metrics(
    predictions: np.ndarray, labels: np.ndarray, present: Mapping[str, np.ndarray]
) -> dict[str, float]:
    metrics = {
        "mse": float(np.mean((predictions - labels) ** 2)) if len(labels) else float("nan"),
        "pearson": _pearson(predictions, labels),
    }
    correlations = {name: _pearson(predictions[rows], labels[rows]) for name, rows in present.items()}
    defined = [value for value in correlations.values() if np.isfinite(value)]
    # Labels that are all the same are no fault of the model's.
    open_groups = [
        name for name, rows in present.items()
        if not np.isfinite(correlations[name]) and len(rows) > 1 and (np.ptp(labels[rows], axis=0) > 0).all()
    ]  # fmt: skip
    if defined and (open_groups or not np.isfinite(predictions).all()):
        metrics["worst_group_pearson"] = float("nan")
    elif defined:
        metrics["worst_group_pearson"] = min(defined)
    return metrics | {f"group_pearson/{name}": value for name, value in correlations.items()}


def _pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Correlation, of several outputs the mean of theirs; NaN where one of them is not defined.

    Over all outputs at once it would be near 1 for a model that has learned nothing but their different scales.
    """
    given, right = (values.reshape(len(values), -1).astype(np.float64) for values in (predictions, labels))
    if len(given) < 2 or (np.ptp(given, axis=0) == 0).any() or (np.ptp(right, axis=0) == 0).any():
        return float("nan")
    return float(np.mean([pearsonr(x, y).statistic for x, y in zip(given.T, right.T, strict=True)]))


def _warn(message: str) -> None:
    warnings.warn(message, GroupRobustWarning, stacklevel=4)
