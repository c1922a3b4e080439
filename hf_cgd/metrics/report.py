"""The table of groups: what a person reads after a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_cgd.metrics.group_metrics import ONE_CLASS
from hf_cgd.metrics.tables import markdown, plain

COLUMNS = ("group", "train", "weight", "eval", "accuracy", "95 % interval", "pearson", "loss")


@dataclass(frozen=True)
class GroupRow:
    """How one group fares. None stands for what was not measured."""

    name: str
    train_count: int | None = None
    weight: float | None = None
    count: int | None = None
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    pearson: float | None = None
    loss: float | None = None

    def cells(self) -> dict[str, str]:
        """Text of each column, "" where there is nothing to say."""
        interval = ""
        if self.accuracy_low is not None and self.accuracy_high is not None:
            interval = f"{self.accuracy_low:.3f}-{self.accuracy_high:.3f}"
        return {
            "group": self.name,
            "train": "" if self.train_count is None else f"{self.train_count:,}",
            "weight": _decimals(self.weight),
            "eval": "" if self.count is None else f"{self.count:,}",
            "accuracy": _decimals(self.accuracy),
            "95 % interval": interval,
            "pearson": _decimals(self.pearson),
            "loss": _decimals(self.loss),
        }


@dataclass(frozen=True)
class GroupReport:
    """All groups and the numbers over them; `print(report)` gives a table, `to_dict` what a file wants."""

    rows: tuple[GroupRow, ...]
    overall: Mapping[str, float]
    objective: str
    weights_step: int | None = None
    """Optimizer steps after which the groups had these weights; None where it is not known or there are none."""

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
            )
            for name in group_names
        )
        names = ("accuracy", "worst_group_accuracy", "mean_group_accuracy", "adjusted_accuracy",
                 "mse", "pearson", "worst_group_pearson", "loss", "worst_group_loss", ONE_CLASS)  # fmt: skip
        return cls(
            rows,
            {name: own[name] for name in names if name in own},
            objective,
            None if weights is None else weights_step,
        )

    @property
    def worst(self) -> GroupRow | None:
        """The group with the lowest accuracy (correlation, for a regression); None if no group was evaluated."""
        return next(iter(self.all_worst), None)

    @property
    def all_worst(self) -> tuple[GroupRow, ...]:
        """All groups with that lowest value."""
        scored = [(row.accuracy if row.accuracy is not None else row.pearson, row) for row in self.rows]
        lowest = min((score for score, _ in scored if score is not None), default=None)
        return tuple(row for score, row in scored if score is not None and score == lowest)

    @property
    def one_class(self) -> bool:
        """Whether the model gave every example the same class, although there are several."""
        return self.overall.get(ONE_CLASS, 0.0) > 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "objective": self.objective,
            "overall": dict(self.overall),
            "groups": [asdict(row) for row in self.rows],
            "weights_step": self.weights_step,
        }

    def to_markdown(self) -> str:
        """The table in Markdown, pipes in group names escaped."""
        return markdown(self.cells())

    def __str__(self) -> str:
        overall = "  ".join(f"{name} {value:.3f}" for name, value in self.overall.items() if name != ONE_CLASS)
        step = "" if self.weights_step is None else f" (weights after step {self.weights_step})"
        note = (
            ["All examples are given the same class: the model has collapsed, or not begun to learn."]
            if self.one_class
            else []
        )
        return "\n".join([f"objective: {self.objective}{step}", plain(self.cells()), overall, *note])

    def cells(self) -> list[list[str]]:
        """Head and rows as text; columns without any entry are left out, the worst group (or groups) is marked."""
        worst = self.all_worst
        marks = [{"group": f"{row.name} (worst)"} if any(row is one for one in worst) else {} for row in self.rows]
        rows = [row.cells() | mark for row, mark in zip(self.rows, marks, strict=True)]
        columns = [name for name in COLUMNS if any(row[name] for row in rows)]
        return [columns, *([row[name] for name in columns] for row in rows)]


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
