"""The evaluation side of the trainer: what the loop is given and keeps, and when a model is the best so far."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, has_length

from hf_cgd.data.training_groups import IGNORED
from hf_cgd.metrics.custom_metrics import GroupMetric, custom_group_metrics, metric_meant, names_of
from hf_cgd.metrics.group_metrics import collapse_beside
from hf_cgd.metrics.names import require_known_metric
from hf_cgd.metrics.token_metrics import span_scores
from hf_cgd.models.heads import Head, QuestionAnsweringHead, TokenHead
from hf_cgd.models.outputs import declared_problem_type, named_outputs, num_outputs_of
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.objectives import Objective
from hf_cgd.trainer.beside_batches import without
from hf_cgd.trainer.best_metric import hint_at_groups, names_of_metrics, set_direction, warn_of_direction
from hf_cgd.trainer.evaluation import GroupEvaluation
from hf_cgd.trainer.evaluation_options import warn_of_no_evaluation
from hf_cgd.trainer.example_results import CollectedResults, EvaluationMetrics, ExampleResults
from hf_cgd.trainer.forward import GroupForward
from hf_cgd.trainer.group_setup import GroupSetup
from hf_cgd.trainer.search import require_model


class SeenBatch(NamedTuple):
    """What the loss of an evaluation batch was formed of."""

    losses: Tensor
    scores: Tensor
    labels: Tensor


def losses_alone(seen: SeenBatch, group_ids: Tensor, head: Head) -> ExampleResults:
    """What the mean loss needs of a batch, where nothing else is asked for: no row of it is as long as the example."""
    labelled = head.labelled(seen.labels)
    flags = torch.zeros_like(labelled, dtype=torch.long).masked_fill(~labelled, IGNORED)
    counts = head.num_tokens(seen.labels) if isinstance(head, TokenHead) else None
    return ExampleResults(flags, group_ids, seen.losses.detach(), flags, token_counts=counts)


class EvaluatingTrainer(Trainer):
    """A `Trainer` whose evaluations report every group. `compute_metrics` may be assigned at any time."""

    group_objective: Objective
    group_evaluation: GroupEvaluation
    _setup: GroupSetup
    _forward: GroupForward
    _seen: SeenBatch | None = None
    _warned_half_labelled = False
    _collected: CollectedResults | None = None
    """Of the evaluation in progress."""
    _own_metrics: dict[str, GroupMetric]

    @property
    def _has_own_loss(self) -> bool:
        """Whether a subclass forms the loss itself."""
        raise NotImplementedError

    @property
    def compute_metrics(self) -> EvaluationMetrics:
        """The user's metrics, with those of the groups."""
        return self._metrics

    @compute_metrics.setter
    def compute_metrics(self, own: Callable[..., dict[str, Any]] | None) -> None:
        self._metrics = (
            own
            if isinstance(own, EvaluationMetrics)
            else EvaluationMetrics(self._group_metrics, self._take_results, own)
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Any]:
        """See `Trainer.prediction_step`."""
        inputs, _ = without(inputs, self._setup.keys_beside)
        missing = [name for name in self.label_names if inputs.get(name) is None]
        if missing:
            self._warn_of_half_labelled(inputs, missing)
            # The parent takes a tensor with one row for a tuple with one entry.
            network = model
            model = lambda **batch: named_outputs(network(**batch))  # type: ignore[assignment] # noqa: E731
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _warn_of_half_labelled(self, inputs: dict[str, Any], missing: list[str]) -> None:
        """Warn once of a batch that has the labels, but not all that `label_names` lists."""
        wanted = self._forward.head.label_names(self.label_names)
        if self._warned_half_labelled or any(name in missing for name in wanted):
            return
        self._warned_half_labelled = True
        warnings.warn(
            f"The batch has {' and '.join(wanted)}, but not {' and '.join(missing)}, which label_names lists as well. "
            "Such a set counts as one without labels: it gets no loss and no metrics. Take what it lacks out of "
            "label_names, or add the column.",
            GroupRobustWarning,
            stacklevel=2,
        )

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """See `Trainer.evaluation_loop`. The loss is the mean over examples or tokens, whatever the batch size."""
        with self._steps_with_results(getattr(dataloader, "dataset", None)) as collected, self._all_losses():
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        self._warn_of_unlabelled(output, description, metric_key_prefix)
        keeps_loss = self._forward.trains_own_loss or self._has_own_loss
        wanted = self.args.metric_for_best_model
        by_tokens, own_metrics = self._forward.by_tokens, names_of(self._own_metrics, [""])
        self.group_evaluation.finish(
            output, collected.arrays(), metric_key_prefix, self.state.global_step, keeps_loss, wanted, by_tokens,
            own_metrics,
        )  # fmt: skip
        if self.is_in_train:
            # Early stopping asks for the best value as soon as there are metrics.
            self._forget_collapsed_best(output.metrics or {})
        return output

    @contextmanager
    def _all_losses(self) -> Iterator[None]:
        """While a loop runs: batches whose loss is not finite are not passed over, which would flatter the others."""
        given, self.args.logging_nan_inf_filter = self.args.logging_nan_inf_filter, False
        try:
            yield
        finally:
            self.args.logging_nan_inf_filter = given

    def _warn_of_unlabelled(self, output: EvalLoopOutput, description: str, prefix: str) -> None:
        """Warn of an evaluation (no prediction) in which nothing could be measured."""
        measured = output.label_ids is not None or f"{prefix}_loss" in (output.metrics or {})
        if description != "Evaluation" or measured or self._warned_half_labelled or output.num_samples == 0:
            return
        warnings.warn(
            f"The evaluation dataset has no labels, so nothing of it was measured: expected {self.label_names} in its "
            f"batches. {self._keep_labels}, or call predict().",
            GroupRobustWarning,
            stacklevel=2,
        )

    @property
    def _keep_labels(self) -> str:
        if self._forward.head.of_tokens:
            return "Keep these columns, or have the collator make them"
        return "Keep the column of the targets ('labels' or 'label')"

    @contextmanager
    def _steps_with_results(self, dataset: Any) -> Iterator[CollectedResults]:
        """While a loop runs: the results of its steps, also of those of a subclass, are collected."""
        expected = len(dataset) if has_length(dataset) else 0
        outer, collected = self._collected, CollectedResults(self.args.eval_accumulation_steps, expected)
        own, before = self.prediction_step, self.__dict__.get("prediction_step")

        def step(
            model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
        ) -> tuple[Tensor | None, Any, Any]:
            inputs, beside = without(inputs, self._setup.keys_beside)
            group_ids = beside.get(self._setup.key)
            self._seen = None
            loss, logits, labels = own(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
            seen, self._seen = self._seen, None
            head = self._forward.head
            if prediction_loss_only and seen is not None and group_ids is not None:
                collected.add(self._of_all_processes(losses_alone(seen, group_ids, head).packed()))
            if labels is None or logits is None or group_ids is None:
                return loss, logits, labels
            if seen is None:
                # A subclass formed the loss without us.
                plain, scores = head.joined(labels, self.label_names), head.scores_of(logits)
                seen = SeenBatch(self._forward.losses(scores, plain, self._network), scores, plain)
            answers = self._forward.predictions(seen.scores, seen.labels, self._network)
            results = ExampleResults(seen.labels, group_ids, seen.losses.detach(), answers)
            if isinstance(head, TokenHead):
                with torch.no_grad():
                    sums = head.token_losses(seen.scores, seen.labels).sum(dim=1)
                counts, right = head.num_tokens(seen.labels), head.num_right(answers, seen.labels)
                results = results._replace(token_counts=counts, token_losses=sums, tokens_right=right)
                if head.predicts_vocabulary and not self._wants_scores:
                    logits = answers
            collected.add(self._of_all_processes(results.packed()))
            return loss, logits, labels

        self.prediction_step = step  # type: ignore[method-assign]
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = outer
            if before is None:
                del self.prediction_step
            else:
                self.prediction_step = before  # type: ignore[method-assign]

    def _of_all_processes(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Results of a batch, with those of the other processes and without repeated rows, as the loop has labels."""
        alone = self.accelerator.num_processes == 1
        if alone and not self.accelerator.gradient_state.end_of_dataloader:
            return results
        padded = self.accelerator.pad_across_processes(self._prepare_input(results), dim=1, pad_index=IGNORED)
        return tuple(self.accelerator.gather_for_metrics(part) for part in padded)

    def _take_results(self) -> ExampleResults | None:
        return None if self._collected is None else self._collected.take()

    @property
    def _wants_scores(self) -> bool:
        """Whether the user has a function that is to see the network's own scores."""
        return self.preprocess_logits_for_metrics is not None or self._metrics.user_metrics is not None

    def _group_metrics(self, results: ExampleResults) -> dict[str, float]:
        names, counts, rate = self._setup.evaluation.names, self._setup.counts_of_evaluated, self.args.learning_rate
        if self._may_be_binary:
            results = results.as_binary()
        by_tokens = self._forward.by_tokens
        scores = None
        if isinstance(self._forward.head, QuestionAnsweringHead):
            scores = span_scores(results.predictions, results.labels)
        ours = self.group_evaluation.metrics_of(results, names, counts, self.group_objective, rate, by_tokens, scores)
        if not self._own_metrics:
            return ours
        rows = results.labelled
        labels = self._forward.head.aligned(results.labels, results.predictions)[rows]
        return ours | custom_group_metrics(
            self._own_metrics, results.predictions[rows], labels, results.group_ids[rows], names
        )

    def _determine_best_metric(self, metrics: dict[str, Any], trial: Any) -> bool:
        wanted = self.args.metric_for_best_model
        if wanted is not None and not self.group_evaluation.may_be_best(metrics, wanted):
            return False
        # Once more, for a subclass that evaluates without our loop.
        self._forget_collapsed_best(metrics)
        collapse = self._collapse
        # A model that gives one class is the best one only as long as there is no other.
        if collapse is not None and metrics.get(collapse) and self._logged_at_best(collapse) == 0:
            return False
        return super()._determine_best_metric(metrics, trial)

    @property
    def _collapse(self) -> str | None:
        """The metric that says of `metric_for_best_model` that it is one of a single class; None for most metrics."""
        wanted = self.args.metric_for_best_model
        return None if wanted is None else collapse_beside(f"eval_{wanted.removeprefix('eval_')}")

    def _forget_collapsed_best(self, metrics: Mapping[str, Any]) -> None:
        """Where the best model so far gives one class and this one does not, any value of this one is better.

        A second call for the same metrics does nothing more.
        """
        wanted, collapse = self.args.metric_for_best_model, self._collapse
        if wanted is None or collapse is None or self.state.best_metric is None or metrics.get(collapse) != 0:
            return
        if self.group_evaluation.may_be_best(metrics, wanted) and self._logged_at_best(collapse):
            self.state.best_metric = None

    def _logged_at_best(self, name: str) -> Any:
        """What was logged under that name when the best model so far was evaluated; None where nothing was."""
        step, logs = self.state.best_global_step, self.state.log_history
        return next((log[name] for log in logs if name in log and log.get("step") == step), None)

    def _require_metric_of_best_model(self, is_last_call: bool) -> None:
        """Raise a ValueError where `metric_for_best_model` will not exist.

        Args:
            is_last_call: whether the user can no longer assign a `compute_metrics` of other names.
        """
        wanted, evaluation = self.args.metric_for_best_model, self._setup.evaluation
        if not is_last_call:
            warn_of_no_evaluation(self.args)
        if wanted is None:
            return
        set_direction(self.args, wanted, self._own_metrics)
        if not is_last_call and metric_meant(wanted, self._own_metrics) is None:
            warn_of_direction(self.args, wanted)
        evaluates = self.eval_dataset is not None and self.args.eval_strategy != "no"
        # A subclass, or metrics of the user's, may give any other name.
        of_a_subclass = type(self).evaluate is not Trainer.evaluate
        has_others = self.compute_metrics.user_metrics is not None or getattr(self.args, "group_metrics", None)
        bare = self.args.prediction_loss_only
        # Between the trials of a search there is no model; it was looked at when the trainer was built.
        if not evaluates or of_a_subclass or (has_others and not bare) or self.model is None:
            return
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        if bare or not evaluation.names:
            by_set = {name: ["loss"] for name in sets}
        else:
            by_set = names_of_metrics(sets, evaluation, self._network, self._own_metrics, self._may_be_binary)
        hint = "prediction_loss_only=True leaves no other metric." if bare else hint_at_groups(sets, evaluation)
        require_known_metric(wanted, by_set, is_last_call or bare, hint)

    @property
    def _may_be_binary(self) -> bool:
        """Whether one output may stand for two classes: with a loss of the user's, and nothing declared."""
        one = num_outputs_of(self._network) in (1, None)
        return self.compute_loss_func is not None and one and declared_problem_type(self._network) is None

    @property
    def _network(self) -> nn.Module:
        return require_model(self.model)
