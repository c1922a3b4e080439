"""Group metrics inside the Trainer's evaluation loop: kept of each batch, computed at its end, written to a file."""

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers.trainer_utils import EvalLoopOutput

from hf_cgd.metrics import GroupReport, named_metrics
from hf_cgd.metrics.group_metrics import own_name
from hf_cgd.metrics.token_metrics import token_metrics
from hf_cgd.metrics.values import as_json
from hf_cgd.models.example_losses import CLASSIFICATION, NO_ANSWER, REGRESSION
from hf_cgd.monitors import GroupRobustWarning, warn_if_one_class
from hf_cgd.objectives import Objective
from hf_cgd.trainer.example_results import ExampleResults
from hf_cgd.whole_files import write_whole

METRICS_FILE = "metrics.json"
"""In output_dir: the latest metrics of every evaluation set."""
MAY_BE_UNDEFINED = ("pearson", "worst_group_pearson", "mse", "group_pearson/", "group_loss/", "worst_group_loss",
                    "perplexity", "group_perplexity/", "worst_group_perplexity")  # fmt: skip
"""Metrics of ours that a set may not define."""


def prefix_of(metrics: Mapping[str, Any]) -> str:
    """The prefix of an evaluation's metrics, "" where they do not tell: what stands before "_runtime".

    All names begin with it, so it is the shortest where a group or a metric of the user's ends so as well.
    """
    return min((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), key=len, default="")


class GroupEvaluation:
    """Computes the metrics of a trainer's evaluations, and keeps the latest of every evaluation set."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        """The latest metrics of every evaluation set, with their prefixes."""
        self._names: dict[str, list[str]] = {}
        """Of each prefix, the names of its metrics in `latest`."""
        self._steps: dict[str, int] = {}
        """Of each prefix, the optimizer step of the model."""
        self._broken: set[str] = set()
        """Prefixes of evaluations in which the model gave NaN or an infinite loss."""
        self._is_broken = False
        self._warned_one_class = self._warned_broken = self._has_learned = False
        self.class_names: Sequence[str] = ()
        """Of the model's classes, for warnings; () where they have none."""

    def begin_run(self) -> None:
        """A run begins: metrics are of another model from now on, and warnings are due anew."""
        self._warned_one_class = self._warned_broken = self._has_learned = False
        self._forget(list(self._names))

    def metrics_of(
        self,
        results: ExampleResults,
        names: Sequence[str],
        train_counts: Mapping[str, int] | None,
        objective: Objective,
        learning_rate: float,
        by_tokens: bool = False,
        example_scores: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, float]:
        """All metrics of one evaluation, without prefix (see `named_metrics`).

        Warns once in a run where a classifier predicts one class for all examples of several, and where it gives NaN.

        Args:
            results: of all examples.
            names: names of the groups; the ids of `results` are indices into them.
            train_counts: training examples by group, None where they are not known or those of other groups.
            objective, learning_rate: for the warning.
            by_tokens, example_scores: of models of tokens; see `token_metrics`.
        """
        is_classes = np.issubdtype(results.predictions.dtype, np.integer)
        of_tokens = results.token_counts is not None
        if is_classes and results.predictions.ndim == 1 and results.labels.size > len(results.labels):
            # Shares of the classes: the largest one's class is the answer.
            results = results._replace(labels=results.labels.argmax(axis=1))
        labelled = results.labelled
        unanswered = results.predictions == NO_ANSWER if is_classes else ~np.isfinite(results.predictions)
        unanswered = unanswered.reshape(len(unanswered), -1).any(axis=1)
        self._is_broken = bool((unanswered | ~np.isfinite(results.losses))[labelled].any())
        if unanswered.any() and not self._warned_broken:
            self._warned_broken = True
            warnings.warn(
                f"The model gave NaN for {int(unanswered.sum())} of {len(unanswered)} evaluated rows. A class that is "
                "NaN counts as wrong, and such a model is never the best one. Look for a learning rate that is too "
                "high, or for bad input.",
                GroupRobustWarning,
                stacklevel=2,
            )
        answered = not unanswered.any()
        if answered and is_classes and results.predictions.ndim == 1 and not self._warned_one_class:
            step_size = objective.knobs().get("step_size")
            self._warned_one_class = warn_if_one_class(
                results.predictions[labelled],
                results.labels[labelled].reshape(-1),
                step_size,
                learning_rate,
                losses=results.losses[labelled],
                class_names=self.class_names,
                has_learned=self._has_learned,
            )
            self._has_learned |= len(np.unique(results.predictions[labelled])) > 1
        if of_tokens:
            return token_metrics(
                results.losses,
                results.group_ids,
                names,
                token_counts=results.token_counts,
                token_losses=results.token_losses,
                tokens_right=results.tokens_right,
                by_tokens=by_tokens,
                example_scores=example_scores,
            )
        return named_metrics(
            results.predictions,
            results.labels.reshape(results.predictions.shape),
            results.group_ids,
            names,
            losses=results.losses,
            train_counts=train_counts,
            problem_type=CLASSIFICATION if is_classes else REGRESSION,
        )

    def finish(
        self,
        output: EvalLoopOutput,
        results: ExampleResults | None,
        prefix: str,
        step: int,
        keeps_loss: bool = False,
        wanted: str | None = None,
        by_tokens: bool = False,
        own_metrics: Sequence[str] = (),
    ) -> None:
        """Put the mean loss over the examples into the metrics of an evaluation loop, whose own is one over batches.

        Nothing is changed where no groups are known.

        Args:
            output: that of the Trainer's loop.
            results: of all examples, None where no groups are known.
            prefix: that of the metrics.
            step: the optimizer step of the model.
            keeps_loss: whether the loss is the model's or a subclass's own, and stays what the Trainer made of it.
            wanted: `metric_for_best_model`. Where it is one of ours and was not defined, it is NaN, so that a run
                which compares by it goes on.
            by_tokens: whether the mean loss is one over all tokens, for models of these.
            own_metrics: names of the user's group metrics, which a set may not define either; up to the group's name.
        """
        self._steps[prefix] = step
        broken, self._is_broken = self._is_broken, False
        self._broken.discard(prefix)
        assert output.metrics is not None
        if broken:
            self._broken.add(prefix)
        if results is None:
            return
        labelled = results.labelled
        losses = results.losses[labelled]
        if not keeps_loss:
            # A network's own loss may take rows without a label for others.
            counts = results.token_counts[labelled] if by_tokens and results.token_counts is not None else None
            output.metrics[f"{prefix}_loss"] = float(np.average(losses, weights=counts)) if len(losses) else math.nan
        name = None if wanted is None else f"eval_{wanted.removeprefix('eval_')}"
        if name is not None and name.startswith(f"{prefix}_") and name not in output.metrics:
            kind = own_name(name.removeprefix(f"{prefix}_"))
            if kind in MAY_BE_UNDEFINED or kind in own_metrics:
                output.metrics[name] = float("nan")

    def may_be_best(self, metrics: Mapping[str, Any], wanted: str) -> bool:
        """Whether a model with these metrics may be the best by `metric_for_best_model`.

        Not where the metric is no finite number, nor where the model gave NaN on the evaluation set that it is of.
        """
        name = f"eval_{wanted.removeprefix('eval_')}"
        if name not in metrics:
            return True
        value = metrics[name]
        if not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
            return False
        return not any(name.startswith(f"{prefix}_") for prefix in self._broken)

    def keep(self, metrics: Mapping[str, Any], folder: str | None) -> None:
        """Keep an evaluation's metrics in the place of the set's earlier ones, and write all of the latest.

        Args:
            metrics: with their prefix.
            folder: where to write `METRICS_FILE`; None: do not write.
        """
        prefix = prefix_of(metrics)
        self._forget([prefix])
        self.latest.update(metrics)
        self._names[prefix] = list(metrics)
        self._write(folder)

    def end_run(self, step: int, best_model_was_loaded: bool, folder: str | None = None) -> None:
        """A run ends at that step: metrics of any but the final model are dropped, in the file as well."""
        stale = [name for name in self._names if best_model_was_loaded or self._steps.get(name) != step]
        self._forget(stale)
        if stale and folder is not None and os.path.exists(os.path.join(folder, METRICS_FILE)):
            self._write(folder)

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
            raise ValueError(
                f"No metrics start with {prefix!r}; there are those of {sorted(self._names)}. Metrics from before "
                "training are those of another model: evaluate or predict again."
            )
        own = {name: self.latest[name] for name in self._names.get(prefix, ())}
        given: Any = {"train_counts": train_counts, "weights": weights, "weights_step": weights_step}
        return GroupReport.from_metrics(own, prefix, names, objective, **given)

    @property
    def prefixes(self) -> list[str]:
        """Of the evaluations whose metrics are those of the present model."""
        return [name for name in self._names if name]

    def has(self, prefix: str) -> bool:
        """Whether there are metrics of that prefix."""
        return prefix in self._names

    def _forget(self, prefixes: Sequence[str]) -> None:
        for prefix in prefixes:
            for name in self._names.pop(prefix, ()):
                self.latest.pop(name, None)

    def _write(self, folder: str | None) -> None:
        if folder is None:
            return
        plain = {name: as_json(value) for name, value in self.latest.items()}
        text = json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        write_whole(os.path.join(folder, METRICS_FILE), text)
