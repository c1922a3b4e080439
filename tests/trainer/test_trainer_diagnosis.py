"""`diagnose_groups`: beside a plain loop, and nothing is changed by it."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import image_dataset, logged, parameters_of, text_dataset, tiny_distilbert
from torch import nn
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, TrainerCallback, default_data_collator

from hf_cgd import GroupRobustTrainer
from hf_cgd.monitors import GroupRobustWarning

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
            held = dict(vars(run))
            assert run.diagnose_groups(steps=3).steps == 3
            assert vars(run).keys() == held.keys() and all(vars(run)[name] is held[name] for name in held)
        assert torch.equal(run.group_weights, weights) and torch.equal(parameters_of(run.model), before)
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in run.model.parameters())
        runs.append((weights, before, logged(run)))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1]) and runs[0][2] == runs[1][2]


def noisy(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator that augments by Python's and numpy's random numbers."""
    batch = default_data_collator(rows)
    turned = batch["input_ids"].flip(1) if random.random() < 0.5 else batch["input_ids"]
    return {**batch, "input_ids": turned.roll(int(np.random.randint(4)), 1)}


@pytest.mark.parametrize("where", ["on_step_begin", "on_substep_end", "on_step_end", "compute_loss"])
def test_a_run_goes_on_where_it_was_asked_in_the_middle_of_it(trainer: Build, where: str) -> None:
    """Also in the middle of a step, whose group ids, window and random numbers are needed yet."""
    runs: list[GroupRobustTrainer] = []
    asked: list[int] = []

    def ask(run: GroupRobustTrainer, asks: bool) -> None:
        if asks and not asked and run.state.global_step == 1:
            asked.append(0)  # First: the probe calls compute_loss too.
            asked[0] = run.diagnose_groups(steps=3).steps

    class Asking(GroupRobustTrainer):
        asks = False

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            ask(self, self.asks and where == "compute_loss")
            return super().compute_loss(*args, **kwargs)

    for asks in (False, True):
        random.seed(0)
        np.random.seed(0)
        calls = TrainerCallback()
        base = trainer({"step_size": 0.5, "gradient_accumulation_steps": 2})
        run = Asking(
            model=tiny_distilbert(dropout=0.1),
            args=base.args,
            train_dataset=text_dataset(24, groups=3),
            data_collator=noisy,
            callbacks=[calls],
        )
        run.asks = asks
        if where != "compute_loss":
            setattr(calls, where, lambda *_, run=run, asks=asks, **__: ask(run, asks))
        run.train()
        runs.append(run)
    assert asked == [3]
    assert torch.equal(parameters_of(runs[0].model), parameters_of(runs[1].model))
    assert torch.equal(runs[0].group_weights, runs[1].group_weights) and logged(runs[0]) == logged(runs[1])


def test_what_becomes_of_a_loss_of_the_models_own_is_said_by_the_run(trainer: Build) -> None:
    """The probe's steps are by the losses of examples; ERM, which comes after them, trains the model's own."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = tiny_distilbert()
            self.config = self.inside.config

        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
            logits = self.inside(input_ids=input_ids, attention_mask=attention_mask).logits
            own = None if labels is None else 2 * nn.functional.cross_entropy(logits, labels)
            return {"logits": logits} if own is None else {"loss": own, "logits": logits}

    run = trainer({"objective": "erm"}, model=Doubled())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.diagnose_groups(steps=1)
    with pytest.warns(GroupRobustWarning, match="trains the model's own"):
        run.train()


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
