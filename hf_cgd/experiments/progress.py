"""How far a grid is that runs elsewhere, in one table."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_cgd.experiments.grid import Grid, Run
from hf_cgd.experiments.selection import RunResult, validation_score
from hf_cgd.experiments.workers import Failure
from hf_cgd.metrics.tables import markdown
from hf_cgd.visible_numbers import decimals
from hf_cgd.whole_files import write_whole

PROGRESS_FILE = "progress.md"
"""In the folder of the experiment."""
FINISHED = "finished"


def progress_rows(
    grid: Grid,
    results: Mapping[Run, RunResult],
    failures: Mapping[Run, Failure],
    jobs: Mapping[Run, tuple[str, str]],
) -> list[list[str]]:
    """A row for each run that has been begun: its job and state, and the score on validation of a finished one.

    Args:
        grid: tells the order.
        results, failures: of runs that have ended.
        jobs: number and state of the jobs of the others.

    Returns:
        the cells, the head first.
    """
    rows = [["run", "state", "job", "score", "seconds"]]
    for run in grid.all_runs():
        if run in results:
            score = decimals(validation_score(results[run], grid.metric))
            rows.append([run.name, FINISHED, "", score, f"{results[run].seconds:.0f}"])
        elif run in jobs:
            job, state = jobs[run]
            rows.append([run.name, state, job, "", ""])
        elif run in failures:
            rows.append([run.name, f"failed: {failures[run].reason.splitlines()[0]}", "", "", ""])
    return rows


def write_progress(folder: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write `progress_rows` to `PROGRESS_FILE`, whole or not at all."""
    ended = sum(row[1] == FINISHED for row in rows)
    text = f"{ended} of {len(rows) - 1} runs that were begun have finished.\n\n{markdown(rows)}\n"
    write_whole(folder / PROGRESS_FILE, text)
