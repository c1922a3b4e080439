"""Group metrics inside the Trainer's evaluation loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from transformers import EvalPrediction


class ExampleResults(NamedTuple):
    """What evaluation keeps of each example; travels through the loop in the place of the labels."""

    labels: Any
    group_ids: Any
    losses: Any
    predictions: Any

    def numpy(self) -> "ExampleResults":
        """The same as arrays on the CPU."""
        return ExampleResults(*(np.asarray(part.cpu() if hasattr(part, "cpu") else part) for part in self))


class EvaluationMetrics:
    """The `compute_metrics` of a `GroupRobustTrainer`: group metrics, and the user's own on plain labels.

    Args:
        group_metrics: metrics of the collected results.
        user_metrics: the user's `compute_metrics` or None. Where it returns a name of ours, its value is kept.
    """

    def __init__(
        self,
        group_metrics: Callable[[ExampleResults], dict[str, float]],
        user_metrics: Callable[..., dict[str, Any]] | None,
    ) -> None:
        self.group_metrics = group_metrics
        self.user_metrics = user_metrics
        self._batches: list[ExampleResults] = []

    def __call__(self, prediction: EvalPrediction, compute_result: bool | None = None) -> dict[str, Any]:
        """All metrics; `compute_result` is given under `batch_eval_metrics`, where batches come one by one."""
        results, labels = unpack_labels(prediction.label_ids)
        if results is not None:
            self._batches.append(results)
        own: dict[str, Any] = {}
        if self.user_metrics is not None:
            plain = EvalPrediction(prediction.predictions, labels, prediction.inputs, prediction.losses)
            extra = {} if compute_result is None else {"compute_result": compute_result}
            own = self.user_metrics(plain, **extra) or {}
        if compute_result is False:
            return own
        batches, self._batches = self._batches, []
        return {**self.group_metrics(concatenate(batches)), **own} if batches else own


def unpack_labels(label_ids: Any) -> tuple[ExampleResults | None, Any]:
    """Our results in what the evaluation loop hands on as labels, and the plain labels without them.

    `label_ids` is a tuple of arrays, or a list of these, one per batch, without `eval_do_concat_batches`.
    """
    if isinstance(label_ids, list) and label_ids and isinstance(label_ids[0], tuple):
        batches = [ExampleResults(*batch).numpy() for batch in label_ids]
        return concatenate(batches), [batch[0] for batch in label_ids]
    if isinstance(label_ids, tuple) and len(label_ids) == len(ExampleResults._fields):
        return ExampleResults(*label_ids).numpy(), label_ids[0]
    return None, label_ids


def concatenate(batches: list[ExampleResults]) -> ExampleResults:
    """One set of results out of those of several batches."""
    return ExampleResults(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))
