"""Where in a file a row of a table stands, in words."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LISTED = 5
"""Rows and values that a message names before it is cut."""

Rows = Sequence[int]
Where = Callable[[str, Rows], str]
"""Words for some rows of a split: "reviews.csv, lines 3, 8"."""


def listed(names: Sequence[str], limit: int = LISTED) -> str:
    """Names with commas; of many, the first ones and how many more there are."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def places_in_files(files: Mapping[str, Path], sizes: Mapping[str, int]) -> Where:
    """Names rows by the lines of the files that splits were read from; rows are counted from 0 where there are none.

    Args:
        files: the table of each split that was read from one.
        sizes: rows of each split. A file that seems to have another number of them names no lines.
    """
    known: dict[str, list[int] | None] = {}

    def where(split: str, rows: Rows) -> str:
        if split in files and split not in known:
            known[split] = line_numbers(files[split])
        lines = known.get(split)
        if lines is not None and len(lines) == sizes[split]:
            numbers, source, unit = [lines[row] for row in rows], files[split].name, "line"
        else:
            numbers, source, unit = list(rows), f"{split} split", "row"
        return f"{source}, {unit}{'s' * (len(numbers) > 1)} {listed(list(map(str, numbers)))}"

    return where


def line_numbers(path: Path) -> list[int] | None:
    """The line, counted from 1, that each row of a CSV, TSV or JSONL file begins at; None for files without lines."""
    if path.suffix in (".csv", ".tsv"):
        with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            lines, start = [], 1
            for row in reader:
                # A quoted cell may hold line ends; empty lines are no rows.
                if row:
                    lines.append(start)
                start = reader.line_num + 1
        return lines[1:]
    if path.suffix == ".jsonl":
        with open(path, encoding="utf-8", errors="replace") as file:
            return [number for number, line in enumerate(file, start=1) if line.strip()]
    return None
