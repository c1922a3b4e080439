"""The workers of a grid: each run is a process of its own, and ends with the program that started it."""

import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from tqdm.auto import tqdm

from hf_cgd.cli import REPORT_FILE
from hf_cgd.cli.output_folder import results_in
from hf_cgd.experiments.grid import Grid, Run
from hf_cgd.experiments.records import (
    LOG_FILE,
    RUN_FILE,
    all_options,
    differing,
    evaluations_in,
    finished_result,
    option_words,
    sources_of,
    write_run,
)
from hf_cgd.experiments.selection import RunResult, validation_score
from hf_cgd.metrics.report import overall_of
from hf_cgd.trainer.checkpoints import last_complete_checkpoint

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two programs from working in the same folder.
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOG_LINES = 8
"""Lines of the log that the message about a failed run shows."""
MODEL_FILES = ("checkpoint-*", "model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin")
"""What is deleted of a finished run, unless models are to be kept."""


@dataclass(frozen=True)
class Failure:
    """A run that ended with an error."""

    run: Run
    reason: str
    log: Path

    def __str__(self) -> str:
        return f"{self.run.name}: {self.reason} (all of it in {self.log})"


class WorkerPool:
    """Works at runs, several at a time, and keeps what came of them."""

    def __init__(
        self, grid: Grid, output_dir: Path, workers: int, launcher: tuple[str, ...], keep_models: bool, progress: bool
    ) -> None:
        self.grid, self.output_dir, self.launcher = grid, output_dir, launcher
        self.workers, self.keep_models, self.progress = workers, keep_models, progress
        self.results: dict[Run, RunResult] = {}
        self.failures: dict[Run, Failure] = {}
        self.busy: list[Run] = []
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._environments: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        for environment in worker_environments(workers):
            self._environments.put(environment)

    def finish(self, runs: Sequence[Run]) -> None:
        """Work at those of the runs that have not finished, in their order."""
        waiting = [run for run in runs if run not in self.results]
        bar = tqdm(total=len(runs), initial=len(runs) - len(waiting), unit="run", disable=not self.progress)
        with bar, ThreadPoolExecutor(self.workers) as executor:
            futures = {executor.submit(self.work_at, run): run for run in waiting}
            try:
                for future in as_completed(futures):
                    run, outcome = futures[future], future.result()
                    if isinstance(outcome, RunResult):
                        self.results[run] = outcome
                    elif isinstance(outcome, Failure):
                        self.failures[run] = outcome
                        tqdm.write(f"Failed: {outcome}", file=sys.stderr)
                    else:
                        self.busy.append(run)
                        tqdm.write(f"{run.name}: another program is working at it", file=sys.stderr)
                    bar.update()
                    bar.set_postfix_str(f"{run.name}{f', {len(self.failures)} failed' if self.failures else ''}")
            except BaseException:
                for pending in futures:
                    pending.cancel()
                self.stop()
                raise

    def stop(self) -> None:
        """End the runs that are being worked at, and begin no other."""
        self._stopped = True
        for process in list(self._processes):
            _stop(process)

    def work_at(self, run: Run, waits: bool = False) -> RunResult | Failure | None:
        """One run from start to end; None where another program has it, unless this one `waits` for that."""
        folder = self.output_dir / run.name
        folder.mkdir(parents=True, exist_ok=True)
        environment = self._environments.get()
        try:
            with open(folder / LOG_FILE, "ab") as log, _claimed(log, waits) as is_ours:
                if not is_ours:
                    return None
                # Another program may have finished it since the start.
                return finished_result(self.grid, self.output_dir, run) or self._train(run, folder, log, environment)
        except Exception as error:  # whatever befalls one run must not end the others
            return Failure(run, f"{type(error).__name__}: {error}", folder / LOG_FILE)
        finally:
            self._environments.put(environment)

    def _train(self, run: Run, folder: Path, log: IO[bytes], environment: Mapping[str, str]) -> RunResult | Failure:
        options = all_options(self.grid, run)
        state: dict[str, Any] = {
            "recipe": Path(self.grid.recipe).name, "options": options, "sources": sources_of(self.grid, run)
        }  # fmt: skip
        checkpoint = _last_checkpoint(folder) if _may_go_on(folder, state["sources"]) else None
        write_run(folder, state)
        report = folder / REPORT_FILE
        # Left over from a run that ended after its report, before it was taken note of.
        report.unlink(missing_ok=True)
        command = [*self.launcher, self.grid.recipe, *option_words(options | {"output_dir": str(folder)})]
        if checkpoint is not None:
            command += ["--resume_from_checkpoint", checkpoint]
        elif results_in(folder):
            # Of a run that came to no checkpoint.
            command += ["--overwrite_output_dir", "true"]
        start = time.perf_counter()
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        code = self._wait_for(command, log, environment)
        if code != 0:
            return Failure(run, f"ended with {code}:\n{_tail(folder / LOG_FILE)}\n", folder / LOG_FILE)
        if not report.exists():
            reason = f"wrote no {REPORT_FILE} to its output_dir; a recipe has to end with hf_cgd.cli.run"
            return Failure(run, reason, folder / LOG_FILE)
        reports = json.loads(report.read_text(encoding="utf-8"))
        result = RunResult(
            run,
            {split: overall_of(report) for split, report in reports.items()},
            {split: report["groups"] for split, report in reports.items()},
            round(time.perf_counter() - start, 1),
            evaluations_in(folder),
        )
        validation_score(result, self.grid.metric)
        numbers = {name: getattr(result, name) for name in ("metrics", "groups", "seconds", "evaluations")}
        write_run(folder, state | {"result": numbers})
        if not self.keep_models:
            for pattern in MODEL_FILES:
                for path in folder.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return result

    def _wait_for(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> int:
        """Exit code of a command, whose output goes to the log. The whole group of its processes ends with us."""
        if self._stopped:
            return -signal.SIGTERM
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self._processes.add(process)
        if self._stopped:
            _stop(process)
        try:
            return process.wait()
        finally:
            self._processes.discard(process)


def worker_environments(workers: int) -> list[dict[str, str]]:
    """The environment of each worker: its share of the cores, and one of the GPUs where there is more than one worker.

    OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES that are set already hold: the GPUs named there are dealt out.
    """
    environments = []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        [str(i) for i in range(torch.cuda.device_count())] if named is None else [d for d in named.split(",") if d]
    )
    for worker in range(workers):
        own = dict(os.environ)
        own.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
        own.setdefault("TOKENIZERS_PARALLELISM", "false")
        if workers > 1 and devices:
            own["CUDA_VISIBLE_DEVICES"] = devices[worker % len(devices)]
        environments.append(own)
    return environments


@contextmanager
def _claimed(log: IO[bytes], waits: bool) -> Iterator[bool]:
    """Whether nobody else holds this file. The recipe inherits it, and outlives us where only we are killed."""
    try:
        if fcntl is not None:
            fcntl.flock(log, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        yield False
    else:
        yield True


def _may_go_on(folder: Path, sources: Mapping[str, str]) -> bool:
    """Whether a run was begun here, on the files that there are now; what is of both would be of neither."""
    path = folder / RUN_FILE
    then = json.loads(path.read_text(encoding="utf-8")).get("sources", {}) if path.exists() else None
    changed = [] if then is None else [name for name in differing(then, sources) if name != "hf_cgd"]
    if changed:
        logger.warning("%s: %s changed since it was begun, the run starts anew", folder, ", ".join(changed))
    return then is not None and not changed


def _last_checkpoint(folder: Path) -> str | None:
    try:
        return last_complete_checkpoint(str(folder))
    except ValueError:
        logger.warning("%s: no checkpoint was written to its end, the run starts anew", folder)
        return None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    # It may end in between: the other runs are to be stopped all the same.
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def _tail(path: Path) -> str:
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(f"    {line[-300:]}" for line in lines[-LOG_LINES:])
