"""`diagnose_groups`: beside a plain loop, and nothing is changed by it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import image_dataset, logged, parameters_of, text_dataset, tiny_distilbert
from torch import nn
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

from hf_cgd import GroupRobustTrainer

Build = Callable[..., GroupRobustTrainer]
IN_ORDER: dict[str, Any] = {"gradient_layers": "all", "train_sampling_strategy": "sequential"}


def by_hand(steps: int) -> tuple[list[list[float]], torch.Tensor]:
    """Losses [T, 2] and, for both groups, mean <a, b> / mean <g, g> of the halves of their examples in batches of 8."""
    model = tiny_distilbert().double().train()
    rows = text_dataset().with_format("torch")
    losses, products, norms = [], torch.zeros(2), torch.zeros(2)
    for number in range(steps):
        batch = rows[8 * number : 8 * number + 8]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        own = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        losses.append([own[batch["group"] == group].mean().item() for group in (0, 1)])
        for group in (0, 1):
            members = (batch["group"] == group).nonzero().flatten()
            parts = [members[0::2], members[1::2], members]
            a, b, g = (
                torch.cat([p.flatten() for p in torch.autograd.grad(own[m].mean(), model.parameters(), retain_graph=True)])
                for m in parts
            )  # fmt: skip
            products[group] += (a @ b).item()
            norms[group] += (g @ g).item()
    return losses, products / norms


@pytest.mark.parametrize("objective", ["cgd", "erm"])
def test_the_numbers_of_a_plain_loop(trainer: Build, objective: str) -> None:
    scope = IN_ORDER if objective == "cgd" else {"train_sampling_strategy": "sequential"}
    run = trainer({"objective": objective, "per_device_train_batch_size": 8, **scope})
    found = run.diagnose_groups(steps=2)
    losses, signal = by_hand(2)
    assert found.losses.tolist() == pytest.approx(torch.tensor(losses).mean(dim=0).tolist(), rel=1e-5)
    assert list(found.names) == list(run.groups.names) and found.steps == 2
    if objective == "cgd":
        assert found.signal.tolist() == pytest.approx(signal.clamp(0, 1).tolist(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_goes_on_as_if_nothing_had_been_asked(trainer: Build, accumulation: int) -> None:
    runs = []
    for asks in (False, True):
        run = trainer(
            {"step_size": 0.5, "gradient_accumulation_steps": accumulation}, model=tiny_distilbert(dropout=0.1)
        )
        if asks:
            run.diagnose_groups(steps=7)
        run.train()
        weights, before = run.group_weights, parameters_of(run.model)
        if asks:
            assert run.diagnose_groups(steps=3).steps == 3
        assert torch.equal(run.group_weights, weights) and torch.equal(parameters_of(run.model), before)
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in run.model.parameters())
        runs.append((weights, before, logged(run)))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1]) and runs[0][2] == runs[1][2]


def test_running_statistics_of_batch_norm_stay(trainer: Build) -> None:
    torch.manual_seed(0)
    config = TimmWrapperConfig(architecture="test_resnet", num_labels=2)
    run = trainer(model=TimmWrapperForImageClassification(config).eval(), train_dataset=image_dataset())
    before = [buffer.clone() for buffer in run.model.buffers()]
    run.diagnose_groups(steps=2)
    assert all(torch.equal(*pair) for pair in zip(before, run.model.buffers(), strict=True))
    assert not any(module.training for module in run.model.modules()), "nor is a model left in training mode"


def test_what_cannot_be_diagnosed_is_refused(trainer: Build) -> None:
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        trainer().diagnose_groups(steps=0)
    with pytest.raises(ValueError, match="needs training groups: set group_column"):
        trainer({"objective": "erm", "group_column": None}).diagnose_groups()
    with pytest.raises(ValueError, match="has no batch"):
        trainer({"per_device_train_batch_size": 32, "dataloader_drop_last": True}).diagnose_groups()
    with pytest.raises(ValueError, match="tensor_hooks' rule out"):
        trainer({"gradient_engine": "tensor_hooks"}).diagnose_groups()
