"""A grid over many machines: each run is a job of a scheduler (Slurm), through `submitit`."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_cgd.experiments.grid import Grid, Run
from hf_cgd.experiments.progress import progress_rows, write_progress
from hf_cgd.experiments.records import LOG_FILE, finished_result
from hf_cgd.experiments.selection import RunResult
from hf_cgd.experiments.workers import Failure, WorkerPool
from hf_cgd.whole_files import write_whole

JOBS = "jobs"
"""Folder of what the scheduler is handed and what it writes, in that of the experiment."""
JOB_FILE = "job.json"
"""In the folder of a run: the number of its latest job."""
MOST_REQUEUES = 50
"""Times that a job goes on which has come to the end of its time."""
LAG = 30
"""Seconds after which a file that another machine has written must be seen."""


@dataclass(frozen=True)
class Cluster:
    """How runs are handed to a scheduler.

    Args:
        options: those of `submitit.AutoExecutor.update_parameters`: `timeout_min` (which has to be given; a run that
            comes to the end of it is queued again and goes on from its last complete checkpoint), `gpus_per_node`,
            `cpus_per_task`, `mem_gb`, `slurm_partition`, `slurm_account`, …
        kind: "slurm", or "local" for processes of this machine, to try things out.
        poll: seconds between two looks at the jobs.

    Raises:
        ValueError: no `timeout_min`.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "slurm"
    poll: float = 15.0

    def __post_init__(self) -> None:
        if "timeout_min" not in self.options:
            raise ValueError(
                "A job needs its time: give timeout_min, in minutes. A run that comes to the end of it is queued "
                "again and goes on from its last complete checkpoint, so it need not be the time of a whole run."
            )


class JobOfRun:
    """What a job does: one run, from where it is to its end. Returns why it failed; None where it finished."""

    def __init__(self, grid: Grid, output_dir: Path, run: Run, launcher: tuple[str, ...], keep_models: bool) -> None:
        self._given = (grid, output_dir, run, launcher, keep_models)
        self._pool: WorkerPool | None = None

    def __call__(self) -> str | None:
        """Work at the run."""
        grid, output_dir, run, launcher, keep_models = self._given
        self._pool = WorkerPool(grid, output_dir, 1, launcher, keep_models, False)
        # A job that was lost sight of may still be at it: what it has finished is not run again.
        outcome = self._pool.work_at(run, waits=True)
        return outcome.reason if isinstance(outcome, Failure) else None

    def checkpoint(self) -> Any:
        """Called by submitit near the end of the job's time: the same again, as a new job."""
        from submitit.helpers import DelayedSubmission

        if self._pool is not None:
            self._pool.stop()
        return DelayedSubmission(JobOfRun(*self._given))


class JobPool:
    """The same as `WorkerPool`, with jobs in place of its own processes. They go on where this program ends."""

    def __init__(
        self,
        grid: Grid,
        output_dir: Path,
        workers: int,
        launcher: tuple[str, ...],
        keep_models: bool,
        progress: bool,
        cluster: Cluster,
    ) -> None:
        if find_spec("submitit") is None:
            raise ImportError("A grid over machines needs submitit: pip install 'hf_cgd[slurm]'.")
        import submitit

        self.grid, self.output_dir, self.launcher = grid, output_dir.resolve(), launcher
        self.keep_models, self.progress, self.cluster = keep_models, progress, cluster
        self.results: dict[Run, RunResult] = {}
        self.failures: dict[Run, Failure] = {}
        self.busy: list[Run] = []
        self._jobs: dict[Run, Any] = {}
        self._kind_of_job: Any = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}[cluster.kind]
        requeues = {f"{cluster.kind}_max_num_timeout": MOST_REQUEUES}
        self._executor = submitit.AutoExecutor(self.output_dir / JOBS, cluster=cluster.kind, **requeues)
        # An array has one number of jobs at a time; processes of this machine wait for their turn here.
        self._at_a_time = workers if cluster.kind == "local" else sys.maxsize
        own = {"slurm_array_parallelism": workers} if cluster.kind == "slurm" else {}
        self._executor.update_parameters(name="hf_cgd", **own, **cluster.options)

    def finish(self, runs: Sequence[Run]) -> None:
        """Have those of the runs worked at that have not finished, and wait for them."""
        waiting = [run for run in runs if run not in self.results]
        jobs = self._jobs = {run: job for run in waiting if (job := self._job_in_progress(run)) is not None}
        waiting = [run for run in waiting if run not in jobs]
        bar = tqdm(
            total=len(runs), initial=len(runs) - len(waiting) - len(jobs), unit="run", disable=not self.progress
        )
        with bar:
            try:
                while jobs or waiting:
                    free = max(self._at_a_time - len(jobs), 0)
                    self._submit(waiting[:free])
                    del waiting[:free]
                    for run in [run for run, job in jobs.items() if job.done()]:
                        self._take(run, jobs.pop(run))
                        bar.update()
                    self._write_progress()
                    if jobs:
                        time.sleep(self.cluster.poll)
            except BaseException:
                if jobs:
                    text = f"{len(jobs)} jobs go on without this program; the same command waits for them."
                    tqdm.write(text, file=sys.stderr)
                raise

    def _submit(self, runs: Sequence[Run]) -> None:
        if not runs:
            return
        # In one array where the scheduler has such; the numbers are known when the block ends.
        with self._executor.batch():
            for run in runs:
                job = JobOfRun(self.grid, self.output_dir, run, self.launcher, self.keep_models)
                self._jobs[run] = self._executor.submit(job)
        for run in runs:
            write_whole(self.output_dir / run.name / JOB_FILE, json.dumps({"job": self._jobs[run].job_id}))

    def _job_in_progress(self, run: Run) -> Any:
        """The job that an earlier call has left for a run; None where there is none, or it is not known to go on."""
        path = self.output_dir / run.name / JOB_FILE
        if not path.exists():
            return None
        number = json.loads(path.read_text(encoding="utf-8"))["job"]
        job = self._kind_of_job(self.output_dir / JOBS, number)
        return None if job.done(force_check=True) or job.state.upper() == "UNKNOWN" else job

    def _take(self, run: Run, job: Any) -> None:
        """What came of a job."""
        log = self.output_dir / run.name / LOG_FILE
        error = job.exception()
        reason = str(error).strip()[-2000:] if error is not None else job.result()
        result, deadline = self._finished(run), time.monotonic() + LAG
        while result is None and reason is None and time.monotonic() < deadline:
            time.sleep(0.5)
            result = self._finished(run)
        if result is not None:
            self.results[run] = result
            self.failures.pop(run, None)
            return
        self.failures[run] = Failure(run, reason or "its job has ended without a result", log)
        tqdm.write(f"Failed: {self.failures[run]}", file=sys.stderr)

    def _finished(self, run: Run) -> RunResult | None:
        return finished_result(self.grid, self.output_dir, run)

    def _write_progress(self) -> None:
        states = {run: (job.job_id, job.state.lower()) for run, job in self._jobs.items()}
        write_progress(self.output_dir, progress_rows(self.grid, self.results, self.failures, states))
