"""Long runs: memory that does not grow, weights that keep their sum, logs of bounded size; runs that are killed."""

import gc
import json
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from killed_run import SAVING
from paths import SUPPORT
from programs import run as run_program
from tiny import parameters_of, predicts_one_class, text_dataset
from torch import nn

from hf_cgd import CGD, ERM, ERMUW, GroupDRO, GroupInfo, GroupRobustLoss, GroupRobustTrainer, Objective
from hf_cgd.gradients import AutoEngine
from hf_cgd.plots import accuracy_curves, weight_curves
from hf_cgd.trainer.checkpoints import last_complete_checkpoint
from hf_cgd.trainer.history import HISTORY_FILE, GroupHistory, read_group_history, run_history

Build = Callable[..., GroupRobustTrainer]


# ---- Thousands of steps ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::hf_cgd.monitors.GroupRobustWarning")
@pytest.mark.parametrize(
    ("objective", "engine"),
    [
        (ERM(), None),
        (ERMUW(adjustment=2.0), None),
        (GroupDRO(step_size=0.1), None),
        (CGD(step_size=0.1), None),
        (CGD(step_size=0.1, interaction_momentum=0.9), "single_pass"),
        (CGD(step_size=0.1, scaling="gradient"), "sketch"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Objective) else str(value),
)
def test_two_thousand_steps(objective: Objective, engine: str | None) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    scope = list(network[2].parameters())
    robust_loss = GroupRobustLoss(
        objective, GroupInfo("abcd", [40, 30, 20, 10]), scope,
        engine=None if engine is None else AutoEngine(network, scope, engine),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    marks: list[tuple[int, int, int]] = []
    for step in range(2000):
        x, labels = torch.randn(8, 8, generator=generator), torch.randint(0, 2, (8,), generator=generator)
        group_ids = torch.randint(0, 4, (8,), generator=generator)
        with robust_loss.recording():
            logits = network(x)
        optimizer.zero_grad()
        robust_loss(F.cross_entropy(logits, labels, reduction="none"), group_ids).backward()
        optimizer.step()
        if step % 10 == 0:
            robust_loss.drain_group_losses()
        if robust_loss.alpha is not None:
            assert abs(robust_loss.alpha.sum().item() - 1) < 1e-6
            assert robust_loss.alpha.min() > 0
        if step in (499, 1999):
            del x, labels, group_ids, logits
            if robust_loss.interactions is not None:
                # Adds up what is pending.
                assert robust_loss.interactions.cosines.shape == (4, 4)
            gc.collect()
            marks.append(
                (
                    sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
                    sys.getallocatedblocks(),
                    # Bytes on a Mac, kilobytes elsewhere.
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1),
                )
            )
    tensors, blocks, resident_kib = (late - early for early, late in zip(*marks, strict=True))
    assert tensors == 0
    assert blocks < 500
    assert resident_kib < 8 * 2**10
    assert robust_loss.updates == (2000 if objective.has_weights else 0)


# ---- Many groups ----------------------------------------------------------------------------------------------------


def test_many_groups_are_logged_as_extremes_and_saved_whole(trainer: Build) -> None:
    run = trainer(
        {"objective": "group_dro", "step_size": 0.5, "max_steps": 4}, train_dataset=text_dataset(80, groups=40)
    )
    run.train()
    for entry in run.state.log_history[:4]:
        group_keys = {name for name in entry if name.startswith("group_")}
        assert group_keys == {"group_loss_min", "group_loss_max", "group_weight_min", "group_weight_max"}
    folder = Path(run.args.output_dir)
    entries = read_group_history(folder)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    last = [entries[-1][f"group_weight/{name}"] for name in run.groups.names]
    assert last == pytest.approx(run.group_weights.tolist(), rel=1e-5)
    for entry, logged in zip(entries, run.state.log_history, strict=False):
        weights = [value for name, value in entry.items() if name.startswith("group_weight/")]
        losses = [value for name, value in entry.items() if name.startswith("group_loss/")]
        assert len(weights) == 40 and 2 <= len(losses) <= 4
        assert max(weights) == pytest.approx(logged["group_weight_max"], rel=1e-5)
        assert min(losses) == pytest.approx(logged["group_loss_min"], rel=1e-5)
    steps, curves = weight_curves(entries)
    assert steps.tolist() == [1, 2, 3, 4] and len(curves) == 40
    # A line of the history costs about ten bytes for each group.
    assert (folder / HISTORY_FILE).stat().st_size < 6 * 40 * 25
    run.train()
    assert [entry["step"] for entry in read_group_history(folder / HISTORY_FILE)] == [1, 2, 3, 4]


def test_names_with_characters_that_may_end_a_line_are_read_back_and_kept(tmp_path: Path) -> None:
    names = ["a\u2028b", "c\x85d", "e\u2029", "f\nf", "g\r\ng"]
    history = GroupHistory(tmp_path, names, 0)
    for step in (1, 2, 3):
        history.append(step, {"group_weight": dict.fromkeys(names, step / 10)})
    for resumed_at, steps in ((3, [1, 2, 3]), (2, [1, 2])):
        GroupHistory(tmp_path, names, resumed_at)
        assert read_group_history(tmp_path) == [
            {"step": step} | {f"group_weight/{name}": step / 10 for name in names} for step in steps
        ]


def test_weights_are_written_however_rarely_a_run_logs(trainer: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_cgd.trainer.history.POINTS", 4)
    straight = trainer({"objective": "group_dro", "step_size": 0.5, "logging_steps": 500, "max_steps": 8})
    straight.train()
    entries = read_group_history(straight.args.output_dir)
    assert [entry["step"] for entry in entries] == [2, 4, 6, 8]
    last = [entries[-1][f"group_weight/{name}"] for name in straight.groups.names]
    assert last == pytest.approx(straight.group_weights.tolist(), rel=1e-5)
    # The entries of the log are those of every step; the file has each step once.
    logged = trainer({"objective": "group_dro", "step_size": 0.5, "logging_steps": 3, "max_steps": 8})
    logged.train()
    assert [entry["step"] for entry in read_group_history(logged.args.output_dir)] == [2, 3, 4, 6, 8]
    history = run_history(logged.state.log_history, logged.args.output_dir)
    steps, curves = weight_curves(history)
    assert steps.tolist() == [2, 3, 4, 6, 8] and len(curves) == 2


@predicts_one_class
def test_evaluations_of_many_groups_are_logged_as_extremes_and_saved_whole(trainer: Build) -> None:
    data = text_dataset(90, groups=45)
    options = {"objective": "group_dro", "step_size": 0.5, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    run = trainer(options, train_dataset=data, eval_dataset=data)
    run.train()
    metrics = run.evaluate()
    assert len([name for name in metrics if name.startswith("eval_group_accuracy/")]) == 45
    assert "eval_group_accuracy_min" not in metrics, "what evaluate() returns stays as it was"
    logged = [entry for entry in run.state.log_history if "eval_loss" in entry]
    assert all(len(json.dumps(entry)) < 1000 for entry in logged)
    assert logged[-1]["eval_group_accuracy_min"] == metrics["eval_worst_group_accuracy"]
    assert logged[-1]["eval_group_loss_max"] == metrics["eval_worst_group_loss"]
    history = run_history(run.state.log_history, run.args.output_dir)
    curves = accuracy_curves(history)
    assert curves.steps.tolist() == [1, 2] and len(curves.groups) == 45
    assert {name: values[-1] for name, values in curves.groups.items()} == pytest.approx(
        {name.removeprefix("eval_group_accuracy/"): value for name, value in metrics.items() if "_accuracy/" in name}
    )
    assert len(weight_curves(history)[1]) == 45


def test_erm_with_few_groups_has_no_history(trainer: Build) -> None:
    run = trainer({"objective": "erm"})
    run.train()
    assert not (Path(run.args.output_dir) / HISTORY_FILE).exists()


def test_history_survives_a_torn_line_and_other_names(tmp_path: Path) -> None:
    history = GroupHistory(tmp_path, ["a", "b"], step=0)
    for step in (1, 2, 3):
        history.append(step, {"group_weight": {"a": step / 7, "b": 1 - step / 7}, "group_loss": {"b": 0.5}})
    with open(tmp_path / HISTORY_FILE, "a") as file:
        file.write('{"step": 4, "group_we')
    assert read_group_history(tmp_path)[0] == {
        "step": 1, "group_weight/a": 0.142857, "group_weight/b": 0.857143, "group_loss/b": 0.5,
    }  # fmt: skip
    again = GroupHistory(tmp_path, ["b", "a"], step=2)
    again.append(3, {"group_weight": {"a": 0.25, "b": 0.75}})
    entries = read_group_history(tmp_path)
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    assert entries[1]["group_weight/a"] == pytest.approx(2 / 7, rel=1e-5) and entries[2]["group_weight/a"] == 0.25
    for line in (tmp_path / HISTORY_FILE).read_text().splitlines():
        json.loads(line)


# ---- Runs that are killed -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_loses_the_steps_since_the_last_checkpoint(
    trainer: Build, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    # Bits depend on the number of threads.
    threads = str(torch.get_num_threads())
    run_program(SUPPORT / "killed_run.py", folder, code=-signal.SIGKILL, OMP_NUM_THREADS=threads)
    assert (folder / "checkpoint-4" / "model.safetensors").exists()
    assert not (folder / "checkpoint-4" / "trainer_state.json").exists()

    data = text_dataset(80, groups=40)
    resumed = trainer({**SAVING, "output_dir": str(folder)}, train_dataset=data)
    resumed.train(resume_from_checkpoint=True)
    straight = trainer({**SAVING, "output_dir": str(tmp_path / "straight")}, train_dataset=data)
    straight.train()
    assert resumed.robust_loss.updates == 6
    assert torch.equal(resumed.group_weights, straight.group_weights)
    assert torch.equal(parameters_of(resumed.model), parameters_of(straight.model))
    assert read_group_history(folder) == read_group_history(tmp_path / "straight")
    assert last_complete_checkpoint(str(folder)) == str(folder / "checkpoint-6")


def spoil(checkpoint: Path, how: str) -> None:
    state = checkpoint / "trainer_state.json"
    if how == "no trainer_state.json":
        state.unlink()
    elif how == "trainer_state.json is cut off":
        state.write_text(state.read_text()[:200])
    else:
        (checkpoint / "group_gradients.safetensors").unlink()


@pytest.mark.parametrize(
    "how", ["no trainer_state.json", "trainer_state.json is cut off", "no group_gradients.safetensors"]
)
def test_a_checkpoint_that_was_not_finished_is_passed_over(
    trainer: Build, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(SAVING)
    run.train()
    folder = Path(run.args.output_dir)
    spoil(folder / "checkpoint-6", how)
    resumed = trainer({**SAVING, "max_steps": 7})
    with caplog.at_level("WARNING", logger="hf_cgd"):
        resumed.train(resume_from_checkpoint=True)
    assert f"checkpoint-6 was not written to its end ({how})" in caplog.text
    assert resumed._run_state.resumed_from == str(folder / "checkpoint-4") and resumed.robust_loss.updates == 7
    for step in (2, 4, 6, 7):
        spoil(folder / f"checkpoint-{step}", how)
    with pytest.raises(
        ValueError, match=r"No checkpoint in .* is complete: checkpoint-7 .*checkpoint-6 .*checkpoint-4 .*-2"
    ):
        trainer(SAVING).train(resume_from_checkpoint=True)
    if how != "no group_gradients.safetensors":
        with pytest.raises(ValueError, match=f"checkpoint-4 cannot be resumed: {how}"):
            trainer(SAVING).train(resume_from_checkpoint=str(folder / "checkpoint-4"))


def test_without_any_checkpoint_the_trainer_says_so(trainer: Build) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer(SAVING).train(resume_from_checkpoint=True)


def test_a_checkpoint_that_is_written_over_is_not_complete_until_it_is(trainer: Build) -> None:
    run = trainer(SAVING)
    run.train()
    folder = Path(run.args.output_dir)
    again = trainer(SAVING)

    def fail(folder: str) -> None:
        raise OSError("disk full")

    again._save_rng_state = fail
    with pytest.raises(OSError, match="disk full"):
        again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert last_complete_checkpoint(str(folder)) == str(folder / "checkpoint-4")
