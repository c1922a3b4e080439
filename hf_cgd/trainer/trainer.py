"""`GroupRobustTrainer`: a `transformers.Trainer` that knows groups."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from hf_cgd.arithmetic import DeviceArithmetic
from hf_cgd.data.collator import GROUP_IDS, GroupCollator, RenamingCollator, SubgroupCollator
from hf_cgd.data.columns import Column, column_names
from hf_cgd.data.evaluation_groups import EvaluationGroups
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.sampling import BalancedGroupSampler, WeightedGroupSampler
from hf_cgd.data.training_groups import (
    LABEL_COLUMNS,
    count_classes,
    is_stream,
    require_valid_labels,
    stream_groups,
    training_columns,
    training_groups,
)
from hf_cgd.distributed.communication import Communication, ProcessGroupCommunication
from hf_cgd.gradients import (
    AutoEngine,
    GradientEngine,
    PerGroupEngine,
    TensorHookEngine,
    gradient_scope,
    needs_static_shapes,
)
from hf_cgd.metrics import GroupReport, group_metrics, is_interval, lower_is_better
from hf_cgd.models.example_losses import CLASSIFICATION, REGRESSION, example_losses, infer_problem_type, predictions_of
from hf_cgd.models.head import HeadInput
from hf_cgd.models.outputs import (
    forward_parameters,
    logits_of,
    order_of_split,
    renamed_input,
    split_forward,
    with_logits,
)
from hf_cgd.monitors import warn_if_one_class
from hf_cgd.objectives import ERM, Objective, build_objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.callbacks import TENSORS_FILE, GroupStateCallback
from hf_cgd.trainer.checkpoints import forget_state, last_complete_checkpoint, require_complete
from hf_cgd.trainer.config import GroupRobustConfig
from hf_cgd.trainer.evaluation import EvaluationMetrics, ExampleResults, unpack_labels
from hf_cgd.trainer.history import GroupHistory
from hf_cgd.trainer.sharding import is_sharded, require_supported, require_that_fsdp_runs

logger = logging.getLogger(__name__)

STATIC_ENGINES = ("auto", "single_pass", "per_group")
"""Values of `gradient_engine` that can be had on XLA devices."""
MAX_LOGGED_GROUPS = 32
"""Weights and losses of more groups than this are logged as their extremes, and whole in a file of their own."""


class GroupRobustTrainer(Trainer):
    """Trains a classifier or regressor so that its worst group does well; elsewhere it is the `Trainer` you know.

    The group column reaches the loss and the metrics and never `model.forward`; nothing has to be said about it but
    its name. `evaluate()` and `predict()` report every group. Checkpoints hold the group weights; a resumed run goes
    on exactly where the saved one was.

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
        self._given_objective = build_objective(objective) if isinstance(objective, str) else objective
        self._given_groups = groups
        column = self._option("group_column") if group_column is None else group_column
        self._group_columns = [column] if isinstance(column, str) else list(column or ())
        self.all_metrics: dict[str, float] = {}
        """The latest metrics of every evaluation set, with their prefixes."""
        self.groups: GroupInfo | None = None
        """Names and counts of the training groups, None without a group column."""
        self.robust_loss: GroupRobustLoss | None = None
        """Forms the loss and owns the group weights; None without a group column."""
        self._warned_one_class = False
        self._metrics_step: int | None = None
        self._resumed_from: str | None = None
        self._history: GroupHistory | None = None
        self._tensor_hooks: TensorHookEngine | None = None
        self._tensor_hooks_made_for: tuple[Any, str] | None = None

        self.group_objective: Objective = self._build_objective()
        """What is minimised. (`objective` is the Trainer's own name for the number that a search compares.)"""
        self._refuse_unsupported()
        if not self.label_names:
            self.label_names = ["labels"]
        arguments = forward_parameters(self._network)
        self._model_columns = (*LABEL_COLUMNS, *self.label_names, *arguments)
        own_name = len(self._group_columns) == 1 and self._group_columns[0] not in self._model_columns
        self.group_key = self._group_columns[0] if own_name else GROUP_IDS
        """Batch key of the group ids: the column's own name where there is one and the model has no use for it."""
        self._model_returns_loss = "labels" in arguments
        self._parent_accepts_loss_kwargs = self.model_accepts_loss_kwargs
        self._set_loss_scaling()
        self._renamed = self._find_renamed_input()
        self._read_training_groups()
        self.robust_loss = self._build_robust_loss()
        user_preprocess = self.preprocess_logits_for_metrics
        if user_preprocess is not None:
            self.preprocess_logits_for_metrics = lambda logits, labels: user_preprocess(
                logits, labels[0] if isinstance(labels, tuple) else labels
            )
        self.compute_metrics = EvaluationMetrics(self._group_metrics, self.compute_metrics)
        callback = GroupStateCallback()
        callback.trainer = self
        self.add_callback(callback)

    # ---- What users read --------------------------------------------------------------------------------------------

    @property
    def group_weights(self) -> Tensor | None:
        """Current group weights [K], float64, summing to 1, in the order of `groups`; None under ERM."""
        if self.robust_loss is None or self.robust_loss.alpha is None:
            return None
        return self.robust_loss.alpha.to("cpu", torch.float64, copy=True)

    @property
    def group_interactions(self) -> Tensor | None:
        """Mean cosines [K, K] between the groups' gradients over this run (see `GroupInteractions`).

        In the order of `groups`; NaN for two groups that never met. None for objectives without gradients, and for
        more than 64 groups.
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
        known = any(name.startswith(f"{metric_key_prefix}_") for name in self.all_metrics)
        if not known and self.eval_dataset is not None and metric_key_prefix.split("_")[0] == "eval":
            self.evaluate()
            known = any(name.startswith(f"{metric_key_prefix}_") for name in self.all_metrics)
        if not known and self.all_metrics:
            raise ValueError(
                f"No metrics start with {metric_key_prefix!r}; there are those of "
                f"{sorted(name.removesuffix('_runtime') for name in self.all_metrics if name.endswith('_runtime'))}."
            )
        weights = self.group_weights
        return GroupReport.from_metrics(
            self.all_metrics,
            metric_key_prefix,
            self.eval_groups.names,
            self.group_objective.name,
            train_counts=self._train_counts(),
            weights=None
            if weights is None or self.groups is None
            else dict(zip(self.groups.names, weights.tolist(), strict=True)),
        )

    # ---- Training ---------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """See `Trainer.train`. Group weights start afresh at each call, or from the checkpoint that is resumed."""
        if self.train_dataset is not self._grouped_dataset:
            self._read_training_groups()
        self.robust_loss = self._build_robust_loss()
        if resume_from_checkpoint is True:
            averages = [TENSORS_FILE] if getattr(self.group_objective, "interaction_momentum", 0.0) else []
            assert self.args.output_dir is not None
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir, averages) or True
        elif resume_from_checkpoint:
            require_complete(resume_from_checkpoint)
        self._resumed_from = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

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

        Args:
            hp_space, n_trials, *args, **kwargs: those of the parent. Knobs of the objective can be searched like any
                other field of `GroupRobustConfig`.
            compute_objective: None for `metric_for_best_model` ("worst_group_accuracy" where there is none), of the
                best evaluation so far. (The parent's default adds up all metrics, group counts among them.)
            direction: None for that of this metric, or for "minimize" with a `compute_objective` of one's own.
        """
        if compute_objective is None:
            compute_objective = self._best_so_far
            direction = direction or ("minimize" if lower_is_better(self._searched_metric) else "maximize")
        return super().hyperparameter_search(
            hp_space, compute_objective, n_trials, direction or "minimize", *args, **kwargs
        )

    @property
    def _searched_metric(self) -> str:
        name = self.args.metric_for_best_model or "worst_group_accuracy"
        return name if name.startswith("eval_") else f"eval_{name}"

    def _best_so_far(self, metrics: dict[str, float]) -> float:
        """The searched metric of the best evaluation of this trial, the present one included."""
        name = self._searched_metric
        if name not in metrics:
            raise ValueError(f"Expected the metric {name!r} to compare trials by, got {sorted(metrics)}.")
        values = [metrics[name], *(entry[name] for entry in self.state.log_history if name in entry)]
        return min(values) if lower_is_better(name) else max(values)

    def begin_run(self, saved: dict[str, Any] | None, resumed: bool) -> None:
        """Called when model and optimizer are ready: builds the loss on the final parameters, restores its state.

        Raises:
            ValueError: a checkpoint without group state, or one of other groups or another objective.
        """
        self._warned_one_class, self._history = False, None
        self.group_objective = self._build_objective()
        self._set_loss_scaling()
        uncounted = self.groups is not None and self.groups.class_counts is None
        if "class_counts" in self.group_objective.reads and uncounted:
            self._read_training_groups()
        self.robust_loss = self._build_robust_loss()
        if self.robust_loss is None or self.groups is None:
            return
        if len(self.groups) > MAX_LOGGED_GROUPS and self.is_world_process_zero():
            assert self.args.output_dir is not None
            self._history = GroupHistory(self.args.output_dir, self.groups.names, self.state.global_step)
        if resumed and saved is not None:
            self.robust_loss.load_state_dict(saved, self._saved_tensors())
        elif resumed and (self.group_objective.has_weights or self.group_objective.reads):
            raise ValueError(
                "The checkpoint holds no group weights or counters: it was not written by a GroupRobustTrainer with "
                "groups. Load its model with from_pretrained and start a new run."
            )
        counts = ", ".join(f"{n} ({c})" for n, c in zip(self.groups.names, self.groups.counts or (), strict=False))
        logger.info("Objective %s, learning rate %g", self.group_objective, self.args.learning_rate)
        logger.info("  %d groups: %s", len(self.groups), counts or ", ".join(self.groups.names))
        if self._tensor_hooks is not None and self.group_objective.needs_gradients:
            size = self._tensor_hooks.size
            logger.info("  Group gradients over %d parameters, by tensor hooks in the backward pass", size)
            logger.info("  weight_timing='next': a step's statistics set the weights of the following one")
        elif self.group_objective.needs_gradients:
            scope = self._gradient_scope()
            size = sum(parameter.numel() for parameter in scope.values())
            logger.info("  Group gradients over %d parameters (%s … %s)", size, next(iter(scope)), list(scope)[-1])

    def _saved_tensors(self) -> dict[str, Tensor]:
        if not getattr(self.group_objective, "interaction_momentum", 0.0):
            return {}
        path = os.path.join(self._resumed_from or "", TENSORS_FILE)
        if not os.path.exists(path):
            raise ValueError(
                f"interaction_momentum needs the running averages of the checkpoint, but there is no {path}. Resume "
                "from an older checkpoint, or with interaction_momentum=0."
            )
        return load_file(path)

    def end_step(self) -> None:
        """Called after an optimizer step: weights stay as they were where the parameters do, after an overflow."""
        if self.robust_loss is not None and self.accelerator.optimizer_step_was_skipped:
            self.robust_loss.undo_update()

    def end_run(self) -> None:
        """Called when training ends: metrics of any but the final model are dropped."""
        if self.args.load_best_model_at_end or self._metrics_step != self.state.global_step:
            self.all_metrics.clear()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of one optimizer step; their group counts are taken note of."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.robust_loss is not None and not self._uses_parent_loss and batches:
            self.robust_loss.open_window([batch[self.group_key] for batch in batches])
        return batches, num_items

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `Trainer.training_step`. Under tensor hooks the group weights move here, behind the backward pass."""
        loss = super().training_step(*args, **kwargs)
        if self.robust_loss is not None:
            self.robust_loss.after_backward()
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The objective's loss in training, the mean loss over the examples in evaluation.

        The group weights move here, before the parameters do, once per optimizer step.
        """
        inputs = dict(inputs)
        group_ids = inputs.pop(self.group_key, None)
        in_training = model.training and torch.is_grad_enabled()
        label_name = self.label_names[0]
        labels = inputs.get(label_name)
        if labels is None:
            raise ValueError(
                f"Expected the batch to hold {label_name!r}, got {sorted(inputs)}. Name the column of the targets "
                "'labels' (or 'label'), or set label_names."
            )
        if self._uses_parent_loss:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            if in_training and self.robust_loss is not None and group_ids is not None:
                with torch.no_grad():
                    logits = logits_of(outputs, after_loss=True)
                    self.robust_loss.record(self._example_losses(logits, labels), group_ids)
            return (loss, outputs) if return_outputs else loss

        inputs.pop(label_name)
        if in_training and self.robust_loss is not None and group_ids is None:
            raise ValueError(
                f"Expected the batch to hold the group ids under {self.group_key!r}, got {sorted(inputs)}. Build "
                "batches with get_train_dataloader(), or put the ids there."
            )
        by_group = in_training and self._option("forward_mode") == "split" and group_ids is not None
        with ExitStack() as recording:
            if in_training and self.robust_loss is not None and not by_group:
                recording.enter_context(self.robust_loss.recording())
            if in_training and self._head is not None:
                recording.enter_context(self._head.recording())
            outputs = split_forward(model, inputs, group_ids) if by_group else model(**inputs)
        needed: dict[str, Tensor] = {}
        if in_training and self.group_objective.reads:
            outputs, needed = self._needed(outputs, labels, order_of_split(group_ids) if by_group else None)
        losses = self._example_losses(outputs, labels, num_items_in_batch)
        if in_training and self.robust_loss is not None and group_ids is not None:
            loss = self.robust_loss(losses, group_ids, **needed)
        else:
            loss = losses.mean()
        # The parent looks for the scores in a mapping, or behind the loss in a tuple.
        if isinstance(outputs, Tensor):
            outputs = {"logits": outputs}
        elif isinstance(outputs, (tuple, list)):
            outputs = (loss, *outputs)
        return (loss, outputs) if return_outputs else loss

    def _needed(self, outputs: Any, labels: Tensor, order: Tensor | None) -> tuple[Any, dict[str, Tensor]]:
        """A model's outputs with logits that can be differentiated by, and what the objective may need of the batch.

        Their gradient stops at a view: hooks on what the network itself returned (of FSDP) must not run for it.
        """
        logits = logits_of(outputs)
        features = None if self._head is None else self._head.features(logits, order)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).view_as(logits)
        needed = {"logits": logits, "labels": labels}
        return with_logits(outputs, logits), needed if features is None else {**needed, "features": features}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See `Trainer.log`. Adds weights and training losses of the groups; intervals stay out of the log."""
        shown = {name: value for name, value in logs.items() if not is_interval(name)}
        if "loss" in logs and self.is_in_train and self.robust_loss is not None:
            shown.update(self._group_logs(self.robust_loss))
        super().log(shown, start_time)
        logs.update({name: value for name, value in shown.items() if name not in logs})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `Trainer.save_model`."""
        if _internal_call and self.args.should_save:
            forget_state(output_dir)
        super().save_model(output_dir, _internal_call)

    def get_train_dataloader(self) -> DataLoader:
        """See `Trainer.get_train_dataloader`; batches carry group ids."""
        with self._collating(self.groups, is_training=True):
            return super().get_train_dataloader()

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        sampling = self._option("group_sampling")
        if sampling == "none":
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = BalancedGroupSampler if sampling == "balanced" else WeightedGroupSampler
        assert self._train_group_ids is not None
        return sampler(self._train_group_ids, self._train_batch_size, seed, self.args.dataloader_drop_last)

    # ---- Evaluation -------------------------------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """See `Trainer.get_eval_dataloader`; batches carry group ids."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, Mapping):
            dataset = self.eval_dataset[dataset]
        with self._collating(self.eval_groups.meet(dataset)):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """See `Trainer.get_test_dataloader`; batches carry group ids."""
        with self._collating(self.eval_groups.meet(test_dataset)):
            return super().get_test_dataloader(test_dataset)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """See `Trainer.prediction_step`; the labels are an `ExampleResults` where the groups are known."""
        inputs = dict(inputs)
        group_ids = inputs.pop(self.group_key, None)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if isinstance(logits, Tensor) and logits.ndim == 1 and labels is None and self._renamed:
            # The parent takes a tensor with one row for a tuple with one entry.
            logits = logits[None]
        if labels is None or logits is None or group_ids is None:
            return loss, logits, labels
        scores = logits[0] if isinstance(logits, (tuple, list)) else logits
        outputs = SequenceClassifierOutput(logits=scores)
        return (
            loss,
            logits,
            (
                labels,
                self._prepare_input(group_ids),
                self._example_losses(outputs, labels),
                predictions_of(scores, self._problem_type(scores, labels)),
            ),
        )

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
        results, labels = unpack_labels(output.label_ids)
        if results is None:
            return output
        mean_loss = float(results.losses.mean())
        assert output.metrics is not None
        if np.isfinite(mean_loss):
            output.metrics[f"{metric_key_prefix}_loss"] = mean_loss
        self._metrics_step = self.state.global_step
        return output._replace(label_ids=labels)

    def _group_metrics(self, results: ExampleResults) -> dict[str, float]:
        is_classes = np.issubdtype(results.predictions.dtype, np.integer)
        if is_classes and results.predictions.ndim == 1 and not self._warned_one_class:
            step_size = getattr(self.group_objective, "step_size", None)
            self._warned_one_class = warn_if_one_class(
                results.predictions, results.labels, step_size, self.args.learning_rate
            )
        return group_metrics(
            results.predictions,
            results.labels.reshape(results.predictions.shape),
            results.group_ids,
            self.eval_groups.names,
            losses=results.losses,
            train_counts=self._train_counts(),
            problem_type=CLASSIFICATION if is_classes else REGRESSION,
        )

    # ---- Setting up -------------------------------------------------------------------------------------------------

    def _option(self, name: str) -> Any:
        """A field of `GroupRobustConfig`, its default where plain `TrainingArguments` were given."""
        return getattr(self.args, name, _DEFAULTS[name])

    @property
    def _uses_parent_loss(self) -> bool:
        """ERM on a model with a loss of its own is left to the parent, to be the plain Trainer bit for bit.

        Not with accumulation or several processes: the parent multiplies the loss of classifiers by their number.
        """
        one_batch = self.args.gradient_accumulation_steps == 1 and self.accelerator.num_processes == 1
        return (
            isinstance(self.group_objective, ERM)
            and one_batch
            and self._option("forward_mode") == "joint"
            and self._model_returns_loss
            and self.compute_loss_func is None
        )

    def _set_loss_scaling(self) -> None:
        """Tell the parent whether to divide the loss by the number of accumulated micro-batches."""
        self.model_accepts_loss_kwargs = self._uses_parent_loss and self._parent_accepts_loss_kwargs
        self.loss_is_scaled_for_ga = None if self._uses_parent_loss else False

    def _build_objective(self) -> Objective:
        if self._given_objective is not None:
            return self._given_objective
        if isinstance(self.args, GroupRobustConfig):
            return self.args.build_objective()
        return build_objective(_DEFAULTS["objective"])

    def _build_robust_loss(self) -> GroupRobustLoss | None:
        self._head: HeadInput | None = None
        if self.groups is None:
            return None
        if "features" in self.group_objective.reads:
            self._head = HeadInput(self._network, self._num_outputs())
        communication = self._communication()
        engine = self._gradient_engine(communication) if self.group_objective.needs_gradients else None
        late = self.args.gradient_accumulation_steps > 1 or isinstance(engine, TensorHookEngine)
        return GroupRobustLoss(
            self.group_objective,
            self.groups,
            engine.parameters if engine is not None else [],
            engine=engine,
            weight_timing=self._option("weight_timing") or ("next" if late else "current"),
            communication=communication,
            loss_scale=None if self.accelerator.scaler is None else self.accelerator.scaler.get_scale,
            nonfinite=self._option("nonfinite"),
            arithmetic=DeviceArithmetic(self.args.device) if self._static_shapes else None,
        )

    def _communication(self) -> Communication:
        if self.accelerator.num_processes == 1:
            return Communication()
        device = self.args.device
        if dist.is_initialized():
            return ProcessGroupCommunication(device)
        return Communication(
            lambda tensor: self.accelerator.reduce(tensor.to(device), reduction="sum").to(tensor.device),
            self.accelerator.num_processes,
            self.accelerator.process_index,
        )

    def _gradient_engine(self, communication: Communication) -> GradientEngine:
        engine = self._option("gradient_engine")
        if engine == "tensor_hooks" or is_sharded(self._network, self.accelerator):
            if self._option("forward_mode") != "joint":
                raise ValueError(
                    "forward_mode='split' has a forward pass for each group, but tensor hooks (sharded parameters, or "
                    "gradient_engine='tensor_hooks') follow a single one. Use forward_mode='joint'."
                )
            # Built while the parameters are whole: FSDP leaves neither their shapes nor their identity.
            made_for = (self._option("gradient_layers"), engine)
            known = self._tensor_hooks is not None and self._tensor_hooks.belongs_to(self._network)
            if not known or made_for != self._tensor_hooks_made_for:
                scope = list(self._gradient_scope().values())
                self._tensor_hooks = TensorHookEngine(self._network, scope, engine == "sketch", self.args.device)
                self._tensor_hooks_made_for = made_for
            assert self._tensor_hooks is not None
            return self._tensor_hooks
        self._tensor_hooks = None
        parameters = list(self._gradient_scope().values())
        # The fast engine needs one forward pass of the whole batch, and one coefficient for each group.
        regular = self._option("forward_mode") == "joint" and self.group_objective.linear_in_losses
        if engine == "per_group" or not regular:
            return PerGroupEngine(parameters)
        return AutoEngine(self._network, parameters, engine, communication.all_agree, static=self._static_shapes)

    def _gradient_scope(self) -> dict[str, nn.Parameter]:
        layers = self._option("gradient_layers")
        return gradient_scope(self._network) if layers is None else gradient_scope(self._network, layers)

    @property
    def _static_shapes(self) -> bool:
        return needs_static_shapes(self.args.device)

    def _refuse_unsupported(self) -> None:
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs are visible to one process, which transformers would drive by DataParallel. "
                "Group losses need one process per GPU: start the script with `accelerate launch`, or set "
                "CUDA_VISIBLE_DEVICES to a single GPU."
            )
        require_that_fsdp_runs(self.accelerator)
        if self._static_shapes:
            self._refuse_changing_shapes()
        if self.group_objective.needs_gradients:
            engine, timing = self._option("gradient_engine"), self._option("weight_timing")
            require_supported(self.group_objective.name, self._network, self.args, self.accelerator, engine, timing)
        if not self._group_columns and not isinstance(self.group_objective, ERM):
            raise ValueError(
                f"objective={self.group_objective.name!r} needs to know the groups: set group_column to the column "
                "that tells an example's group. Only objective='erm' does without."
            )

    def _refuse_changing_shapes(self) -> None:
        if self._option("forward_mode") != "joint":
            raise ValueError(
                "forward_mode='split' runs the network on batches of another size in every step, and XLA devices "
                "would compile it for each. Use forward_mode='joint'."
            )
        if self._option("gradient_engine") not in STATIC_ENGINES:
            raise ValueError(
                f"gradient_engine={self._option('gradient_engine')!r} takes slices as long as groups are, and XLA "
                f"devices would compile each anew. Expected one of {', '.join(STATIC_ENGINES)}."
            )

    def _read_training_groups(self) -> None:
        self._grouped_dataset = self.train_dataset
        self._train_group_ids: np.ndarray | None = None
        sampling = self._option("group_sampling")
        if sampling != "none" and not (self._group_columns and self.train_dataset is not None):
            raise ValueError("group_sampling needs group_column and a train_dataset to balance the groups of.")
        read: dict[str, Column] = {}
        streams = self.train_dataset is not None and is_stream(self.train_dataset)
        if sampling != "none" and streams:
            raise ValueError(
                f"group_sampling={sampling!r} needs access by index, which an IterableDataset "
                f"({type(self.train_dataset).__name__}) does not have. Use a map-style dataset, or "
                "group_sampling='none' with a stream that is already mixed."
            )
        if self._group_columns and streams:
            self.groups = stream_groups(self.train_dataset, self._group_columns, self._given_groups)
        elif self._group_columns and self.train_dataset is not None:
            read = training_columns(self.train_dataset, self._group_columns, self.label_names)
            smallest = 1 if isinstance(self.group_objective, ERM) else self._option("min_group_size")
            self.groups, self._train_group_ids = training_groups(
                read, self._group_columns, self._given_groups, smallest
            )
            self._check_labels(read)
        if self.groups is not None and "class_counts" in self.group_objective.reads:
            self._count_classes(read)
        self.eval_groups = EvaluationGroups(self._group_columns, self._option("eval_group_column"), self.groups)

    def _check_labels(self, read: Mapping[str, Column]) -> None:
        num_classes = self._num_outputs()
        label = self._label_column(read)
        if label is not None and num_classes is not None and num_classes > 1 and self._may_be_classification():
            require_valid_labels(label, read[label], num_classes)

    def _count_classes(self, read: Mapping[str, Column]) -> None:
        """Add the counts of the classes to the groups, where they are not given and the labels can be read."""
        label = self._label_column(read)
        if not self._may_be_classification() or self._num_outputs() == 1:
            raise ValueError(
                f"objective={self.group_objective.name!r} compares predicted probabilities of classes, but this model "
                f"has problem_type {getattr(getattr(self.model, 'config', None), 'problem_type', None)!r} and "
                f"{self._num_outputs()} output(s). Use 'irm', 'coral' or another objective for regression and "
                "multi-label problems."
            )
        assert self.groups is not None
        if self.groups.class_counts is None and label is not None:
            assert self._train_group_ids is not None
            counts = count_classes(label, read[label], self._train_group_ids, len(self.groups))
            self.groups = replace(self.groups, class_counts=counts)

    def _label_column(self, read: Mapping[str, Column]) -> str | None:
        return next((name for name in read if name in (*self.label_names, *LABEL_COLUMNS)), None)

    def _may_be_classification(self) -> bool:
        return getattr(getattr(self.model, "config", None), "problem_type", None) in (None, CLASSIFICATION)

    def _num_outputs(self) -> int | None:
        config = getattr(self.model, "config", None)
        return getattr(config, "num_labels", None) or getattr(self.model, "num_classes", None)

    @property
    def _network(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def _find_renamed_input(self) -> dict[str, str]:
        dataset = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if isinstance(dataset, Mapping):
            dataset = next(iter(dataset.values()))
        columns = None if dataset is None else column_names(dataset)
        if columns is None:
            return {}
        return renamed_input(self._network, columns, (*LABEL_COLUMNS, *self._group_columns))

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            super()._set_signature_columns_if_needed()
            assert self._signature_columns is not None
            self._signature_columns += [*self._group_columns, *self.eval_groups.columns, *self._renamed]

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, GroupStateCallback):
                callback.trainer = self

    # ---- Batches ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _collating(self, groups: GroupInfo | None, is_training: bool = False) -> Iterator[None]:
        """Within, loaders are built with a collator that adds the ids of `groups`, if there are any."""
        user_collator = self.data_collator
        if self._renamed:
            self.data_collator = RenamingCollator(self.data_collator, self._renamed)
        if groups is not None:
            kind = SubgroupCollator if self.eval_groups.overlapping and not is_training else GroupCollator
            columns = dict.fromkeys([*self._group_columns, *self.eval_groups.columns])
            self.data_collator = kind(
                self.data_collator,
                groups,
                batch_key=self.group_key,
                group_columns=[name for name in columns if name not in self._model_columns],
                optional=not is_training,
                in_group_order=is_training and self.group_objective.needs_gradients,
            )
        try:
            yield
        finally:
            self.data_collator = user_collator

    # ---- The forward pass -------------------------------------------------------------------------------------------

    def _problem_type(self, logits: Tensor, labels: Tensor) -> str:
        declared = getattr(getattr(self.model, "config", None), "problem_type", None)
        return declared or infer_problem_type(logits.shape[-1] if logits.ndim > 1 else 1, labels)

    def _example_losses(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        if self.compute_loss_func is not None:
            losses = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
            if not isinstance(losses, Tensor) or losses.shape != labels.shape[:1]:
                shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
                raise ValueError(
                    f"compute_loss_func must return one loss per example, shape ({len(labels)},), so that group means "
                    f"can be formed; got {shape}. Leave the mean out (reduction='none')."
                )
            return losses
        logits = logits_of(outputs)
        return example_losses(logits, labels, self._problem_type(logits, labels), self.args.label_smoothing_factor)

    # ---- Numbers ----------------------------------------------------------------------------------------------------

    def _train_counts(self) -> dict[str, int] | None:
        if self.groups is None or self.groups.counts is None:
            return None
        return dict(zip(self.groups.names, self.groups.counts, strict=True))

    def _group_logs(self, robust_loss: GroupRobustLoss) -> dict[str, float]:
        values = {"group_loss": _finite(robust_loss.drain_group_losses())}
        if robust_loss.alpha is not None:
            weights = zip(robust_loss.groups.names, robust_loss.alpha.tolist(), strict=True)
            values["group_weight"] = _finite(dict(weights))
        if self._history is not None:
            self._history.append(self.state.global_step, values)
        logs: dict[str, float] = {}
        for kind, by_name in values.items():
            if len(robust_loss.groups) <= MAX_LOGGED_GROUPS:
                logs |= {f"{kind}/{name}": value for name, value in by_name.items()}
            elif by_name:
                logs |= {f"{kind}_min": min(by_name.values()), f"{kind}_max": max(by_name.values())}
        if robust_loss.skipped_updates:
            logs["skipped_weight_updates"] = robust_loss.skipped_updates
        return logs


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(GroupRobustConfig)}


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """Numbers that are not finite are left out: JSON has none."""
    return {name: value for name, value in values.items() if np.isfinite(value)}
