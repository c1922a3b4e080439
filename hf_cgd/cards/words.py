"""What a report means, in plain words: the same in cards and HTML pages."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from hf_cgd.cards.record import RunRecord
from hf_cgd.metrics import ONE_CLASS, GroupReport, GroupRow
from hf_cgd.metrics.group_metrics import own_name
from hf_cgd.metrics.intervals import confidence_of_extremes, wilson_of_share
from hf_cgd.visible_numbers import decimals
from hf_cgd.visible_text import quoted_name

FEW = 100
"""Evaluated examples below which a group's accuracy is called uncertain: its 95 % interval may span 0.2."""
NAMED = 5
"""Groups that a sentence names at most."""


def headline(report: GroupReport) -> str:
    """The worst group and the distance to the best one, or why it is not known; "" where no group was evaluated."""
    if report.metric is not None and report.unknown_worst():
        return report.unknown_worst_in_words()
    worst, metric, gap = report.worst, report.metric, report.gap()
    if worst is None or metric is None or gap is None:
        return ""
    known = [row for row in report.rows if row.value(metric) is not None]
    if len(known) > 1 and gap == 0:
        return f"All groups that were evaluated have the same {metric}, {decimals(worst.value(metric))}."
    value, interval = worst.value(metric), worst.interval(metric)
    assert value is not None
    about = [] if interval is None else [f"95 % interval {' to '.join(map(decimals, interval))}"]
    about += [] if worst.count is None else [f"{worst.count:,} examples"]
    others = len(report.all_worst) - 1
    also = f" (and {others} more with the same value)" if others else ""
    beside = f" ({', '.join(about)})" if about else ""
    apart = f" Between the best and the worst group lie {decimals(gap)}." if len(known) > 1 else ""
    return f"The worst group is {quoted_name(worst.name)}{also}: {metric} {decimals(value)}{beside}.{apart}"


def limits(record: RunRecord) -> list[str]:
    """What these numbers do not tell, a sentence each."""
    found = []
    for name, report in record.reports.items():
        found += [f"{name}: {sentence}" for sentence in _of_report(report)]
    found += list(record.data.cautions)
    if not record.reports:
        found.append("No group of this model has been evaluated yet.")
    if record.kept_step is not None and record.kept_step != record.steps:
        of = "" if record.steps is None else f" of {record.steps:,}"
        found.append(f"The model, and its group weights, are those of step {record.kept_step:,}{of}, not of the last.")
        if gives_one_class(record.history, record.kept_step):
            found.append(
                "At that step it gave every evaluated row the same class, and no other step was judged better: its "
                "numbers tell which classes there are in the groups, not what it has learned."
            )
    chosen_on = _chosen_on(record)
    if chosen_on is not None:
        found.append(
            f"The model was chosen among {record.compared or 'several'} by its numbers on the {chosen_on} set, so "
            "those flatter it. A set that had no part in the choice is the better judge."
        )
    found.append(
        "Only the groups that are listed were looked at. Others, and groups within these groups, may fare worse."
    )
    return found


def gives_one_class(history: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Whether the model of a step gave one class to all rows of some evaluation, by the entries of a log."""
    return any(
        entry.get("step") == step
        and any(value and own_name(name).endswith(ONE_CLASS) for name, value in entry.items())
        for entry in history
    )


def _chosen_on(record: RunRecord) -> str | None:
    """The evaluation set that the model was chosen on, None where it is not reported or there was no choice."""
    if not record.training.get("load_best_model_at_end") or record.compared in (0, 1):
        return None
    wanted = str(record.training.get("metric_for_best_model") or "").removeprefix("eval_")
    # Of several sets the metric names one: "eval_hospital_worst_group_accuracy". The longest name is meant.
    named = [name for name in record.reports if name not in ("validation", "") and wanted.startswith(f"{name}_")]
    return max(named, key=len, default="validation" if "validation" in record.reports else None)


def _of_report(report: GroupReport) -> list[str]:
    found = []
    small = [row for row in report.rows if row.count is not None and row.count < FEW]
    if small:
        told = any(row.interval(report.metric or "") is not None for row in small)
        found.append(
            f"fewer than {FEW} examples were evaluated of {_names(small)}; their numbers are uncertain"
            f"{', see the intervals' if told else ', and there are no intervals of these'}."
        )
    absent = [row for row in report.rows if row.count is None]
    if absent:
        found.append(f"no examples were evaluated of {_names(absent)}.")
    if report.one_class:
        found.append("the model gives every example the same class: it has collapsed, or not begun to learn.")
    if not isfinite(report.overall.get("loss", 0.0)):
        found.append("the mean loss is not finite: to some examples the model gives NaN or infinite scores.")
    metric = report.metric
    scored = [row for row in report.ranked if metric is not None and row.value(metric) is not None]
    if metric is not None and len(scored) > 1 and report.gap() != 0:
        number = len(scored)
        wider = confidence_of_extremes(number)
        worst, best = (_wilson(row, metric, wider) or row.interval(metric) for row in (scored[0], scored[-1]))
        if worst is None or best is None:
            found.append(f"without intervals of the {metric} nobody knows whether the gap is more than chance.")
        elif worst[0] <= best[1] and best[0] <= worst[1]:
            found.append("the intervals of the worst and the best group overlap: the gap may be chance.")
        if number > 2:
            sentence = f"the worst of {number} groups looks worse than it is by chance alone"
            honest = _wilson(scored[0], metric, 1 - 0.05 / number)
            if scored[0].interval(metric) is not None:
                sentence += (
                    f", so that its true {metric} lies outside of its interval more often than in 5 of 100 samples"
                )
            choice = (
                f" An interval that makes up for the choice: {' to '.join(map(decimals, honest))}." if honest else ""
            )
            found.append(f"{sentence}.{choice}")
    return found


def _wilson(row: GroupRow, metric: str, confidence: float) -> tuple[float, float] | None:
    """The interval of a group's accuracy at that confidence; None for other metrics, and where it has none of 95 %."""
    if metric != "accuracy" or row.accuracy is None or not row.count or row.interval(metric) is None:
        return None
    return wilson_of_share(row.accuracy, row.count, confidence)


def _names(rows: list[GroupRow]) -> str:
    names = [quoted_name(row.name) for row in rows[:NAMED]]
    more = f" and {len(rows) - NAMED} more groups" if len(rows) > NAMED else ""
    return ", ".join(names) + more
