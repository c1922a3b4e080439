"""Runs a grid: what has finished is not run again, values are chosen on validation, the choice gets all its seeds."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_cgd.experiments.cluster import Cluster, JobPool
from hf_cgd.experiments.grid import Grid, Run
from hf_cgd.experiments.records import load_results
from hf_cgd.experiments.selection import Choice, RunResult, choose, reported_runs
from hf_cgd.experiments.workers import Failure, WorkerPool


@dataclass(frozen=True)
class Outcome:
    """What came of a grid.

    Attributes:
        results: of the finished runs.
        choices: see `choose`.
        failures: runs that ended with an error; a further call tries them again.
        busy: runs that another program is working at.
    """

    results: tuple[RunResult, ...]
    choices: tuple[Choice, ...]
    failures: tuple[Failure, ...]
    busy: tuple[Run, ...]


def run_grid(
    grid: Grid,
    output_dir: str | Path,
    *,
    workers: int = 1,
    launcher: Sequence[str] = (sys.executable,),
    keep_models: bool = False,
    progress: bool = True,
    cluster: Cluster | None = None,
) -> Outcome:
    """Run what has not finished, choose on validation, run the choice with the remaining seeds.

    A finished run is never repeated, an interrupted one goes on from its last complete checkpoint, a failed one is
    tried again. Every run keeps `group_report.json`, `experiment.json` and `log.txt` in a folder of its own.

    Args:
        grid: what to run.
        output_dir: folder of the experiment.
        workers: runs at a time. Each gets its share of the CPU cores (unless OMP_NUM_THREADS is set) and one GPU.
        launcher: words of the command before the recipe, such as `("accelerate", "launch", "--num_processes", "2")`.
        keep_models: keep models and checkpoints of finished runs as well.
        progress: show a bar.
        cluster: hand the runs to a scheduler, as jobs; `workers` are then the runs at a time among all machines. None
            for this machine. An interrupted call leaves its jobs to the scheduler, and the next one waits for them.

    Raises:
        FileNotFoundError: there is no such recipe.
        ImportError: `cluster` without submitit.
        ValueError: no worker, or a folder that holds runs with other options.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    if not Path(grid.recipe).is_file():
        raise FileNotFoundError(f"Expected the path of a recipe, got {grid.recipe!r}. Start from its repository.")
    pool: WorkerPool | JobPool
    if cluster is None:
        pool = WorkerPool(grid, Path(output_dir), workers, tuple(launcher), keep_models, progress)
    else:
        pool = JobPool(grid, Path(output_dir), workers, tuple(launcher), keep_models, progress, cluster)
    # Before anything starts, so that other options are refused at once.
    pool.results = {result.run: result for result in load_results(grid, output_dir)}
    pool.finish(grid.search_runs())
    choices = choose(grid, list(pool.results.values()))
    remaining = [run for run in reported_runs(grid, choices) if run not in pool.results]
    if remaining:
        pool.finish(remaining)
        choices = choose(grid, list(pool.results.values()))
    return Outcome(tuple(pool.results.values()), tuple(choices), tuple(pool.failures.values()), tuple(pool.busy))
