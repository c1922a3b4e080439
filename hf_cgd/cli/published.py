"""The numbers of a run beside those that were published."""

from collections.abc import Mapping

import numpy as np

from hf_cgd.metrics.tables import in_units, plain
from hf_cgd.tasks.base import TaskInfo


def published_table(
    info: TaskInfo, objective: str, metrics: Mapping[str, Mapping[str, float]], made_up: bool = False
) -> str:
    """A table with a row for the run, and one for each source that reports this objective (else: all it reports).

    The average that the benchmark reports stands in a column of its own where the source has none of it.

    Args:
        info: of the benchmark.
        objective: of the run.
        metrics: of the run by split, names without prefix.
        made_up: whether the run's data was; its numbers mean nothing then, which a line says.
    """
    lines = []
    for source, published in info.published.items():
        columns = list(dict.fromkeys([*published.metrics, info.average_metric]))
        rows = [["", *columns], [f"{objective}, this run", *(_cell(metrics, metric) for metric in columns)]]
        blank = [""] * (len(columns) - len(published.metrics))
        named = [objective] if objective in published.cells else list(published.cells)
        rows += [[f"{name}, {source}", *published.cells[name], *blank] for name in named]
        lines.append(plain(rows))
    if made_up:
        lines.append("The data of this run was made up: its numbers do not compare.")
    elif info.caveat:
        lines.append(info.caveat)
    return "\n".join(lines)


def _cell(metrics: Mapping[str, Mapping[str, float]], metric: str) -> str:
    split, _, name = metric.rpartition(":")
    value = metrics.get(split or "test", {}).get(name)
    return "" if value is None else in_units(np.array([value]), name)
