"""Pictures of finished runs: how each group fares, and where the weights went.

Nothing here touches matplotlib's global state or needs a display; matplotlib is imported when a figure is made.
Shapes in this folder: S runs (seeds), K groups, T log entries.
"""

from hf_cgd.plots.curves import accuracies_figure, draw_group_weights, weights_figure
from hf_cgd.plots.groups import LABELLED_GROUPS, comparison_figure, draw_group_accuracies
from hf_cgd.plots.interactions import interactions_figure
from hf_cgd.plots.logs import AccuracyCurves, LogHistory, accuracy_curves, weight_curves
from hf_cgd.plots.saving import save_figure
from hf_cgd.plots.studies import points_figure, sweep_figure
from hf_cgd.plots.style import DASHES, EXTREMES, MARKERS, MUTED, PALETTE, WORST, group_colors

__all__ = [
    "DASHES",
    "EXTREMES",
    "LABELLED_GROUPS",
    "MARKERS",
    "MUTED",
    "PALETTE",
    "WORST",
    "AccuracyCurves",
    "LogHistory",
    "accuracies_figure",
    "accuracy_curves",
    "comparison_figure",
    "draw_group_accuracies",
    "draw_group_weights",
    "group_colors",
    "interactions_figure",
    "points_figure",
    "save_figure",
    "sweep_figure",
    "weight_curves",
    "weights_figure",
]
