"""What a table tells of its groups: counts, how they go with the label, how closely accuracies can be known."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset
from scipy.stats import chi2_contingency
from scipy.stats.contingency import association

from hf_cgd.cli.command_line import readable_errors, show_messages
from hf_cgd.cli.data_check import TYPICAL, WIDEST, table_of
from hf_cgd.cli.evaluation import split_of
from hf_cgd.cli.own_data_options import OwnDataOptions
from hf_cgd.data.columns import is_missing, require_columns
from hf_cgd.data.table_checks import LONG, Table, problems_of_names
from hf_cgd.data.table_places import Where, places_in_files
from hf_cgd.data.values import group_name
from hf_cgd.metrics.intervals import wilson_of_share
from hf_cgd.metrics.tables import plain
from hf_cgd.trainer.config import GroupOptions
from hf_cgd.visible_numbers import decimals, per_cent
from hf_cgd.visible_text import visible_name

MOST_VALUES = 20
"""A column with more different values than this is no group that a table could show."""
STRONG, WEAK = 0.3, 0.1
"""Cramér's V from which a correlation of label and group is called strong, and below which it is passed over."""
SIGNIFICANT = 0.01
SHOWN = 40
"""Groups that are shown."""


@dataclass(frozen=True)
class Correlation:
    """How a column and the label go together.

    Attributes:
        column: its name.
        cramers_v: 0 for none, 1 where one tells the other.
        p: of Pearson's chi-squared test; no telling where `expected` is below 5.
        expected: the smallest expected count of a cell.
        table: counts by value of the column and class.
    """

    column: str
    cramers_v: float
    p: float
    expected: float
    table: Mapping[str, Mapping[str, int]]

    @property
    def is_suspicious(self) -> bool:
        """Whether a network may take the group for the label, or the label for the group."""
        return self.cramers_v >= WEAK and self.p < SIGNIFICANT


@dataclass(frozen=True)
class GroupCount:
    """A group: its examples, and the 95 % interval that an accuracy of .8 measured on as many would have."""

    name: str
    count: int
    share: float
    low: float
    high: float

    @property
    def is_small(self) -> bool:
        """Whether that interval is too wide to compare by."""
        return self.high - self.low > WIDEST


@dataclass(frozen=True)
class GroupFacts:
    """What was found.

    Attributes:
        split, rows, missing: what was looked at, its rows, and those without a label or group.
        label_column, group_columns: by name; no group columns where none were asked for.
        groups: the smallest first; () without group columns.
        correlations: of the group columns with the label, or of all columns that may be groups, the strongest first.
        problems: what is wrong with the names of classes and groups, a sentence each; a training may refuse these.
    """

    split: str
    rows: int
    missing: int
    label_column: str
    group_columns: tuple[str, ...]
    groups: tuple[GroupCount, ...]
    correlations: tuple[Correlation, ...]
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, with `advice`."""
        return asdict(self) | {"advice": self.advice}

    @property
    def advice(self) -> list[str]:
        """What to do, in a sentence each."""
        lines = list(self.problems)
        asked = " ".join(dict.fromkeys((self.label_column, *self.group_columns)))
        suspicious = [one for one in self.correlations if one.is_suspicious]
        if not self.group_columns:
            names = [one.column for one in suspicious] or [one.column for one in self.correlations]
            if names:
                lines.append(f"Look closer at a column: --group_column {names[0]}")
            return lines or ["No column has few enough values to be a group: bring one along, or discover groups."]
        if any(one.column != self.label_column for one in suspicious):
            lines.append(
                f"Label and group go together, so a network may take one for the other: train on their crossing, "
                f"--group_column {asked}, and compare: --compare erm erm_uw group_dro cgd."
            )
        elif self.groups[0].count * 2 < self.groups[-1].count:
            lines.append(
                "The groups differ in size: see whether the small ones fare worse, --compare erm erm_uw group_dro cgd."
            )
        small = [group for group in self.groups if group.is_small]
        if small:
            need = _enough()
            lines.append(
                f"{len(small)} of {len(self.groups)} groups are too small to judge a model by: {need} examples of "
                f"each in validation and test tell an accuracy of {TYPICAL:g} to within ±{WIDEST / 2:g}. Collect "
                "more, or merge groups that are alike."
            )
        if self.missing:
            lines.append(f"{self.missing:,} rows have no label or group: fill them in (for instance 'unknown').")
        return lines or ["Nothing stands out."]


def look(
    data: str, config_name: str | None, label_column: str, group_columns: Sequence[str] | None, split: str | None
) -> GroupFacts:
    """Read a table and look at its groups.

    Args:
        data, config_name, split: see `hf_cgd.cli.evaluation.split_of`; the split is "train" by default.
        label_column: column of the classes.
        group_columns: columns whose crossing makes the groups; None for all that may be groups, one by one.

    A missing column, or data that cannot be read, ends the program with a message.
    """
    show_messages()
    with readable_errors(OwnDataOptions, GroupOptions, spellings={"dataset: ": "DATA: "}):
        name, rows = split_of(data, config_name, split, default="train")
        advice = "Pass {}= with one of these."
        require_columns(rows, [label_column], "label_column", f"{name} split", advice.format("label_column"))
        require_columns(rows, group_columns or [], "group_column", f"{name} split", advice.format("group_column"))
        where = places_in_files({"train": Path(data)} if Path(data).is_file() else {}, {"train": len(rows)})
        return facts_of(rows, name, label_column, group_columns, where)


def facts_of(
    rows: Dataset, split: str, label_column: str, group_columns: Sequence[str] | None, where: Where
) -> GroupFacts:
    """What a split tells; see `look`. `where` tells the places of rows of a split "train"."""
    single = [
        column for column, kind in rows.features.items() if isinstance(kind, (datasets.Value, datasets.ClassLabel))
    ]
    wanted = list(group_columns or [column for column in single if column != label_column])
    table = table_of({"train": rows}, [label_column, *wanted], where)
    for option, columns in {"label_column": [label_column], "group_column": wanted}.items():
        images = [column for column in columns if column not in table.splits["train"]]
        if images:
            raise ValueError(f"{option}: expected a column of names or numbers, {images[0]!r} holds images.")
    values = {column: _names(table, column) for column in dict.fromkeys((label_column, *wanted))}
    if group_columns is None:
        wanted = [column for column in wanted if _may_be_groups(values[column])]
    groups: tuple[GroupCount, ...] = ()
    known = [None not in row for row in zip(*(values[c] for c in (label_column, *wanted)), strict=True)]
    if group_columns is not None:
        cells = zip(*(values[column] for column in group_columns), strict=True)
        counts = Counter(group_name(group_columns, list(cell)) for cell in cells if None not in cell)
        total = sum(counts.values())
        groups = tuple(
            GroupCount(name, count, count / total, *wilson_of_share(TYPICAL, count))
            for name, count in sorted(counts.items(), key=lambda item: (item[1], item[0]))
        )
        if not groups:
            raise ValueError(f"group_column: no row of the {split} split has a value in {list(group_columns)}.")
    found = [_correlation(column, values[column], values[label_column]) for column in wanted if column != label_column]
    correlations = sorted((one for one in found if one is not None), key=lambda one: -one.cramers_v)
    missing = known.count(False) if group_columns is not None else 0
    problems = []
    for column in dict.fromkeys((label_column, *(group_columns or ()))):
        role = f"{'label' if column == label_column else 'group'}_column {column!r}"
        found_wrong, _ = problems_of_names(table, column, role)
        problems += [problem.text for problem in found_wrong]
    return GroupFacts(
        split, len(rows), missing, label_column, tuple(group_columns or ()), groups, tuple(correlations),
        tuple(problems),
    )  # fmt: skip


def _may_be_groups(values: Sequence[str | None]) -> bool:
    different = {value for value in values if value is not None}
    return 2 <= len(different) <= min(MOST_VALUES, len(values) // 2) and max(map(len, different)) <= LONG


def _names(table: Table, column: str) -> list[str | None]:
    known = table.class_names.get(column)
    return [
        None if is_missing(value) or (known and value == -1)
        else known[value] if known and isinstance(value, int) else str(value)
        for value in table.splits["train"][column]
    ]  # fmt: skip


def _correlation(column: str, groups: Sequence[str | None], labels: Sequence[str | None]) -> Correlation | None:
    pairs = [(g, c) for g, c in zip(groups, labels, strict=True) if g is not None and c is not None]
    names, classes = (sorted({pair[place] for pair in pairs}) for place in (0, 1))
    if len(names) < 2 or len(classes) < 2:
        return None
    counts = Counter(pairs)
    table = np.array([[counts[name, one] for one in classes] for name in names])
    test = chi2_contingency(table, correction=False)
    by_name = {name: dict(zip(classes, map(int, row), strict=True)) for name, row in zip(names, table, strict=True)}
    return Correlation(
        column,
        float(association(table, method="cramer")),
        float(test.pvalue),
        float(test.expected_freq.min()),
        by_name,
    )


def _enough() -> int:
    """Examples from which an accuracy of .8 is known closely enough."""
    # No interval is wider than z / sqrt(n), with z < 2.
    return 1 + max(n for n in range(1, ceil((2 / WIDEST) ** 2)) if _is_wide(n))


def _is_wide(n: int) -> bool:
    low, high = wilson_of_share(TYPICAL, n)
    return high - low > WIDEST


def told(facts: GroupFacts) -> str:
    """The facts in words and tables."""
    parts = [f"{facts.split}: {facts.rows:,} rows, label {facts.label_column!r}"]
    if facts.groups:
        rows = [["group", "n", "share", f"{TYPICAL:g} would be known to"]]
        for group in facts.groups[:SHOWN]:
            mark = " (too wide)" if group.is_small else ""
            rows.append(
                [
                    visible_name(group.name),
                    f"{group.count:,}",
                    per_cent(group.share),
                    f"{group.low:.2f}-{group.high:.2f}{mark}",
                ]
            )
        more = f"\n… and {len(facts.groups) - SHOWN:,} larger ones" if len(facts.groups) > SHOWN else ""
        parts.append(f"{len(facts.groups)} groups by {' x '.join(facts.group_columns)}\n{plain(rows)}{more}")
    for one in facts.correlations if facts.groups else ():
        classes = list(next(iter(one.table.values())))
        if len(classes) <= MOST_VALUES and len(one.table) <= SHOWN:
            cells = [[visible_name(name), *(f"{row[c]:,}" for c in classes)] for name, row in one.table.items()]
            parts.append(plain([[f"{one.column} \\ {facts.label_column}", *map(visible_name, classes)], *cells]))
    if facts.correlations:
        rows = [["column", "Cramér's V", "p", ""]]
        for one in facts.correlations:
            word = "strong" if one.cramers_v >= STRONG else "notable"
            note = [word] if one.is_suspicious else []
            note += ["few examples in some cells: p is no telling"] if one.expected < 5 else []
            rows.append([one.column, decimals(one.cramers_v, 2), f"{one.p:.1e}", "; ".join(note)])
        parts.append(f"How the label and other columns go together (V: 0 not at all, 1 fully)\n{plain(rows)}")
    parts.append("What to do\n" + "\n".join(f"  - {line}" for line in facts.advice))
    return "\n\n".join(parts)
