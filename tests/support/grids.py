"""Small grids over a recipe that trains nothing."""

from pathlib import Path
from typing import Any

from paths import SUPPORT

from hf_cgd.experiments import Grid, Run, RunResult, run_grid
from hf_cgd.experiments.runner import Outcome

RECIPE = str(SUPPORT / "fake_recipe.py")


def result(
    run: Run,
    score: float,
    test: float | None = None,
    metric: str = "worst_group_accuracy",
    one_class: bool | None = None,
) -> RunResult:
    metrics = {"validation": {metric: score}}
    if test is not None:
        metrics["test"] = {metric: test, "accuracy": 0.9}
    if one_class is not None:
        metrics = {split: {**found, "one_class_predicted": float(one_class)} for split, found in metrics.items()}
    return RunResult(run, metrics, {name: [] for name in metrics}, 1.0)


def starts(folder: Path) -> dict[str, list[str]]:
    """What each run was told to resume from, by its folder, once for each time it was started."""
    return {str(path.parent.relative_to(folder)): path.read_text().splitlines() for path in folder.rglob("starts.txt")}


def run(grid: Grid, folder: Path, **options: Any) -> Outcome:
    return run_grid(grid, folder, progress=False, **options)


def small(**changes: Any) -> Grid:
    fields: dict[str, Any] = {"values": {"step_size": [1, 0.1]}, "seeds": (0, 1)}
    return Grid(RECIPE, ("erm", "cgd"), **{**fields, **changes})
