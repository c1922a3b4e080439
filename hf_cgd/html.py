"""Small pieces of HTML that no text can break out of."""

from collections.abc import Iterable
from html import escape
from typing import Any, NewType

from hf_cgd.visible_numbers import decimals

Html = NewType("Html", str)
"""Text that is HTML already. Every other text is escaped where it is put in."""


def tag(name: str, /, *content: str | Html | Iterable[Html] | None, **attributes: Any) -> Html:
    """An element.

    Args:
        name: of the element.
        content: text (escaped), `Html` made by this function or `raw`, or lists of it; None for nothing.
        attributes: `class_` stands for class, other underscores for hyphens; None leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(_inside(part) for part in content if part is not None)
    return raw(f"<{name}{given}>" if name in ("img", "br", "meta") else f"<{name}{given}>{inside}</{name}>")


class _Html(str):
    """A string that `tag` knows to be HTML."""


def raw(text: str) -> Html:
    """Text that is HTML: only for what this package wrote itself."""
    return Html(_Html(text))


def _inside(part: str | Iterable[Html]) -> str:
    if isinstance(part, str):
        return part if isinstance(part, _Html) else escape(part)
    return "".join(_inside(one) for one in part)


def interval_bar(value: float, low: float | None, high: float | None, color: str = "#0072B2") -> Html:
    """A bar from 0 to 1 with a line for an interval; `low` and `high` are None where there is none.

    Styles stand in the elements, since notebooks strip style sheets.
    """
    share = max(0.0, min(1.0, value))
    whisker = None
    if low is not None and high is not None:
        left, right = max(0.0, min(1.0, low)), max(0.0, min(1.0, high))
        whisker = tag(
            "span",
            style=f"position:absolute;left:{100 * left:.1f}%;width:{100 * (right - left):.1f}%;top:45%;height:2px;"
            "background:currentColor;",
        )
    bar = tag(
        "span",
        style=f"position:absolute;left:0;top:15%;height:70%;width:{100 * share:.1f}%;background:{color};opacity:.45;",
    )
    frame = "position:relative;display:inline-block;width:120px;height:1em;border-left:1px solid currentColor;"
    return tag("span", bar, whisker, style=frame, role="img", aria_label=f"{decimals(value)} on a scale from 0 to 1")
