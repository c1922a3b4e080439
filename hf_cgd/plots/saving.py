"""Writing a figure to files."""

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_cgd.monitors import GroupRobustWarning

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(
    figure: "Figure", path: str | os.PathLike[str], *, vector: Literal["svg", "pdf"] | None = "svg"
) -> list[Path]:
    """Write the figure as `path` (its suffix says the format, 150 dots per inch) and as a vector graphic beside it.

    Args:
        figure: what to save.
        path: where to; missing folders are made.
        vector: format of the second file; None for none.

    Returns:
        the files written.

    Raises:
        ValueError: a suffix that matplotlib cannot write.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path] if vector is None else list(dict.fromkeys([path, path.with_suffix(f".{vector}")]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for file in files:
            figure.savefig(file, dpi=150)
    lacking: dict[str, None] = {}
    for one in caught:
        glyph = re.match(r"Glyph (\d+) ", str(one.message))
        if glyph is None:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        else:
            lacking[chr(int(glyph[1]))] = None
    if lacking:
        shown = "".join(lacking)
        warnings.warn(
            f"The font of pictures has no shape for {shown[:20]!r}. Such characters are boxes in {path.name}, so that "
            "names may look alike there. Choose a font that has them, for instance "
            "matplotlib.rcParams['font.family'] = 'Noto Sans CJK JP'.",
            GroupRobustWarning,
            stacklevel=2,
        )
    return files
