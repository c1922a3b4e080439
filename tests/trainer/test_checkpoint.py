"""Checkpoints: a resumed run is the uninterrupted one, bit for bit, or refuses with a reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import NotedRows, parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from transformers import Trainer, TrainerCallback

import hf_cgd.trainer.engine_choice
from hf_cgd import GroupDRO, GroupInfo, GroupRobustConfig, GroupRobustLoss, GroupRobustTrainer, GroupRobustWarning
from hf_cgd.gradients import ENGINES
from hf_cgd.trainer.history import HISTORY_FILE
from hf_cgd.trainer.resume import GROUP_TENSORS_FILE

Build = Callable[..., GroupRobustTrainer]
SAVES = {
    "save_strategy": "steps",
    "save_steps": 3,
    "max_steps": 8,
    "step_size": 0.5,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
}


def checkpoint(run: GroupRobustTrainer, step: int) -> Path:
    return Path(run.args.output_dir) / f"checkpoint-{step}"


@pytest.mark.parametrize("sampling", ["none", "balanced", "weighted", "weights"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_is_bit_equal_to_the_uninterrupted_run(trainer: Build, sampling: str, accumulation: int) -> None:
    changes = {**SAVES, "group_sampling": sampling, "gradient_accumulation_steps": accumulation}
    data = NotedRows(text_dataset(32))
    straight = trainer(changes, model=tiny_distilbert(dropout=0.1), train_dataset=data)
    data.read.clear()
    straight.train()
    order = list(data.read)

    data = NotedRows(text_dataset(32))
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


@pytest.mark.parametrize("sampling", ["balanced", "weights"])
def test_resume_with_true_and_without_skipping_data(trainer: Build, sampling: str) -> None:
    straight = trainer({**SAVES, "group_sampling": sampling, "ignore_data_skip": True})
    straight.train()
    resumed = trainer({**SAVES, "group_sampling": sampling, "ignore_data_skip": True, "max_steps": 9})
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
    with pytest.raises(ValueError, match=r"objective='cgd' \(.*CGD\), but this run has 'group_dro'"):
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


def saved_by(run: GroupRobustTrainer, step: int) -> dict[str, Any]:
    state = json.loads((checkpoint(run, step) / "trainer_state.json").read_text())
    return state["stateful_callbacks"]["GroupStateCallback"]["attributes"]["saved"]


def test_the_loss_is_built_once_for_a_run(trainer: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[list[int]] = []

    class Counted(GroupRobustLoss):
        def __init__(self, objective: Any, groups: Any, parameters: Any = (), **options: Any) -> None:
            super().__init__(objective, groups, parameters, **options)
            built.append([id(parameter) for parameter in parameters])

    monkeypatch.setattr(hf_cgd.trainer.engine_choice, "GroupRobustLoss", Counted)
    run = trainer(SAVES, model_init=lambda: tiny_distilbert())
    # One that refuses what does not fit, and answers until a run begins.
    assert len(built) == 1 and run.group_weights.tolist() == [0.5, 0.5]
    for runs, resumed in ((2, None), (3, None), (4, str(checkpoint(run, 3)))):
        run.train(resume_from_checkpoint=resumed)
        assert len(built) == runs
        # On the parameters that were trained, which `model_init` made anew.
        assert set(built[-1]) < {id(parameter) for parameter in run.model.parameters()}


@pytest.mark.parametrize(
    "changes",
    [
        *({"gradient_engine": engine} for engine in ENGINES),
        {"gradient_engine": "tensor_hooks", "gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2},
        {"objective": "group_dro"},
        {"objective": "erm", "step_size": None},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_steps_are_those_of_the_trainer_in_the_checkpoint_too(trainer: Build, changes: dict[str, Any]) -> None:
    run = trainer({**SAVES, **changes})
    run.train()
    assert run.robust_loss.steps == run.state.global_step == 8
    assert [saved_by(run, step)["steps"] for step in (3, 6)] == [3, 6]
    resumed = trainer({**SAVES, **changes, "max_steps": 9})
    resumed.train(resume_from_checkpoint=str(checkpoint(run, 6)))
    assert resumed.robust_loss.steps == resumed.state.global_step == 9


class Mine(GroupDRO):
    name = "custom"


class Yours(GroupDRO):
    name = "custom"


def test_a_checkpoint_of_another_objective_of_the_same_name_is_refused(trainer: Build) -> None:
    args = {key: value for key, value in SAVES.items() if key != "step_size"}
    first = trainer(args, objective=Mine(step_size=0.5))
    first.train()
    path = str(checkpoint(first, 3))
    trainer(args, objective=Mine(step_size=0.5)).train(resume_from_checkpoint=path)
    with pytest.raises(ValueError, match=r"Mine\), but this run has 'custom' \(.*Yours\)"):
        trainer(args, objective=Yours(step_size=0.5)).train(resume_from_checkpoint=path)
    with pytest.raises(ValueError, match=r"other options of objective='custom': step_size 0.5 -> 0.25"):
        trainer(args, objective=Mine(step_size=0.25)).train(resume_from_checkpoint=path)


def test_a_checkpoint_that_knows_the_name_of_its_objective_only_is_refused(trainer: Build) -> None:
    first = trainer(SAVES)
    first.train()
    file = checkpoint(first, 3) / "trainer_state.json"
    state = json.loads(file.read_text())
    state["stateful_callbacks"]["GroupStateCallback"]["attributes"]["saved"]["objective"] = "cgd"
    file.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="tells of its objective only the name 'cgd'"):
        trainer(SAVES).train(resume_from_checkpoint=str(checkpoint(first, 3)))


def test_a_resume_that_is_refused_leaves_the_history_as_it_was(trainer: Build) -> None:
    data = text_dataset(80, groups=40)
    first = trainer(SAVES, train_dataset=data)
    first.train()
    history = Path(first.args.output_dir) / HISTORY_FILE
    written = history.read_text()
    assert len(written.splitlines()) == 1 + 8
    with pytest.raises(ValueError, match="other options of objective='cgd'"):
        trainer({**SAVES, "step_size": 0.25}, train_dataset=data).train(
            resume_from_checkpoint=str(checkpoint(first, 3))
        )
    assert history.read_text() == written


def test_averages_of_other_layers_are_refused(trainer: Build) -> None:
    """The two layers have as many numbers, so that nothing else would tell. Without averages a run may go on."""
    names = {layer: [rf"layer\.{layer}\."] for layer in (0, 1)}
    changes = {**SAVES, "gradient_layers": names[0], "gradient_accumulation_steps": 2}
    run = trainer({**changes, "interaction_momentum": 0.9})
    run.train()
    other = trainer({**changes, "interaction_momentum": 0.9, "gradient_layers": names[1]})
    with pytest.raises(
        ValueError, match=r"averages of gradients over 16 .*layer.0.*compares .*layer.1.*gradient_layers"
    ):
        other.train(resume_from_checkpoint=str(checkpoint(run, 3)))
    sketched = trainer({**changes, "interaction_momentum": 0.9, "gradient_engine": "sketch"})
    with pytest.raises(ValueError, match=r"of gradients over 16 .*compares sketches of gradients over 16"):
        sketched.train(resume_from_checkpoint=str(checkpoint(run, 3)))
    same = trainer({**changes, "interaction_momentum": 0.9, "gradient_engine": "per_group"})
    same.train(resume_from_checkpoint=str(checkpoint(run, 3)))
    assert torch.allclose(same.group_weights, run.group_weights, atol=1e-6)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"seed": 1}, r"seed of the order 0 -> 1\. So the rest of the epoch holds other examples"),
        ({"data_seed": 5}, r"seed of the order 0 -> 5\. So"),
        ({"per_device_train_batch_size": 8}, r"training examples of a step 4 -> 8\. So"),
        (
            {"gradient_accumulation_steps": 2, "weight_timing": "next"},
            r"training examples of a step 4 -> 8; .*timing 'current' ->",
        ),
        ({"train_sampling_strategy": "sequential"}, r"train_sampling_strategy 'random' -> 'sequential'\. So"),
        ({"group_sampling": "balanced"}, r"group_sampling 'none' -> 'balanced'\. So"),
        ({"gradient_layers": 1}, r"gradient_layers 3 -> 1\. Model"),
        ({"class_weights": [1.0, 2.0]}, r"class_weights None -> \[1\.0, 2\.0\]\. Model"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor 0\.0 -> 0\.1\. Model"),
        (
            {"forward_mode": "split", "focal_gamma": 2.0},
            r"forward_mode 'joint' -> 'split'; focal_gamma None -> 2\.0\. M",
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_run_that_goes_on_with_other_settings_says_so(trainer: Build, changes: dict[str, Any], words: str) -> None:
    first = trainer(SAVES)
    first.train()
    with pytest.warns(GroupRobustWarning, match=f"other settings than its checkpoint was trained with: {words}"):
        trainer({**SAVES, **changes}).train(resume_from_checkpoint=str(checkpoint(first, 3)))


def test_epochs_of_other_steps_are_told(trainer: Build) -> None:
    """Later epochs begin at another step, so that all that follows is of other examples."""
    first = trainer(SAVES, train_dataset=text_dataset(18))
    first.train()
    with pytest.warns(GroupRobustWarning, match=r"trained with: steps of an epoch 5 -> 4\. So the rest"):
        trainer({**SAVES, "dataloader_drop_last": True}, train_dataset=text_dataset(18)).train(
            resume_from_checkpoint=str(checkpoint(first, 3))
        )


def test_draws_by_other_weights_are_told(trainer: Build) -> None:
    first = trainer({**SAVES, "group_sampling": "weights"})
    first.train()
    changes = {"group_sampling": "weights", "dataloader_num_workers": 1}
    with pytest.warns(GroupRobustWarning, match=r"trained with: steps from the weights to the draws .* 1 -> 3\. Mod"):
        trainer({**SAVES, **changes}).train(resume_from_checkpoint=str(checkpoint(first, 3)))


def test_other_reference_losses_are_told(trainer: Build) -> None:
    first = trainer({**SAVES, "reference_losses": {"0": 0.1, "1": 0.1}})
    first.train()
    with pytest.warns(GroupRobustWarning, match=r"trained with: reference_losses '0' 0\.1 -> 0\.2\. Model"):
        trainer({**SAVES, "reference_losses": {"0": 0.2, "1": 0.1}}).train(
            resume_from_checkpoint=str(checkpoint(first, 3))
        )


def test_settings_in_other_words_are_the_same(trainer: Build, recwarn: pytest.WarningsRecorder) -> None:
    """A twice as large batch in place of two, and defaults that are written out: the very run."""
    straight = trainer({**SAVES, "gradient_accumulation_steps": 2})
    straight.train()
    written_out = {"gradient_layers": ["3"], "weight_timing": "next", "group_unit": "example", "data_seed": 0}
    resumed = trainer({**SAVES, **written_out, "per_device_train_batch_size": 8})
    resumed.train(resume_from_checkpoint=str(checkpoint(straight, 3)))
    assert not [warning for warning in recwarn if "other settings" in str(warning.message)]
    assert torch.allclose(parameters_of(resumed.model), parameters_of(straight.model), atol=1e-5)


def test_other_counts_of_the_groups_are_told(trainer: Build) -> None:
    first = trainer(SAVES, train_dataset=text_dataset(32))
    first.train()
    with pytest.warns(GroupRobustWarning, match=r"of the groups '0' 16 -> 20, '1' 16 -> 20\. So the rest"):
        trainer(SAVES, train_dataset=text_dataset(40)).train(resume_from_checkpoint=str(checkpoint(first, 3)))


def test_a_checkpoint_of_an_older_version_is_compared_as_far_as_it_tells(trainer: Build, recwarn: Any) -> None:
    first = trainer(SAVES)
    first.train()
    file = checkpoint(first, 3) / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"]["GroupStateCallback"]["attributes"]["saved"]["settings"]
    file.write_text(json.dumps(state))
    trainer({**SAVES, "seed": 1}).train(resume_from_checkpoint=str(checkpoint(first, 3)))
    assert not [warning for warning in recwarn if "other settings" in str(warning.message)]


@pytest.mark.parametrize("step, is_told", [(3, False), (6, True)])
def test_a_later_epoch_of_a_stream_begins_anew_and_says_so(
    trainer: Build, recwarn: pytest.WarningsRecorder, step: int, is_told: bool
) -> None:
    """Four steps are an epoch. The oracle is the rows that were read."""
    read: list[int] = []

    def note(row: dict[str, Any]) -> dict[str, Any]:
        read.append(row.pop("number"))
        return row

    def run() -> GroupRobustTrainer:
        data = text_dataset(16).add_column("number", list(range(16)))
        made = trainer(
            {**SAVES, "objective": "group_dro"}, groups=GroupInfo(["0", "1"], [8, 8]),
            train_dataset=data.to_iterable_dataset().map(note, remove_columns=["number"]),
        )  # fmt: skip
        read.clear()
        return made

    straight = run()
    straight.train()
    rest = read[4 * step :]
    run().train(resume_from_checkpoint=str(checkpoint(straight, step)))
    told = [str(warning.message) for warning in recwarn if "of a stream" in str(warning.message)]
    assert [message.split(" of a stream")[0] for message in told] == ["The run is resumed in epoch 2"] * is_told
    assert (read[-len(rest) :] == rest) == (not is_told)


@pytest.mark.parametrize("step, is_told", [(3, False), (4, False), (6, True)])
def test_an_order_by_length_is_drawn_anew_within_a_later_epoch_and_says_so(
    trainer: Build, recwarn: pytest.WarningsRecorder, step: int, is_told: bool
) -> None:
    """Four steps are an epoch. The oracle is the rows that were read."""

    def run() -> tuple[GroupRobustTrainer, NotedRows]:
        rows = NotedRows(text_dataset(16))
        changes = {**SAVES, "save_steps": 1, "train_sampling_strategy": "group_by_length"}
        made = trainer(changes, train_dataset=rows)
        return made, rows

    straight, rows = run()
    straight.train()
    rest = rows.read[-4 * (8 - step) :]
    resumed, rows = run()
    resumed.train(resume_from_checkpoint=str(checkpoint(straight, step)))
    told = [str(warning.message) for warning in recwarn if "group_by_length" in str(warning.message)]
    assert [message.split(" under ")[0] for message in told] == ["The run is resumed within epoch 2"] * is_told
    assert (rows.read[-len(rest) :] == rest) == (not is_told)


def test_a_checkpoint_behind_epochs_that_were_cut_short_is_told_of(trainer: Build) -> None:
    """The Trainer takes its step for one of whole epochs, and passes over other batches than were trained on."""

    class ShortEpochs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = is_cut

    for is_cut in (False, True):
        run = trainer({**SAVES, "save_steps": 1, "max_steps": -1, "num_train_epochs": 4}, callbacks=[ShortEpochs()])
        run.train()
        assert run.state.global_step == (4 if is_cut else 16)
        resumed = trainer({**SAVES, "max_steps": 4})
        if is_cut:
            with pytest.warns(GroupRobustWarning, match="step 3, which the checkpoint says is 2.25 epochs.* for 0.75"):
                resumed.train(resume_from_checkpoint=str(checkpoint(run, 3)))
        else:
            resumed.train(resume_from_checkpoint=str(checkpoint(run, 3)))


@pytest.mark.parametrize("each_node", [True, False])
def test_each_node_that_saves_has_the_tensors_it_will_resume_from(
    trainer: Build, monkeypatch: pytest.MonkeyPatch, each_node: bool
) -> None:
    """The first process of another node writes under save_on_each_node alone; it is told by its number here."""
    monkeypatch.setattr(GroupRobustTrainer, "is_world_process_zero", lambda self: False)
    monkeypatch.setattr(GroupRobustConfig, "process_index", property(lambda self: 1))
    changes = {**SAVES, "objective": "cgd", "interaction_momentum": 0.5, "save_on_each_node": each_node}
    run = trainer(changes)
    run.train()
    folder = checkpoint(run, 3)
    assert [(folder / name).is_file() for name in (GROUP_TENSORS_FILE, "trainer_state.json")] == [each_node] * 2
