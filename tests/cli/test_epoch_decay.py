"""A learning rate that falls after each epoch."""

from typing import Any

import pytest
import torch
from tiny import logged, parameters_of, tiny_distilbert

from hf_cgd.cli.epoch_decay import EpochDecay

EPOCHS = {"max_steps": -1, "num_train_epochs": 3, "learning_rate": 0.1, "objective": "erm"}


@pytest.mark.parametrize(
    ("schedule", "within"), [("constant", [1.0] * 12), ("linear", [1 - s / 12 for s in range(12)])]
)
def test_rate_of_each_step(schedule: str, within: list[float], trainer: Any) -> None:
    """16 rows in batches of 4: four steps an epoch, each at the schedule's rate times the factor to the epoch."""
    seen = []

    class Watch(EpochDecay):
        def on_step_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

    trainer(EPOCHS | {"lr_scheduler_type": schedule}, callbacks=[Watch(0.5)]).train()
    assert seen == pytest.approx([0.1 * rate * 0.5 ** (step // 4) for step, rate in enumerate(within)])


def test_a_resumed_run_goes_on_as_it_was(trainer: Any) -> None:
    """Stopped in the middle of the second epoch; a twin that decays anew from the start would be elsewhere."""
    runs = []
    for stop in (None, 6):
        options = EPOCHS | {"save_strategy": "steps", "save_steps": 6, "num_train_epochs": 3}
        run = trainer(options, model=tiny_distilbert(), callbacks=[EpochDecay(0.5)])
        if stop is None:
            run.train()
        else:
            run.train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-{stop}")
        runs.append(run)
    torch.testing.assert_close(parameters_of(runs[1].model), parameters_of(runs[0].model), rtol=1e-6, atol=1e-8)
    assert logged(runs[1], "learning_rate")[-1] == logged(runs[0], "learning_rate")[-1]


def test_factor() -> None:
    with pytest.raises(ValueError, match="lr_decay_per_epoch must be above 0, got 0"):
        EpochDecay(0)
