"""Running a grid: what is run, what is run again, and what is left alone."""

import json
import math
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from grids import RECIPE, run, small, starts
from paths import ROOT
from programs import HANGS, started, wait_until

from hf_cgd.experiments import Grid, load_results
from hf_cgd.experiments.__main__ import main
from hf_cgd.experiments.workers import worker_environments


def test_a_grid_is_run_once(tmp_path: Path) -> None:
    outcome = run(small(), tmp_path)
    assert not outcome.failures and len(outcome.results) == 6
    assert starts(tmp_path) == {each.name: ["None"] for each in small().search_runs()}
    scores = {c.objective: (c.point, round(c.score, 6)) for c in outcome.choices}
    assert scores == {"erm": ((), 0.504), "cgd": ((("step_size", 1),), 0.604)}
    assert run(small(), tmp_path).choices == outcome.choices
    assert all(len(times) == 1 for times in starts(tmp_path).values()), "nothing that has finished is run again"
    assert tuple(load_results(small(), tmp_path)) == outcome.results
    left = {path.name for path in (tmp_path / "erm/seed-0").iterdir()}
    kept = {"starts.txt", "log.txt", "experiment.json", "group_report.json", "trainer_state.json"}
    assert left == kept, "models are not kept"


def test_evaluations_of_a_run_are_kept_beside_the_best_one(tmp_path: Path) -> None:
    (result,) = run(Grid(RECIPE, ("erm",), seeds=(0,)), tmp_path).results
    assert result.evaluations[1] == {"step": 1, "worst_group_accuracy": pytest.approx(0.399), "loss": 1.0}
    assert result.last_evaluations("worst_group_accuracy") == pytest.approx(0.499 - 0.1 * 3)
    assert math.isnan(result.last_evaluations("accuracy")), "no evaluation has it"
    assert load_results(Grid(RECIPE, ("erm",), seeds=(0,)), tmp_path) == [result]


def test_models_are_kept_on_demand(tmp_path: Path) -> None:
    run(Grid(RECIPE, ("erm",), seeds=(0,)), tmp_path, keep_models=True)
    assert (tmp_path / "erm/seed-0/model.safetensors").exists() and (tmp_path / "erm/seed-0/checkpoint-5").exists()


def test_more_seeds_are_run_for_what_was_chosen_only(tmp_path: Path) -> None:
    outcome = run(small(seeds=(1, 2, 3), search_seeds=(0,)), tmp_path)
    assert sorted(starts(tmp_path)) == sorted(
        [
            "cgd_step_size=0.1/seed-0",
            *(f"cgd_step_size=1/seed-{s}" for s in range(4)),
            *(f"erm/seed-{s}" for s in range(4)),
        ]
    )
    assert [[r.run.seed for r in choice.results] for choice in outcome.choices] == [[1, 2, 3]] * 2


def test_other_options_are_refused_before_anything_runs(tmp_path: Path) -> None:
    run(small(), tmp_path)
    before = starts(tmp_path)
    with pytest.raises(ValueError, match=r"with other options: ratio None \(now 5\)\. .*another output_dir"):
        run(small(options={"ratio": 5}, seeds=(0, 1, 2)), tmp_path)
    assert starts(tmp_path) == before


def test_a_failed_run_costs_nobody_else_and_is_tried_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    grid = small(options={"fail": "cgd_step_size=1/seed-1", "broken": str(broken)})
    outcome = run(grid, tmp_path / "runs", workers=2)
    (failure,) = outcome.failures
    assert "ended with 1" in str(failure) and "the disk is full" in str(failure) and failure.log.exists()
    assert len(outcome.results) == 5
    assert {c.objective: c.point for c in outcome.choices}["cgd"] == (("step_size", 0.1),), "of what has finished"
    broken.unlink()
    again = run(grid, tmp_path / "runs")
    assert not again.failures and len(again.results) == 6
    assert sorted(len(times) for times in starts(tmp_path / "runs").values()) == [1, 1, 1, 1, 1, 2]


def test_an_interrupted_run_goes_on_from_its_last_complete_checkpoint(tmp_path: Path) -> None:
    grid = Grid(RECIPE, ("erm",), seeds=(0,))
    run(grid, tmp_path, keep_models=True)
    folder = tmp_path / "erm/seed-0"
    state = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    del state["result"]
    (folder / "experiment.json").write_text(json.dumps(state))
    (folder / "checkpoint-9").mkdir()
    run(grid, tmp_path)
    assert starts(tmp_path)["erm/seed-0"] == ["None", str(folder / "checkpoint-5")]


def test_a_recipe_without_a_report_is_a_failure(tmp_path: Path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("")
    (failure,) = run(Grid(str(silent), ("erm",), seeds=(0,)), tmp_path / "runs").failures
    assert "wrote no group_report.json" in str(failure)
    with pytest.raises(FileNotFoundError, match="path of a recipe, got 'recipes/mnist.py'"):
        run(Grid("recipes/mnist.py"), tmp_path)
    with pytest.raises(ValueError, match="workers must be at least 1"):
        run(small(), tmp_path, workers=0)


def test_workers_work_side_by_side(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    grid = Grid(RECIPE, ("erm",), seeds=(0, 1, 2), options={"begun": str(begun), "wait_for": 3})
    assert len(run(grid, tmp_path / "runs", workers=3).results) == 3, "each has waited for the two others"


def test_each_worker_has_its_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    own = worker_environments(3)
    assert [(e["CUDA_VISIBLE_DEVICES"], e["OMP_NUM_THREADS"]) for e in own] == [("2", "2"), ("5", "2"), ("2", "2")]
    assert worker_environments(1)[0]["CUDA_VISIBLE_DEVICES"] == "2,5"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert worker_environments(2)[0]["OMP_NUM_THREADS"] == "1"


def program(folder: Path, *words: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    command = ["-m", "hf_cgd.experiments", RECIPE, "--objectives", "erm", "--seeds", "0", "--output_dir", folder]
    return started(*command, *words, cwd=ROOT)


def processes_of(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and f"{folder}/erm/seed-0".encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


@contextmanager
def none_left(folder: Path) -> Iterator[None]:
    """Recipes that hang are in sessions of their own, and end with nobody."""
    try:
        yield
    finally:
        for process in processes_of(folder):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc to look for processes")
def test_stopped_and_killed_programs(tmp_path: Path) -> None:
    """One that is told to stop stops its runs. One that is killed leaves a run, which keeps others off its folder."""
    folder = tmp_path / "runs"
    with none_left(folder):
        with program(folder, "--", "--hang") as stopped:
            wait_until(lambda: starts(folder).get("erm/seed-0"), stopped)
            stopped.terminate()
            assert stopped.wait(HANGS) != 0
            wait_until(lambda: not processes_of(folder))
        with program(folder, "--", "--hang") as killed:
            wait_until(lambda: len(starts(folder).get("erm/seed-0", [])) == 2, killed)
            killed.kill()
            killed.wait(HANGS)
        assert processes_of(folder), "the run goes on"
        busy = run(Grid(RECIPE, ("erm",), seeds=(0,), options={"hang": True}), folder)
        assert [each.name for each in busy.busy] == ["erm/seed-0"] and not busy.results


def test_runs_on_other_files_than_now_are_told_of_and_never_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options are the same words; what is in the file that they name is not."""
    table = tmp_path / "reviews.csv"
    table.write_text("text,label\na,1\n")
    words = [RECIPE, "--objectives", "erm", "cgd", "--seeds", "0", "--output_dir", str(tmp_path / "runs")]
    rest = ["--", "--dataset", str(table), "--group_column", "label"]
    assert main([*words, *rest]) == 0 and "same sources" not in capsys.readouterr().out
    table.write_text("text,label\nb,0\n")
    assert main([*words, "--table", *rest]) == 0
    assert f"same sources: {table} was another in 2 finished runs" in capsys.readouterr().out
    assert "same sources" in (tmp_path / "runs/tables.md").read_text(encoding="utf-8")
    # One that has not finished has a checkpoint of the other table.
    file = tmp_path / "runs/erm/seed-0/experiment.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    del state["result"]
    file.write_text(json.dumps(state))
    (file.parent / "checkpoint-5").mkdir()
    (file.parent / "checkpoint-5/trainer_state.json").write_text("{}")
    assert main([*words, *rest]) == 0
    assert starts(tmp_path / "runs")["erm/seed-0"] == ["None", "None"]
    assert f"{table} was another in 1 finished run." in capsys.readouterr().out
    # Runs of before this was noted are not judged.
    for place in tmp_path.rglob("experiment.json"):
        place.write_text(
            json.dumps({k: v for k, v in json.loads(place.read_text(encoding="utf-8")).items() if k != "sources"})
        )
    assert main([*words, "--table", *rest]) == 0 and "same sources" not in capsys.readouterr().out
