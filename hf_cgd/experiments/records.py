"""What each run of a grid is told, and what it leaves in its folder: options, result, log."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from hf_cgd.cli import BEST_WORST_GROUP
from hf_cgd.experiments.grid import Grid, Run
from hf_cgd.experiments.selection import RunResult
from hf_cgd.trainer.run_facts import versions
from hf_cgd.whole_files import write_whole

RUN_FILE = "experiment.json"
"""Options of a run, and its result once it has finished."""
LOG_FILE = "log.txt"
"""What a run has said."""


def load_results(grid: Grid, output_dir: str | Path) -> list[RunResult]:
    """Results of the finished runs of a grid, nothing is run.

    Raises:
        ValueError: the folder holds runs with other options.
    """
    found = (finished_result(grid, Path(output_dir), run) for run in grid.all_runs())
    return [result for result in found if result is not None]


def option_words(options: Mapping[str, Any]) -> list[str]:
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


def finished_result(grid: Grid, output_dir: Path, run: Run) -> RunResult | None:
    """The result of a run that has finished.

    Raises:
        ValueError: it was run with other options, or started with others and not finished.
    """
    path = output_dir / run.name / RUN_FILE
    if not path.exists():
        return None
    state = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(all_options(grid, run)))
    other = [
        f"{name} {state['options'].get(name)!r} (now {now.get(name)!r})"
        for name in sorted(now.keys() | state["options"].keys())
        if not _same(state["options"].get(name), now.get(name))
    ]
    if other or state["recipe"] != Path(grid.recipe).name:
        raise ValueError(
            f"{path.parent} holds a run of {state['recipe']} with other options: {', '.join(other) or 'none'}. "
            "Results of different options must not be mixed: choose another output_dir, or remove this folder."
        )
    if "result" not in state:
        return None
    return RunResult(run, **state["result"])


def sources_of(grid: Grid, run: Run) -> dict[str, str]:
    """What a run's numbers come of besides its options: the version of hf_cgd, and digests of its recipe and files.

    Files are the values of options that are one: tables, configs. Of folders nothing is noted.
    """
    values = [value for given in all_options(grid, run).values() for value in _listed(given)]
    paths = [Path(grid.recipe), *(Path(value) for value in values if isinstance(value, str) and _is_file(value))]
    return {"hf_cgd": versions().get("hf-cgd", "")} | {str(path): _digest(path) for path in dict.fromkeys(paths)}


def other_sources(grid: Grid, output_dir: Path) -> list[str]:
    """What the runs of a folder were not alike in, or are not like now: files that changed, versions; () for nothing.

    Runs of versions that noted nothing are passed over.
    """
    changed: dict[str, int] = {}
    for run in grid.all_runs():
        path = output_dir / run.name / RUN_FILE
        state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        then = state.get("sources")
        if then is None or "result" not in state:
            continue
        for name, value in differing(then, sources_of(grid, run)).items():
            what = f"{name} was {value}" if name == "hf_cgd" else f"{name} was another"
            changed[what] = changed.get(what, 0) + 1
    return [f"{what} in {count} finished run{'s' * (count > 1)}" for what, count in changed.items()]


def differing(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The sources of then that are others now."""
    return {name: then[name] for name in sorted(then.keys() & now.keys()) if then[name] != now[name]}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except OSError:  # A text that is too long for a path.
        return False


def _digest(path: Path) -> str:
    """Of a file, which is read once as long as it stays as it is."""
    if not path.is_file():
        return "missing"
    stat = path.stat()
    return _digest_then(path, stat.st_size, stat.st_mtime_ns)


@cache
def _digest_then(path: Path, size: int, changed: int) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()[:16]


def evaluations_in(folder: Path) -> list[dict[str, float]]:
    """Metrics of each evaluation of a run, without "eval_", and their "step"; [] where it has left no log."""
    path = folder / TRAINER_STATE_NAME
    state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return [
        {"step": entry["step"]} | {name.removeprefix("eval_"): v for name, v in entry.items() if "eval_" in name}
        for entry in state.get("log_history", ())
        if any(name.startswith("eval_") for name in entry)
    ]


def _same(before: Any, now: Any) -> bool:
    """Whether an option says the same; 1e-05 of a file and "1e-5" of a command line do."""
    if isinstance(before, (int, float)) and isinstance(now, str):
        try:
            return float(now) == before
        except ValueError:
            return False
    return bool(before == now)


def write_run(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the file of a run."""
    write_whole(folder / RUN_FILE, json.dumps(content, indent=2, ensure_ascii=False))
