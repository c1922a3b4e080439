"""Weights and losses of the groups over a run: in the Trainer's log, and whole in a file."""

import json
import os
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from hf_cgd.arithmetic import is_on_host
from hf_cgd.metrics import ONE_CLASS
from hf_cgd.metrics.group_metrics import own_name
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.whole_files import write_whole

MAX_LOGGED_GROUPS = 32
"""Weights and losses of more groups than this are logged as their extremes, and whole in a file of their own."""
HISTORY_FILE = "group_history.jsonl"
"""In output_dir, for runs with group weights, and for those with more groups than are logged by name."""
POINTS = 200
"""Steps at which the weights are written between the entries of the log, about this many in a run."""
MAX_NUMBERS = 20_000
"""Weights of a run's record at most; of more, entries are left out evenly."""


class GroupHistory:
    """Writes `HISTORY_FILE`: a line with the names, {"groups": […]}, then a line for each step.

    A line holds {"step": …} and lists in the order of the names, null where a group has no value, six digits each.
    Each line is appended and closed, so that a run that is killed loses none but the one it was writing.

    Args:
        folder: where to.
        names: the K groups.
        step: what was written for later steps is dropped: 0 for a new run, the step of the checkpoint for a resumed.
    """

    def __init__(self, folder: str | os.PathLike[str], names: Sequence[str], step: int) -> None:
        self.path = Path(folder) / HISTORY_FILE
        self._names = self._of_training = list(names)
        kept = [row for row in _rows(self.path) if "groups" in row or row["step"] <= step] if step > 0 else []
        headers = [row["groups"] for row in kept if "groups" in row]
        if not headers or headers[-1] != self._names:
            kept.append({"groups": self._names})
        write_whole(self.path, "".join(_line(row) for row in kept))

    def append(self, step: int, values: Mapping[str, Mapping[str, float]], names: Sequence[str] | None = None) -> None:
        """Add a line.

        Args:
            step: the optimizer step.
            values: by kind ("group_weight", "group_loss"), values by group.
            names: the groups, where they are others than those of the training set; None for those.
        """
        wanted = self._of_training if names is None else list(names)
        row: dict[str, Any] = {"step": step}
        if wanted != self._names:
            self._names = wanted
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(_line({"groups": wanted}))
        for kind, by_name in values.items():
            row[kind] = [_short(by_name.get(name)) for name in self._names]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(row))


class GroupLog:
    """Adds the group values of a run to the Trainer's log.

    Up to `MAX_LOGGED_GROUPS` groups are logged by name. Of more groups the log has the smallest and the largest value,
    and `HISTORY_FILE` has all. It has the weights at about `POINTS` steps besides, however rarely a run logs.

    Args:
        folder: where the history goes; None for no history (other processes than the main one).
        names: the K groups.
        step: see `GroupHistory`.
        max_steps: of the run.
        has_weights: whether there are weights to be written.
    """

    def __init__(
        self, folder: str | None, names: Sequence[str], step: int, max_steps: int = 0, has_weights: bool = False
    ) -> None:
        self._by_name = len(names) <= MAX_LOGGED_GROUPS
        wanted = folder is not None and (has_weights or not self._by_name)
        self.folder = folder if wanted else None
        """Where the history is; None for none."""
        self._history = None if self.folder is None else GroupHistory(self.folder, names, step)
        self._stride = max(1, max_steps // POINTS)

    def append(self, step: int, values: Mapping[str, Mapping[str, float]]) -> None:
        """Write an evaluation's values by kind and group, where there are any and a file."""
        if self._history is not None and values:
            names = list(dict.fromkeys(name for by_name in values.values() for name in by_name))
            self._history.append(step, values, names)

    def note(self, robust_loss: GroupRobustLoss, step: int) -> None:
        """Write the weights after a step that the log will have no entry of, if it is the turn of that step."""
        alpha = robust_loss.alpha
        # Weights on a device would have to be waited for.
        if self._history is not None and alpha is not None and is_on_host(alpha) and step % self._stride == 0:
            weights = dict(zip(robust_loss.groups.names, alpha.tolist(), strict=True))
            self._history.append(step, {"group_weight": _finite(weights)})

    def values(self, robust_loss: GroupRobustLoss, step: int) -> dict[str, float]:
        """What the log gains at a step; the mean group losses since the last call are used up.

        Numbers that are not finite are left out: JSON has none.
        """
        values = {
            "group_loss": robust_loss.drain_group_losses(),
            "group_excess_loss": robust_loss.drain_group_excess(),
        }
        if robust_loss.alpha is not None:
            values["group_weight"] = dict(zip(robust_loss.groups.names, robust_loss.alpha.tolist(), strict=True))
        values = {kind: _finite(by_name) for kind, by_name in values.items()}
        if self._history is not None:
            self._history.append(step, values)
        logs: dict[str, float] = {}
        for kind, by_name in values.items():
            if self._by_name:
                logs |= {f"{kind}/{name}": value for name, value in by_name.items()}
            elif by_name:
                logs |= _extremes(kind, by_name)
        if robust_loss.skipped_updates:
            logs["skipped_weight_updates"] = robust_loss.skipped_updates
        return logs


def condensed(logs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """A log entry with the extremes of what it holds of more than `MAX_LOGGED_GROUPS` groups; and all of that.

    Args:
        logs: by name; those of groups are "<kind>/<group>".

    Returns:
        the entry to be logged, and what was taken out of it by kind and group.
    """
    by_kind: dict[str, dict[str, float]] = {}
    for name, value in logs.items():
        kind = own_name(name)
        if kind.endswith("/") and isinstance(value, (int, float)):
            by_kind.setdefault(kind, {})[name.removeprefix(kind)] = value
    many = {kind: values for kind, values in by_kind.items() if len(values) > MAX_LOGGED_GROUPS}
    shown = {name: value for name, value in logs.items() if own_name(name) not in many}
    for kind, values in many.items():
        shown |= _extremes(kind.rstrip("/"), values)
    return shown, {kind.rstrip("/"): _finite(values) for kind, values in many.items()}


def read_group_history(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """What a run wrote, as entries like those of `trainer.state.log_history`: "step", "group_weight/<name>", ….

    Args:
        path: the file, or the folder it is in.
    """
    path = Path(path)
    entries: list[dict[str, float]] = []
    names: list[str] = []
    for row in _rows(path / HISTORY_FILE if path.is_dir() else path):
        if "groups" in row:
            names = row["groups"]
            continue
        entry = {"step": row.pop("step")}
        for kind, values in row.items():
            entry |= {f"{kind}/{name}": v for name, v in zip(names, values, strict=True) if v is not None}
        if entries and entries[-1]["step"] == entry["step"]:
            entries[-1] |= entry
        else:
            entries.append(entry)
    return entries


def run_history(
    log_history: Sequence[Mapping[str, Any]], folder: str | os.PathLike[str] | None
) -> list[dict[str, Any]]:
    """Weights, losses and accuracies of the groups over a run, for its record.

    Args:
        log_history: of the Trainer.
        folder: where the history file is; its weights take the place of those of the log. None for no file.
    """
    of_file = [] if folder is None else read_group_history(folder)
    of_log = [
        {
            name: value
            for name, value in entry.items()
            if name == "step" or "group_" in name.split("/")[0] or name.endswith(ONE_CLASS)
        }
        for entry in log_history
    ]
    if of_file:
        moving = ("group_weight", "group_loss", "group_excess_loss")
        of_log = [{k: v for k, v in entry.items() if not k.startswith(moving)} for entry in of_log]
    most = max(20, MAX_NUMBERS // max(1, max((len(entry) for entry in of_file), default=1)))
    every = -(-len(of_file) // most) or 1
    kept = [entry for number, entry in enumerate(of_file) if number % every == 0 or number == len(of_file) - 1]
    found = [*kept, *(entry for entry in of_log if len(entry) > 1)]
    return sorted(found, key=lambda entry: entry["step"])


def _rows(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last one of a run that was killed may be torn."""
    if not path.exists():
        return []
    rows = []
    # Names of groups may hold other characters that Python takes for line ends.
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _finite(by_name: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in by_name.items() if isfinite(value)}


def _extremes(kind: str, by_name: Mapping[str, float]) -> dict[str, float]:
    return {f"{kind}_min": min(by_name.values()), f"{kind}_max": max(by_name.values())}


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
