"""`group_sampling="weights"` and `mixture()` in a trainer."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import NotedRows, parameters_of, text_dataset, text_rows, tiny_distilbert
from transformers import TrainerCallback

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

Build = Callable[..., GroupRobustTrainer]
OPTIONS: dict[str, Any] = {"objective": "group_dro", "step_size": 0.5, "group_sampling": "weights", "max_steps": 6}


def noted_rows(size: int = 48) -> NotedRows:
    """2 of 3 are in group 0."""
    rows = text_rows(size)
    rows["group"] = [0 if row % 3 else 1 for row in range(size)]
    return NotedRows(Dataset.from_dict(rows))


class Weights(TrainerCallback):
    """Keeps the weights after each step, those of the start first."""

    def __init__(self) -> None:
        self.run: Any = None
        self.seen: list[Any] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self.seen:
            self.seen.append(self.run.group_weights.clone())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(self.run.group_weights.clone())


def sharp() -> torch.nn.Module:
    """A network that is sure of what it says, so that losses differ and weights move."""
    return tiny_distilbert(initializer_range=0.5)


def watched(trainer: Build, changes: dict[str, Any], **kwargs: Any) -> tuple[GroupRobustTrainer, list[torch.Tensor]]:
    weights = Weights()
    weights.run = trainer({**OPTIONS, **changes}, callbacks=[weights], model=sharp(), **kwargs)
    return weights.run, weights.seen


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("objective", ["group_dro", "cgd", "erm_uw"])
def test_groups_are_drawn_by_the_weights_of_a_step_before(trainer: Build, objective: str, accumulation: int) -> None:
    changes = {"objective": objective, "gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8,
               **({"step_size": None, "adjustment": 3.0} if objective == "erm_uw" else {})}  # fmt: skip
    data = noted_rows()
    run, weights = watched(trainer, changes, train_dataset=data)
    data.read.clear()
    run.train()
    size = 8 * accumulation
    groups = np.array([0 if row % 3 else 1 for row in range(48)])
    for step in range(6):
        counts = np.bincount(groups[data.read[size * step : size * (step + 1)]], minlength=2)
        used = weights[max(0, step - 1)].numpy()
        assert np.abs(counts - size * used).max() <= 1 + 1e-9
    if objective == "group_dro":
        assert (weights[0] - weights[-1]).abs().max() > 0.05
    if objective == "erm_uw":
        assert weights[0][1] > 0.55


def test_the_loss_is_the_plain_mean_and_follows_no_weight(trainer: Build) -> None:
    """A step by the plain Trainer's loss on the same rows gives the same parameters; the weights move all the same."""
    data = noted_rows()
    changes = {"per_device_train_batch_size": 12, "max_steps": 2}
    run, weights = watched(trainer, changes, train_dataset=data)
    data.read.clear()
    run.train()
    model = sharp()
    losses = []
    for step in range(2):
        rows = data.data.select(data.read[12 * step : 12 * step + 12])
        ids, labels = torch.tensor(rows["input_ids"][:]), torch.tensor(rows["labels"][:])
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits, labels)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        losses.append(loss.item())
    assert [entry["loss"] for entry in run.state.log_history if "loss" in entry] == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(parameters_of(run.model), parameters_of(model), atol=1e-5)
    assert all(not torch.equal(*pair) for pair in pairwise(weights))


def test_workers_change_how_old_the_weights_are_and_not_from_run_to_run(trainer: Build) -> None:
    changes = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2, "per_device_train_batch_size": 8}
    runs = [watched(trainer, changes, train_dataset=text_dataset(48)) for _ in range(2)]
    for run, _ in runs:
        run.train()
    assert torch.equal(runs[0][0].group_weights, runs[1][0].group_weights)
    assert torch.equal(parameters_of(runs[0][0].model), parameters_of(runs[1][0].model))
    assert runs[0][0]._drawn is not None and runs[0][0]._drawn.ahead == 3


def test_the_mixture_is_the_mean_of_the_weights(trainer: Build) -> None:
    for sampling in ("none", "weights"):
        run, weights = watched(trainer, {"group_sampling": sampling}, train_dataset=text_dataset(48, groups=3))
        assert run.mixture() == pytest.approx({"0": 1 / 3, "1": 1 / 3, "2": 1 / 3})
        run.train()
        mean = torch.stack(weights[1:]).mean(dim=0)
        assert list(run.mixture().values()) == pytest.approx(mean.tolist(), abs=1e-12)
        assert sum(run.mixture().values()) == pytest.approx(1, abs=1e-12)
    with pytest.raises(ValueError, match="mixture.. needs group weights: objective='erm' has none"):
        trainer({"objective": "erm"}).mixture()


def test_a_resumed_run_has_the_mixture_of_the_whole(trainer: Build) -> None:
    changes = {**OPTIONS, "save_strategy": "steps", "save_steps": 2}
    straight = trainer(changes, model=sharp())
    straight.train()
    resumed = trainer(changes, model=sharp())
    resumed.train(resume_from_checkpoint=f"{straight.args.output_dir}/checkpoint-2")
    assert resumed.mixture() == straight.mixture()
    other = trainer({**changes, "group_sampling": "none"})
    with pytest.raises(ValueError, match="weights_enter='sampling', but this run has 'loss'"):
        other.train(resume_from_checkpoint=f"{straight.args.output_dir}/checkpoint-2")


def test_loaders_beside_a_run_and_diagnoses_leave_its_order_alone(trainer: Build) -> None:
    orders = []
    for aside in (False, True):
        data = noted_rows()
        run = trainer({**OPTIONS, "objective": "cgd"}, train_dataset=data)
        if aside:
            assert len(list(run.get_train_dataloader())) == 12
            run.diagnose_groups(14)
        data.read.clear()
        run.train()
        orders.append(list(data.read))
        weights = run.group_weights
        run.diagnose_groups(2)
        assert torch.equal(run.group_weights, weights)
    assert orders[0] == orders[1]
    assert len(Counter(orders[0])) > 20


def test_what_has_no_weights_to_draw_by_is_refused(trainer: Build, config: Callable[..., GroupRobustConfig]) -> None:
    for objective in ("erm", "irm", "coral", "pgi"):
        with pytest.raises(ValueError, match=f"no effect on objective='{objective}', which has no group weights"):
            config(objective=objective, group_sampling="weights")
    from hf_cgd import ERM

    with pytest.raises(ValueError, match="draws groups by their weights, but objective='erm' has none"):
        trainer({"group_sampling": "weights"}, objective=ERM())


class ShortEpochs(TrainerCallback):
    """Ends each epoch after two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_epochs_that_are_cut_short_draw_on_from_where_they_were(trainer: Build, accumulation: int) -> None:
    """The steps are those of whole epochs: draws depend on the step and the weights alone."""
    changes = {**OPTIONS, "gradient_accumulation_steps": accumulation}
    runs = []
    for callbacks, length in (([], {}), ([ShortEpochs()], {"max_steps": -1, "num_train_epochs": 3})):
        weights = Weights()
        options: dict[str, Any] = {**changes, **length}
        weights.run = trainer(options, callbacks=[*callbacks, weights], model=sharp(), train_dataset=noted_rows())
        weights.run.train()
        runs.append((torch.stack(weights.seen), parameters_of(weights.run.model)))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
