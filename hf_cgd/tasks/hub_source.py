"""Benchmarks from the Hub, or from a folder that holds what the Hub's repository holds."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, DatasetDict

from hf_cgd.data.columns import read_columns
from hf_cgd.data.sources import load_from_hub
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.tasks.base import TaskInfo
from hf_cgd.tasks.raw_files import data_missing


def hub_splits(
    info: TaskInfo, folder: Path | None, names: Mapping[str, str], columns: Sequence[str], advice: str = ""
) -> DatasetDict:
    """The splits of a dataset of the Hub under our names.

    Args:
        folder: a copy of its repository; None for the Hub itself.
        names: {their name: our name}.
        columns: what every split must have.
        advice: last line of the message where the Hub cannot be reached; by default what a folder would have to hold.

    Raises:
        ConnectionError: the Hub cannot be reached; the message says what to pass instead.
        FileNotFoundError: no such folder, or one without the data.
        ValueError: a split or a column that is missing.
    """
    assert info.hub is not None
    if folder is None:
        advice = advice or f"Pass data_dir= with a folder: {info.layout or 'the files of the benchmark'}"
        found = load_from_hub(info.hub.id, advice, info.hub.config, info.hub.revision)
    else:
        if not folder.is_dir():
            raise data_missing(info, folder, f"a copy of {info.hub.id} of the Hub")
        try:
            found = datasets.load_dataset(str(folder), info.hub.config)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise data_missing(info, folder, f"a copy of {info.hub.id} of the Hub ({reason})") from error
    where = str(folder or info.hub.id)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{where}: expected the splits {list(names)}, got {list(found)}. Is it {info.hub.id}?")
    for name in names:
        lacking = [column for column in columns if column not in found[name].column_names]
        if lacking:
            raise ValueError(
                f"{where}: expected the column(s) {lacking} in the {name} split, got {found[name].column_names}. Is "
                f"it {info.hub.id}?"
            )
    return DatasetDict({ours: found[theirs] for theirs, ours in names.items()})


def in_our_classes(rows: Dataset, column: str, names: Sequence[str], where: str) -> np.ndarray:
    """A column as numbers of our classes, int64 [N]: by their names where the data tells them, else by number.

    Args:
        rows: of a split.
        column: a `ClassLabel`, whose classes may be in another order than ours; or names; or numbers or bools.
        names: of our classes, in order. Capitals and what is no letter or digit make no difference.
        where: what the rows are, for messages.

    Raises:
        ValueError: a value, or a name of a class, that is none of ours.
    """
    read = read_columns(rows, [column])[column]
    ours = {_letters(name): number for number, name in enumerate(names)}
    numbers: dict[Any, int] = {number: number for number in range(len(names))}
    numbers |= {str(number): number for number in numbers}
    theirs = read.class_names
    if theirs is None:
        places = {value: numbers.get(value, ours.get(_letters(str(value)), -1)) for value in read.factors[0]}
    else:
        known = [ours.get(_letters(name), numbers.get(name, -1)) for name in theirs]
        if max(known) < 0 and len(theirs) == len(names):
            known = list(range(len(names)))
            warnings.warn(
                f"{where}: the classes of column {column!r} are called {list(theirs)}. They are taken for "
                f"{list(names)}, in this order.",
                GroupRobustWarning,
                stacklevel=3,
            )
        if min(known) < 0 or len(set(known)) < len(known):
            raise ValueError(
                f"{where}: column {column!r}: expected the classes {list(names)}, in whatever order, got "
                f"{list(theirs)}. It is another data set, or another version."
            )
        places = {value: known[value] if value in range(len(known)) else -1 for value in read.factors[0]}
    found = np.asarray([places[value] for value in read.factors[0]], dtype=np.int64)[read.factors[1]]
    bad = np.flatnonzero(found < 0)
    if len(bad):
        raise ValueError(
            f"{where}: column {column!r}: expected one of {list(names)[:10]} or their numbers, got "
            f"{read.values[bad[0]]!r} in row {bad[0]} ({len(bad):,} such rows)."
        )
    return found


def with_our_classes(splits: DatasetDict, column: str, feature: datasets.ClassLabel, where: str) -> DatasetDict:
    """The splits with a column of our classes, see `in_our_classes`."""
    return DatasetDict(
        {
            name: rows.remove_columns([column]).add_column(
                column, in_our_classes(rows, column, feature.names, f"{where}, {name} split"), feature=feature
            )
            for name, rows in splits.items()
        }
    )


def _letters(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())
