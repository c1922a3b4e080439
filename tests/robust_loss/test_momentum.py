"""`interaction_momentum`: running averages by hand, nothing without it, saved and restored bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import parameters_of, text_dataset

from hf_cgd import CGD, GroupInfo, GroupRobustLoss, GroupRobustTrainer
from hf_cgd.functional import cgd_step

Build = Callable[..., GroupRobustTrainer]
F64 = torch.float64


def test_averages_by_hand() -> None:
    """Three steps; group 1 is absent in the second, so that its average stands still there."""
    beta, eta = 0.75, 0.4
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=F64))
    robust_loss = GroupRobustLoss(CGD(step_size=eta, interaction_momentum=beta), GroupInfo("ab", [5, 5]), [parameter])
    generator = torch.Generator().manual_seed(0)
    alpha = torch.tensor([0.5, 0.5], dtype=F64)
    average: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for present in ([0, 1], [0], [0, 1]):
        gradients = {group: torch.randn(3, generator=generator, dtype=F64) for group in present}
        losses = {group: torch.rand((), generator=generator, dtype=F64) for group in present}
        robust_loss(torch.stack([losses[g] + parameter @ gradients[g] for g in present]), torch.tensor(present))
        for group in present:
            new = (gradients[group], losses[group])
            old = average.get(group)
            average[group] = (
                new if old is None else tuple(beta * o + (1 - beta) * n for o, n in zip(old, new, strict=True))
            )  # type: ignore[assignment]
        rows = torch.stack([average[g][0] if g in present else torch.zeros(3, dtype=F64) for g in (0, 1)])
        means = torch.stack([average[g][1] if g in present else torch.zeros((), dtype=F64) for g in (0, 1)])
        there = torch.tensor([group in present for group in (0, 1)])
        alpha = cgd_step(alpha, means, rows @ rows.T, step_size=eta, present=there, min_weight=1e-5 / 2)
        assert torch.allclose(robust_loss.alpha, alpha, atol=1e-9)


@pytest.mark.parametrize("engine", ["per_group", "single_pass", "sketch"])
def test_saved_and_restored_bit_for_bit_with_every_engine(trainer: Build, engine: str) -> None:
    changes: dict[str, Any] = {
        "gradient_engine": engine, "interaction_momentum": 0.9, "step_size": 0.5, "max_steps": 6,
        "save_strategy": "steps", "save_steps": 3,
    }  # fmt: skip
    data = text_dataset(40, groups=3)
    straight = trainer(changes, train_dataset=data)
    straight.train()
    path = Path(straight.args.output_dir) / "checkpoint-3"
    assert (path / "group_gradients.safetensors").exists()
    resumed = trainer(changes, train_dataset=data)
    resumed.train(resume_from_checkpoint=str(path))
    assert torch.equal(resumed.group_weights, straight.group_weights)
    assert torch.equal(parameters_of(resumed.model), parameters_of(straight.model))
    plain = trainer({**changes, "interaction_momentum": 0.0, "save_strategy": "no"}, train_dataset=data)
    plain.train()
    assert not torch.equal(plain.group_weights, straight.group_weights)
    assert not torch.equal(parameters_of(plain.model), parameters_of(straight.model))


def test_zero_is_exactly_the_paper(trainer: Build) -> None:
    runs = []
    for changes in ({}, {"interaction_momentum": 0.0}):
        run = trainer({"step_size": 0.5, "save_strategy": "steps", "save_steps": 3, **changes})
        run.train()
        runs.append(run.group_weights)
        assert not (Path(run.args.output_dir) / "checkpoint-3" / "group_gradients.safetensors").exists()
    assert torch.equal(*runs)


def test_a_checkpoint_without_averages_is_refused(trainer: Build) -> None:
    run = trainer({"save_strategy": "steps", "save_steps": 2})
    run.train()
    path = f"{run.args.output_dir}/checkpoint-2"
    with pytest.raises(
        ValueError, match=r"needs the running averages of the checkpoint, but there is no .*safetensors"
    ):
        trainer({"interaction_momentum": 0.5}).train(resume_from_checkpoint=path)


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_range(value: float) -> None:
    with pytest.raises(ValueError, match=r"interaction_momentum must lie in \[0, 1\)"):
        CGD(interaction_momentum=value)
