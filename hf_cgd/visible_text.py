"""Names that came with the data, as a reader may see them: on one line, nothing hidden, nothing set in reverse."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2065\u206a-\u206f\ufeff]"
)
"""Controls and characters without a shape. Joiners are none of them: scripts and emoji are written with these."""
_ISOLATES = re.compile("[\u2066-\u2069]")
_ISOLATE, _END = "\u2068", "\u2069"
"""Around text that runs from right to left. Without them it takes the numbers that follow into its own order."""
LABEL = 40
"""Characters of a name in a picture."""


def visible(text: str) -> str:
    r"""Text on one line: line ends and tabs are spaces, hidden characters are written out, as `\u200b`."""
    line = " ".join(text.replace("\t", " ").splitlines())
    return _HIDDEN.sub(_written, line)


def visible_name(name: str) -> str:
    """A name for a table or a sentence: `visible`, and numbers beside it keep their order whatever its script."""
    shown = _ISOLATES.sub(_written, visible(name))
    return f"{_ISOLATE}{shown}{_END}" if any(map(_runs_leftwards, shown)) else shown


def quoted_name(name: str) -> str:
    """A name for a sentence or a list: `visible_name` in quotes, so that a comma in it does not end it."""
    return '"' + visible_name(name).replace('"', '\\"') + '"'


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The question " Did you mean x?" for the known name that is most like this one, "" where none is.

    `cutoff` in [0, 1] says how alike it has to be.
    """
    found = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {found[0]}?" if found else ""


def width(text: str) -> int:
    """Columns of a terminal that a text takes: two for a wide character, none for an accent or a joiner."""
    return sum(_columns(character) for character in text)


def labels(names: Sequence[str]) -> list[str]:
    """The names for a picture: long ones have an ellipsis in the middle, unless another one then reads the same."""
    shown = [_ISOLATES.sub(_written, visible(name)) for name in names]
    short = [_shortened(name) for name in shown]
    return [name if short.count(label) > 1 else label for name, label in zip(shown, short, strict=True)]


def _shortened(name: str) -> str:
    return name if len(name) <= LABEL else f"{name[: LABEL // 2]}…{name[1 - LABEL // 2 :]}"


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _runs_leftwards(character: str) -> bool:
    return unicodedata.bidirectional(character) in ("R", "AL", "AN")


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def as_read(value: Any, numbers_too: bool = False) -> str:
    """What a value looks like to a reader: without capitals, invisible characters and the number of spaces.

    With `numbers_too` the text 007 is read as the number 7 is, which another file may have made of it.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = unicodedata.normalize("NFKC", str(value)).casefold()
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    text = " ".join(text.split())
    return str(int(text)) if numbers_too and re.fullmatch(r"0+\d+", text) else text
