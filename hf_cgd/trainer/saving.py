"""The checkpoints of the trainer: those of the `Trainer`, and the group state as of the last completed step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.loaders import GroupDataTrainer
from hf_cgd.trainer.mid_step import StepStart
from hf_cgd.trainer.resume import mark_incomplete, save_tensors, saved_entry


class GroupCheckpointTrainer(GroupDataTrainer):
    """A `Trainer` whose checkpoints hold the group state, whenever in a step they are written."""

    robust_loss: GroupRobustLoss | None = None
    """Forms the loss and owns the group weights; None without a group column."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_start = StepStart()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of one optimizer step, which begins here."""
        awaits_signal = self.model if self.args.enable_jit_checkpoint else None
        self._step_start.note(self.state.global_step, self.robust_loss, awaits_signal)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `Trainer.save_model`. A checkpoint gets the large part of the group state as well."""
        if _internal_call and self.args.should_save:
            mark_incomplete(output_dir)
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and self.robust_loss is not None:
            state = self._step_start.state_of(self.robust_loss, self.state.global_step)
            save_tensors(self.robust_loss, state, output_dir, self.args.should_save)

    def group_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the groups: the state after the last completed step."""
        loss, step = self.robust_loss, self.state.global_step
        drawn = None if self._drawn is None else self._drawn.state_dict(step)
        if loss is None:
            return saved_entry(None)
        return saved_entry(loss, self._step_start.state_of(loss, step), drawn, self._settings_of_run(loss))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._step_start.put_back(self.state.global_step):
            super()._save_checkpoint(*args, **kwargs)
