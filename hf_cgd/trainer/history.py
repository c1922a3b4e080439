"""Weights and losses of very many groups over a run: one line of a file for each log entry, in place of the log."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HISTORY_FILE = "group_history.jsonl"
"""In output_dir, where a run has more groups than are logged by name."""


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
        self._names = list(names)
        kept = [row for row in _rows(self.path) if "groups" in row or row["step"] <= step] if step > 0 else []
        headers = [row["groups"] for row in kept if "groups" in row]
        if not headers or headers[-1] != self._names:
            kept.append({"groups": self._names})
        os.makedirs(folder, exist_ok=True)
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        os.replace(unfinished, self.path)

    def append(self, step: int, values: Mapping[str, Mapping[str, float]]) -> None:
        """Add a line.

        Args:
            step: the optimizer step.
            values: by kind ("group_weight", "group_loss"), values by group.
        """
        row: dict[str, Any] = {"step": step}
        for kind, by_name in values.items():
            row[kind] = [_short(by_name.get(name)) for name in self._names]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(row))


def read_group_history(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """What a run wrote, as entries like those of `trainer.state.log_history`: "step", "group_weight/<name>", ….

    Args:
        path: the file, or the folder it is in.
    """
    path = Path(path)
    entries, names = [], []
    for row in _rows(path / HISTORY_FILE if path.is_dir() else path):
        if "groups" in row:
            names = row["groups"]
            continue
        entry = {"step": row.pop("step")}
        for kind, values in row.items():
            entry |= {f"{kind}/{name}": v for name, v in zip(names, values, strict=True) if v is not None}
        entries.append(entry)
    return entries


def _rows(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last one of a run that was killed may be torn."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
