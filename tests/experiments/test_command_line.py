"""`python -m hf_cgd.experiments`, and the grids that come along."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from grids import RECIPE, starts
from paths import RECIPES, ROOT
from recipe_parts import recipe_parts

from hf_cgd import GroupRobustConfig
from hf_cgd.experiments import PRESETS
from hf_cgd.experiments.__main__ import _number, _preset, main
from hf_cgd.tasks import TASKS

# ---- The command line -----------------------------------------------------------------------------------------------


def options_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "experiment.json").read_text(encoding="utf-8"))["options"]


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
    assert "55.3 (0.7)" in (tmp_path / "tables.md").read_text(encoding="utf-8") and "\\toprule" in (
        tmp_path / "tables.tex"
    ).read_text(encoding="utf-8")
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"groups_0.png", "groups_1.png", "conditions.png", "learning_0.png", "learning_1.png"}
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


def test_options_are_passed_on_as_they_were_written(tmp_path: Path) -> None:
    odd = ["007", "1.10", "1_000", "nan", "1e-5", "inf", "-0", "00", "True", "2024-01", "5", "0.5", "-3"]
    words = [RECIPE, "--objectives", "erm", "--seeds", "0", "--output_dir", str(tmp_path)]
    words += ["--", *(word for number, value in enumerate(odd) for word in (f"--name_{number}", value))]
    words += ["--names", "01", "1e2"]
    assert main(words) == 0
    command = (tmp_path / "erm/seed-0/log.txt").read_text(encoding="utf-8").splitlines()[0].split()
    assert [command[command.index(f"--name_{number}") + 1] for number in range(len(odd))] == odd
    assert command[command.index("--names") + 1 :][:2] == ["01", "1e2"]
    # The same command has nothing left to do.
    assert main(words) == 0 and starts(tmp_path) == {"erm/seed-0": ["None"]}


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), ("0.1", 0.1), ("1e-3", 1e-3), ("-2", -2), ("1E2", 100.0), ("007", "007"), ("1.10", "1.10"), ("nan", "nan"),
     ("1_000", "1_000"), ("", ""), (".", "."), ("e5", "e5"), (3, 3)],
)  # fmt: skip
def test_what_is_a_number(text: Any, number: Any) -> None:
    found = _number(text)
    assert found == number and type(found) is type(number)


def test_a_wrong_option_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["mnist_settings", "--worker", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "python -m hf_cgd.experiments: there is no option --worker. Did you mean --workers? "
        "All options: python -m hf_cgd.experiments --help\n"
    )


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
        ([RECIPE, "--objectives", "magic"], "got 'magic'"),
    ],
)
def test_wrong_command_lines_say_so(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(words)


# ---- Presets --------------------------------------------------------------------------------------------------------


GRIDS = {path.name: path for path in sorted((RECIPES / "grids").glob("*.yaml"))}


@pytest.mark.parametrize("name", [*PRESETS, *GRIDS])
def test_grids_that_come_along_name_options_that_their_recipe_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    preset = _preset(str(GRIDS.get(name, name)))
    grids = [preset.grid, preset.quick().grid] if name in PRESETS else [preset.grid]
    own, _, _ = recipe_parts(Path(grids[0].recipe))
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


@pytest.mark.parametrize("name", TASKS)
def test_every_benchmark_has_the_paper_s_grid(name: str) -> None:
    info, grid = TASKS[name]().info, PRESETS[name].grid
    assert grid.metric == info.metric
    if info.search is not None:
        assert PRESETS[name].columns == info.published["paper"].metrics and grid.options["preset"] == "paper"
        assert {objective for _, objective in PRESETS[name].published} == set(grid.objectives)


def test_what_the_paper_searched() -> None:
    """Points: learning rate 2 x weight decay 3, step 4, seven values of C; on WILDS the step alone."""
    points = {
        name: [len(PRESETS[name].grid.points(objective)) for objective in PRESETS[name].grid.objectives]
        for name in ("waterbirds", "celeba", "multinli", "civilcomments")
    }
    of_labels = [6, 6 * 7, 6 * 4, 6 * 4 * 7, 6 * 4 * 7]
    assert points == {
        "waterbirds": of_labels,
        "celeba": of_labels,
        "multinli": of_labels,
        "civilcomments": [1, 1, 1, 4, 4],
    }
    assert PRESETS["civilcomments"].grid.seeds == (0, 1, 2, 3, 4) and PRESETS["celeba"].grid.seeds == (0, 1, 2)


def test_a_real_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table holds the numbers of the runs, read from their own files."""
    monkeypatch.chdir(ROOT)
    words = ["multinli", "--fast", "--objectives", "cgd", "--values", "step_size=0.1", "--output_dir", str(tmp_path)]
    told = ["--use_cpu", "--pictures", "false", "--max_steps", "3"]
    for when in ("eval", "save"):
        told += [f"--{when}_strategy", "steps", f"--{when}_steps", "1"]
    assert main([*words, "--", *told]) == 0
    report = json.loads((tmp_path / "cgd_step_size=0.1/seed-0/group_report.json").read_text(encoding="utf-8"))["test"][
        "overall"
    ]
    result = json.loads((tmp_path / "cgd_step_size=0.1/seed-0/experiment.json").read_text(encoding="utf-8"))["result"]
    assert [entry["step"] for entry in result["evaluations"]] == [1, 2, 3], "whichever was best"
    row = f"| cgd | {100 * report['accuracy']:.1f} | {100 * report['worst_group_accuracy']:.1f} | step_size=0.1, 1 |"
    assert row in " ".join(capsys.readouterr().out.split())
