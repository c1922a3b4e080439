"""The pictures of a run, as files of its folder."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hf_cgd.cards.record import RunRecord
from hf_cgd.plots import (
    accuracies_figure,
    comparison_figure,
    interactions_figure,
    save_figure,
    weight_curves,
    weights_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = "pictures"
"""Folder of the pictures, in that of the run."""
DRAWN_GROUPS = 64
"""A matrix of interactions of more groups than this is not drawn."""


def figures_of(record: RunRecord) -> dict[str, "Figure"]:
    """The pictures of a run by name: "group_accuracies_<set>" or, of a language model, "group_perplexities_<set>" over
    its steps, "group_weights", "group_interactions".

    What a run does not have is left out: accuracies before the first evaluation, perplexities with fewer than two,
    weights under ERM, interactions of objectives without gradients.
    """
    from matplotlib import rc_context

    # A dollar in a group's name begins no formula.
    with rc_context({"text.parse_math": False}):
        return _figures(record)


def _figures(record: RunRecord) -> dict[str, "Figure"]:
    figures = {}
    for name, report in record.reports.items():
        if any(row.accuracy is not None for row in report.rows):
            figures[f"group_accuracies_{name}"] = comparison_figure({record.objective_name: [report]}, title=name)
        prefix = "eval" if name == "validation" else f"eval_{name}"
        key = f"{prefix}_group_perplexity/"
        if len({entry["step"] for entry in record.history if any(kind.startswith(key) for kind in entry)}) > 1:
            figures[f"group_perplexities_{name}"] = accuracies_figure(
                {record.objective_name: [record.history]}, prefix=prefix, title=name
            )
    if weight_curves(record.history)[1]:
        figures["group_weights"] = weights_figure({record.objective_name: {"": [record.history]}})
    matrix = record.interactions
    if matrix is not None and record.groups is not None and len(record.groups) <= DRAWN_GROUPS:
        cosines = [[float("nan") if value is None else value for value in row] for row in matrix]
        figures["group_interactions"] = interactions_figure(cosines, record.groups.names)
    return figures


def write_pictures(record: RunRecord, folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Write the pictures of a run as PNG files; where they are, by name."""
    target = Path(folder) / PICTURES
    written = {}
    for name, figure in figures_of(record).items():
        path = target / f"{_file_name(name)}.png"
        save_figure(figure, path, vector=None)
        written[name] = path
    return written


def _file_name(name: str) -> str:
    return "".join(character if character.isalnum() or character in "-_" else "_" for character in name)
