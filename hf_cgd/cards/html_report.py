"""One page to hand on: how the groups fare under one or several runs, in a single file that needs nothing else."""

import os
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from hf_cgd.cards.formulas import explained
from hf_cgd.cards.html_style import STYLE
from hf_cgd.cards.loading import load_run
from hf_cgd.cards.record import RunRecord
from hf_cgd.cards.svg import legend, line_chart
from hf_cgd.cards.words import headline, limits
from hf_cgd.html import Html, raw, tag
from hf_cgd.metrics import GroupReport, GroupRow
from hf_cgd.plots.logs import weight_curves
from hf_cgd.visible_numbers import decimals
from hf_cgd.visible_text import quoted_name, visible_name
from hf_cgd.whole_files import write_whole

SHOWN_GROUPS = 30
"""Groups of a table that are shown at once; the others, which fare better, stand behind a click."""
MATRIX_GROUPS = 16
"""Groups up to which the whole matrix of interactions is shown; of more, the strongest pairs only."""
FIRST = "accuracy"
"""Column that comes first where there is one: on a narrow screen the others are behind a scroll."""
PAIRS = 5
"""Pairs of groups that are named on either side."""
NUMBERS = {"worst_group_accuracy": "worst group", "accuracy": "average", "adjusted_accuracy": "adjusted average",
           "worst_group_pearson": "worst group, correlation", "pearson": "correlation",
           "worst_group_perplexity": "worst group, perplexity", "perplexity": "perplexity"}  # fmt: skip
"""What stands in large figures above a table, where a report has it."""

ONE_OF_SEVERAL = (
    "Each row is a single run: with another seed it may come out otherwise, and the best of several looks better than "
    "it is."
)

Run = RunRecord | str | os.PathLike[str]


def html_report(runs: Sequence[Run] | Run, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Write a page about one run, or about several side by side.

    It holds the groups with their intervals, the gap, the weights over time, who helps whom, the settings, and what
    the numbers do not tell, in plain words. It loads nothing: styles and pictures stand in the file.

    Args:
        runs: records, folders of runs, or ids of repositories on the Hub.
        path: the file to write, .html.
        title: of the page; None for the names of the runs.

    Returns:
        where the page is.

    Raises:
        ValueError: no run, or a place that holds none.
    """
    given = [runs] if isinstance(runs, (RunRecord, str, os.PathLike)) else list(runs)
    records = [run if isinstance(run, RunRecord) else load_run(run) for run in given]
    if not records:
        raise ValueError("Expected at least one run to report of, got none.")
    path = Path(path)
    write_whole(path, page(records, title))
    return path


def page(records: Sequence[RunRecord], title: str | None = None) -> str:
    """The page as text."""
    names = _distinct(records)
    heading = title or f"How the groups fare: {', '.join(names)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", heading),
        tag("style", raw(STYLE)),
    )
    parts = [tag("h1", heading)]
    if len(records) > 1:
        parts += [tag("h2", "The runs side by side"), _side_by_side(records, names)]
        parts.append(tag("p", ONE_OF_SEVERAL))
        parts += _groups_by_run(records, names)
    parts.append(tag("div", [_run(record, name) for record, name in zip(records, names, strict=True)], class_="runs"))
    parts.append(tag("footer", f"Written by hf_cgd on {date.today().isoformat()} from the runs' own numbers."))
    return "<!DOCTYPE html>\n" + tag("html", head, tag("body", tag("main", parts)), lang="en") + "\n"


def _distinct(records: Sequence[RunRecord]) -> list[str]:
    """A name for each run; where names are the same, with the objective or a number."""
    names = [record.name or record.objective_name for record in records]
    if len(set(names)) < len(names):
        names = [f"{name} ({record.objective_name})" for name, record in zip(names, records, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    return names


def _finals(records: Sequence[RunRecord]) -> list[tuple[str, GroupReport] | None]:
    """The report of each run that is set beside the others: of the test set, else of the first set that all have.

    Where they have none in common, the test set or the first one of each: sets of other names do not compare.
    """
    shared = [name for name in records[0].reports if all(name in record.reports for record in records)]

    def wanted(names: Sequence[str]) -> str | None:
        return "test" if "test" in names else next(iter(names), None)

    names = [wanted(shared or list(record.reports)) for record in records]
    return [
        None if name is None else (name, record.reports[name]) for name, record in zip(names, records, strict=True)
    ]


def _side_by_side(records: Sequence[RunRecord], names: Sequence[str]) -> Html:
    rows = []
    for record, name, final in zip(records, names, _finals(records), strict=True):
        cells = [name, record.objective_name, *([""] * 6)]
        if final is not None:
            where, report = final
            worst, metric = report.worst, report.metric
            cells[2] = where
            if worst is not None and metric is not None:
                average = report.overall.get(metric)
                others = len(report.all_worst) - 1
                name = visible_name(worst.name) + (f" and {others} more" if others else "")
                cells[3:] = [name, _value(worst, metric), _span(worst, metric), decimals(average),
                             decimals(report.gap())]  # fmt: skip
        rows.append(cells)
    head = ["run", "objective", "evaluated on", "worst group", "its value", "95 % interval", "average", "gap"]
    return _table(head, rows)


def _groups_by_run(records: Sequence[RunRecord], names: Sequence[str]) -> list[Html]:
    """Each group under each run, where the runs report the same metric of the same set."""
    finals = [final for final in _finals(records) if final is not None]
    reports = [report for _, report in finals]
    metrics, sets = {report.metric for report in reports}, {name for name, _ in finals}
    if len(reports) < len(records) or len(metrics) > 1 or None in metrics or len(sets) > 1:
        return []
    metric = str(metrics.pop())
    rows_in_order = [report.rows if len(report.rows) <= SHOWN_GROUPS else report.ranked for report in reports]
    groups = list(dict.fromkeys(row.name for rows in rows_in_order for row in rows))
    by_run = [{row.name: row for row in report.rows} for report in reports]
    rows = []
    for group in groups[:SHOWN_GROUPS]:
        found = [rows_of.get(group) for rows_of in by_run]
        rows.append(
            [
                visible_name(group),
                *("" if row is None else f"{_value(row, metric)} ({_span(row, metric)})" for row in found),
            ]
        )
    more = f", the {SHOWN_GROUPS} of {len(groups)} that fare worst in {names[0]}" if len(groups) > SHOWN_GROUPS else ""
    title = f"{metric} of each group under each run, {sets.pop()} (95 % interval){more}"
    return [tag("h3", title), _table(["group", *names], rows)]


def _run(record: RunRecord, name: str) -> Html:
    parts = [tag("h2", name)]
    if record.objective is None:
        parts.append(tag("p", "The model was evaluated only; how it was trained is not known here."))
    else:
        told = explained(record.objective)
        parts.append(tag("p", f"Trained under {told.title}. {told.words.replace('`', '')}"))
    for set_name, report in record.reports.items():
        parts += _report(set_name, report)
    if record.groups is not None and record.groups.counts is not None:
        total = sum(record.groups.counts)
        by = ", ".join(map(quoted_name, record.groups.columns))
        parts.append(tag("p", f"Trained on {total:,} examples of {len(record.groups)} groups by {by}."))
    steps, curves = weight_curves(record.history)
    if curves:
        parts.append(tag("h3", "Weights of the groups over the training steps"))
        parts.append(tag("p", "The more weight a group has, the more its loss counts. Weights sum to 1."))
        parts += [line_chart(steps, curves, "Weights of the groups over the training steps"), legend(curves)]
    if record.interactions is not None and record.groups is not None:
        parts += _interactions(record.interactions, record.groups.names)
    parts.append(tag("h3", "What these numbers do not tell"))
    parts.append(tag("ul", [tag("li", line) for line in limits(record)]))
    settings = {k: v for k, v in {**record.settings, **record.training}.items() if v is not None}
    for caption, table in (("Settings", settings), ("Versions", record.versions)):
        if table:
            rows = [[key, str(value)] for key, value in table.items()]
            content = _table(["setting" if caption == "Settings" else "library", "value"], rows, class_="settings")
            parts.append(tag("details", tag("summary", caption), content))
    return tag("section", parts, class_="run")


def _report(name: str, report: GroupReport) -> list[Html]:
    parts = [tag("h3", f"How the groups fare: {name}")]
    numbers = [(title, report.overall[key]) for key, title in NUMBERS.items() if key in report.overall]
    gap = report.gap()
    if gap is not None:
        numbers.append(("gap between best and worst", gap))
    parts.append(tag("ul", [tag("li", tag("b", decimals(value)), tag("span", title)) for title, value in numbers],
                     class_="numbers"))  # fmt: skip
    parts.append(tag("p", headline(report)))
    head, *cells = report.cells()
    if not head:
        return parts
    order = sorted(range(1, len(head)), key=lambda column: column < head.index(FIRST) if FIRST in head else False)
    metric = report.metric
    worst = {id(row) for row in report.all_worst} if gap else set()
    texts_of = {id(row): texts for row, texts in zip(report.rows, cells, strict=True)}
    body = []
    for row in report.rows if len(report.rows) <= SHOWN_GROUPS else report.ranked:
        texts = texts_of[id(row)]
        # The style sheet marks the worst group.
        columns = [
            tag("td", visible_name(row.name)),
            tag("td", _bar(row, metric)),
            *(tag("td", texts[n]) for n in order),
        ]
        is_worst = id(row) in worst
        body.append(tag("tr", columns, class_="worst" if is_worst else None))
    titles = {"train": "trained on", "eval": "evaluated"}
    line = tag("tr", tag("th", head[0]), tag("th", ""), [tag("th", titles.get(head[n], head[n])) for n in order])
    parts.append(_grid(line, body[:SHOWN_GROUPS]))
    if body[SHOWN_GROUPS:]:
        rest = _grid(line, body[SHOWN_GROUPS:])
        parts.append(tag("details", tag("summary", f"The other {len(body) - SHOWN_GROUPS} groups"), rest))
    return parts


def _interactions(cosines: Sequence[Sequence[float | None]], names: Sequence[str]) -> list[Html]:
    parts = [
        tag("h3", "Who helps whom"),
        tag(
            "p",
            "The mean cosine of two groups' gradients, from -1 to 1. Blue, above 0: a training step for one group "
            "also lowers the loss of the other. Red, below 0: it raises it.",
        ),
    ]
    met = [(float(value), names[i], names[j]) for i, row in enumerate(cosines) for j, value in enumerate(row)
           if i < j and value is not None]  # fmt: skip
    pairs = sorted(met, reverse=True)
    for words, chosen in (
        ("Help each other most", [pair for pair in pairs[:PAIRS] if pair[0] > 0]),
        ("Hinder each other most", [pair for pair in pairs[::-1][:PAIRS] if pair[0] < 0]),
    ):
        if chosen:
            listed = "; ".join(
                f"{quoted_name(first)} and {quoted_name(second)} ({value:+.2f})" for value, first, second in chosen
            )
            parts.append(tag("p", f"{words}: {listed}."))
    if len(names) <= MATRIX_GROUPS:
        head = tag("tr", tag("th", ""), [tag("th", visible_name(name)) for name in names])
        rows = [
            tag("tr", tag("th", visible_name(name)), [_cosine(value) for value in row])
            for name, row in zip(names, cosines, strict=True)
        ]
        parts.append(_grid(head, rows, class_="matrix"))
    return parts


def _cosine(value: float | None) -> Html:
    if value is None:
        return tag("td", "never met", style="background:#d9d9d9")
    strength = round(12 + 60 * min(1.0, abs(value)))
    hue = "#2166ac" if value > 0 else "#b2182b"
    return tag("td", f"{value:.2f}", style=f"background:color-mix(in srgb, {hue} {strength}%, white)")


def _bar(row: GroupRow, metric: str | None) -> Html | None:
    value = None if metric is None else row.value(metric)
    if metric is None or value is None or not 0 <= value <= 1:
        return None
    interval = row.interval(metric)
    whisker = None
    if interval is not None:
        low, high = (100 * max(0.0, min(1.0, bound)) for bound in interval)
        whisker = tag("u", style=f"left:{low:.1f}%;width:{high - low:.1f}%")
    return tag("span", tag("i", style=f"width:{100 * value:.1f}%"), whisker, class_="bar")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], **attributes: Any) -> Html:
    return _grid(
        tag("tr", [tag("th", text) for text in head]),
        [tag("tr", [tag("td", text) for text in row]) for row in rows],
        **attributes,
    )


def _grid(head: Html, rows: Sequence[Html], **attributes: Any) -> Html:
    return tag("div", tag("table", tag("thead", head), tag("tbody", rows), **attributes), class_="scroll")


def _value(row: GroupRow, metric: str) -> str:
    return decimals(row.value(metric))


def _span(row: GroupRow, metric: str) -> str:
    interval = row.interval(metric)
    return "no interval" if interval is None else " to ".join(map(decimals, interval))
