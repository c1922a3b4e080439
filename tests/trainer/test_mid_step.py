"""Checkpoints that are written in mid-step, steps that are broken off, and batch sizes that are found by trying."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from tests.support.tiny import parameters_of, predicts_one_class, text_dataset, tiny_distilbert

STEP_SIZES = {"group_dro": 0.5, "cgd": 0.5}


def config(output: Path, objective: str, **options: Any) -> GroupRobustConfig:
    common = {
        "group_column": "group", "per_device_train_batch_size": 8, "optim": "sgd", "learning_rate": 0.1, "seed": 0,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "use_cpu": True, "report_to": [], "logging_steps": 1,
        "disable_tqdm": True, "save_strategy": "no", "step_size": STEP_SIZES.get(objective),
    }  # fmt: skip
    return GroupRobustConfig(str(output), objective=objective, **{**common, **options})


def outcome(trainer: GroupRobustTrainer) -> tuple[Any, ...]:
    assert trainer.robust_loss is not None
    weights = None if trainer.group_weights is None else trainer.group_weights.tolist()
    loss = trainer.robust_loss
    parameters = parameters_of(trainer.model).tolist()
    return weights, parameters, loss.steps, loss.updates, trainer.state.global_step


class Signal(TrainerCallback):
    """Raises the flag that a real SIGTERM would, at one event of one step."""

    def __init__(self, event: str, step: int) -> None:
        self.trainer: GroupRobustTrainer | None = None
        setattr(self, event, lambda args, state, control, **kwargs: self._raise_at(step, state.global_step))

    def _raise_at(self, step: int, now: int) -> None:
        if step == now and self.trainer is not None:
            for callback in self.trainer.callback_handler.callbacks:
                if isinstance(callback, JITCheckpointCallback):
                    callback.jit_manager.is_checkpoint_requested = True


class RaisesWhileFetching(GroupRobustTrainer):
    """The signal comes while the batches of a step are fetched, and is seen where the step begins."""

    signal: Signal

    def get_batch_samples(self, *args: Any) -> Any:
        batches = super().get_batch_samples(*args)
        self.signal._raise_at(3, self.state.global_step)
        return batches


def interrupted_and_resumed(
    output: Path, objective: str, signal: Signal, network: Callable[[], nn.Module], kind: type, **options: Any
) -> GroupRobustTrainer:
    args = config(output, objective, max_steps=6, enable_jit_checkpoint=True, **options)
    first = kind(model=network(), args=args, train_dataset=text_dataset(32), callbacks=[signal])
    first.signal = signal
    signal.trainer = first
    first.train()
    assert [name for name in os.listdir(output) if name.startswith("checkpoint")]
    second = GroupRobustTrainer(model=network(), args=args, train_dataset=text_dataset(32))
    second.train(resume_from_checkpoint=True)
    return second


CASES = [
    ("group_dro", {}),
    ("cgd", {"interaction_momentum": 0.9}),
    ("irm", {"penalty_weight": 50.0, "penalty_anneal_steps": 4}),
    ("erm", {}),
    ("group_dro", {"gradient_accumulation_steps": 2}),
    ("cgd", {"gradient_engine": "tensor_hooks"}),
]


@pytest.mark.parametrize(("objective", "options"), CASES, ids=str)
@pytest.mark.parametrize("event", ["on_step_begin", "on_optimizer_step", "while fetching"])
def test_a_run_resumed_from_a_signals_checkpoint_is_the_straight_run(
    tmp_path: Path, objective: str, options: dict[str, Any], event: str
) -> None:
    def network() -> nn.Module:
        return tiny_distilbert(dropout=0.1)

    args = config(tmp_path / "straight", objective, max_steps=6, **options)
    straight = GroupRobustTrainer(model=network(), args=args, train_dataset=text_dataset(32))
    straight.train()
    kind = RaisesWhileFetching if event == "while fetching" else GroupRobustTrainer
    signal = Signal("on_nothing" if event == "while fetching" else event, 3)
    resumed = interrupted_and_resumed(tmp_path / "signal", objective, signal, network, kind, **options)
    assert outcome(resumed) == outcome(straight)


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(input_ids).mean(dim=1)))


def test_running_statistics_do_not_move_twice(tmp_path: Path) -> None:
    args = config(tmp_path / "straight", "group_dro", max_steps=6)
    straight = GroupRobustTrainer(model=WithBatchNorm(), args=args, train_dataset=text_dataset(32))
    straight.train()
    signal = Signal("on_step_begin", 3)
    resumed = interrupted_and_resumed(tmp_path / "signal", "group_dro", signal, WithBatchNorm, GroupRobustTrainer)
    assert outcome(resumed) == outcome(straight)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


class Hungry(nn.Module):
    """Runs out of memory in training: for batches beyond a size, or in one forward pass."""

    def __init__(self, largest: int = 99, failing_pass: int | None = None) -> None:
        super().__init__()
        self.network, self.largest, self.failing_pass = tiny_distilbert(), largest, failing_pass
        self.sizes: list[int] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: Any = None) -> Any:
        if self.training:
            self.sizes.append(len(input_ids))
            if len(input_ids) > self.largest or len(self.sizes) == self.failing_pass:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return self.network(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("erm", {"gradient_accumulation_steps": 2}),
        ("erm_uw", {}),
        ("group_dro", {"group_sampling": "balanced"}),
        ("cgd", {}),
        ("cgd", {"gradient_engine": "tensor_hooks"}),
        ("cgd", {"interaction_momentum": 0.5, "gradient_accumulation_steps": 2}),
        ("irm", {"group_sampling": "weighted"}),
        ("coral", {}),
    ],
    ids=str,
)
def test_a_batch_size_found_by_trying_trains_like_that_size_from_the_start(
    tmp_path: Path, objective: str, options: dict[str, Any]
) -> None:
    def run(name: str, **sizes: Any) -> GroupRobustTrainer:
        args = config(tmp_path / name, objective, num_train_epochs=1, **options, **sizes)
        trainer = GroupRobustTrainer(model=Hungry(largest=5), args=args, train_dataset=text_dataset(32, groups=4))
        trainer.train()
        return trainer

    found = run("found", auto_find_batch_size=True)
    size = max(size for size in found.model.sizes if size <= 5)
    assert outcome(found) == outcome(run("direct", per_device_train_batch_size=size))
    assert not found.model._forward_hooks and not any(m._forward_pre_hooks for m in found.model.modules())


@predicts_one_class
@pytest.mark.parametrize("objective", ["group_dro", "cgd", "irm"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_trainer_whose_step_failed_can_be_used_again(tmp_path: Path, objective: str, accumulated: int) -> None:
    args = config(tmp_path / "failed", objective, max_steps=3, gradient_accumulation_steps=accumulated)
    data = text_dataset(32)
    trainer = GroupRobustTrainer(model=Hungry(failing_pass=2), args=args, train_dataset=data, eval_dataset=data)
    before = parameters_of(trainer.model)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    trainer.save_state()
    trainer.evaluate()
    with torch.no_grad():
        nn.utils.vector_to_parameters(before.float(), trainer.model.parameters())
    trainer.train()
    args = config(tmp_path / "fresh", objective, max_steps=3, gradient_accumulation_steps=accumulated)
    fresh = GroupRobustTrainer(model=Hungry(), args=args, train_dataset=data)
    fresh.train()
    assert outcome(trainer) == outcome(fresh)
