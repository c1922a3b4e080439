"""Options and callbacks of the Trainer that are none of our business: ERM is the plain Trainer's run, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

pytestmark = predicts_one_class

EVALUATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "scheduler": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", **EVALUATES},
    "neftune": {"neftune_noise_alpha": 5.0},
    "caches": {"torch_empty_cache_steps": 2},
    "log by epochs": {"logging_strategy": "epoch"},
    "log the first step": {"logging_first_step": True, "logging_steps": 4},
    "tokens seen": {"include_num_input_tokens_seen": "non_padding"},
    "evaluate first": {"eval_on_start": True, "eval_delay": 3, **EVALUATES},
    "evaluate in parts": {"eval_accumulation_steps": 1, **EVALUATES},
    "determinism": {"full_determinism": True},
    "hooks on all modules": {"debug": "underflow_overflow"},
    "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
    "no seedable sampler": {"accelerator_config": {"use_seedable_sampler": False}, "data_seed": 3},
    "lengths": {"train_sampling_strategy": "group_by_length", **EVALUATES},
    "the best saved": {"save_strategy": "best", "metric_for_best_model": "loss", "load_best_model_at_end": True,
                       **EVALUATES},
    "another optimizer": {"optim": "adafactor", "max_grad_norm": 0.01},
}  # fmt: skip


class StopsEpochs(TrainerCallback):
    """Ends the first epoch after two steps, the run after the third epoch's first."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == 2
        control.should_training_stop = state.global_step == 8
        control.should_evaluate = control.should_save = state.global_step == 3


def run(trainer_class: type[Trainer], folder: Path, options: dict[str, Any], **kwargs: Any) -> Trainer:
    ours = trainer_class is GroupRobustTrainer
    groups: dict[str, Any] = {"objective": "erm", "group_column": "group"} if ours else {}
    quiet = dict(
        output_dir=str(folder / trainer_class.__name__), per_device_train_batch_size=4, learning_rate=0.01,
        use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, max_steps=6, disable_tqdm=True,
    )  # fmt: skip
    arguments = (GroupRobustConfig if ours else TrainingArguments)(**{**quiet, **options, **groups})  # type: ignore[arg-type]
    model = tiny_distilbert(dropout=0.1)
    torch.manual_seed(1)
    sets = {"train_dataset": text_dataset(18), "eval_dataset": text_dataset(10, seed=3)}
    found = trainer_class(model=model, args=arguments, **sets, **kwargs)
    found.train()
    return found


def assert_same_run(folder: Path, options: dict[str, Any], callbacks: Callable[[], list[TrainerCallback]]) -> None:
    plain, ours = (run(kind, folder, options, callbacks=callbacks()) for kind in (Trainer, GroupRobustTrainer))
    assert torch.equal(parameters_of(plain.model), parameters_of(ours.model))
    assert len(plain.state.log_history) == len(ours.state.log_history)
    for expected, entry in zip(plain.state.log_history, ours.state.log_history, strict=True):
        for name, value in expected.items():
            # The mean over examples is formed in float64 here.
            exact = not name.endswith(("runtime", "per_second", "time", "eval_loss"))
            assert entry[name] == value if exact else name in entry
            assert name != "eval_loss" or entry[name] == pytest.approx(value, abs=1e-6)
    for name in ("global_step", "epoch", "best_global_step", "num_input_tokens_seen", "total_flos"):
        assert getattr(plain.state, name) == getattr(ours.state, name), name
    saved = [
        sorted(str(file.relative_to(one.args.output_dir)) for file in Path(one.args.output_dir).glob("*/*"))
        for one in (plain, ours)
    ]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_trainer(tmp_path: Path, name: str) -> None:
    assert_same_run(tmp_path, OPTIONS[name], list)


def test_callbacks_that_end_epochs_and_runs(tmp_path: Path) -> None:
    assert_same_run(tmp_path, {"max_steps": -1, "num_train_epochs": 3}, lambda: [StopsEpochs()])
