"""Writing a figure to files."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
    for file in files:
        figure.savefig(file, dpi=150)
    return files
