"""What evaluation keeps of each example, and how it travels through the Trainer's loop beside the user's labels."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import EvalPrediction

from hf_cgd.data.training_groups import IGNORED
from hf_cgd.models.example_losses import NO_ANSWER


class ExampleResults(NamedTuple):
    """What evaluation keeps of each example; travels through the loop in the place of the labels.

    Of models of tokens a few numbers are kept of each example in place of scores, which are as wide as a vocabulary:
    the number of tokens with a label, the sum of their losses (without label smoothing), and how many are right.
    """

    labels: Any
    group_ids: Any
    losses: Any
    predictions: Any
    token_counts: Any = None
    token_losses: Any = None
    tokens_right: Any = None

    def packed(self) -> tuple[Any, ...]:
        """What there is, for the loop, which takes nothing that is None."""
        return tuple(part for part in self if part is not None)

    def numpy(self) -> "ExampleResults":
        """The same as arrays on the CPU."""
        return ExampleResults(*(np.asarray(part.cpu() if hasattr(part, "cpu") else part) for part in self.packed()))

    @property
    def labelled(self) -> np.ndarray:
        """Which examples [N] have a label; -100 stands for none among classes."""
        if self.token_counts is not None:
            return self.token_counts > 0
        if self.labels.ndim > 1 or not np.issubdtype(self.predictions.dtype, np.integer):
            return np.ones(len(self.labels), dtype=bool)
        return self.labels != IGNORED

    def as_binary(self) -> "ExampleResults":
        """Single scores of examples with integer labels 0 and 1 as the classes that they stand for."""
        labels, scores = self.labels, self.predictions
        given = labels[labels != IGNORED] if np.issubdtype(labels.dtype, np.integer) else np.array([0.5])
        if (
            labels.ndim > 1
            or scores.ndim > 1
            or np.issubdtype(scores.dtype, np.integer)
            or not np.isin(given, (0, 1)).all()
        ):
            return self
        return self._replace(predictions=np.where(np.isnan(scores), NO_ANSWER, scores > 0).astype(np.int64))


SIZES = (4, len(ExampleResults._fields))
"""How many values there are of whole examples, and with those of tokens."""


class EvaluationMetrics:
    """The `compute_metrics` of a `GroupRobustTrainer`: group metrics, and the user's own on plain labels.

    Args:
        metrics_of: group metrics of the collected results.
        user_metrics: the user's `compute_metrics` or None. Where it returns a name of ours, its value is kept.
        as_given: labels as the user knows them, of those in the results.
    """

    def __init__(
        self,
        metrics_of: Callable[[ExampleResults], dict[str, float]],
        user_metrics: Callable[..., dict[str, Any]] | None,
        as_given: Callable[[Any], Any] = lambda labels: labels,
    ) -> None:
        self.metrics_of = metrics_of
        self.as_given = as_given
        self.user_metrics = user_metrics
        self._batches: list[ExampleResults] = []

    def __call__(self, prediction: EvalPrediction, compute_result: bool | None = None) -> dict[str, Any]:
        """All metrics; `compute_result` is given under `batch_eval_metrics`, where batches come one by one."""
        results, labels = unpack_labels(prediction.label_ids)
        if results is not None:
            self._batches.append(results)
        own: dict[str, Any] = {}
        if self.user_metrics is not None:
            given = labels if results is None else self.as_given(labels)
            plain = EvalPrediction(prediction.predictions, given, prediction.inputs, prediction.losses)
            extra = {} if compute_result is None else {"compute_result": compute_result}
            own = self.user_metrics(plain, **extra) or {}
        if compute_result is False:
            return own
        batches, self._batches = self._batches, []
        return {**self.metrics_of(concatenate(batches)), **own} if batches else own


def on_plain_labels(
    preprocess: Callable[[Any, Any], Any] | None, as_given: Callable[[Any], Any] = lambda labels: labels
) -> Callable[[Any, Any], Any] | None:
    """The user's `preprocess_logits_for_metrics`, called with the labels as they were given; None for none."""
    if preprocess is None:
        return None
    return lambda logits, labels: preprocess(logits, as_given(labels[0]) if isinstance(labels, tuple) else labels)


def unpack_labels(label_ids: Any) -> tuple[ExampleResults | None, Any]:
    """Our results in what the evaluation loop hands on as labels, and the plain labels without them.

    `label_ids` is a tuple of arrays, or a list of these, one per batch, without `eval_do_concat_batches`.
    """
    if isinstance(label_ids, list) and label_ids and isinstance(label_ids[0], tuple):
        batches = [ExampleResults(*batch).numpy() for batch in label_ids]
        return concatenate(batches), [batch[0] for batch in label_ids]
    if isinstance(label_ids, tuple) and len(label_ids) in SIZES:
        return ExampleResults(*label_ids).numpy(), label_ids[0]
    return None, label_ids


def concatenate(batches: list[ExampleResults]) -> ExampleResults:
    """One set of results out of those of several batches."""
    parts = zip(*(batch.packed() for batch in batches), strict=True)
    return ExampleResults(*(np.concatenate(_of_one_width(part)) for part in parts))


def _of_one_width(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Arrays [B, L] of rows of other lengths, filled up by -100; others as they are."""
    widths = {part.shape[1] for part in parts if part.ndim == 2}
    if len(widths) < 2:
        return list(parts)
    return [np.pad(part, ((0, 0), (0, max(widths) - part.shape[1])), constant_values=IGNORED) for part in parts]
