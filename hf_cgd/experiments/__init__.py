"""Experiments: objectives x values x seeds over one recipe, chosen by the worst group on validation, as tables.

python -m hf_cgd.experiments --help
"""

from hf_cgd.experiments.cluster import Cluster
from hf_cgd.experiments.grid import Grid, Run
from hf_cgd.experiments.presets import PRESETS, Preset
from hf_cgd.experiments.records import load_results
from hf_cgd.experiments.runner import Outcome, run_grid
from hf_cgd.experiments.selection import Choice, RunResult, choose
from hf_cgd.experiments.summary import accuracy_figure, condition_figure, result_rows, search_rows
from hf_cgd.experiments.workers import Failure

__all__ = [
    "PRESETS",
    "Choice",
    "Cluster",
    "Failure",
    "Grid",
    "Outcome",
    "Preset",
    "Run",
    "RunResult",
    "accuracy_figure",
    "choose",
    "condition_figure",
    "load_results",
    "result_rows",
    "run_grid",
    "search_rows",
]
