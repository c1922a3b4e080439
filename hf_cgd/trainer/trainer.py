"""`GroupRobustTrainer`: a `transformers.Trainer` that knows groups. It hands the Trainer's hooks on to its parts."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput

from hf_cgd.data.groups import GroupInfo
from hf_cgd.distributed.communication import Communication
from hf_cgd.gradients import needs_static_shapes
from hf_cgd.metrics import is_interval
from hf_cgd.metrics.custom_metrics import as_group_metrics
from hf_cgd.metrics.values import without_arrays
from hf_cgd.models.example_losses import require_classes_to_smooth
from hf_cgd.models.heads import ExampleHead, Head, head_of
from hf_cgd.models.outputs import class_names_of
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.robust_loss.uncounted import silence_uncounted
from hf_cgd.trainer.accumulation import AccumulatingTrainer
from hf_cgd.trainer.beside_batches import without
from hf_cgd.trainer.callbacks import GroupStateCallback, bind_callbacks
from hf_cgd.trainer.config import GroupRobustConfig, objective_of, options_of
from hf_cgd.trainer.continuity import warn_of_another_order
from hf_cgd.trainer.engine_choice import EngineChoice
from hf_cgd.trainer.evaluating import EvaluatingTrainer, SeenBatch
from hf_cgd.trainer.evaluation import GroupEvaluation
from hf_cgd.trainer.evaluation_options import require_no_generation
from hf_cgd.trainer.example_weights import ExampleWeights
from hf_cgd.trainer.forward import GroupForward, labels_in
from hf_cgd.trainer.group_setup import GroupSetup, read_once
from hf_cgd.trainer.history import GroupLog, condensed
from hf_cgd.trainer.host_ids import HostIds
from hf_cgd.trainer.label_setup import names_of_labels
from hf_cgd.trainer.notebook import with_short_tables
from hf_cgd.trainer.outcomes import OutcomesTrainer
from hf_cgd.trainer.own_loss import EXAMINED, OwnLoss, require_objective_used
from hf_cgd.trainer.pushing import PushingTrainer
from hf_cgd.trainer.reference_losses import Given, ReferenceLosses, column_of, reference_of
from hf_cgd.trainer.resume import RunState
from hf_cgd.trainer.same_batches import SameBatches
from hf_cgd.trainer.saving import GroupCheckpointTrainer
from hf_cgd.trainer.search import WorstGroupSearch
from hf_cgd.trainer.trackers import TrackerPictures
from hf_cgd.trainer.weights import WholeWeightsTrainer


class GroupRobustTrainer(
    OutcomesTrainer,
    PushingTrainer,
    EvaluatingTrainer,
    WholeWeightsTrainer,
    WorstGroupSearch,
    GroupCheckpointTrainer,
    AccumulatingTrainer,
):
    """Trains a classifier, regressor or language model so that its worst group does well; else the `Trainer` you know.

    The group column reaches the loss and the metrics and never `model.forward`. `evaluate()` and `predict()` report
    every group. Checkpoints hold the group weights; a resumed run goes on exactly where the saved one was.

    Args:
        *args, **kwargs: those of `transformers.Trainer`. `compute_loss_func(outputs, labels, num_items_in_batch=…)`
            must return one loss per example, [B].
        objective: an `Objective` or the name of one; None for what a `GroupRobustConfig` says ("cgd" by default).
        group_column: column(s) that hold the group; None for what a `GroupRobustConfig` says.
        groups: groups and counts of the training set; needed for streams, which cannot be counted.
        group_metrics: metrics by name, each a function of (predictions, labels), an `evaluate` metric or a
            `GroupMetric`: reported as `<name>`, `group_<name>/<group>` and `worst_group_<name>`.
        reference_losses: what group weights see the training losses in excess of (Group-DRO, CGD): a column, a number
            for each group by name, or a model; None for what a `GroupRobustConfig` says. See `ReferenceLosses`.

    Raises:
        ValueError: before the first step, for whatever of the data, the options or the model does not fit together.
    """

    def __init__(
        self,
        *args: Any,
        objective: Objective | str | None = None,
        group_column: str | list[str] | None = None,
        groups: GroupInfo | None = None,
        group_metrics: Mapping[str, Any] | None = None,
        reference_losses: Given | None = None,
        **kwargs: Any,
    ) -> None:
        self._own_metrics = as_group_metrics(group_metrics)
        super().__init__(*args, **kwargs)
        self.label_names = names_of_labels(self.args.label_names, self.label_names, head_of(self._network))
        require_no_generation(self.args)
        self._given_objective, self._given_reference = objective, reference_losses
        self._given_column, self._given_groups = group_column, groups
        self._engine_choice = EngineChoice(self.args)
        self._same_batches = SameBatches(self._communication, asks=not needs_static_shapes(self.args.device))
        self._run_state = RunState()
        self._read_by: dict[str, Any] = {}
        """What the groups were read by."""
        self._batches_left = 0
        """Micro-batches of the step in progress whose loss the objective has not formed."""
        self._group_log: GroupLog | None = None
        self._parent_accepts_loss_kwargs = self.model_accepts_loss_kwargs
        self._own_loss = OwnLoss()
        self._host_ids = HostIds(self._communication, self.args.device)
        self.group_evaluation = GroupEvaluation()
        self.group_evaluation.class_names = class_names_of(self.model)
        self.all_metrics = self.group_evaluation.latest
        """The latest metrics of every evaluation set, with their prefixes."""
        self.group_objective: Objective = objective_of(objective, self.args)
        """What is minimised. (`objective` is the Trainer's own name for the number that a search compares.)"""
        self._engine_choice.require_supported(self.group_objective, self._network, self.accelerator)
        self._read_groups(anew=True)
        for dataset in self._evaluation_sets().values():
            self._require_rows_once(dataset)
        # Refuses what does not fit before anything is trained. A run builds its own when it begins.
        self.robust_loss = self._build_loss()
        """Forms the loss and owns the group weights; None without a group column."""
        self._require_metric_of_best_model(is_last_call=False)
        self.add_callback(GroupStateCallback)
        bind_callbacks(self.callback_handler.callbacks, self)
        callbacks = self.callback_handler.callbacks
        self.callback_handler.callbacks = [TrackerPictures(self), *with_short_tables(callbacks)]

    # ---- Training ---------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """See `Trainer.train`. Group weights start afresh at each call, or from the checkpoint that is resumed."""
        self._begin_trial(trial)
        if self.model_init is not None:
            # Another network may have another loss of its own.
            self._own_loss = OwnLoss()
        checkpoint = self._run_state.find(resume_from_checkpoint, self.args.output_dir, self.group_objective)
        self._require_metric_of_best_model(is_last_call=True)
        # The loss of the last run holds on to its model; that of this one is built when its model is ready.
        self.robust_loss = None
        return super().train(checkpoint, trial, ignore_keys_for_eval)

    def _hp_search_setup(self, trial: Any) -> None:
        """Settings of a trial, or of a script that has changed some since the last run, hold before data are read."""
        super()._hp_search_setup(trial)
        if isinstance(self.args, GroupRobustConfig):
            self.args.require_consistent()
        if not self.args.auto_find_batch_size:
            # The Trainer reads it when it is built, and in trials.
            self._train_batch_size = self.args.train_batch_size
        before, self.group_objective = self.group_objective, objective_of(self._given_objective, self.args)
        if self.group_objective != before and self.model is not None:
            self._engine_choice.require_supported(self.group_objective, self._network, self.accelerator)

    def begin_run(self) -> None:
        """Called when model and optimizer of a run are ready; resume.py tells what happens then."""
        self._require_that_groups_were_sampled()
        self._kept_step = self._kept_weights = None
        self._same_batches.require_same_length(self.callback_handler.train_dataloader)
        self.robust_loss, self._group_log = self._run_state.begin(
            self._build_loss, self.run_folder, self.state, self._drawn, self._settings_of_run
        )
        loader = None if self._run_state.is_told else self.callback_handler.train_dataloader
        warn_of_another_order(self.train_dataset, self.args, self.state, loader)
        self._engine_choice.log_run(self.robust_loss, self._network)

    def begin_epoch(self) -> None:
        """Called when an epoch begins."""
        self._same_batches.begin_epoch()
        self._engine_choice.watch_scope(self._network)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of one optimizer step; their group counts are taken note of."""
        own = self._same_batches.take(epoch_iterator, num_batches, self._require_usable)
        batches, num_items = super().get_batch_samples(iter(own), num_batches, device)
        self._batches_left = len(batches)
        if not batches or self._uses_parent_loss:
            return batches, num_items
        if self.group_objective.plain_mean and not self._has_own_loss:
            # What ERM trains is settled before a step begins.
            for batch in batches:
                self._examine(batch)
        beside = [self._beside.find(batch) for batch in batches]
        labels = [self._head.labels_in(batch, self.label_names) for batch in batches]
        if self.robust_loss is not None and not self._uses_parent_loss:
            ids = [self._ids_of(taken, own) for taken, own in zip(beside, labels, strict=True)]
            known = [part for part in ids if part is not None]
            if len(known) == len(ids):
                self.robust_loss.open_window(known)
        there = [own for own in labels if own is not None]
        if self._example_weights.are_set and len(there) == len(labels):
            self._example_weights.open_step(there, beside, self._setup.key)
        return batches, num_items

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `Trainer.training_step`. Under tensor hooks the group weights move here, behind the backward pass."""
        self._scale_as_the_parent(self._uses_parent_loss or self._has_own_loss)
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
        inputs, beside = self._split(inputs)
        inputs = self._forward.without_idle_labels(inputs, self.label_names)
        labels = labels_in(inputs, self.label_names, self._head)
        trains = model.training and torch.is_grad_enabled()
        robust_loss = self.robust_loss if trains else None
        group_ids = None if robust_loss is None else self._ids_of(beside, labels)
        if self._uses_parent_loss or not (trains and self.group_objective.plain_mean):
            self._examine(inputs)
        if robust_loss is not None:
            self._batches_left -= 1
        is_the_parents = self._uses_parent_loss
        self._scale_as_the_parent(is_the_parents)
        if is_the_parents:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            with torch.no_grad():
                scores = self._head.scores_of(outputs, after_loss=True)
                self._seen = SeenBatch(self._losses_of_examples(scores, labels), scores, labels)
            if robust_loss is not None and group_ids is not None:
                robust_loss.record(self._seen.losses, group_ids, self.accelerator.sync_gradients)
        else:
            inputs = self._forward.inputs_of(inputs, labels, self._network, self.label_names)
            if robust_loss is not None:
                self._setup.require_ids(group_ids, inputs)

            def seen(outputs: Any, labels: Tensor) -> Tensor:
                losses = self._losses_of_examples(outputs, labels, num_items_in_batch)
                self._seen = None if trains else SeenBatch(losses, self._head.scores_of(outputs), labels)
                return losses

            def weigh(losses: Tensor, labels: Tensor) -> Tensor:
                return self._example_weights.weighed(losses, labels, beside, self._setup.key)

            weighed = weigh if trains and self._example_weights.are_set else None
            reference = self._reference_losses(inputs, labels, beside) if trains else None
            loss, outputs = self._forward(model, inputs, labels, group_ids, robust_loss, seen, weighed, reference)
        loss = self._share_of_step(loss)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See `Trainer.log`. Adds weights and training losses of the groups; intervals stay out of the log.

        Of evaluations of very many groups the log has the extremes.
        """
        shown = {name: without_arrays(value) for name, value in logs.items() if not is_interval(name)}
        shown, of_groups = condensed(shown)
        if self._group_log is not None and self.is_in_train:
            self._group_log.append(self.state.global_step, of_groups)
        is_training = "loss" in logs and self.is_in_train
        if is_training and self.robust_loss is not None and self._group_log is not None:
            self._host_ids.require_same()
            shown.update(self._group_log.values(self.robust_loss, self.state.global_step))
        super().log(shown, start_time)
        if not of_groups:
            logs.update({name: value for name, value in shown.items() if name not in logs})

    def note_step(self, is_logged: bool) -> None:
        """Called after a step, with whether the log will have an entry of it."""
        if self._drawn is not None and self.robust_loss is not None and self.robust_loss.alpha is not None:
            self._drawn.note(self.state.global_step, self.robust_loss.alpha)
        if self.robust_loss is not None and self._group_log is not None and not is_logged:
            self._group_log.note(self.robust_loss, self.state.global_step)

    def end_run(self) -> None:
        """Called when no step will follow, nor an entry of the log, with which checks are read on a device."""
        self._host_ids.require_same()
        if self.robust_loss is not None:
            self.robust_loss.read_checks()
        if self._drawn is not None:
            self._drawn.follows = False

    def _forget_trials(self) -> None:
        super()._forget_trials()
        # Tables and cards of the last trial would be taken for those of the search.
        self.group_evaluation.begin_run()
        self._group_log = None

    def require_objective_used(self) -> None:
        """Called before an optimizer step."""
        require_objective_used(self, self.robust_loss, self._batches_left)

    @property
    def _communication(self) -> Communication:
        return self._engine_choice.communication_of(self.accelerator)

    @property
    def _has_own_loss(self) -> bool:
        """Whether a subclass overrides `compute_loss`."""
        return getattr(self.compute_loss, "__func__", None) is not GroupRobustTrainer.compute_loss

    @property
    def _uses_parent_loss(self) -> bool:
        if not (self.group_objective.plain_mean and self._example_weights.leave_the_mean):
            return False
        return self._forward.left_to_the_trainer(self.accelerator.num_processes, self.compute_loss_func)

    def _examine(self, inputs: dict[str, Any]) -> None:
        """Find out once whether the model has a loss of its own, from a batch without group ids."""
        forward, own_loss = self._forward, self._own_loss
        if not (forward.may_have_own_loss(self.compute_loss_func) and self._example_weights.leave_the_mean):
            return
        labels = self._head.labels_in(inputs, self.label_names)
        if labels is None:
            return
        if self.accelerator.distributed_type not in EXAMINED:
            own_loss.leave_unexamined(self._network)
            return
        inputs = forward.without_idle_labels(inputs, self.label_names)
        num_processes = self.accelerator.num_processes
        # All processes have to come to an end of it at the same batch.
        is_last, replaced = num_processes > 1, forward.replaces_own_loss(num_processes)
        with self.compute_loss_context_manager():
            inputs, labels = self._prepare_inputs(inputs), self._prepare_input(labels)
            own_loss.examine(self._network, inputs, labels, self._head, self.group_objective.name, replaced, is_last)

    def _require_usable(self, batch: Mapping[str, Any]) -> None:
        """Raise a ValueError for a batch that will be refused, while all processes can still learn of it."""
        beside, labels = without(batch, self._setup.keys_beside)[1], self._head.labels_in(batch, self.label_names)
        if self.robust_loss is not None:
            ids = self._ids_of(beside, labels)
            if ids is not None and ids.device.type == "cpu" and self.robust_loss.engine is not None:
                silence_uncounted(torch.zeros(len(ids)), ids, may_look=True)
        if self._uses_parent_loss:
            return
        if labels is not None:
            self._example_weights.require_usable(labels, beside)
        if self._reference is not None:
            self._reference.require_usable(beside)

    def _ids_of(self, beside: Mapping[str, Any], labels: Any) -> Tensor | None:
        return self._host_ids.of(beside, self._setup.key, labels, self._head)

    @property
    def _worst_group_metric(self) -> str:
        return "worst_group_loss" if self._head.of_tokens else super()._worst_group_metric

    @property
    def _head(self) -> Head:
        return self._forward.head

    def _reference_losses(self, inputs: dict[str, Any], labels: Tensor, beside: Mapping[str, Any]) -> Tensor | None:
        """Reference loss of each example of a training batch [B], weighed as its own loss is; None for none."""
        if self._reference is None:
            return None
        forward, own = self._forward, self.compute_loss_func
        found = self._reference.of(
            inputs,
            labels,
            beside,
            self._setup.key,
            lambda outputs, given, net: forward.losses(outputs, given, net, own),
        )
        if self._example_weights.are_set:
            found = self._example_weights.weighed(found, labels, beside, self._setup.key)
        return found

    def _losses_of_examples(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return self._forward.losses(outputs, labels, self._network, self.compute_loss_func, num_items_in_batch)

    def _read_groups(self, anew: bool = False) -> None:
        options, objective = options_of(self.args), self.group_objective
        given = options.group_column if self._given_column is None else self._given_column
        columns, reference = [given] if isinstance(given, str) else list(given or ()), self._given_reference
        read_by = read_once(options, objective, columns)
        if anew or read_by != self._read_by or not self._setup.training.suits(self.train_dataset, objective):
            self._setup: GroupSetup = GroupSetup(
                self.train_dataset, self.eval_dataset, objective, self._network, options=options, columns=columns,
                labels=self.label_names, given=self._given_groups, reference_column=column_of(reference, options),
                collator=self._own_collator or self.data_collator, own_loss=self.compute_loss_func is not None,
            )  # fmt: skip
            self._read_by = read_by
            self.groups, self.eval_groups, self.group_key = self._setup.groups, self._setup.evaluation, self._setup.key
            self._signature_columns = None

    def _build_loss(self, objective: Objective | None = None) -> GroupRobustLoss | None:
        """Objective (or another one) and loss of a run, for the options and the model as they are now."""
        self.group_objective = objective or objective_of(self._given_objective, self.args)
        self._read_groups()
        trains = self.groups is not None
        self._forward = GroupForward(self._network, self.group_objective, self.args, trains, self._own_loss)
        if isinstance(self._head, ExampleHead):
            self._head.may_be_shares = self._setup.labels.may_be_shares
        num_groups = None if self.groups is None else len(self.groups)
        classes, options = self._setup.class_weights, options_of(self.args)
        self._example_weights = ExampleWeights(
            self.group_objective,
            num_groups,
            classes,
            options,
            self._communication,
            self._head,
            self._forward.by_tokens,
        )
        self._scale_as_the_parent(self._uses_parent_loss or self._has_own_loss)
        if not self._has_own_loss:
            require_classes_to_smooth(self._setup.labels.kind, self.args.label_smoothing_factor)
        self._reference: ReferenceLosses | None = None
        if objective is None:
            # A probe looks at the losses themselves.
            given, data = self._given_reference, self.train_dataset
            self._reference = reference_of(given, options, self.groups, data, self._network)
        clip = None if self._reference is None else self._reference.clip
        build, chosen = self._engine_choice.build_loss, self.group_objective
        return None if self.groups is None else build(chosen, self.groups, self._network, self.accelerator, clip)

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        bind_callbacks(self.callback_handler.callbacks, self)
