"""The front matter of a card, as huggingface_hub and the Hub check it."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from hf_cgd.cards.record import RunRecord
from hf_cgd.metrics import GroupReport

TAGS = ("group-robustness", "hf_cgd")
"""On every card."""
UNKNOWN_DATASET = "unknown"
"""Type of a data set that is not on the Hub; a result without a type would be refused."""
METRICS = {
    "accuracy": ("accuracy", "Accuracy"),
    "worst_group_accuracy": ("worst_group_accuracy", "Worst-group accuracy"),
    "adjusted_accuracy": ("adjusted_accuracy", "Adjusted accuracy (groups weighted by training shares)"),
    "mean_group_accuracy": ("mean_group_accuracy", "Mean group accuracy"),
    "pearson": ("pearsonr", "Pearson correlation"),
    "worst_group_pearson": ("worst_group_pearson", "Worst-group Pearson correlation"),
    "mse": ("mse", "Mean squared error"),
    "perplexity": ("perplexity", "Perplexity"),
    "worst_group_perplexity": ("worst_group_perplexity", "Worst-group perplexity"),
    "token_accuracy": ("token_accuracy", "Token accuracy"),
    "worst_group_token_accuracy": ("worst_group_token_accuracy", "Worst-group token accuracy"),
    "span_exact_match": ("exact_match", "Exact match of the answer's places"),
    "span_f1": ("f1", "F1 of the answer's places"),
}
"""Type and display name of the numbers over all groups that stand in the model index."""


def card_data(
    record: RunRecord,
    *,
    language: str | list[str] | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    dataset_names: Sequence[str] = (),
    dataset_args: Sequence[str | None] = (),
) -> ModelCardData:
    """The front matter.

    Args:
        record: the run.
        language, license: None where they are not known.
        tags: besides ours.
        dataset_names, dataset_args: of the data sets `record.data.ids`, in their order.
    """
    objective = [] if record.objective is None else [record.objective_name]
    results = list(eval_results(record, dataset_names, dataset_args))
    given: dict[str, Any] = {
        "language": language,
        "license": license,
        "library_name": record.model.library,
        "base_model": record.model.base_model,
        "pipeline_tag": record.model.task,
        "datasets": list(record.data.ids) or None,
        "metrics": list(dict.fromkeys(result.metric_type for result in results)) or None,
    }
    given["tags"] = list(dict.fromkeys([*tags, *TAGS, *objective]))
    if results:
        given |= {"model_name": record.name, "eval_results": results}
    return ModelCardData(**{name: value for name, value in given.items() if value})


def eval_results(
    record: RunRecord, dataset_names: Sequence[str] = (), dataset_args: Sequence[str | None] = ()
) -> Iterable[EvalResult]:
    """Complete results only: none without a task, none that is not finite."""
    if record.model.task is None:
        return
    named = len(record.data.ids) > 0
    for set_name, report in record.reports.items():
        for metric, (kind, title) in _numbers(report).items():
            value = report.overall[metric]
            if not math.isfinite(value):
                continue
            name = (dataset_names[0] if dataset_names else record.data.name) or record.name
            arguments = dataset_args[0] if dataset_args else None
            yield EvalResult(
                task_type=record.model.task,
                task_name=record.model.task.replace("-", " ").capitalize(),
                dataset_type=record.data.ids[0] if named else UNKNOWN_DATASET,
                dataset_name=name if named else f"{record.data.name or 'data of its own'} ({set_name})",
                dataset_config=record.data.config,
                dataset_split=record.data.splits.get(set_name, set_name),
                dataset_args=None if arguments is None else {"name": arguments},
                metric_type=kind,
                metric_name=title,
                metric_value=float(value),
            )


def _numbers(report: GroupReport) -> dict[str, tuple[str, str]]:
    """Metrics of a report that stand in the model index: ours, and the user's own with their worst group."""
    own = dict.fromkeys(name for row in report.rows for name in row.others)
    wanted = {name: (name, name) for name in own}
    wanted |= {f"worst_group_{name}": (f"worst_group_{name}", f"Worst-group {name}") for name in own}
    wanted = {name: title for name, title in wanted.items() if name not in METRICS}
    wanted = dict(METRICS) | wanted
    return {name: titles for name, titles in wanted.items() if name in report.overall}
