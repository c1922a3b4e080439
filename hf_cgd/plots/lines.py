"""Lines of several runs with the band that they span."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_cgd.plots.style import DASHES, EXTREMES, MUTED, PALETTE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MARKED_STEPS = 12
"""Steps up to which each point of a curve has a marker: few points, or a single one, make no line that is seen."""


def draw_curves(axes: "Axes", steps: np.ndarray, curves: Mapping[str, np.ndarray], colors: Mapping[str, str]) -> None:
    """Curves [S, T] of the groups: those in colour above the others and, of many groups, with bands they alone."""
    picked = [name for name in curves if colors.get(name, EXTREMES) != MUTED]
    for name, values in curves.items():
        style: dict[str, Any] = {"linestyle": "solid", "linewidth": 1.0, "zorder": 2}
        if name in picked:
            style = {"linestyle": DASHES[picked.index(name) % len(DASHES)], "linewidth": 1.8, "zorder": 3}
        band = name in picked or len(curves) <= len(PALETTE)
        draw_runs(axes, steps, values, band=band, color=colors.get(name, EXTREMES), label=name, **style)


def draw_runs(axes: "Axes", steps: np.ndarray, values: np.ndarray, *, band: bool = True, **style: Any) -> None:
    """Mean of the runs [S, T] with a band from the lowest to the highest one, where no run is NaN."""
    from matplotlib.ticker import MaxNLocator

    steps, values = steps[np.isfinite(values).all(axis=0)], values[:, np.isfinite(values).all(axis=0)]
    if len(steps) <= MARKED_STEPS:
        style |= {"marker": "o", "markersize": 2 * style["linewidth"]}
    low, high = (values.min(axis=0), values.max(axis=0)) if band and len(values) > 1 else (None, None)
    draw_band(axes, steps, values.mean(axis=0), low, high, **style)
    axes.set_xmargin(0.03)
    # Narrow panels have room for a few numbers of six digits.
    axes.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 2.5, 5, 10], integer=True))


def draw_band(
    axes: "Axes", x: np.ndarray, means: np.ndarray, low: np.ndarray | None, high: np.ndarray | None, **style: Any
) -> "Artist":
    """A line and, unless its bounds are None or NaN, a band below it; returns the line."""
    (line,) = axes.plot(x, means, **style)
    if low is not None and high is not None and np.isfinite(low).any():
        below = style["zorder"] - 1
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0, zorder=below)
    return line
