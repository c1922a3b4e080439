"""The table of groups: what a person reads after a run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from hf_cgd.html import Html
from hf_cgd.metrics.custom_metrics import lower_is_better_by_name
from hf_cgd.metrics.group_metrics import ONE_CLASS
from hf_cgd.metrics.report_row import GroupRow
from hf_cgd.metrics.tables import html, markdown, plain
from hf_cgd.visible_numbers import decimals
from hf_cgd.visible_text import quoted_name

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("group", "train", "weight", "eval", "accuracy", "95 % interval", "pearson", "loss")
OURS = ("accuracy", "accuracy_low", "accuracy_high", "pearson", "loss", "count", "token_count")
"""Kinds of group metrics that have fields of their own, or are no measure of how a group fares."""
DIRECTIONS = ("lower_is_better", "higher_is_better")
"""Fields of a report that say which direction is better, in their order."""


@dataclass(frozen=True)
class GroupReport:
    """All groups and the numbers over them; `print(report)` gives a table, `to_dict` what a file wants."""

    rows: tuple[GroupRow, ...]
    overall: Mapping[str, float]
    objective: str
    weights_step: int | None = None
    """Optimizer steps after which the groups had these weights; None where it is not known or there are none."""
    lower_is_better: tuple[str, ...] = ()
    """Metrics of the user's own that are better when lower, beside those whose names say so."""
    higher_is_better: tuple[str, ...] = ()
    """Those that are better when higher, whatever their names say."""

    @classmethod
    def from_metrics(
        cls,
        metrics: Mapping[str, float],
        prefix: str,
        group_names: Sequence[str],
        objective: str,
        *,
        train_counts: Mapping[str, int] | None = None,
        weights: Mapping[str, float] | None = None,
        weights_step: int | None = None,
    ) -> "GroupReport":
        """Collect the metrics that start with `prefix_` (as `evaluate()` returns them) into one row per group."""
        own = {k.removeprefix(f"{prefix}_"): v for k, v in metrics.items() if k.startswith(f"{prefix}_")}
        found = (re.fullmatch(r"group_(\w+)/.*", key, flags=re.DOTALL) for key in own)
        kinds = list(dict.fromkeys(match[1] for match in found if match is not None and match[1] not in OURS))
        others = [kind for kind in kinds if not _is_bound(kind, kinds)]
        rows = tuple(
            GroupRow(
                name=name,
                train_count=(train_counts or {}).get(name),
                weight=(weights or {}).get(name),
                count=None if f"group_count/{name}" not in own else int(own[f"group_count/{name}"]),
                accuracy=own.get(f"group_accuracy/{name}"),
                accuracy_low=own.get(f"group_accuracy_low/{name}"),
                accuracy_high=own.get(f"group_accuracy_high/{name}"),
                pearson=own.get(f"group_pearson/{name}"),
                loss=own.get(f"group_loss/{name}"),
                others={kind: own[f"group_{kind}/{name}"] for kind in others if f"group_{kind}/{name}" in own},
                intervals={
                    kind: (own[f"group_{kind}_low/{name}"], own[f"group_{kind}_high/{name}"])
                    for kind in others
                    if f"group_{kind}_low/{name}" in own and f"group_{kind}_high/{name}" in own
                },
            )
            for name in group_names
        )
        names: tuple[str, ...] = ("accuracy", "worst_group_accuracy", "mean_group_accuracy", "adjusted_accuracy",
                 "mse", "pearson", "worst_group_pearson", "loss", "worst_group_loss", ONE_CLASS)  # fmt: skip
        names += tuple(name for kind in others for name in (kind, f"worst_group_{kind}"))
        return cls(
            rows,
            {name: own[name] for name in names if name in own},
            objective,
            None if weights is None else weights_step,
        )

    @property
    def metric(self) -> str | None:
        """What groups are compared by: accuracy, else the correlation, else the first metric of the user's own."""
        others = dict.fromkeys(name for row in self.rows for name in row.others)
        wanted = ("accuracy", "pearson", *others)
        return next((name for name in wanted if any(row.value(name) is not None for row in self.rows)), None)

    @property
    def ranked(self) -> tuple[GroupRow, ...]:
        """All groups, the worst by `metric` first; those without a value last."""
        metric = self.metric
        sign = -1 if metric is not None and self._is_lower_better(metric) else 1
        values = {id(row): None if metric is None else row.value(metric) for row in self.rows}
        known = [row for row in self.rows if values[id(row)] is not None]
        return (
            *sorted(known, key=lambda row: sign * values[id(row)]),  # type: ignore[operator]
            *(row for row in self.rows if values[id(row)] is None),
        )

    @property
    def worst(self) -> GroupRow | None:
        """The group that fares worst by `metric`; None if no group was evaluated."""
        return next(iter(self.all_worst), None)

    @property
    def all_worst(self) -> tuple[GroupRow, ...]:
        """All groups with that worst value."""
        metric = self.metric
        values = self._values(metric)
        if metric is None or not values:
            return ()
        worst = max(values) if self._is_lower_better(metric) else min(values)
        return tuple(row for row in self.rows if row.value(metric) == worst)

    def gap(self, metric: str | None = None) -> float | None:
        """Highest minus lowest value over the groups.

        Args:
            metric: "accuracy", "pearson", "loss" or one of the user's own; None for `metric`.

        Returns:
            None where no group has the metric, or it is not known of all that count (`unknown_worst`).
        """
        values = self._values(metric or self.metric)
        return max(values) - min(values) if values else None

    def ratio(self, metric: str | None = None) -> float | None:
        """Lowest over highest value over the groups, 1 for equal ones; None where that means nothing (values <= 0).

        Args:
            metric: see `gap`.
        """
        values = self._values(metric or self.metric)
        return min(values) / max(values) if values and min(values) >= 0 and max(values) > 0 else None

    def unknown_worst(self, metric: str | None = None) -> tuple[GroupRow, ...]:
        """The evaluated groups without a finite value of the metric, where this leaves open which is the worst.

        So it is where the model gave no finite answer, or the same one to all rows of a group: then `overall` has no
        "worst_group_<metric>", and the groups that are left would flatter the model.

        Args:
            metric: see `gap`.
        """
        metric = metric or self.metric
        if metric is None or f"worst_group_{metric}" in self.overall:
            return ()
        return tuple(row for row in self.rows if row.count and not _is_known(row.value(metric)))

    def _values(self, metric: str | None) -> list[float]:
        if self.unknown_worst(metric):
            return []
        found = (None if metric is None else row.value(metric) for row in self.rows)
        return [value for value in found if value is not None and _is_known(value)]

    def _is_lower_better(self, metric: str) -> bool:
        return metric not in self.higher_is_better and (
            metric in self.lower_is_better or lower_is_better_by_name(metric)
        )

    @property
    def one_class(self) -> bool:
        """Whether the model gave every example the same class, although there are several."""
        return self.overall.get(ONE_CLASS, 0.0) > 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "objective": self.objective,
            "overall": dict(self.overall),
            "groups": [
                {name: value for name, value in asdict(row).items() if value or name not in ("others", "intervals")}
                for row in self.rows
            ],
            "weights_step": self.weights_step,
        } | {name: list(getattr(self, name)) for name in DIRECTIONS if getattr(self, name)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "GroupReport":
        """Inverse of `to_dict`.

        Raises:
            ValueError: something that `to_dict` did not write.
        """
        known = {one.name for one in fields(GroupRow)}
        groups = data.get("groups") if isinstance(data, Mapping) else None
        if not isinstance(groups, list) or not all(isinstance(row, Mapping) and "name" in row for row in groups):
            given = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(
                'Expected a report as GroupReport.to_dict gives it, with a list of "groups" that have names, got '
                f"{given}. A file of several reports holds one for each evaluation set: take one of them."
            )
        rows = [{name: value for name, value in row.items() if name in known} for row in groups]
        for row in rows:
            row["intervals"] = {name: tuple(bounds) for name, bounds in row.get("intervals", {}).items()}
        return cls(
            tuple(GroupRow(**row) for row in rows),
            overall_of(data),
            str(data.get("objective", "")),
            data.get("weights_step"),
            *(tuple(data.get(name, ())) for name in DIRECTIONS),
        )

    def to_dataframe(self) -> "DataFrame":
        """A row for each group, a column for each of its numbers; those that no group has are left out."""
        import pandas as pd

        rows = []
        for row in self.rows:
            numbers = {name: value for name, value in asdict(row).items() if name not in ("others", "intervals")}
            numbers |= row.others
            for name, (low, high) in row.intervals.items():
                numbers |= {f"{name}_low": low, f"{name}_high": high}
            rows.append(numbers)
        return (
            pd.DataFrame(rows).rename(columns={"name": "group"}).set_index("group").dropna(axis="columns", how="all")
        )

    def to_markdown(self) -> str:
        """The table in Markdown, pipes in group names escaped."""
        return markdown(self.cells())

    def __str__(self) -> str:
        return "\n".join([self._headline(), plain(self.cells()), self._summary(), *self._notes()])

    def _repr_html_(self) -> Html:
        """What a notebook shows: the table, the worst group marked, bars with intervals."""
        below, worst = [self._summary(), *self._notes()], self.all_worst if self.gap() else ()
        return html(self.cells(), self._headline(), below, self._bars(), [row in worst for row in self.rows])

    def _headline(self) -> str:
        step = "" if self.weights_step is None else f" (weights after step {self.weights_step})"
        return f"objective: {self.objective}{step}" if self.objective else "groups"

    def _summary(self) -> str:
        numbers = {name: value for name, value in self.overall.items() if name != ONE_CLASS}
        metric = self.metric
        if metric is not None and len(self.rows) > 1:
            numbers |= {f"{metric} gap": self.gap()} if self.gap() is not None else {}  # type: ignore[dict-item]
            numbers |= {f"{metric} ratio": self.ratio()} if self.ratio() is not None else {}  # type: ignore[dict-item]
        return "  ".join(f"{name} {decimals(value)}" for name, value in numbers.items())

    def _notes(self) -> list[str]:
        collapsed = "All examples are given the same class: the model has collapsed, or not begun to learn."
        notes = [collapsed] if self.one_class else []
        return [*notes, self.unknown_worst_in_words()] if self.unknown_worst() else notes

    def unknown_worst_in_words(self) -> str:
        """The sentence for groups that `unknown_worst` names."""
        names = ", ".join(quoted_name(row.name) for row in self.unknown_worst())
        return f"The worst group is not known: no finite {self.metric} of {names}."

    def _bars(self) -> list[tuple[float, tuple[float, float] | None] | None]:
        """Value and interval of each group, where these lie between 0 and 1."""
        metric = self.metric
        values = [None if metric is None else row.value(metric) for row in self.rows]
        if metric is None or not all(value is None or 0 <= value <= 1 for value in values):
            return [None] * len(values)
        return [
            None if value is None else (value, row.interval(metric))
            for value, row in zip(values, self.rows, strict=True)
        ]

    def cells(self) -> list[list[str]]:
        """Head and rows as text; columns without any entry are left out.

        The worst group (or groups) is marked, unless all have the same value.
        """
        worst = self.all_worst if self.gap() else ()
        rows = [row.cells() for row in self.rows]
        for row, texts in zip(self.rows, rows, strict=True):
            if any(row is one for one in worst):
                texts["group"] += " (worst)"
        others = dict.fromkeys(name for row in self.rows for name in row.others)
        columns = [name for name in (*COLUMNS, *others) if any(row.get(name) for row in rows)]
        return [columns, *([row.get(name, "") for name in columns] for row in rows)]


def overall_of(data: Mapping[str, Any]) -> dict[str, float]:
    """The numbers over all groups of a report as a file has it: JSON has no NaN, and such a number is null there."""
    return {name: nan if value is None else value for name, value in data.get("overall", {}).items()}


def _is_bound(kind: str, kinds: Sequence[str]) -> bool:
    """Whether a kind of group metric is a bound of the interval of another one, which has both."""
    metric = kind.removesuffix("_low").removesuffix("_high")
    return kind != metric and {metric, f"{metric}_low", f"{metric}_high"} <= set(kinds)


def _is_known(value: float | None) -> bool:
    return value is not None and isfinite(value)
