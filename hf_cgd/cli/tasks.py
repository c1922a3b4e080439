"""`hf-cgd tasks`: the benchmarks that come with the package."""

from collections.abc import Sequence
from typing import Any

from hf_cgd.cli.parser import parser_of


def main(words: Sequence[str]) -> list[dict[str, Any]]:
    """Print a table of them, and return what it says."""
    parser_of("tasks", "List the benchmarks that come with the package.", ("tasks", "tasks --json")).parse_args(words)
    from hf_cgd.metrics.tables import plain
    from hf_cgd.tasks import TASKS, build_task

    rows = []
    for name in TASKS:
        info = build_task(name).info
        found: dict[str, Any] = {
            "name": info.name,
            "groups": list(info.group_columns),
            "metric": info.metric,
            "splits": list(info.splits),
            "sources": list(getattr(info, "sources", ())),
        }
        rows.append(found)
    cells = [[", ".join(v) if isinstance(v, list) else str(v) for v in row.values()] for row in rows]
    print(plain([list(rows[0]), *cells]))
    print("\nData and networks of each: hf_cgd.tasks.load_task(name, …), and its recipe, recipes/<name>*.py.")
    return rows
