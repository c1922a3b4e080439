"""Runs a grid: each run in a process of its own, several side by side, and whatever has finished is not run again."""

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from tqdm.auto import tqdm

from hf_cgd.cli.launch import BEST_WORST_GROUP, REPORT_FILE
from hf_cgd.experiments.grid import Grid, Run
from hf_cgd.experiments.selection import Choice, RunResult, choose, reported_runs, validation_score
from hf_cgd.trainer.checkpoints import last_complete_checkpoint

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two programs from working in the same folder.
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

STATE_FILE = "experiment.json"
"""Options of a run, and its result once it has finished."""
LOG_FILE = "log.txt"
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
) -> Outcome:
    """Run what has not finished yet, choose on validation, run the choice with the remaining seeds.

    A finished run is never repeated, one that was interrupted goes on from its last complete checkpoint, and one that
    failed is tried again. Every run keeps `group_report.json`, `experiment.json` and `log.txt` in a folder of its own.

    Args:
        grid: what to run.
        output_dir: folder of the experiment.
        workers: runs at a time. Each gets its share of the CPU cores (unless OMP_NUM_THREADS is set) and one GPU.
        launcher: words of the command before the recipe, such as `("accelerate", "launch", "--num_processes", "2")`.
        keep_models: keep models and checkpoints of finished runs as well.
        progress: show a bar.

    Raises:
        FileNotFoundError: there is no such recipe.
        ValueError: no worker, or a folder that holds runs with other options.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    if not Path(grid.recipe).is_file():
        raise FileNotFoundError(f"Expected the path of a recipe, got {grid.recipe!r}. Start from its repository.")
    pool = _Pool(grid, Path(output_dir), workers, tuple(launcher), keep_models, progress)
    # Before anything starts, so that other options are refused at once.
    pool.results = {result.run: result for result in load_results(grid, output_dir)}
    pool.finish(grid.search_runs())
    choices = choose(grid, list(pool.results.values()))
    remaining = [run for run in reported_runs(grid, choices) if run not in pool.results]
    if remaining:
        pool.finish(remaining)
        choices = choose(grid, list(pool.results.values()))
    return Outcome(tuple(pool.results.values()), tuple(choices), tuple(pool.failures.values()), tuple(pool.busy))


def load_results(grid: Grid, output_dir: str | Path) -> list[RunResult]:
    """Results of the finished runs of a grid, nothing is run.

    Raises:
        ValueError: the folder holds runs with other options.
    """
    found = (_finished(grid, Path(output_dir), run) for run in grid.all_runs())
    return [result for result in found if result is not None]


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line: true and false, lists one word each, None left out."""
    words: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        words += [f"--{name}", *(json.dumps(v) if isinstance(v, (bool, dict)) else str(v) for v in values)]
    return words


def all_options(grid: Grid, run: Run) -> dict[str, Any]:
    """What a run is told, its folder left out; the grid's own options take precedence over those that it implies."""
    implied = BEST_WORST_GROUP | {"metric_for_best_model": grid.metric, "disable_tqdm": True}
    return implied | grid.options_of(run)


def _finished(grid: Grid, output_dir: Path, run: Run) -> RunResult | None:
    """The result of a run that has finished.

    Raises:
        ValueError: it was run with other options, or started with others and not finished.
    """
    path = output_dir / run.name / STATE_FILE
    if not path.exists():
        return None
    state = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(all_options(grid, run)))
    other = [
        f"{name} {state['options'].get(name)!r} (now {now.get(name)!r})"
        for name in sorted(now.keys() | state["options"].keys())
        if state["options"].get(name) != now.get(name)
    ]
    if other or state["recipe"] != Path(grid.recipe).name:
        raise ValueError(
            f"{path.parent} holds a run of {state['recipe']} with other options: {', '.join(other) or 'none'}. "
            "Results of different options must not be mixed: choose another output_dir, or remove this folder."
        )
    if "result" not in state:
        return None
    return RunResult(run, **state["result"])


class _Pool:
    """Works off runs and keeps what came of them."""

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
            futures = {executor.submit(self._work, run): run for run in waiting}
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
                self._stopped = True
                for waiting_future in futures:
                    waiting_future.cancel()
                for process in list(self._processes):
                    _stop(process)
                raise

    def _work(self, run: Run) -> RunResult | Failure | None:
        """One run from start to end; None where another program has it."""
        folder = self.output_dir / run.name
        folder.mkdir(parents=True, exist_ok=True)
        environment = self._environments.get()
        try:
            with open(folder / LOG_FILE, "ab") as log, _claimed(log) as is_ours:
                if not is_ours:
                    return None
                # Another program may have finished it since the start.
                return _finished(self.grid, self.output_dir, run) or self._train(run, folder, log, environment)
        except Exception as error:  # whatever befalls one run must not end the others
            return Failure(run, f"{type(error).__name__}: {error}", folder / LOG_FILE)
        finally:
            self._environments.put(environment)

    def _train(self, run: Run, folder: Path, log: IO[bytes], environment: Mapping[str, str]) -> RunResult | Failure:
        options = all_options(self.grid, run)
        state: dict[str, Any] = {"recipe": Path(self.grid.recipe).name, "options": options}
        checkpoint = _last_checkpoint(folder) if (folder / STATE_FILE).exists() else None
        _write(folder / STATE_FILE, state)
        report = folder / REPORT_FILE
        # Left over from a run that ended after its report, before it was taken note of.
        report.unlink(missing_ok=True)
        command = [*self.launcher, self.grid.recipe, *command_line(options | {"output_dir": str(folder)})]
        if checkpoint is not None:
            command += ["--resume_from_checkpoint", checkpoint]
        start = time.perf_counter()
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        code = self._call(command, log, environment)
        if code != 0:
            return Failure(run, f"ended with {code}:\n{_tail(folder / LOG_FILE)}\n", folder / LOG_FILE)
        if not report.exists():
            reason = f"wrote no {REPORT_FILE} to its output_dir; a recipe has to end with hf_cgd.cli.launch.run"
            return Failure(run, reason, folder / LOG_FILE)
        reports = json.loads(report.read_text(encoding="utf-8"))
        result = RunResult(
            run,
            {split: report["overall"] for split, report in reports.items()},
            {split: report["groups"] for split, report in reports.items()},
            round(time.perf_counter() - start, 1),
        )
        validation_score(result, self.grid.metric)
        numbers = {name: getattr(result, name) for name in ("metrics", "groups", "seconds")}
        _write(folder / STATE_FILE, state | {"result": numbers})
        if not self.keep_models:
            for pattern in MODEL_FILES:
                for path in folder.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return result

    def _call(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> int:
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
def _claimed(log: IO[bytes]) -> Iterator[bool]:
    """Whether nobody else holds this file. The recipe inherits it, and outlives us where only we are killed."""
    try:
        if fcntl is not None:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True


def _last_checkpoint(folder: Path) -> str | None:
    try:
        return last_complete_checkpoint(str(folder))
    except ValueError:
        logger.warning("%s: no checkpoint was written to its end, the run starts anew", folder)
        return None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all, whenever the program is killed."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    os.replace(part, path)


def _tail(path: Path) -> str:
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(f"    {line[-300:]}" for line in lines[-LOG_LINES:])
