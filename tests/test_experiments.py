"""Grids: which runs there are, which are run again, what is chosen, and what the tables say."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cgd import GroupRobustConfig
from hf_cgd.experiments import PRESETS, Grid, Run, RunResult, choose, load_results, result_rows, run_grid, search_rows
from hf_cgd.experiments.__main__ import _preset, main
from hf_cgd.experiments.records import option_words
from hf_cgd.experiments.runner import Outcome
from hf_cgd.experiments.summary import accuracy_figure, condition_figure, reported_split
from hf_cgd.experiments.workers import worker_environments
from hf_cgd.metrics.tables import latex

RECIPE = str(Path(__file__).parent / "fake_recipe.py")
ROOT = Path(__file__).parent.parent

# ---- Which runs there are -------------------------------------------------------------------------------------------


def test_values_of_knobs_are_searched_for_the_objectives_that_have_them() -> None:
    grid = Grid(
        RECIPE,
        ("erm", "erm_uw", "cgd", "pgi"),
        {"learning_rate": [1e-3, 1e-5], "step_size": [1, 0.1, 0.01], "adjustment": [0, 5], "penalty_weight": [1]},
        seeds=(3, 4),
    )
    assert [len(grid.points(name)) for name in grid.objectives] == [2, 4, 12, 2]
    assert grid.points("erm") == [(("learning_rate", 1e-3),), (("learning_rate", 1e-5),)]
    assert grid.points("pgi")[0] == (("learning_rate", 1e-3), ("penalty_weight", 1))
    assert len(grid.search_runs()) == len(set(grid.search_runs())) == (2 + 4 + 12 + 2) * 2
    assert len({run.name for run in grid.search_runs()}) == 40


def test_fewer_seeds_to_choose_on() -> None:
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1]}, seeds=(0, 1, 2), search_seeds=(7,))
    assert [run.seed for run in grid.search_runs()] == [7, 7]
    assert sorted(run.seed for run in grid.all_runs()) == [0, 0, 1, 1, 2, 2, 7, 7]


def test_options_of_a_run() -> None:
    grid = Grid(
        RECIPE,
        ("erm", "cgd"),
        {"step_size": [0.1], "learning_rate": [1e-3]},
        {"ratio": [10]},
        options={"adjustment": 2, "model": "resnet18", "group_sampling": "balanced"},
        objective_options={"erm": {"group_sampling": "none"}},
    )
    erm, cgd = (grid.options_of(run) for run in grid.search_runs() if run.seed == 1)
    shared = {"seed": 1, "ratio": 10, "learning_rate": 1e-3, "model": "resnet18"}
    assert erm == shared | {"objective": "erm", "group_sampling": "none"}, "no knob that ERM does not have"
    assert cgd == shared | {"objective": "cgd", "group_sampling": "balanced", "step_size": 0.1, "adjustment": 2}


def test_a_value_that_an_objective_has_of_its_own_is_not_searched_for_it() -> None:
    grid = Grid(RECIPE, ("cgd", "erm"), {"lr": [1, 2]}, objective_options={"cgd": {"lr": 3}})
    assert grid.points("cgd") == [()] and len(grid.points("erm")) == 2


def test_folders_tell_what_the_run_is() -> None:
    run = Run((("setting", "noise"),), "cgd", (("step_size", 0.1), ("gradient_layers", ["a/b", "all"])), 4)
    assert run.name == "setting=noise/cgd_step_size=0.1_gradient_layers=a_b+all/seed-4"
    assert Run((), "erm", (), 0).name == "erm/seed-0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objectives": ("cdg",)}, "objectives among erm, .*got cdg"),
        ({"objectives": ("erm", "erm")}, "objectives: expected a list of one or more different values"),
        ({"seeds": ()}, "seeds: expected a list"),
        ({"values": {"step_size": "0.1"}}, "step_size: expected a list .*'0.1'"),
        ({"values": {"step_size": [1, 1.0]}}, "step_size: .*different"),
        ({"objectives": ("erm",), "values": {"step_size": [1]}}, "None of erm has step_size"),
        ({"values": {"lr": [1]}, "options": {"lr": 2}}, "given once.*lr again"),
        ({"conditions": {"lr": [1]}, "values": {"lr": [2]}}, "given once.*lr again"),
        ({"options": {"seed": 2}}, "set by the grid itself, got seed again"),
        ({"objective_options": {"cgd": {"output_dir": "x"}}}, "got output_dir again"),
    ],
)
def test_grids_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(RECIPE, **fields)


def test_options_as_words() -> None:
    options = {"a": True, "b": [1, "x y"], "c": None, "d": 1e-5, "e": "text", "f": False}
    assert option_words(options) == ["--a", "true", "--b", "1", "x y", "--d", "1e-05", "--e", "text", "--f", "false"]


# ---- The choice -----------------------------------------------------------------------------------------------------


def result(run: Run, score: float, test: float | None = None, metric: str = "worst_group_accuracy") -> RunResult:
    metrics = {"validation": {metric: score}}
    if test is not None:
        metrics["test"] = {metric: test, "accuracy": 0.9}
    return RunResult(run, metrics, {name: [] for name in metrics}, 1.0)


@given(st.lists(st.floats(0, 1), min_size=6, max_size=6), st.booleans())
def test_the_best_mean_on_validation_is_chosen(scores: list[float], lower: bool) -> None:
    metric = "worst_group_loss" if lower else "worst_group_accuracy"
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1, 0.01]}, seeds=(0, 1), metric=metric)
    results = [result(run, score, metric=metric) for run, score in zip(grid.search_runs(), scores, strict=True)]
    (choice,) = choose(grid, results[::-1])
    means = [(scores[2 * i] + scores[2 * i + 1]) / 2 for i in range(3)]
    best = min(means) if lower else max(means)
    assert choice.score == pytest.approx(best) and choice.candidates == 3
    assert choice.point == grid.points("cgd")[means.index(best)], "the first of equal ones"
    assert [r.run.seed for r in choice.results] == [0, 1]


def test_the_test_set_has_no_say() -> None:
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1]}, seeds=(0,))
    good, bad = grid.search_runs()
    (choice,) = choose(grid, [result(good, 0.6, test=0.1), result(bad, 0.5, test=0.9)])
    assert choice.point == good.point


def test_unfinished_and_diverged_points_take_no_part() -> None:
    grid = Grid(RECIPE, ("cgd", "erm"), {"step_size": [1, 0.1, 0.01]}, seeds=(0, 1))
    runs = grid.search_runs()
    scores = [0.9, None, 0.8, float("nan"), 0.1, 0.2, None, 0.5]
    finished = [result(run, score) for run, score in zip(runs, scores, strict=True) if score is not None]
    (choice,) = choose(grid, finished)
    assert (choice.objective, choice.point, choice.candidates) == ("cgd", (("step_size", 0.01),), 1)


def test_conditions_are_chosen_for_apart() -> None:
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1]}, {"ratio": [2, 50]}, seeds=(0,))
    scores = [0.9, 0.1, 0.2, 0.3]
    choices = choose(grid, [result(run, score) for run, score in zip(grid.search_runs(), scores, strict=True)])
    assert [(dict(c.condition)["ratio"], dict(c.point)["step_size"]) for c in choices] == [(2, 1), (50, 0.1)]


def test_a_run_without_the_metric_is_refused() -> None:
    grid = Grid(RECIPE, ("erm",), seeds=(0,), metric="worst_group_pearson")
    with pytest.raises(
        ValueError, match="expected 'worst_group_pearson' of a validation split, got .'worst_group_acc"
    ):
        choose(grid, [result(grid.search_runs()[0], 0.5)])


# ---- Tables and pictures --------------------------------------------------------------------------------------------


def test_the_table_of_results() -> None:
    grid = Grid(RECIPE, ("erm", "cgd"), {"step_size": [1, 0.1]}, seeds=(0, 1))
    tests = {("erm", 0): 0.1, ("erm", 1): 0.3}
    results = [
        result(
            run, 0.5 if dict(run.point).get("step_size") == 0.1 else 0.4, tests.get((run.objective, run.seed), 0.75)
        )
        for run in grid.search_runs()
    ]
    choices = choose(grid, results)
    rows = result_rows(choices, published={("", "cgd"): ("78.6 (0.5)", "65.6 (5.9)")})
    assert rows == [
        ["", "accuracy", "worst_group_accuracy", "chosen, seeds"],
        ["erm", "90.0 (0.0)", "20.0 (14.1)", "2"],
        ["cgd", "90.0 (0.0)", "75.0 (0.0)", "step_size=0.1, 2"],
        ["cgd, paper", "78.6 (0.5)", "65.6 (5.9)", ""],
    ]
    assert search_rows(grid, results[:-1], choices)[1:] == [
        ["erm", "", "40.0 (0.0)", "20.0 (14.1)", "2"],
        ["cgd", "step_size=1", "40.0 (0.0)", "75.0 (0.0)", "2"],
        ["cgd", "step_size=0.1 *", "50.0", "75.0", "1 of 2"],
    ]


def test_the_table_says_which_values_were_chosen_where() -> None:
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1]}, {"ratio": [2, 50]}, seeds=(0,))
    for scores, note in [
        ([0.9, 0.1, 0.3, 0.2], "step_size=1, 1"),
        ([0.9, 0.1, 0.2, 0.3], "ratio=2: step_size=1, 1; ratio=50: step_size=0.1, 1"),
    ]:
        runs = zip(grid.search_runs(), scores, strict=True)
        rows = result_rows(choose(grid, [result(run, score, 0.5) for run, score in runs]), ("worst_group_accuracy",))
        assert rows[0][1:3] == ["ratio=2 worst_group_accuracy", "ratio=50 worst_group_accuracy"] and rows[1][3] == note


def test_without_a_test_split_validation_is_reported() -> None:
    grid = Grid(RECIPE, ("erm",), seeds=(0,))
    results = [result(grid.search_runs()[0], 0.5)]
    assert reported_split(results) == "validation"
    rows = result_rows(choose(grid, results), ("worst_group_accuracy",), split="validation")
    assert rows[1] == ["erm", "50.0", "1"]


def test_latex() -> None:
    assert latex([["a_b", "50 %"], ["x", "1 (2)"]]) == "\n".join(
        [
            r"\begin{tabular}{lr}",
            r"\toprule",
            r"a\_b & 50 \% \\",
            r"\midrule",
            r"x & 1 (2) \\",
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def test_pictures_show_the_chosen_runs() -> None:
    grid = Grid(RECIPE, ("erm", "cgd"), {}, {"ratio": [2, 1000]}, seeds=(0, 1))
    results = [
        RunResult(
            run,
            {name: {"worst_group_accuracy": 0.1 * run.seed + (0.5 if run.objective == "cgd" else 0.2)} for name in
             ("validation", "test")},
            {"test": [{"name": "a", "accuracy": 0.9}, {"name": "b", "accuracy": 0.25}]},
            1.0,
        )
        for run in grid.search_runs()
    ]  # fmt: skip
    choices = choose(grid, results)
    axes = condition_figure(choices, grid.metric).axes[0]
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 2]
    found = sorted(np.asarray(line.get_ydata()).round(6).tolist() for line in lines)
    assert found == [[0.25, 0.25], [0.55, 0.55]] and axes.get_xlabel() == "ratio"
    bars = accuracy_figure(choices, grid.all_conditions()[1]).axes
    assert [sorted(round(patch.get_width(), 6) for patch in panel.patches) for panel in bars] == [[0.25, 0.9]] * 2
    with pytest.raises(ValueError, match="one condition that is a number"):
        condition_figure(choose(Grid(RECIPE, ("erm",), seeds=(0,)), [result(Run((), "erm", (), 0), 0.5)]), "accuracy")


# ---- Running --------------------------------------------------------------------------------------------------------


def starts(folder: Path) -> dict[str, list[str]]:
    """What each run was told to resume from, by its folder, once for each time it was started."""
    return {str(path.parent.relative_to(folder)): path.read_text().splitlines() for path in folder.rglob("starts.txt")}


def run(grid: Grid, folder: Path, **options: Any) -> Outcome:
    return run_grid(grid, folder, progress=False, **options)


def small(**changes: Any) -> Grid:
    fields: dict[str, Any] = {"values": {"step_size": [1, 0.1]}, "seeds": (0, 1)}
    return Grid(RECIPE, ("erm", "cgd"), **{**fields, **changes})


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
    assert left == {"starts.txt", "log.txt", "experiment.json", "group_report.json"}, "models are not kept"


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
    state = json.loads((folder / "experiment.json").read_text())
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


def program(folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "hf_cgd.experiments", RECIPE, "--objectives", "erm", "--seeds", "0"]
    return subprocess.Popen(
        [*command, "--output_dir", str(folder), *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_until(condition: Callable[[], Any]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("waited for a minute in vain")


def processes_of(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and f"{folder}/erm/seed-0".encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc to look for processes")
def test_stopped_and_killed_programs(tmp_path: Path) -> None:
    """One that is told to stop stops its runs. One that is killed leaves a run, which keeps others off its folder."""
    folder = tmp_path / "runs"
    stopped = program(folder, "--", "--hang")
    wait_until(lambda: (folder / "erm/seed-0/starts.txt").exists())
    stopped.terminate()
    assert stopped.wait(60) != 0
    wait_until(lambda: not processes_of(folder))
    killed = program(folder, "--", "--hang")
    wait_until(lambda: len(starts(folder).get("erm/seed-0", [])) == 2)
    killed.kill()
    killed.wait(60)
    assert processes_of(folder), "the run goes on"
    busy = run(Grid(RECIPE, ("erm",), seeds=(0,), options={"hang": True}), folder)
    assert [each.name for each in busy.busy] == ["erm/seed-0"] and not busy.results
    for process in processes_of(folder):
        os.kill(process, signal.SIGKILL)


# ---- The command line -----------------------------------------------------------------------------------------------


def options_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "experiment.json").read_text())["options"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [RECIPE, "--objectives", "erm", "cgd", "--values", "step_size=1,0.1", "--conditions", "ratio=2,50"]
    words += ["--seeds", "0", "1", "--output_dir", str(tmp_path), "--workers", "2"]
    assert main([*words, "--", "--group_column", "label", "place", "--bf16"]) == 0
    printed = capsys.readouterr().out
    # Score .5 + .1 step + .01 seed - .001 ratio, .05 less on test: (60 + 61) / 2 - .2 - 5.
    assert "| cgd | 90.0 (0.0) |" in " ".join(printed.split()) and "55.3 (0.7)" in printed and "50.5 (0.7)" in printed
    assert "ratio=2 worst_group_accuracy" in printed and "step_size=1 *" in printed
    told = options_in(tmp_path / "ratio=2/cgd_step_size=0.1/seed-1")
    assert told["group_column"] == ["label", "place"] and told["bf16"] is True and told["step_size"] == 0.1
    assert told["metric_for_best_model"] == "worst_group_accuracy" and told["load_best_model_at_end"] is True
    assert (
        "55.3 (0.7)" in (tmp_path / "tables.md").read_text() and "\\toprule" in (tmp_path / "tables.tex").read_text()
    )
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"groups_0.png", "groups_1.png", "conditions.png"}
    before = starts(tmp_path)
    assert main([*words, "--table", "--", "--group_column", "label", "place", "--bf16"]) == 0
    assert capsys.readouterr().out == printed and starts(tmp_path) == before


def test_command_line_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        f"recipe: {RECIPE}\nobjectives: [erm, cgd]\nvalues: {{step_size: [1e-1, 1.0]}}\nseeds: [0]\n"
        "columns: [worst_group_accuracy]\noptions: {ratio: 10}\n"
    )
    assert main([str(file), "--objectives", "erm", "--output_dir", str(tmp_path / "runs")]) == 0
    assert list(starts(tmp_path / "runs")) == ["erm/seed-0"], "values that only CGD has are left out with it"
    assert "| erm | 44.0 | 1 |" in " ".join(capsys.readouterr().out.split())
    assert main([str(file), "--output_dir", str(tmp_path / "runs"), "--values", "step_size=0.5"]) == 0
    assert sorted(starts(tmp_path / "runs")) == ["cgd_step_size=0.5/seed-0", "erm/seed-0"]
    assert main([str(file), "--output_dir", str(tmp_path / "more"), "--", "--step_size", "2"]) == 0
    assert sorted(starts(tmp_path / "more")) == ["cgd/seed-0", "erm/seed-0"], "what is fixed is not searched"
    assert options_in(tmp_path / "more/cgd/seed-0")["step_size"] == 2
    assert "step_size" not in options_in(tmp_path / "more/erm/seed-0")


def test_failures_end_with_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken").touch()
    words = [RECIPE, "--objectives", "erm", "--seeds", "0", "--output_dir", str(tmp_path / "runs")]
    assert main([*words, "--", "--fail", "erm", "--broken", str(tmp_path / "broken")]) == 1
    told = capsys.readouterr().err
    assert "erm/seed-0: ended with 1" in told and "the disk is full" in told and "1 runs failed" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mnist"], "Expected a preset .colored_mnist, .*got 'mnist'"),
        ([RECIPE, "--fast"], "--fast: .* has no small version"),
        ([RECIPE, "--values", "step_size"], "Expected NAME=VALUE,VALUE, got 'step_size'"),
        ([RECIPE, "--", "label"], "options of the recipe .*got 'label'"),
        ([RECIPE, "--workers", "0"], "--workers must be at least 1"),
        ([RECIPE, "--objectives", "magic"], "got magic"),
    ],
)
def test_wrong_command_lines_say_so(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(words)


# ---- Presets --------------------------------------------------------------------------------------------------------


GRIDS = {path.name: path for path in sorted((ROOT / "recipes/grids").glob("*.yaml"))}


@pytest.mark.parametrize("name", [*PRESETS, *GRIDS])
def test_grids_that_come_along_name_options_that_their_recipe_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    preset = _preset(str(GRIDS.get(name, name)))
    grids = [preset.grid, preset.quick().grid] if name in PRESETS else [preset.grid]
    own = runpy.run_path(grids[0].recipe)["Options"]
    known = {field.name for kind in (own, GroupRobustConfig) for field in fields(kind)}
    for grid in grids:
        assert grid.search_runs() and all(grid.options_of(run).keys() <= known for run in grid.search_runs())
    if name in PRESETS:
        assert len(preset.quick().grid.search_runs()) <= 18 and not preset.quick().published


def test_published_grids() -> None:
    grid = PRESETS["colored_mnist"].grid
    assert [len(grid.points(name)) for name in grid.objectives] == [6, 6, 24, 24, 24] and grid.seeds == (0, 1, 2)
    conditions = {"setting=noise", "setting=rotation", "setting=spurious"}
    assert {key[0] for key in PRESETS["mnist_settings"].published} == conditions
    assert PRESETS["colored_mnist"].published["", "cgd"] == ("78.6 (0.5)", "65.6 (5.9)")


def test_a_real_recipe(tmp_path: Path) -> None:
    """The table holds the numbers of the runs, read from their own files."""
    words = ["multinli", "--fast", "--objectives", "cgd", "--values", "step_size=0.1", "--output_dir", str(tmp_path)]
    told = ["--use_cpu", "--max_steps", "3", "--eval_strategy", "no", "--load_best_model_at_end", "false"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hf_cgd.experiments", *words, "--", *told]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    report = json.loads((tmp_path / "cgd_step_size=0.1/seed-0/group_report.json").read_text())["test"]["overall"]
    row = f"| cgd | {100 * report['accuracy']:.1f} | {100 * report['worst_group_accuracy']:.1f} | step_size=0.1, 1 |"
    assert row in " ".join(done.stdout.split())
