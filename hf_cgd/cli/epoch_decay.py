"""A learning rate that falls after each epoch, which none of the schedules of `transformers` does."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class EpochDecay(TrainerCallback):
    """Multiplies the learning rate by `factor` after each epoch, whatever the schedule within (`StepLR` of WILDS).

    The schedule's own base rate is what is changed, and checkpoints hold that, so a resumed run goes on as it was.

    Raises:
        ValueError: a factor that is not above 0.
    """

    def __init__(self, factor: float) -> None:
        if factor <= 0:
            raise ValueError(f"lr_decay_per_epoch must be above 0, got {factor}.")
        self.factor = factor

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Between two epochs; the rate of the next step has been set already."""
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)
        schedule.base_lrs = [rate * self.factor for rate in schedule.base_lrs]
        for group in optimizer.param_groups:
            group["lr"] *= self.factor
