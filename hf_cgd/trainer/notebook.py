"""The progress table of a notebook: six columns, whatever the number of groups."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from transformers import TrainerCallback

from hf_cgd.metrics import lower_is_better

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
    prefix = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "eval")
    shown = {f"{prefix}_{name}": metrics[f"{prefix}_{name}"] for name in SHOWN if f"{prefix}_{name}" in metrics}
    for kind in SCORES:
        start = f"{prefix}_{kind}"
        values = {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}
        if values:
            # The table shows its cells as they are.
            worst = max if lower_is_better(kind) else min
            shown[f"{prefix}_worst_group"] = escape(worst(values, key=values.__getitem__))
            break
    return shown


def _short_table(given: TrainerCallback) -> TrainerCallback:
    kind: Any = type(given)

    class ShortProgressTable(kind):
        """The table of transformers, with the metrics that tell most."""

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            """A line of the table."""
            super().on_evaluate(args, state, control, metrics=shown_metrics(metrics or {}), **kwargs)

    return ShortProgressTable()
