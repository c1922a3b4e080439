"""`group_metrics`: how each group fares, from plain arrays and any metric, with intervals."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import isclose
from typing import Any

import numpy as np

from hf_cgd.data.columns import Column, is_missing, listed_rows
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.training_groups import IGNORED
from hf_cgd.metrics.custom_metrics import GroupMetric, declared_directions, is_finite, warn_of_unknown_directions
from hf_cgd.metrics.intervals import bootstrap_interval, class_strata, wilson_of_share
from hf_cgd.metrics.report import GroupReport
from hf_cgd.metrics.report_row import GroupRow
from hf_cgd.monitors import GroupRobustWarning

ACCURACY = "accuracy"


def group_metrics(
    y_true: Any,
    y_pred: Any,
    groups: Any,
    *,
    metrics: Mapping[str, Any] | None = None,
    classes: Sequence[Any] | None = None,
    resamples: int = 500,
    seed: int = 0,
) -> GroupReport:
    """Metrics of any model's predictions over all examples and over each group.

        report = group_metrics(y_true, y_pred, frame["region"], metrics={"accuracy": accuracy_score, "f1": f1_score})
        report.worst, report.gap("f1"), report.ratio("f1"), report.to_dataframe()

    Args:
        y_true: [N] true classes (integers, strings, bools) or values; a table [N, 1] counts as [N].
        y_pred: [N] predicted ones, in the order of `y_true`; for metrics that take scores, those, [N] or [N, C].
        groups: the group of each example, [N] integers >= 0, strings or bools; or several such columns (a DataFrame or
            a mapping), which are crossed.
        metrics: by name, each a function of (y_true, y_pred), a `GroupMetric` that says which direction is better, or
            an `evaluate` metric. None for {"accuracy": …}.
        classes: the classes that there are; a prediction of any other is refused. None for no such check.
        resamples: draws of the bootstrap; 0 for no intervals but those of the accuracy.
        seed: of the bootstrap.

    Returns:
        a report, groups in sorted order. Intervals are 95 %: Wilson's for the accuracy; of other metrics percentiles
        of a bootstrap that draws within each group and, where the labels are classes, within each class of it, so that
        a group keeps its size and classes (see `class_strata`). Where all draws agree, or a class or the group has too
        few examples to draw from (`hf_cgd.metrics.intervals.FEWEST`), there is no interval: too small to tell.
        `overall` has each metric over all examples, `worst_group_<name>`, and the means of the groups' accuracies.

    Raises:
        ValueError: lengths that differ, missing groups or labels, pandas objects in different orders, scores where
            classes are needed, classes that cannot be compared or are not among `classes`, a metric that fails on all
            examples.
    """
    _require_one_order({"y_true": y_true, "y_pred": y_pred, "groups": groups})
    truth, given = _of_one_shape(as_array("y_true", y_true), as_array("y_pred", y_pred))
    columns = _columns(groups)
    lengths = {"y_true": len(truth), "y_pred": len(given)} | {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"Expected one entry for each example in all of these, got the lengths {lengths}.")
    info = GroupInfo.from_columns(columns)
    ids = info.encode_columns(columns)
    wanted = {
        name: (one if isinstance(one, GroupMetric) else GroupMetric(one)).named(name)
        for name, one in ({ACCURACY: _share_of_right} if metrics is None else metrics).items()
    }
    warn_of_unknown_directions(wanted)
    if classes is not None or any(_is_accuracy(name, one) for name, one in wanted.items()):
        require_classes(truth, given, classes)
        _require_labels(truth)
        _warn_of_other_names(truth, given)

    rows_of = [np.flatnonzero(ids == group) for group in range(len(info))]
    found: dict[str, list[float | None]] = {}
    bounds: dict[str, list[tuple[float, float] | None]] = {}
    overall: dict[str, float] = {}
    undefined = []
    for name, metric in wanted.items():
        overall[name] = _on_all(name, metric, truth, given)
        values = [metric(name, given[rows], truth[rows], truth_first=True) for rows in rows_of]
        undefined += [f"{name} of {info.names[k]}" for k, value in enumerate(values) if not np.isfinite(value)]
        found[name] = [value if np.isfinite(value) else None for value in values]
        bounds[name] = [
            None if value is None else _interval(name, metric, value, truth[rows], given[rows], resamples, seed)
            for rows, value in zip(rows_of, found[name], strict=True)
        ]
        worst = metric.worst_of(name, values, is_finite(given))
        if worst is not None:
            overall[f"worst_group_{name}"] = worst
        defined = [value for value in found[name] if value is not None]
        if defined and name == ACCURACY:
            overall["mean_group_accuracy"] = float(np.mean(defined))
    if undefined:
        message = f"These metrics are not defined on these groups and are left out: {undefined}."
        warnings.warn(message, GroupRobustWarning, stacklevel=2)

    def row(k: int, name: str) -> GroupRow:
        low, high = bounds.get(ACCURACY, [None] * len(info))[k] or (None, None)
        others = {n: value for n, values in found.items() if n != ACCURACY and (value := values[k]) is not None}
        intervals = {n: interval for n in others if (interval := bounds[n][k]) is not None}
        accuracy = found.get(ACCURACY, [None] * len(info))[k]
        return GroupRow(name, None, None, len(rows_of[k]), accuracy, low, high, others=others, intervals=intervals)

    defined_overall = {name: value for name, value in overall.items() if np.isfinite(value)}
    return GroupReport(
        tuple(map(row, range(len(info)), info.names)), defined_overall, "", **declared_directions(wanted)
    )


def _require_one_order(given: Mapping[str, Any]) -> None:
    """Raise a ValueError where two pandas objects hold the same rows in different orders: rows go by their place."""
    indices = {
        name: values.index for name, values in given.items() if hasattr(values, "index") and hasattr(values, "iloc")
    }
    for first, second in combinations(indices, 2):
        one, other = indices[first], indices[second]
        if len(one) == len(other) and one.is_unique and not one.equals(other) and one.isin(other).all():
            raise ValueError(
                f"{first} and {second} hold the same rows in different orders (index {one[:3].tolist()}, … and "
                f"{other[:3].tolist()}, …). Rows are compared by their place: use {second}.loc[{first}.index], or "
                "pass .to_numpy() where the places are right."
            )


def _of_one_shape(truth: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as [N] where one is [N] and the other [N, 1], of which numpy would compare each with every other."""
    if {truth.ndim, given.ndim} == {1, 2}:
        truth, given = (
            values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values for values in (truth, given)
        )
    elif truth.shape == given.shape and truth.ndim == 2 and truth.shape[1] == 1:
        truth, given = truth[:, 0], given[:, 0]
    return truth, given


def as_array(name: str, values: Any) -> np.ndarray:
    """An array of classes or values; raises a ValueError where some are missing, or text stands beside numbers."""
    if str(getattr(values, "dtype", "")) == "torch.bfloat16":
        values = values.float()
    array = np.asarray(values)
    if len(array) == 0:
        raise ValueError(f"{name} is empty. Check the split or the filter that made it.")
    if array.dtype.kind in "OfUMm":
        missing = [row for row, value in enumerate(array.reshape(len(array), -1)) if any(map(is_missing, value))]
        if missing:
            raise ValueError(
                f"{name} is missing (None, NaN or blank) in {listed_rows(missing, len(array))}. Leave them out."
            )
    if array.dtype == object:
        kinds = {isinstance(value, str) for value in array.ravel()}
        if len(kinds) > 1:
            raise ValueError(f"{name} holds texts and numbers, {array.ravel()[:3].tolist()}, …: expected one kind.")
        array = np.asarray(array.tolist())
    return array


def _columns(groups: Any) -> dict[str, Column]:
    if hasattr(groups, "column_names") and hasattr(groups, "to_pydict"):
        # An arrow table, whose `columns` are the values.
        groups = groups.to_pydict()
    if isinstance(groups, Mapping) or hasattr(groups, "columns"):
        names = list(groups if isinstance(groups, Mapping) else groups.columns)
        return {str(name): Column(plain_values(groups[name])) for name in names}
    name = getattr(groups, "name", None)
    return {name if isinstance(name, str) else "group": Column(plain_values(groups))}


def plain_values(values: Any) -> list[Any]:
    """Values of a column, missing ones as None."""
    if hasattr(values, "isna"):
        return [None if missing else value for value, missing in zip(values.tolist(), values.isna(), strict=True)]
    if hasattr(values, "to_pylist"):
        return list(values.to_pylist())
    return list(values.tolist() if isinstance(values, np.ndarray) else values)


def _share_of_right(y_true: np.ndarray, y_pred: np.ndarray) -> float:
    right = y_true == y_pred
    return float(right.reshape(len(right), -1).all(axis=1).mean())


def _is_accuracy(name: str, metric: GroupMetric) -> bool:
    # That of scikit-learn is known by its name, without importing it.
    return name == ACCURACY or getattr(metric.compute, "__name__", "") == "accuracy_score"


def require_classes(truth: np.ndarray, given: np.ndarray, classes: Sequence[Any] | None = None) -> None:
    """Raise a ValueError unless both hold classes that can be compared (see `group_metrics`)."""
    if given.ndim == truth.ndim + 1 and given.dtype.kind not in "US":
        raise ValueError(
            f"y_pred has the shape {given.shape}, y_true {truth.shape}: expected a class for each example, got what "
            "looks like logits or probabilities. Pass y_pred.argmax(axis=1)."
        )
    if given.shape != truth.shape:
        raise ValueError(
            f"y_true has the shape {truth.shape}, y_pred {given.shape}: expected the same number of classes for each "
            "example in both."
        )
    for name, values in (("y_true", truth), ("y_pred", given)):
        if values.dtype.kind == "f" and not np.equal(values, np.round(values)).all():
            raise ValueError(
                f"{name} holds decimal numbers ({values.ravel()[:3].tolist()}, …): expected classes. Turn scores into "
                "classes ((scores > 0.5).astype(int)), or name metrics that take values."
            )
    if (truth.dtype.kind in "US") != (given.dtype.kind in "US"):
        raise ValueError(
            f"y_true holds {truth.ravel()[:3].tolist()}, y_pred {given.ravel()[:3].tolist()}: text and numbers are "
            "never equal. Use the same names of the classes in both."
        )
    if classes is not None:
        for name, values in (("y_true", truth), ("y_pred", given)):
            unknown = sorted(set(np.unique(values).tolist()) - set(classes), key=str)
            if unknown:
                raise ValueError(f"{name} holds {unknown[:5]}, which are not among the classes {list(classes)[:20]}.")


def _require_labels(truth: np.ndarray) -> None:
    unlabelled = np.flatnonzero(truth == IGNORED).tolist() if truth.ndim == 1 and truth.dtype.kind in "if" else []
    if unlabelled:
        raise ValueError(
            f"y_true is {IGNORED} in {listed_rows(unlabelled, len(truth))}, which stands for no label: every answer "
            "to such a row would count as wrong. Leave them out."
        )


def _warn_of_other_names(truth: np.ndarray, given: np.ndarray) -> None:
    if len(truth) > 1 and not set(np.unique(truth).tolist()) & set(np.unique(given).tolist()):
        warnings.warn(
            f"No predicted class ({np.unique(given)[:5].tolist()}) is ever a true one "
            f"({np.unique(truth)[:5].tolist()}): are they numbered or named differently?",
            GroupRobustWarning,
            stacklevel=3,
        )


def _on_all(name: str, metric: GroupMetric, truth: np.ndarray, given: np.ndarray) -> float:
    try:
        return metric.defined(name, given, truth, truth_first=True)
    except (ValueError, ZeroDivisionError, TypeError) as error:
        raise ValueError(f"metrics[{name!r}] failed on all examples: {error}") from error


def _interval(
    name: str, metric: GroupMetric, value: float, truth: np.ndarray, given: np.ndarray, resamples: int, seed: int
) -> tuple[float, float] | None:
    # Under that name may stand per cent, or a balanced accuracy, of which Wilson's interval says nothing.
    if _is_accuracy(name, metric) and isclose(value, share := _share_of_right(truth, given)):
        return wilson_of_share(share, len(truth))
    strata = class_strata(truth) if _are_classes(truth, given) else np.zeros(len(truth), dtype=int)

    def again(rows: np.ndarray) -> float:
        return metric(name, given[rows], truth[rows], truth_first=True)

    with warnings.catch_warnings():
        # What a metric has to say of these examples it has said; some draws of them would have it said again.
        warnings.simplefilter("ignore")
        return bootstrap_interval(again, strata, resamples, seed)


def _are_classes(truth: np.ndarray, given: np.ndarray) -> bool:
    """Whether the truth holds classes. Whole numbers that decimal ones are predicted for are values, but 0 and 1."""
    if truth.ndim != 1 or truth.dtype.kind == "f":
        return False
    values = given.ndim == 1 and given.dtype.kind == "f" and truth.dtype.kind in "iu"
    return not values or len(np.unique(truth)) <= 2
