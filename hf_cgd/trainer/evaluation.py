"""Group metrics inside the Trainer's evaluation loop: kept of each batch, computed at its end, written to a file."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput

from hf_cgd.metrics import GroupReport, group_metrics
from hf_cgd.models.example_losses import CLASSIFICATION, REGRESSION
from hf_cgd.monitors import warn_if_one_class
from hf_cgd.objectives import Objective

METRICS_FILE = "metrics.json"
"""In output_dir: the latest metrics of every evaluation set."""


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
        metrics_of: group metrics of the collected results.
        user_metrics: the user's `compute_metrics` or None. Where it returns a name of ours, its value is kept.
    """

    def __init__(
        self,
        metrics_of: Callable[[ExampleResults], dict[str, float]],
        user_metrics: Callable[..., dict[str, Any]] | None,
    ) -> None:
        self.metrics_of = metrics_of
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
        return {**self.metrics_of(concatenate(batches)), **own} if batches else own


def on_plain_labels(preprocess: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any] | None:
    """The user's `preprocess_logits_for_metrics`, called with the labels alone; None for none."""
    if preprocess is None:
        return None
    return lambda logits, labels: preprocess(logits, labels[0] if isinstance(labels, tuple) else labels)


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


class GroupEvaluation:
    """Computes the metrics of a trainer's evaluations, and keeps the latest of every evaluation set."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        """The latest metrics of every evaluation set, with their prefixes."""
        self._step: int | None = None
        self._warned_one_class = self._has_learned = False
        self.class_names: Sequence[str] = ()
        """Of the model's classes, for warnings; () where they have none."""

    def begin_run(self) -> None:
        """A run begins: its warnings are due anew."""
        self._warned_one_class = self._has_learned = False

    def metrics_of(
        self,
        results: ExampleResults,
        names: Sequence[str],
        train_counts: Mapping[str, int] | None,
        objective: Objective,
        learning_rate: float,
    ) -> dict[str, float]:
        """All metrics of one evaluation, without prefix (see `group_metrics`).

        Warns once in a run where a classifier predicts one class for all examples of several.

        Args:
            results: of all examples.
            names: names of the groups; the ids of `results` are indices into them.
            train_counts: training examples by group, None where they are not known.
            objective, learning_rate: for the warning.
        """
        is_classes = np.issubdtype(results.predictions.dtype, np.integer)
        if is_classes and results.predictions.ndim == 1 and not self._warned_one_class:
            step_size = objective.knobs().get("step_size")
            self._warned_one_class = warn_if_one_class(
                results.predictions,
                results.labels,
                step_size,
                learning_rate,
                losses=results.losses,
                class_names=self.class_names,
                has_learned=self._has_learned,
            )
            self._has_learned |= len(np.unique(results.predictions)) > 1
        return group_metrics(
            results.predictions,
            results.labels.reshape(results.predictions.shape),
            results.group_ids,
            names,
            losses=results.losses,
            train_counts=train_counts,
            problem_type=CLASSIFICATION if is_classes else REGRESSION,
        )

    def finish(self, output: EvalLoopOutput, prefix: str, step: int, keeps_loss: bool = False) -> EvalLoopOutput:
        """What an evaluation loop returns: with plain labels, and with the mean loss over the examples.

        (The Trainer's is a mean over batches.) Nothing is changed where no groups are known.

        Args:
            output: that of the Trainer's loop.
            prefix: that of the metrics.
            step: the optimizer step of the model.
            keeps_loss: whether the loss is one that a subclass forms itself, and stays what the Trainer made of it.
        """
        results, labels = unpack_labels(output.label_ids)
        if results is None:
            return output
        self._step = step
        mean_loss = float(results.losses.mean())
        assert output.metrics is not None
        if np.isfinite(mean_loss) and not keeps_loss:
            output.metrics[f"{prefix}_loss"] = mean_loss
        return output._replace(label_ids=labels)

    def keep(self, metrics: Mapping[str, float], folder: str | None) -> None:
        """Keep an evaluation's metrics, and write all of the latest to `METRICS_FILE`; no folder: do not write."""
        self.latest.update(metrics)
        if folder is None:
            return
        os.makedirs(folder, exist_ok=True)
        finite = {name: value if math.isfinite(value) else None for name, value in self.latest.items()}
        with open(os.path.join(folder, METRICS_FILE), "w", encoding="utf-8") as file:
            json.dump(finite, file, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)

    def end_run(self, step: int, best_model_was_loaded: bool) -> None:
        """A run ends at that step: metrics of any but the final model are dropped."""
        if best_model_was_loaded or self._step != step:
            self.latest.clear()

    def report(
        self,
        prefix: str,
        names: Sequence[str],
        objective: str,
        train_counts: Mapping[str, int] | None,
        weights: Mapping[str, float] | None,
        weights_step: int | None = None,
    ) -> GroupReport:
        """The table of groups (see `GroupReport.from_metrics`).

        Raises:
            ValueError: there are metrics, but none of that prefix.
        """
        if self.latest and not self.has(prefix):
            there = sorted(name.removesuffix("_runtime") for name in self.latest if name.endswith("_runtime"))
            raise ValueError(f"No metrics start with {prefix!r}; there are those of {there}.")
        latest = self.latest
        given: Any = {"train_counts": train_counts, "weights": weights, "weights_step": weights_step}
        return GroupReport.from_metrics(latest, prefix, names, objective, **given)

    def has(self, prefix: str) -> bool:
        """Whether there are metrics of that prefix."""
        return any(name.startswith(f"{prefix}_") for name in self.latest)
