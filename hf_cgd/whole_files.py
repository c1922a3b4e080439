"""Files that are written whole or not at all, whenever the program is stopped."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all: until the end of the call it is what it was.

    Args:
        path: where to; missing folders are made.
        content: text, written as UTF-8 with its line ends as they are, or bytes.
    """
    with whole_file(path) as unfinished:
        unfinished.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """For writers that want a path: gives one beside `path`, which takes its place when the block has ended well.

    After an exception `path` is what it was, and the other file is gone. A file that was there keeps its permissions,
    a new one has those that the writer gave it. A symbolic link is followed.

    Args:
        path: where to; missing folders are made.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: two processes may write the same file.
    unfinished = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        yield unfinished
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
