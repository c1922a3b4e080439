"""A row of the table of groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_cgd.visible_numbers import decimals
from hf_cgd.visible_text import visible_name

MEASURED = ("accuracy", "pearson", "loss")
"""Group metrics with a field of their own that tell how a group fares."""


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
    others: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the user's own, by name."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """95 % intervals (low, high) of these, by name."""

    def value(self, metric: str) -> float | None:
        """The group's "accuracy", "pearson", "loss" or one of `others`; None where it was not measured."""
        found: float | None = getattr(self, metric, None) if metric in MEASURED else self.others.get(metric)
        return found

    def interval(self, metric: str) -> tuple[float, float] | None:
        """The 95 % interval of a metric, None where there is none."""
        if metric == "accuracy" and self.accuracy_low is not None and self.accuracy_high is not None:
            return self.accuracy_low, self.accuracy_high
        return self.intervals.get(metric)

    def cells(self) -> dict[str, str]:
        """Text of each column, "" where there is nothing to say."""
        interval = self.interval("accuracy")
        return {
            "group": visible_name(self.name),
            "train": "" if self.train_count is None else f"{self.train_count:,}",
            "weight": decimals(self.weight),
            "eval": "" if self.count is None else f"{self.count:,}",
            "accuracy": decimals(self.accuracy),
            "95 % interval": "" if interval is None else _span(interval),
            "pearson": decimals(self.pearson),
            "loss": decimals(self.loss),
        } | {
            name: decimals(value) + (f" ({_span(self.intervals[name])})" if name in self.intervals else "")
            for name, value in self.others.items()
        }


def _span(interval: tuple[float, float]) -> str:
    return "-".join(map(decimals, interval))
