"""A grid handed to a scheduler: submitit's own local executor stands for one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from grids import RECIPE, starts
from paths import ROOT
from programs import HANGS, started, wait_until

from hf_cgd.experiments import Cluster, Grid, load_results, run_grid
from hf_cgd.experiments.cluster import JOB_FILE, JobPool
from hf_cgd.experiments.progress import PROGRESS_FILE, progress_rows

pytest.importorskip("submitit")

LOCAL = Cluster({"timeout_min": 60}, "local", poll=0.1)


@pytest.fixture(autouse=True)
def jobs_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are new processes of Python, which know the package by the path alone."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def run(grid: Grid, folder: Path, **options: Any) -> Any:
    return run_grid(grid, folder, progress=False, cluster=LOCAL, **options)


@pytest.mark.slow
def test_jobs_do_what_workers_do_and_a_failed_one_is_tried_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    grid = Grid(RECIPE, ("erm",), seeds=(0, 1), options={"fail": "erm/seed-1", "broken": str(broken)})
    folder = tmp_path / "runs"
    outcome = run(grid, folder, workers=3)
    (failure,) = outcome.failures
    assert "the disk is full" in str(failure) and len(outcome.results) == 1
    table = (folder / PROGRESS_FILE).read_text()
    assert table.startswith("1 of 2 runs") and "failed: ended with 1" in table
    broken.unlink()
    again = run(grid, folder, workers=3)
    assert not again.failures and len(again.results) == 2
    assert sorted(len(times) for times in starts(folder).values()) == [1, 2], "what has finished is not run again"
    assert run_grid(grid, folder, progress=False).choices == again.choices, "without a scheduler it is the same folder"


@pytest.mark.slow
def test_a_program_that_is_killed_in_the_middle_leaves_its_job_and_nothing_is_run_twice(tmp_path: Path) -> None:
    folder, begun = tmp_path / "runs", tmp_path / "begun"
    begun.mkdir()
    # The run ends when there are two files here: its own, and one that the test writes later.
    words = ["--objectives", "erm", "--seeds", "0", "--output_dir", folder, "--cluster", "local", "--cluster_options",
             "timeout_min=60", "--", "--begun", begun, "--wait_for", "2"]  # fmt: skip
    with started("-m", "hf_cgd.experiments", RECIPE, *words, cwd=ROOT) as killed:
        wait_until(lambda: starts(folder).get("erm/seed-0") and (folder / "erm/seed-0" / JOB_FILE).exists(), killed)
        killed.kill()
        killed.wait(HANGS)
        grid = Grid(RECIPE, ("erm",), seeds=(0,), options={"begun": str(begun), "wait_for": 2})
        assert load_results(grid, folder) == []
        (begun / "the test").touch()
        outcome = run(grid, folder)
        assert len(outcome.results) == 1 and not outcome.failures
        assert len(starts(folder)["erm/seed-0"]) == 1, "the job that was left has done it"


def test_a_job_that_is_in_the_queue_is_waited_for_and_not_handed_over_again(tmp_path: Path) -> None:
    grid = Grid(RECIPE, ("erm",), seeds=(0, 1, 2))
    pool = JobPool(grid, tmp_path, 1, ("python",), False, False, LOCAL)
    states = {"7": "PENDING", "8": "UNKNOWN", "9": "COMPLETED"}

    class Job:
        def __init__(self, folder: Path, number: str) -> None:
            self.job_id, self.state = number, states[number]

        def done(self, force_check: bool = False) -> bool:
            return self.state == "COMPLETED"

    pool._kind_of_job = Job
    for run_, number in zip(grid.all_runs(), states, strict=True):
        (tmp_path / run_.name).mkdir(parents=True)
        (tmp_path / run_.name / JOB_FILE).write_text(json.dumps({"job": number}))
    found = [pool._job_in_progress(each) for each in grid.all_runs()]
    assert [None if job is None else job.job_id for job in found] == ["7", None, None]


def test_progress_has_a_row_for_each_run_that_was_begun() -> None:
    grid = Grid(RECIPE, ("erm",), seeds=(0, 1))
    first, _ = grid.all_runs()
    head, *rows = progress_rows(grid, {}, {}, {first: ("12_0", "pending")})
    assert head[:3] == ["run", "state", "job"] and rows == [["erm/seed-0", "pending", "12_0", "", ""]]


def test_a_job_needs_its_time() -> None:
    with pytest.raises(ValueError, match="give timeout_min, in minutes"):
        Cluster({"gpus_per_node": 1})
