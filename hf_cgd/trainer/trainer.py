"""`GroupRobustTrainer`: a `transformers.Trainer` that knows groups. It hands the Trainer's hooks on to its parts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from hf_cgd.data.groups import GroupInfo
from hf_cgd.metrics import GroupReport, is_interval
from hf_cgd.models.outputs import logits_of
from hf_cgd.objectives import Objective, build_objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.callbacks import GroupStateCallback, bind_callbacks
from hf_cgd.trainer.config import options_of
from hf_cgd.trainer.engine_choice import EngineChoice
from hf_cgd.trainer.evaluation import EvaluationMetrics, ExampleResults, GroupEvaluation, on_plain_labels
from hf_cgd.trainer.forward import GroupForward, labels_in
from hf_cgd.trainer.group_setup import GroupSetup
from hf_cgd.trainer.history import GroupLog
from hf_cgd.trainer.label_setup import names_of_labels
from hf_cgd.trainer.resume import RunState, mark_incomplete
from hf_cgd.trainer.search import comparison


class GroupRobustTrainer(Trainer):
    """Trains a classifier or regressor so that its worst group does well; elsewhere it is the `Trainer` you know.

    The group column reaches the loss and the metrics and never `model.forward`. `evaluate()` and `predict()` report
    every group. Checkpoints hold the group weights; a resumed run goes on exactly where the saved one was.

    Args:
        *args, **kwargs: those of `transformers.Trainer`. `compute_loss_func(outputs, labels, num_items_in_batch=…)`
            must return one loss per example, [B].
        objective: an `Objective` or the name of one; None for what a `GroupRobustConfig` says ("cgd" by default).
        group_column: column(s) that hold the group; None for what a `GroupRobustConfig` says.
        groups: groups and counts of the training set; needed for streams, which cannot be counted.

    Raises:
        ValueError: before the first step, for whatever of the data, the options or the model does not fit together.
    """

    def __init__(
        self,
        *args: Any,
        objective: Objective | str | None = None,
        group_column: str | list[str] | None = None,
        groups: GroupInfo | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.label_names = names_of_labels(self.args.label_names, self.label_names)
        options = options_of(self.args)
        column = options.group_column if group_column is None else group_column
        columns = [column] if isinstance(column, str) else list(column or ())
        self._given_objective = build_objective(objective) if isinstance(objective, str) else objective
        self._set_up = partial(GroupSetup, options=options, columns=columns, labels=self.label_names, given=groups,
                               collator=self.data_collator, own_loss=self.compute_loss_func is not None)  # fmt: skip
        self._engine_choice = EngineChoice(self.args)
        self._run_state = RunState()
        self._group_log: GroupLog | None = None
        self._parent_accepts_loss_kwargs = self.model_accepts_loss_kwargs
        self.group_evaluation = GroupEvaluation()
        self.all_metrics = self.group_evaluation.latest
        """The latest metrics of every evaluation set, with their prefixes."""
        self.group_objective: Objective = self._given_objective or options.build_objective()
        """What is minimised. (`objective` is the Trainer's own name for the number that a search compares.)"""
        self._engine_choice.require_supported(self.group_objective, self._network, self.accelerator)
        self._read_groups(anew=True)
        # Refuses what does not fit before anything is trained. A run builds its own when it begins.
        self.robust_loss = self._build_loss()
        """Forms the loss and owns the group weights; None without a group column."""
        self.preprocess_logits_for_metrics = on_plain_labels(self.preprocess_logits_for_metrics)
        self.compute_metrics = EvaluationMetrics(self._group_metrics, self.compute_metrics)
        self.add_callback(GroupStateCallback)
        bind_callbacks(self.callback_handler.callbacks, self)

    # ---- What users read --------------------------------------------------------------------------------------------

    @property
    def group_weights(self) -> Tensor | None:
        """Current group weights [K], float64, summing to 1, in the order of `groups`; None under ERM."""
        alpha = None if self.robust_loss is None else self.robust_loss.alpha
        return None if alpha is None else alpha.to("cpu", torch.float64, copy=True)

    @property
    def group_interactions(self) -> Tensor | None:
        """Mean cosines [K, K] between the groups' gradients over this run, NaN for two groups that never met.

        None for objectives without gradients, and for more than 64 groups (see `GroupInteractions`).
        """
        loss = self.robust_loss
        return None if loss is None or loss.interactions is None else loss.interactions.cosines

    def group_report(self, metric_key_prefix: str = "eval") -> GroupReport:
        """The table of groups: training count, weight, and how each fares on the evaluation set.

        Evaluates the model first if it has not been since it was last changed. `print` it, or use its `to_dict` and
        `to_markdown`. With several evaluation sets, `metric_key_prefix` is "eval_<name>".

        Raises:
            ValueError: no metrics have that prefix.
        """
        is_evaluation = self.eval_dataset is not None and metric_key_prefix.split("_")[0] == "eval"
        if is_evaluation and not self.group_evaluation.has(metric_key_prefix):
            self.evaluate()
        weights, counts = self._setup.by_name(self.group_weights), self._setup.train_counts
        names, objective = self.eval_groups.names, self.group_objective.name
        return self.group_evaluation.report(metric_key_prefix, names, objective, counts, weights)

    # ---- Training ---------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """See `Trainer.train`. Group weights start afresh at each call, or from the checkpoint that is resumed."""
        checkpoint = self._run_state.find(resume_from_checkpoint, self.args.output_dir, self.group_objective)
        # The loss of the last run holds on to its model; that of this one is built when its model is ready.
        self.robust_loss = None
        return super().train(checkpoint, trial, ignore_keys_for_eval)

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """See `Trainer.hyperparameter_search`; trials are compared by their worst group.

        Knobs of the objective can be searched like any other field of `GroupRobustConfig`. Without a
        `compute_objective`, the best `metric_for_best_model` of a trial counts ("worst_group_accuracy" where there is
        none), in its own direction. (The parent's default adds up all metrics, group counts among them.)
        """
        compute_objective, direction = comparison(
            self.args, compute_objective, direction, lambda: self.state.log_history
        )
        return super().hyperparameter_search(hp_space, compute_objective, n_trials, direction, *args, **kwargs)

    def begin_run(self) -> None:
        """Called when model and optimizer of a run are ready; resume.py tells what happens then."""
        self.robust_loss, self._group_log = self._run_state.begin(self._build_loss, self.args, self.state)
        self._engine_choice.log_run(self.robust_loss, self._network)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of one optimizer step; their group counts are taken note of."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.robust_loss is not None and not self._uses_parent_loss and batches:
            ids = [self._setup.take_ids(batch)[1] for batch in batches]
            if not any(part is None for part in ids):
                self.robust_loss.open_window(ids)
        return batches, num_items

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `Trainer.training_step`. Under tensor hooks the group weights move here, behind the backward pass."""
        loss = super().training_step(*args, **kwargs)
        if self.robust_loss is not None:
            self.robust_loss.after_backward()
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor | tuple[Tensor, Any]:
        """The objective's loss in training, the mean loss over the examples in evaluation.

        The group weights move here, before the parameters do, once per optimizer step.
        """
        inputs, group_ids = self._setup.take_ids(inputs)
        labels = labels_in(inputs, self.label_names[0])
        robust_loss = self.robust_loss if model.training and torch.is_grad_enabled() else None
        if self._uses_parent_loss:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            if robust_loss is not None and group_ids is not None:
                with torch.no_grad():
                    robust_loss.record(
                        self._losses_of_examples(logits_of(outputs, after_loss=True), labels), group_ids
                    )
        else:
            if not self._forward.requires(self.label_names[0]):
                del inputs[self.label_names[0]]
            if robust_loss is not None:
                self._setup.require_ids(group_ids, inputs)
            losses_of = partial(self._losses_of_examples, num_items_in_batch=num_items_in_batch)
            loss, outputs = self._forward(model, inputs, labels, group_ids, robust_loss, losses_of)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See `Trainer.log`. Adds weights and training losses of the groups; intervals stay out of the log."""
        shown = {name: value for name, value in logs.items() if not is_interval(name)}
        if "loss" in logs and self.is_in_train and self.robust_loss is not None and self._group_log is not None:
            shown.update(self._group_log.values(self.robust_loss, self.state.global_step))
        super().log(shown, start_time)
        logs.update({name: value for name, value in shown.items() if name not in logs})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `Trainer.save_model`."""
        if _internal_call and self.args.should_save:
            mark_incomplete(output_dir)
        super().save_model(output_dir, _internal_call)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader:
        """Behind `get_train_dataloader`, `get_eval_dataloader` and `get_test_dataloader`: batches get group ids."""
        own = self.data_collator
        if kwargs.get("is_training"):
            self._read_groups()
            self.data_collator = self._setup.training_collator(own, self.group_objective.needs_gradients)
        else:
            self.data_collator = self._setup.evaluation_collator(own, dataset)
        dataset = self._setup.rows_with_groups(dataset, bool(kwargs.get("is_training")))
        try:
            return super()._get_dataloader(dataset, *args, **kwargs)
        finally:
            self.data_collator = own

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = self._setup.sampler(self._train_batch_size, seed, self.args.dataloader_drop_last)
        return super()._get_train_sampler(train_dataset) if sampler is None else sampler

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            super()._set_signature_columns_if_needed()
            assert self._signature_columns is not None
            self._signature_columns += self._setup.extra_columns

    # ---- Evaluation -------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Any]:
        """See `Trainer.prediction_step`; the labels are an `ExampleResults` where the groups are known."""
        inputs, group_ids = self._setup.take_ids(inputs)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if isinstance(logits, Tensor) and logits.ndim == 1 and labels is None and self._setup.renamed:
            # The parent takes a tensor with one row for a tuple with one entry.
            logits = logits[None]
        if labels is None or logits is None or group_ids is None:
            return loss, logits, labels
        outputs = SequenceClassifierOutput(logits=logits_of(logits))
        losses = self._losses_of_examples(outputs, labels)
        answers = self._forward.predictions(outputs, labels, self._network)
        return loss, logits, tuple(ExampleResults(labels, self._prepare_input(group_ids), losses, answers))

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """See `Trainer.evaluation_loop`. The loss is the mean over the examples, whatever the batch size."""
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        return self.group_evaluation.finish(output, metric_key_prefix, self.state.global_step)

    def _group_metrics(self, results: ExampleResults) -> dict[str, float]:
        names, counts, rate = self.eval_groups.names, self._setup.train_counts, self.args.learning_rate
        return self.group_evaluation.metrics_of(results, names, counts, self.group_objective, rate)

    @property
    def _network(self) -> nn.Module:
        assert self.model is not None
        return self.model

    @property
    def _uses_parent_loss(self) -> bool:
        return self._forward.left_to_the_trainer(self.accelerator.num_processes, self.compute_loss_func)

    def _losses_of_examples(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return self._forward.losses(outputs, labels, self._network, self.compute_loss_func, num_items_in_batch)

    def _read_groups(self, anew: bool = False) -> None:
        if anew or not self._setup.suits(self.train_dataset, self.group_objective):
            self._setup: GroupSetup = self._set_up(
                self.train_dataset, self.eval_dataset, self.group_objective, self._network
            )
            self.groups, self.eval_groups, self.group_key = self._setup.groups, self._setup.evaluation, self._setup.key
            self._signature_columns = None

    def _build_loss(self) -> GroupRobustLoss | None:
        """Objective and loss of a run, for the options and the model as they are now."""
        self.group_objective = self._given_objective or options_of(self.args).build_objective()
        self._read_groups()
        self._forward = GroupForward(self._network, self.group_objective, self.args, self.groups is not None)
        self._forward.may_be_shares = self._setup.labels.may_be_shares
        # The parent has to know whether to divide the loss by the number of accumulated micro-batches.
        self.model_accepts_loss_kwargs = self._uses_parent_loss and self._parent_accepts_loss_kwargs
        self.loss_is_scaled_for_ga = None if self._uses_parent_loss else False
        build, objective = self._engine_choice.build_loss, self.group_objective
        return None if self.groups is None else build(objective, self.groups, self._network, self.accelerator)

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        bind_callbacks(self.callback_handler.callbacks, self)
