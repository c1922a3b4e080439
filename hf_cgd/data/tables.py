"""Tables of examples in files: what stands in a CSV file is kept as it was written."""

import csv
import warnings
from collections import Counter
from pathlib import Path

import datasets
import pandas as pd
from datasets import Dataset
from datasets.exceptions import DatasetsError

from hf_cgd.monitors import GroupRobustWarning

READERS = {".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Endings of the files that hold a table of examples, and the reader of each."""
INTEGER = r"-?[1-9]\d{0,17}|0"
FEW_VALUES = 20
"""A column with at most as many different values is one of classes or groups."""
NUMBER = r"[+-]?(?:(?:[1-9]\d*|0)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"


def read_table(path: str | Path) -> Dataset:
    """The rows of a CSV, TSV, JSONL, JSON or Parquet file.

    Of a CSV file an empty cell is missing, and nothing else: "NA", "None" and "null" are texts. A column is of numbers
    or bools where every cell reads as one; where a number has leading zeros (007) the column is of texts.

    Raises:
        ValueError: another ending, another encoding than UTF-8, another separator than commas (TSV: tabs), rows with
            more cells than there are columns, two columns of one name, or a file that its reader cannot read.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    if path.suffix not in READERS:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(READERS)}. Convert it to one of these.")
    if not path.is_file():
        raise FileNotFoundError(f"Expected a table of examples at {path}, but there is no such file.")
    if READERS[path.suffix] != "csv":
        try:
            return datasets.load_dataset(READERS[path.suffix], data_files={"train": str(path)}, split="train")
        except DatasetsError as error:
            raise ValueError(
                f"{path}: expected a table of {path.suffix}, but it cannot be read: {reason_of(error)}."
            ) from error
    separator = "\t" if path.suffix == ".tsv" else ","
    try:
        table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8, got other bytes (Latin-1 or Windows-1252, it seems). Convert the file: "
            f"iconv -f WINDOWS-1252 -t UTF-8 {path.name} > new_{path.name}"
        ) from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(
            f"{path}: expected a table with a head of names, but {error}. Put texts in quotes."
        ) from error
    if len(table.columns) == 1 and any(other in table.columns[0] for other in ";\t|"):
        raise ValueError(
            f"{path}: expected columns separated by {separator!r}, got one column {table.columns[0]!r}, so it seems "
            'that there is another separator. Convert it: python -c "import pandas; '
            f"pandas.read_csv('{path.name}', sep=None, engine='python').to_csv('new_{path.name}', index=False)\""
        )
    _require_different_names(path, separator)
    if not isinstance(table.index, pd.RangeIndex):
        raise ValueError(
            f"{path}: expected {len(table.columns)} cells per row, one for each column {list(table.columns)}, got "
            "more. Put texts with commas in quotes, or name all columns in the first line."
        )
    _warn_of_open_quotes(path, table, separator)
    return Dataset.from_dict({str(name): typed(table[name].tolist()) for name in table.columns})


def reason_of(error: DatasetsError) -> str:
    """Why `datasets` cannot read a file, in one line."""
    return " ".join(str(error.__cause__ or error).split())[:200]


def _require_different_names(path: Path, separator: str) -> None:
    """Of two columns of one name the second would get another one, and which of them is meant nobody knows."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        names = next((names for names in csv.reader(file, delimiter=separator) if names), [])
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise ValueError(
            f"{path}: expected different names of columns, got {', '.join(map(repr, twice))} more than once in "
            f"{names}. Rename or remove the columns that are not meant."
        )


def _warn_of_open_quotes(path: Path, table: pd.DataFrame, separator: str) -> None:
    """Warn of texts that hold rows of the table: those between a quote that nothing ends and the next one."""
    with open(path, "rb") as file:
        if sum(1 for _ in file) <= len(table) + 1:
            return
    texts = {
        name: [(row, cell) for row, cell in enumerate(column.tolist()) if "\n" in str(cell)]
        for name, column in table.items()
    }
    few = {
        name: set(column) for name, column in table.items()
        if not texts[name] and column.nunique() <= min(FEW_VALUES, len(table) / 2)
    }  # fmt: skip
    rows = []
    for row, cell in sorted(one for found in texts.values() for one in found) if few else ():
        for line in cell.split("\n")[1:-1]:
            cells = dict(zip(table.columns, line.split(separator), strict=False))
            whole = line.count(separator) == len(table.columns) - 1
            if whole and all(cells[name].strip() in values for name, values in few.items()):
                rows.append(row)
    if rows:
        warnings.warn(
            f"{path}: {len(rows):,} lines that look like rows of the table stand inside of texts, the first ones in "
            f"row {rows[0]}: a quotation mark begins a text there, and the next one, lines later, ends it. If they "
            "are rows, they are missing. Double the quotation marks inside of texts, and put such texts in quotes.",
            GroupRobustWarning,
            stacklevel=3,
        )


def typed(cells: list[str | float]) -> list[str | int | float | bool | None]:
    """The cells of a column as integers, numbers or bools where all of them are written so, else as texts."""
    texts = [cell if isinstance(cell, str) and cell != "" else None for cell in cells]
    filled = pd.Series([text for text in texts if text is not None], dtype=object)
    if len(filled) == 0:
        return list(texts)
    if filled.str.fullmatch(INTEGER).all():
        return [None if text is None else int(text) for text in texts]
    if filled.str.fullmatch(NUMBER).all():
        return [None if text is None else float(text) for text in texts]
    if filled.str.fullmatch("True|False|TRUE|FALSE|true|false").all():
        return [None if text is None else text.lower() == "true" for text in texts]
    return list(texts)
