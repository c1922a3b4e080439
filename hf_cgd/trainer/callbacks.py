"""The callback that hands the Trainer's events on to the parts that have something to do then."""

from collections.abc import Iterable
from typing import Any, Protocol

from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.evaluation import GroupEvaluation
from hf_cgd.trainer.resume import saved_entry, tell_sampler


class GroupRun(Protocol):
    """What the callback needs of a trainer."""

    accelerator: Accelerator
    robust_loss: GroupRobustLoss | None
    group_evaluation: GroupEvaluation

    @property
    def run_folder(self) -> str:
        """Where the files of the latest run go."""

    def begin_run(self) -> None:
        """Model and optimizer are ready."""

    def begin_epoch(self) -> None:
        """An epoch begins; all that a script does then has been done."""

    def group_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the groups, after the last completed step."""

    def note_step(self, is_logged: bool) -> None:
        """A step is over; whether the log will have an entry of it."""

    def end_run(self) -> None:
        """No step will follow."""

    def require_objective_used(self) -> None:
        """All batches of a step have been differentiated."""


class GroupStateCallback(TrainerCallback, ExportableState):
    """Saves and restores the group state with the checkpoints, and writes the latest metrics to a file.

    Without a `trainer` it does nothing; see `bind_callbacks`.
    """

    trainer: GroupRun | None = None
    _epoch: int | None = None
    """The epoch in progress; None before the first of a run."""

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into a checkpoint's `trainer_state.json`, under this class's name."""
        return saved_entry(None) if self.trainer is None else self.trainer.group_state()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fresh group state for a new run, the saved one for a resumed run."""
        self._epoch = None
        if self.trainer is not None:
            self.trainer.group_evaluation.begin_run()
            self.trainer.begin_run()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the sampler which epoch it is, and look whether layers were frozen or unfrozen."""
        self._epoch = tell_sampler(kwargs.get("train_dataloader"), args, state, self._epoch)
        if self.trainer is not None:
            self.trainer.begin_epoch()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the group weights as they were where the parameters were left so, after an overflow."""
        run = self.trainer
        if run is not None and run.robust_loss is not None and run.accelerator.optimizer_step_was_skipped:
            run.robust_loss.undo_update()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop a run whose loss is not the objective's, before the first step is taken."""
        if self.trainer is not None:
            self.trainer.require_objective_used()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the weights down, also where the run logs rarely."""
        if self.trainer is not None:
            self.trainer.note_step(is_logged=control.should_log)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget metrics of a model that is not the final one."""
        if self.trainer is not None:
            folder = self.trainer.run_folder if state.is_world_process_zero else None
            self.trainer.end_run()
            self.trainer.group_evaluation.end_run(state.global_step, args.load_best_model_at_end, folder)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep and write the latest metrics of every evaluation set, intervals included."""
        self._keep(state, kwargs["metrics"])

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        """The same for predictions."""
        self._keep(state, metrics)

    def _keep(self, state: TrainerState, metrics: dict[str, float]) -> None:
        if self.trainer is not None:
            folder = self.trainer.run_folder if state.is_world_process_zero else None
            self.trainer.group_evaluation.keep(metrics, folder)


def bind_callbacks(callbacks: Iterable[TrainerCallback], trainer: GroupRun) -> None:
    """Tell our callbacks among these their trainer: new ones, and those that the Trainer made of a checkpoint."""
    for callback in callbacks:
        if isinstance(callback, GroupStateCallback):
            callback.trainer = trainer
