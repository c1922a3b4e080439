"""The picture of group interactions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_cgd.plots.style import add_title
from hf_cgd.visible_text import labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRITTEN_COSINES = 12
"""Groups up to which a matrix of interactions has its numbers written in."""


def interactions_figure(cosines: Any, names: Sequence[str], *, title: str | None = None) -> "Figure":
    """The matrix of group interactions: whose training helps (blue) or harms (red) whom.

        interactions_figure(trainer.group_interactions, trainer.groups.names)

    Args:
        cosines: tensor or array [K, K] in [-1, 1], NaN where two groups never met (hatched).
        names: K.
        title: of the figure.

    Raises:
        ValueError: another number of names than of rows.
    """
    from matplotlib.figure import Figure

    values = np.asarray(cosines, dtype=float)
    if values.shape != (len(names), len(names)):
        raise ValueError(f"Expected cosines [{len(names)}, {len(names)}] for {len(names)} names, got {values.shape}.")
    # Inches of the matrix and of the names beside it; points of the names, a little less than a row is high.
    side = min(max(0.45 * len(names), 2.2), 9.0)
    text = min(9.0, 0.7 * 72 * side / len(names))
    written = labels(names)
    margin = 0.65 * text / 72 * max(map(len, written))
    figure = Figure(figsize=(side + margin + 1.5, side + margin + 0.5), layout="compressed")
    axes = figure.subplots()
    axes.patch.set(facecolor="#D9D9D9", edgecolor="#808080", hatch="////", linewidth=0)
    image = axes.imshow(np.ma.masked_invalid(values), cmap="RdBu", vmin=-1, vmax=1)
    axes.set_xticks(range(len(names)), written, rotation=90, fontsize=text, parse_math=False)
    axes.set_yticks(range(len(names)), written, fontsize=text, parse_math=False)
    axes.tick_params(length=0)
    if len(names) <= WRITTEN_COSINES:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "white" if abs(value) > 0.6 else "black"
                shown = round(float(value), 2) + 0.0  # Not -0.00.
                axes.text(column, row, f"{shown:.2f}", ha="center", va="center", color=ink, fontsize=text)
    figure.colorbar(image, ax=axes, label="mean cosine of the gradients", fraction=0.046, pad=0.03)
    add_title(figure, title)
    return figure
