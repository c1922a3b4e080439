"""Tables of examples in files: what stands in a CSV file is kept as it was written."""

from pathlib import Path

import datasets
import pandas as pd
from datasets import Dataset

READERS = {".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Endings of the files that hold a table of examples, and the reader of each."""
INTEGER = r"-?[1-9]\d{0,17}|0"
NUMBER = r"[+-]?(?:(?:[1-9]\d*|0)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"


def read_table(path: str | Path) -> Dataset:
    """The rows of a CSV, TSV, JSONL, JSON or Parquet file.

    Of a CSV file an empty cell is missing, and nothing else: "NA", "None" and "null" are texts. A column is of numbers
    or bools where every cell reads as one; where a number has leading zeros (007) the column is of texts.

    Raises:
        ValueError: another ending, another encoding than UTF-8, another separator than commas (TSV: tabs), or rows
            with more cells than there are columns.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    if path.suffix not in READERS:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(READERS)}. Convert it to one of these.")
    if not path.is_file():
        raise FileNotFoundError(f"Expected a table of examples at {path}, but there is no such file.")
    if READERS[path.suffix] != "csv":
        return datasets.load_dataset(READERS[path.suffix], data_files={"train": str(path)}, split="train")
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
    if not isinstance(table.index, pd.RangeIndex):
        raise ValueError(
            f"{path}: expected {len(table.columns)} cells per row, one for each column {list(table.columns)}, got "
            "more. Put texts with commas in quotes, or name all columns in the first line."
        )
    return Dataset.from_dict({str(name): typed(table[name].tolist()) for name in table.columns})


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
