"""Text of others in Markdown: nothing in it is a table, a formula, a link or a tag."""

import re

from hf_cgd.visible_numbers import decimals
from hf_cgd.visible_text import visible

_SPECIAL = re.compile(r"[\\`*_\[\]<>~#&$|]")
_ENTITIES = {"|": "&#124;", "$": "&#36;", "<": "&lt;", ">": "&gt;", "&": "&amp;", "\\": "&#92;", "`": "&#96;"}
"""Characters that Markdown dialects escape differently, or that end a table's cell or begin a formula."""


def text(words: object) -> str:
    """Words to be shown as they are, on one line."""
    line = visible(" ".join(str(words).split()))
    return _SPECIAL.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), line)


def code(words: object) -> str:
    """A value set as code, also inside a table: backticks, pipes and line ends in it do not end it."""
    line = visible(" ".join(str(words).split())).replace("`", "'")
    return f"<code>{text(line)}</code>" if "|" in line or "$" in line else f"`{line}`"


def number(value: float | None) -> str:
    """A number, "n/a" for none or one that is not finite."""
    return decimals(value) or "n/a"
