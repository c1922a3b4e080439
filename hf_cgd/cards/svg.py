"""Lines over the steps of a run as SVG, in the colours of the page that holds them."""

import math
from collections.abc import Mapping

import numpy as np

from hf_cgd.html import Html, raw, tag
from hf_cgd.plots.style import PALETTE
from hf_cgd.visible_text import visible_name

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 34
"""Room for the numbers beside the axes, in the same units."""
LINES = len(PALETTE)
"""Curves that have a colour; of more, those that end highest have one and the others are grey."""
DASHES = ("", "6 3", "2 3", "8 3 2 3")


def line_colors(curves: Mapping[str, np.ndarray]) -> dict[str, tuple[str, str]]:
    """Colour and dash pattern of each curve [T] that is picked out."""
    finite = {name: values[np.isfinite(values)] for name, values in curves.items()}
    last = {name: float(values[-1]) for name, values in finite.items() if len(values)}
    picked = [name for name in curves if name in last]
    if len(picked) > LINES:
        highest = sorted(picked, key=last.__getitem__, reverse=True)[:LINES]
        picked = [name for name in picked if name in highest]
    return {name: (PALETTE[n % LINES], DASHES[n % len(DASHES)]) for n, name in enumerate(picked)}


def line_chart(steps: np.ndarray, curves: Mapping[str, np.ndarray], title: str) -> Html:
    """Curves over the steps, from 0 to a little above the highest value.

    Args:
        steps: [T], rising.
        curves: [T] by name, NaN where there is no value.
        title: what a screen reader says of it.
    """
    values = np.concatenate([np.asarray(curve, dtype=float) for curve in curves.values()])
    top = _nice(float(np.nanmax(values)) if np.isfinite(values).any() else 1.0)
    first, last = float(steps[0]), float(steps[-1])

    def x(step: float) -> float:
        share = 0.5 if last == first else (step - first) / (last - first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for level in np.linspace(0, top, 5):
        parts.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y(level):.1f}", y2=f"{y(level):.1f}"))
        parts.append(tag("text", f"{level:.2g}", x=LEFT - 6, y=f"{y(level) + 4:.1f}", text_anchor="end"))
    for step, anchor in {first: "start", last: "end"}.items():
        parts.append(tag("text", f"{step:g}", x=f"{x(step):.1f}", y=HEIGHT - BOTTOM + 16, text_anchor=anchor))
    parts.append(tag("text", "step", x=WIDTH / 2, y=HEIGHT - 4, text_anchor="middle"))
    colors = line_colors(curves)
    for name in sorted(curves, key=lambda one: one in colors):
        points = [(x(s), y(v)) for s, v in zip(steps, curves[name], strict=True) if math.isfinite(v)]
        color, dash = colors.get(name, ("var(--muted)", ""))
        style = {"stroke": color, "stroke_width": 2 if name in colors else 1, "stroke_dasharray": dash or None}
        if len(points) == 1:
            (px, py), style = points[0], {"fill": color}
            parts.append(tag("circle", tag("title", visible_name(name)), cx=f"{px:.1f}", cy=f"{py:.1f}", r=3, **style))
        elif points:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            parts.append(tag("polyline", tag("title", visible_name(name)), points=path, fill="none", **style))
    box = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", parts, viewBox=box, role="img", aria_label=title, xmlns="http://www.w3.org/2000/svg")


def legend(curves: Mapping[str, np.ndarray]) -> Html:
    """What the colours of `line_chart` stand for."""
    colors = line_colors(curves)
    entries = []
    for name, (color, dash) in colors.items():
        line = tag("line", x1=0, x2=26, y1=6, y2=6, stroke=color, stroke_width=3, stroke_dasharray=dash or None)
        entries.append(
            tag("li", tag("svg", line, width=26, height=12, aria_hidden="true"), raw(" "), visible_name(name))
        )
    if len(colors) < len(curves):
        entries.append(tag("li", f"grey: {len(curves) - len(colors)} other groups"))
    return tag("ul", entries, class_="legend")


def _nice(value: float) -> float:
    """The next number above that reads well."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(factor * unit for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if factor * unit >= value)
