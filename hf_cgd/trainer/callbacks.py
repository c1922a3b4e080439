"""The callback that keeps a run's group state with its checkpoints, and its metrics in a file."""

import json
import math
import os
from typing import Any, Protocol

from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_cgd.robust_loss.loss import GroupRobustLoss

METRICS_FILE = "metrics.json"
TENSORS_FILE = "group_gradients.safetensors"
"""In a checkpoint, where running averages of group gradients are kept."""


class GroupRun(Protocol):
    """What the callback needs of a trainer."""

    robust_loss: GroupRobustLoss | None
    all_metrics: dict[str, float]

    def begin_run(self, saved: dict[str, Any] | None, resumed: bool) -> None:
        """Start afresh, or from the saved state."""

    def end_step(self) -> None:
        """An optimizer step is over."""

    def end_run(self) -> None:
        """Training is over."""


class GroupStateCallback(TrainerCallback, ExportableState):
    """Saves the group state in `trainer_state.json`, starts or restores it when training begins, writes metrics.json.

    Without a `trainer` it does nothing; the trainer binds itself.
    """

    trainer: GroupRun | None = None

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into a checkpoint's `trainer_state.json`, under this class's name."""
        loss = self.trainer.robust_loss if self.trainer is not None else None
        return {"args": {}, "attributes": {"saved": None if loss is None else loss.state_dict()}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fresh group state for a new run, the saved one for a resumed run."""
        if self.trainer is None:
            return
        assert isinstance(state.stateful_callbacks, dict)
        resumed = state.global_step > 0
        # The Trainer expects an entry for every callback of this kind when it saves.
        saved = state.stateful_callbacks.get(type(self).__name__) if resumed else None
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.trainer.begin_run(saved["attributes"]["saved"] if saved else None, resumed)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the sampler its epoch, which does not reach it where several processes resume within an epoch."""
        loader: Any = kwargs.get("train_dataloader")
        sampler = getattr(loader, "batch_sampler", None)
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                steps = max(1, math.ceil(len(loader) / args.gradient_accumulation_steps))
                sampler.set_epoch(state.global_step // steps)
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the trainer, which knows whether the step was left out."""
        if self.trainer is not None:
            self.trainer.end_step()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the large part of the group state, where there is any, beside the checkpoint that was just written."""
        loss = self.trainer.robust_loss if self.trainer is not None else None
        tensors = {} if loss is None else loss.state_tensors()
        if tensors and state.is_world_process_zero:
            assert args.output_dir is not None
            folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            unfinished = os.path.join(folder, f"{TENSORS_FILE}.tmp")
            save_file(tensors, unfinished)
            os.replace(unfinished, os.path.join(folder, TENSORS_FILE))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget metrics of a model that is not the final one."""
        if self.trainer is not None:
            self.trainer.end_run()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the latest metrics of every evaluation set, intervals included."""
        self._write(args, state, kwargs["metrics"])

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        """The same for predictions."""
        self._write(args, state, metrics)

    def _write(self, args: TrainingArguments, state: TrainerState, metrics: dict[str, float]) -> None:
        if self.trainer is None:
            return
        self.trainer.all_metrics.update(metrics)
        if not state.is_world_process_zero:
            return
        assert args.output_dir is not None
        os.makedirs(args.output_dir, exist_ok=True)
        finite = {name: value if math.isfinite(value) else None for name, value in self.trainer.all_metrics.items()}
        with open(os.path.join(args.output_dir, METRICS_FILE), "w", encoding="utf-8") as file:
            json.dump(finite, file, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
