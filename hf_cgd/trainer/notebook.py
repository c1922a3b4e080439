"""The progress table of a notebook: six columns, whatever the number of groups."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from transformers import TrainerCallback

from hf_cgd.metrics import lower_is_better
from hf_cgd.trainer.evaluation import prefix_of

SHOWN = ("loss", "accuracy", "worst_group_accuracy", "mse", "pearson", "worst_group_pearson", "perplexity",
         "worst_group_perplexity", "span_f1", "worst_group_span_f1")  # fmt: skip
"""Metrics that have a column, besides the step and the training loss."""
SCORES = ("group_accuracy/", "group_pearson/", "group_perplexity/", "group_span_f1/")
"""What the worst group is found by; the first kind that there is."""


def with_short_tables(callbacks: Sequence[TrainerCallback]) -> list[TrainerCallback]:
    """The callbacks; the progress table of notebooks, where it is among them, has few columns."""
    return [_short_table(one) if type(one).__name__ == "NotebookProgressCallback" else one for one in callbacks]


def shown_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What of an evaluation's metrics stands in the table: the main ones, and the name of the worst group."""
    prefix = prefix_of(metrics) or "eval"
    shown = {f"{prefix}_{name}": metrics[f"{prefix}_{name}"] for name in SHOWN if f"{prefix}_{name}" in metrics}
    for kind in SCORES:
        start = f"{prefix}_{kind}"
        values = {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}
        if values:
            is_known = f"{prefix}_worst_{kind.rstrip('/')}" in metrics
            # The table shows its cells as they are.
            shown[f"{prefix}_worst_group"] = escape(_worst(values, lower_is_better(kind))) if is_known else "not known"
            break
    return shown


def _worst(values: Mapping[str, float], lower_is_better: bool) -> str:
    """The worst group, and how many others have its value."""
    lowest, highest = min(values.values()), max(values.values())
    if len(values) > 1 and lowest == highest:
        return "all alike"
    worst = [name for name, value in values.items() if value == (highest if lower_is_better else lowest)]
    return worst[0] + (f" and {len(worst) - 1} more" if len(worst) > 1 else "")


def _short_table(given: TrainerCallback) -> TrainerCallback:
    kind: Any = type(given)

    class ShortProgressTable(kind):
        """The table of transformers, with the metrics that tell most."""

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            """A line of the table."""
            super().on_evaluate(args, state, control, metrics=shown_metrics(metrics or {}), **kwargs)

    return ShortProgressTable()
