"""The raw files of benchmarks: found, read and checked, with messages that say what is wanted and where to get it."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features
from datasets.table import InMemoryTable

from hf_cgd.tasks.base import TaskInfo

SHOWN = 10


def data_missing(info: TaskInfo, folder: Path, wanted: str) -> FileNotFoundError:
    """The error that names what is wanted, the folder and what is in it, the layout, and the places to get it."""
    found = (
        f"found {sorted(path.name for path in folder.iterdir())[:SHOWN]}" if folder.is_dir() else "which is not there"
    )
    lines = [f"{info.name}: expected {wanted} in {folder}, {found}."]
    lines += [f"Lay it out like this: {info.layout}"] if info.layout else []
    lines += [f"A place to get it: {place}" for place in info.places]
    return FileNotFoundError("\n".join(lines))


def base_folder(info: TaskInfo, folder: Path, file: str, below: Sequence[str] = ()) -> Path:
    """The folder that holds `file`: the given one, or one of those `below` it.

    Raises:
        FileNotFoundError: there is no such file.
    """
    for place in (folder, *(folder / name for name in below)):
        if (place / file).is_file():
            return place
    raise data_missing(info, folder, file)


def read_csv(info: TaskInfo, folder: Path, file: str, columns: Iterable[str], **options: Any) -> pd.DataFrame:
    """A CSV file with (at least) these columns.

    Args:
        options: of `pandas.read_csv`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no CSV file, it was cut off, or a column is missing.
    """
    path = folder / file
    if not path.is_file():
        raise data_missing(info, folder, file)
    try:
        table = pd.read_csv(path, **options)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: expected a CSV file, but it cannot be read ({' '.join(str(error).split())}). Was the download "
            "cut off? Fetch the file again."
        ) from error
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise ValueError(
            f"{path}: expected the column(s) {missing}, got {[str(name) for name in table.columns][:SHOWN]}. "
            f"Is it the file of {info.name}?"
        )
    return table


def codes(table: pd.DataFrame, column: str, allowed: Sequence[int], path: Path) -> np.ndarray:
    """A column as int64, once every row has been found to hold one of the `allowed` numbers.

    Raises:
        ValueError: another value, or none; the message names the row.
    """
    values = pd.to_numeric(table[column], errors="coerce")
    require_one_of(table, column, allowed, path, values)
    return values.to_numpy(dtype=np.int64)


def require_one_of(
    table: pd.DataFrame, column: str, allowed: Sequence[Any], path: Path, values: pd.Series | None = None
) -> None:
    """Check that every row of a column (its `values`, where they were made of it) holds one of the `allowed` ones.

    Raises:
        ValueError: another value, or none; the message names the row.
    """
    bad = np.flatnonzero(~(table[column] if values is None else values).isin(allowed).to_numpy())
    if len(bad):
        raise ValueError(
            f"{path}: column {column!r}: expected one of {list(allowed)[:SHOWN]} in every row, got "
            f"{_plain(table[column].iloc[bad[0]])!r} in row {bad[0]} ({len(bad)} such rows). Correct or drop them."
        )


def numbers(table: pd.DataFrame, column: str, path: Path) -> np.ndarray:
    """A column as float64, once every row has been found to hold a finite number.

    Raises:
        ValueError: a text, a NaN or nothing; the message names the row.
    """
    values = pd.to_numeric(table[column], errors="coerce").to_numpy(dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(
            f"{path}: column {column!r}: expected a number in every row, got {_plain(table[column].iloc[bad[0]])!r} "
            f"in row {bad[0]} ({len(bad)} such rows). Correct or drop them."
        )
    return values


def require_files(info: TaskInfo, folder: Path, names: Sequence[str]) -> list[str]:
    """Paths of files below a folder, all of which are there (folders are listed, files are not opened).

    Raises:
        FileNotFoundError: some are missing, as in a half-downloaded folder; how many, and the first one.
    """
    there = set()
    for parent in {os.path.dirname(name) for name in names}:
        if (folder / parent).is_dir():
            there |= {os.path.join(parent, entry) for entry in os.listdir(folder / parent)}
    missing = [name for name in names if name not in there and not (folder / name).is_file()]
    if missing:
        raise data_missing(
            info, folder, f"{len(names):,} files, of which {len(missing):,} are missing, such as {missing[0]},"
        )
    return [os.path.join(folder, name) for name in names]


def by_split(
    columns: Mapping[str, Any], split: np.ndarray, names: Mapping[Any, str], features: Features, where: Path | str
) -> DatasetDict:
    """The rows of each split in the order of the file.

    Args:
        columns: of all rows, each a list or an array of the type that `features` says.
        split: [N] the split of each row.
        names: {what stands in `split`: name of the split}; other values are an error.
        features: types of the columns.
        where: the file, for messages.

    Raises:
        ValueError: an unknown split, or a split without rows.
    """
    known = np.isin(split, list(names))
    if not known.all():
        row = int(np.flatnonzero(~known)[0])
        raise ValueError(
            f"{where}: expected one of the splits {list(names)} in every row, got {_plain(split[row])!r} in row {row}."
        )
    table = pa.table({name: _as_arrow(columns[name]) for name in features})
    whole = Dataset(InMemoryTable(table.cast(features.arrow_schema)))
    splits = DatasetDict()
    for value, name in names.items():
        rows = np.flatnonzero(split == value)
        if len(rows) == 0:
            raise ValueError(f"{where}: expected rows of the {name} split ({_plain(value)!r}), got none.")
        splits[name] = whole.select(rows)
    return splits


def images_at(paths: Sequence[str]) -> pa.Array:
    """A column of images that are opened when a row is read."""
    nothing = pa.nulls(len(paths), pa.binary())
    return pa.StructArray.from_arrays([nothing, pa.array(paths, pa.string())], names=["bytes", "path"])


def _as_arrow(values: Any) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
