"""Texts of several sources, cut into rows of equal length for a language model."""

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict

from hf_cgd.data.tables import READERS, read_table

SOURCE = "source"
"""Column of the rows that names their source."""
SPLIT_SEED = 0
"""Which documents are held out is the same in every run, so that runs with different seeds can be compared."""
DEMO_CHARACTERS = {"docstrings": 160_000, "code": 60_000, "licences": 16_000}
"""Size of each source of the demo."""


def read_sources(wanted: Sequence[str], text_column: str) -> dict[str, list[str]]:
    """Documents of each source by name.

    Args:
        wanted: "name=path" each. A folder has a document in every file (UTF-8; others are passed over), a table (CSV,
            JSONL, Parquet) in every row, any other file in every line that is not empty.
        text_column: of the tables.

    Raises:
        ValueError: not of that form, fewer than two sources, a name twice, a missing column, or no text.
        FileNotFoundError: there is no such path.
    """
    found: dict[str, list[str]] = {}
    for one in wanted:
        name, equals, place = one.partition("=")
        if not name or not equals or not place:
            raise ValueError(f"sources: expected name=path for each, such as news=news.txt; got {one!r}.")
        if name in found:
            raise ValueError(f"sources: {name!r} comes twice. Put the files of one source into a folder.")
        documents = [text for text in _documents(Path(place), text_column) if text.strip()]
        if not documents:
            raise ValueError(f"sources: there is no text in {place} ({name}).")
        found[name] = documents
    if len(found) < 2:
        raise ValueError(f"sources: expected at least two, got {sorted(found)}.")
    return found


def _documents(path: Path, text_column: str) -> list[str]:
    if path.is_dir():
        return [text for file in sorted(path.rglob("*")) if file.is_file() and (text := _text_in(file)) is not None]
    if not path.is_file():
        raise FileNotFoundError(f"sources: expected a file or a folder, but there is none at {path}.")
    if path.suffix in READERS:
        table = read_table(path)
        if text_column not in table.column_names:
            raise ValueError(f"{path}: expected the column {text_column!r} (text_column), got {table.column_names}.")
        return [str(text) for text in table[text_column][:] if text is not None]
    return path.read_text(encoding="utf-8").split("\n")


def _text_in(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def demo_sources() -> dict[str, list[str]]:
    """Real text that is there wherever the package is: docstrings, code and licences of installed packages."""
    import numpy
    import scipy.stats
    import torch.nn.functional

    modules = (numpy, scipy.stats, torch, torch.nn.functional)
    docstrings = [doc for module in modules for _, doc in sorted(_docstrings(module).items())]
    library = Path(inspect.getsourcefile(inspect) or "").parent
    code = [text for file in sorted(library.glob("*.py")) if (text := _text_in(file)) is not None]
    licences = []
    for package in sorted(importlib.metadata.distributions(), key=lambda one: one.metadata["Name"] or ""):
        named = [
            Path(str(file.locate())) for file in package.files or () if Path(file).name.upper().startswith("LICENSE")
        ]
        # Old ways of installing list files that are not there.
        files = [file for file in named if file.is_file()]
        licences += [text for file in files[:1] if (text := _text_in(file)) is not None]
    found = {"docstrings": docstrings, "code": code, "licences": list(dict.fromkeys(licences))}
    return {name: _first(documents, DEMO_CHARACTERS[name]) for name, documents in found.items()}


def _docstrings(module: Any) -> dict[str, str]:
    found = {name: getattr(getattr(module, name, None), "__doc__", None) for name in dir(module) if name[0] != "_"}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _first(documents: Sequence[str], characters: int) -> list[str]:
    """Pieces of at most 2,000 characters of the documents, up to so many characters in all."""
    pieces = [text[start : start + 2000] for text in documents for start in range(0, len(text), 2000)]
    ends = np.cumsum([len(piece) for piece in pieces])
    return pieces[: int(np.searchsorted(ends, characters)) + 1]


def held_out(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Documents to train on, and that share of them (at least one) to validate on; the same at every call.

    Raises:
        ValueError: a single document, of which none can be held out.
    """
    if len(documents) < 2:
        raise ValueError("A source needs at least two documents: one of them is held out. Split its text up.")
    order = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
    size = min(len(documents) - 1, max(1, round(share * len(documents))))
    chosen = set(order[:size].tolist())
    train = [text for place, text in enumerate(documents) if place not in chosen]
    return train, [documents[place] for place in sorted(chosen)]


def rows_of(
    documents: Mapping[str, Sequence[str]], encode: Callable[[str], Sequence[int]], end: int, length: int
) -> Dataset:
    """Rows of `length` tokens: the documents of each source one after the other, `end` behind each, cut up.

    What is left of a source at its end is dropped. Labels are the tokens themselves.

    Args:
        documents: of each source.
        encode: a text to its tokens, none of them added.
        end: the token between documents.
        length: of a row.

    Raises:
        ValueError: a source has fewer tokens than a row.
    """
    parts: dict[str, list[Any]] = {"input_ids": [], "labels": [], SOURCE: []}
    for name, texts in documents.items():
        tokens = [token for text in texts for token in [*encode(text), end]]
        rows = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
        if not rows:
            raise ValueError(
                f"The source {name!r} has {len(tokens)} tokens in a split, fewer than a row of {length}. Lower "
                "block_length, or give it more text."
            )
        parts["input_ids"] += rows
        parts["labels"] += rows
        parts[SOURCE] += [name] * len(rows)
    return Dataset.from_dict(parts)


def splits_of(
    train: Mapping[str, Sequence[str]],
    validation: Mapping[str, Sequence[str]],
    encode: Callable[[str], Sequence[int]],
    end: int,
    length: int,
) -> DatasetDict:
    """`rows_of` both splits."""
    return DatasetDict(
        {
            "train": rows_of(train, encode, end, length),
            "validation": rows_of(validation, encode, end, length),
        }
    )
