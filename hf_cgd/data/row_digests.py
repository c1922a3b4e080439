"""Digests of what a model is given of each row, by which rows are known again in a file of another name or order."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset

from hf_cgd.data.columns import read_columns
from hf_cgd.whole_files import whole_file

FILE = "_training_rows.npz"
"""Name of the file beside a model. Names with such a beginning are not pushed to the Hub: whoever has the digests can
tell whether a text that he guesses was among the rows."""
MOST = 100_000
"""Digests that are kept; 0.8 MB."""
LARGEST = 2**64 - 1
BATCH, PART, THREADS = 256, 4096, 8
"""Of images: rows that are held at a time, bytes of each of three parts of a file, and readers of files."""


@dataclass(frozen=True)
class RowDigests:
    """The rows of a training set, or as many of them as are kept: those with the smallest digests.

    Of other rows those with a digest up to `bound` can be looked up; which they are is chance, so that the share found
    among them is that among all.

    Attributes:
        digests: different ones, sorted, uint64.
        bound: the largest digest that would be among them.
    """

    digests: np.ndarray
    bound: int = LARGEST

    @classmethod
    def of(cls, digests: np.ndarray) -> "RowDigests":
        """All those of a training set [N]."""
        return cls(np.unique(digests))

    def at_most(self, most: int) -> "RowDigests":
        """So many of them, the smallest."""
        if len(self.digests) <= most:
            return self
        return RowDigests(self.digests[:most], int(self.digests[most - 1]))

    def found_in(self, digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of other rows [N] which can be looked up, and which of them are training rows; two bool [N]."""
        looked_up = digests <= np.uint64(self.bound)
        return looked_up, looked_up & np.isin(digests, self.digests)

    def save(self, folder: str | Path) -> Path:
        """Write them into a folder; where they are."""
        path = Path(folder) / FILE
        with whole_file(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, digests=self.digests, bound=np.uint64(self.bound))
        return path

    @classmethod
    def load(cls, folder: str | Path) -> "RowDigests | None":
        """Those that lie in a run's folder; None where there are none."""
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        with np.load(path) as stored:
            return cls(stored["digests"], int(stored["bound"]))


def digests_of_texts(rows: Dataset, columns: Sequence[str]) -> np.ndarray:
    """One digest of the texts of each row, uint64 [N]; the number of spaces between words makes no difference.

    A million texts take two seconds.
    """
    read = read_columns(rows, columns)
    texts = zip(*(read[column].values for column in columns), strict=True)
    return _as_numbers(
        blake2b("\x1f".join(" ".join(str(text).split()) for text in one).encode("utf-8", "replace"), digest_size=8)
        for one in texts
    )


def digests_of_images(rows: Dataset, column: str) -> np.ndarray:
    """One digest of the image file of each row, uint64 [N]: of its size and its first, middle and last 4 KB.

    Nothing is decoded; 100,000 files that were read before take 15 seconds. An image that was written anew is another.
    """
    if not isinstance(rows.features[column], datasets.Image):
        raise TypeError(f"{column!r}: expected a column of images, got {rows.features[column]}.")
    stored = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False)).with_format("arrow")
    found = []
    with ThreadPoolExecutor(THREADS) as pool:
        for batch in stored.iter(batch_size=BATCH):
            found += list(pool.map(_of_image, batch.column(column).combine_chunks()))
    return _as_numbers(iter(found))


def _of_image(image: Any) -> Any:
    if not image.is_valid:
        return blake2b(digest_size=8)
    if image["bytes"].is_valid:
        content = memoryview(image["bytes"].as_buffer())
        return _of_parts(len(content), lambda start: bytes(content[start : start + PART]))
    with open(image["path"].as_py(), "rb") as file:
        size = file.seek(0, 2)

        def read(start: int) -> bytes:
            file.seek(start)
            return file.read(PART)

        return _of_parts(size, read)


def _of_parts(size: int, read: Callable[[int], bytes]) -> Any:
    digest = blake2b(str(size).encode(), digest_size=8)
    for start in (0, max(0, size // 2 - PART // 2), max(0, size - PART)):
        digest.update(read(start))
    return digest


def _as_numbers(digests: Iterator[Any]) -> np.ndarray:
    return np.frombuffer(b"".join(digest.digest() for digest in digests), dtype="<u8").astype(np.uint64)
