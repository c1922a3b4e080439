"""Checkpoints: a resumed run is the uninterrupted one, bit for bit, or refuses with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from transformers import Trainer, TrainerCallback

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

Build = Callable[..., GroupRobustTrainer]
SAVES = {
    "save_strategy": "steps",
    "save_steps": 3,
    "max_steps": 8,
    "step_size": 0.5,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
}


class Indices(torch.utils.data.Dataset):
    """Rows that tell which were read, in order."""

    def __init__(self, size: int = 32) -> None:
        self.data = text_dataset(size)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(int(index))
        return self.data[int(index)]


def checkpoint(run: GroupRobustTrainer, step: int) -> Path:
    return Path(run.args.output_dir) / f"checkpoint-{step}"


@pytest.mark.parametrize("sampling", ["none", "balanced", "weighted"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_is_bit_equal_to_the_uninterrupted_run(trainer: Build, sampling: str, accumulation: int) -> None:
    changes = {**SAVES, "group_sampling": sampling, "gradient_accumulation_steps": accumulation}
    data = Indices()
    straight = trainer(changes, model=tiny_distilbert(dropout=0.1), train_dataset=data)
    data.read.clear()
    straight.train()
    order = list(data.read)

    data = Indices()
    resumed = trainer(changes, model=tiny_distilbert(dropout=0.1, seed=9), train_dataset=data)
    data.read.clear()
    resumed.train(resume_from_checkpoint=str(checkpoint(straight, 3)))
    assert torch.equal(parameters_of(resumed.model), parameters_of(straight.model))
    assert torch.equal(resumed.group_weights, straight.group_weights)
    assert resumed.robust_loss.updates == straight.robust_loss.updates == 8
    rest = 5 * 4 * accumulation
    assert data.read[-rest:] == order[-rest:]
    logs = [
        [
            {k: v for k, v in entry.items() if k.startswith(("loss", "group_weight"))}
            for entry in run.state.log_history[3:8]
        ]
        for run in (straight, resumed)
    ]
    assert logs[0] == logs[1]


def test_resume_with_true_and_without_skipping_data(trainer: Build) -> None:
    straight = trainer({**SAVES, "group_sampling": "balanced", "ignore_data_skip": True})
    straight.train()
    resumed = trainer({**SAVES, "group_sampling": "balanced", "ignore_data_skip": True, "max_steps": 9})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.robust_loss.updates == 9


def test_callback_states_may_be_restored_too(trainer: Build) -> None:
    straight = trainer(SAVES)
    straight.train()
    resumed = trainer({**SAVES, "restore_callback_states_from_checkpoint": True})
    resumed.train(resume_from_checkpoint=str(checkpoint(straight, 3)))
    assert torch.equal(resumed.group_weights, straight.group_weights)
    again = trainer({**SAVES, "max_steps": 8})
    again.train(resume_from_checkpoint=str(checkpoint(resumed, 6)))
    assert torch.equal(again.group_weights, straight.group_weights)


def test_a_second_train_starts_afresh(trainer: Build) -> None:
    run = trainer({"step_size": 0.5}, model_init=lambda: tiny_distilbert())
    run.train()
    first, parameters = run.group_weights, parameters_of(run.model)
    run.train()
    assert torch.equal(run.group_weights, first) and run.robust_loss.updates == 3
    assert torch.equal(parameters_of(run.model), parameters)


def test_a_run_that_was_broken_off_does_not_spoil_the_next(trainer: Build) -> None:
    class Stop(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    changes = {"step_size": 0.5, "gradient_accumulation_steps": 2}
    run = trainer(changes, model_init=lambda: tiny_distilbert(), callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.remove_callback(Stop)
    run.train()
    twin = trainer(changes, model_init=lambda: tiny_distilbert())
    twin.train()
    assert torch.equal(run.group_weights, twin.group_weights)


def test_the_state_is_strict_json_with_names_weights_and_counters(trainer: Build) -> None:
    names = ["größe|x", "日本"]
    data = text_dataset(32)
    data = data.remove_columns("group").add_column("group", [names[g] for g in data["group"]])
    run = trainer(SAVES, train_dataset=data, eval_dataset=data)
    run.train()

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    text = (checkpoint(run, 6) / "trainer_state.json").read_text(encoding="utf-8")
    state = json.loads(text, parse_constant=refuse)
    saved = state["stateful_callbacks"]["GroupStateCallback"]["attributes"]["saved"]
    assert saved["groups"]["names"] == sorted(names) and saved["updates"] == 6
    assert sum(saved["alpha"]) == pytest.approx(1, abs=1e-9)
    for entry in state["log_history"]:
        assert all(isinstance(value, (int, float)) for value in entry.values())


@predicts_one_class
def test_an_empty_evaluation_group_leaves_the_state_strict(trainer: Build) -> None:
    only_zero = text_dataset().filter(lambda row: row["group"] == 0)
    run = trainer({**SAVES, "eval_strategy": "steps", "eval_steps": 3}, eval_dataset=only_zero)
    with pytest.warns(match="No examples of the group"):
        run.train()
    text = (checkpoint(run, 6) / "trainer_state.json").read_text()
    json.loads(text, parse_constant=lambda token: pytest.fail(token))


def renamed(mapping: dict[int, str]) -> Any:
    data = text_dataset(32)
    return data.remove_columns("group").add_column("group", [mapping[g] for g in data["group"]])


def test_other_groups_are_refused_and_another_order_is_matched(trainer: Build) -> None:
    first = trainer(SAVES, train_dataset=renamed({0: "a", 1: "b"}))
    first.train()
    path = str(checkpoint(first, 3))
    more = text_dataset(33, groups=3)
    more = more.remove_columns("group").add_column("group", ["abc"[g] for g in more["group"]])
    with pytest.raises(ValueError, match=r"groups \['a', 'b'\], but the training data has \['a', 'b', 'c'\]"):
        trainer(SAVES, train_dataset=more).train(resume_from_checkpoint=path)
    from datasets import ClassLabel

    swapped = renamed({0: "a", 1: "b"}).cast_column("group", ClassLabel(names=["b", "a"]))
    second = trainer(SAVES, train_dataset=swapped)
    assert second.groups.names == ("b", "a")
    second.train(resume_from_checkpoint=path)
    assert torch.allclose(second.group_weights.flip(0), first.group_weights, atol=1e-9)


def test_another_objective_or_a_plain_checkpoint_is_refused(
    trainer: Build, config: Callable[..., GroupRobustConfig]
) -> None:
    first = trainer(SAVES)
    first.train()
    with pytest.raises(ValueError, match=r"objective='cgd', but this run has 'group_dro'"):
        trainer({**SAVES, "objective": "group_dro"}).train(resume_from_checkpoint=str(checkpoint(first, 3)))
    plain = Trainer(
        tiny_distilbert(),
        config(**{**SAVES, "output_dir": first.args.output_dir + "-plain"}),
        train_dataset=text_dataset(),
    )
    plain.train()
    path = str(Path(plain.args.output_dir) / "checkpoint-3")
    with pytest.raises(ValueError, match="holds no group weights"):
        trainer(SAVES).train(resume_from_checkpoint=path)
    erm = {key: value for key, value in SAVES.items() if key != "step_size"}
    trainer({**erm, "objective": "erm"}).train(resume_from_checkpoint=path)


def test_a_checkpoint_without_optimizer_keeps_the_weights(trainer: Build) -> None:
    run = trainer({**SAVES, "save_only_model": True})
    run.train()
    saved = json.loads((checkpoint(run, 3) / "trainer_state.json").read_text())["stateful_callbacks"]
    assert saved["GroupStateCallback"]["attributes"]["saved"]["updates"] == 3
    assert not (checkpoint(run, 3) / "optimizer.pt").exists()
