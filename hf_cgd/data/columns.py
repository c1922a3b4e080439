"""Read one column of a dataset without decoding the rest of it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import torch.utils.data
from torch.utils.data import ConcatDataset, Subset

from hf_cgd.data.rows import names_in, undisturbed, value_of
from hf_cgd.visible_text import did_you_mean

logger = logging.getLogger(__name__)


class Column:
    """The values of one column.

    Args:
        values: one per example, as a list or an arrow array.
        class_names: names of its classes where the dataset knows them (`ClassLabel`).
        rows: the dataset's number of each value where some of its rows are None; None for all of them in order.
        renumbered: whether parts of the dataset number the classes differently; `values` follow `class_names`.
    """

    def __init__(
        self,
        values: Any,
        class_names: Sequence[str] | None = None,
        rows: np.ndarray | None = None,
        renumbered: bool = False,
    ) -> None:
        self._given = values
        self.class_names = None if class_names is None else tuple(class_names)
        self.rows = rows
        self.renumbered = renumbered

    def __len__(self) -> int:
        return len(self._given)

    @cached_property
    def values(self) -> list[Any]:
        """The values as Python objects."""
        return self._given.to_pylist() if isinstance(self._given, pa.ChunkedArray) else list(self._given)

    @cached_property
    def factors(self) -> tuple[list[Any], np.ndarray]:
        """The different values in the order in which they first come, and the place of each row's among them [N]."""
        if isinstance(self._given, pa.ChunkedArray):
            encoded = self._given.dictionary_encode(null_encoding="encode").combine_chunks()
            if isinstance(encoded, pa.ChunkedArray):
                encoded = pa.chunked_array(encoded.chunks).combine_chunks()
            return encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        places: dict[Any, int] = {}
        different: list[Any] = []
        codes = np.empty(len(self), dtype=np.int64)
        for row, value in enumerate(self._given):
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                value = value.item()
            # The type is a part of the key since True and 1 are equal, yet other groups.
            key = (type(value), value) if isinstance(value, (str, int, float, np.generic)) else (None, id(value))
            place = places.setdefault(key, len(different))
            if place == len(different):
                different.append(value)
            codes[row] = place
        return different, codes

    def with_class_names(self, class_names: Sequence[str] | None) -> "Column":
        """The same column; with these names of its classes where it has none of its own."""
        if self.class_names or class_names is None:
            return self
        return Column(self._given, class_names, self.rows, self.renumbered)

    def row(self, place: int) -> int:
        """The dataset's number of the row of that value."""
        return int(place if self.rows is None else self.rows[place])

    def rows_of(self, codes: Iterable[int]) -> list[int]:
        """Numbers of the rows that hold one of the different values (see `factors`) at these places."""
        return [self.row(place) for place in np.flatnonzero(np.isin(self.factors[1], list(codes))).tolist()]


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, NaT, pandas' NA, or text without a visible character."""
    return (
        value is None
        or value is pd.NA
        or value is pd.NaT
        or (isinstance(value, (float, np.floating)) and bool(np.isnan(value)))
        or (isinstance(value, (np.datetime64, np.timedelta64)) and bool(np.isnat(value)))
        or (isinstance(value, str) and not value.strip())
    )


def listed_rows(rows: Sequence[int], total: int, most: int = 5) -> str:
    """How many rows there are of how many, and the first few: "3 of 16 rows: 1, 4, 7"."""
    more = ", …" if len(rows) > most else ""
    return f"{len(rows)} of {total} rows: {', '.join(map(str, rows[:most]))}{more}"


def has_transform(dataset: Any) -> bool:
    """Whether rows are made by a function of the user's when they are read (`with_transform`)."""
    return isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom"


def first_row(dataset: Any) -> Any:
    """The first row that is not None, as a reader gets it; None where there is none. Draws no random numbers."""
    with undisturbed(dataset):
        for index in range(len(dataset)):
            row = dataset[index]
            if row is not None:
                return row
    return None


def column_names(dataset: Any) -> list[str] | None:
    """The columns of a dataset that can be read, or None where only reading an example could tell."""
    if isinstance(dataset, datasets.Dataset):
        return list(dataset.format["columns"] or dataset.column_names)
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.column_names
    inner = _inner(dataset)
    if inner:
        return column_names(inner[0])
    if hasattr(dataset, "__len__") and len(dataset) > 0 and hasattr(dataset, "__getitem__"):
        return names_in(first_row(dataset))
    return None


def row_names(dataset: Any) -> list[str] | None:
    """What a reader gets of each row; with a transform that may be other names than those of the columns."""
    inner = _inner(dataset)
    if inner and isinstance(inner[0], datasets.Dataset):
        return row_names(inner[0])
    if has_transform(dataset) and len(dataset) > 0:
        return names_in(first_row(dataset))
    return column_names(dataset)


def _inner(dataset: Any) -> list[Any]:
    """The datasets that a plain `Subset` or `ConcatDataset` takes its rows from, if their columns are known."""
    parts: list[Any] = []
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        parts = [dataset.dataset]
    elif isinstance(dataset, ConcatDataset) and type(dataset).__getitem__ is ConcatDataset.__getitem__:
        parts = list(dataset.datasets)
    return parts if parts and (isinstance(parts[0], datasets.Dataset) or _inner(parts[0])) else []


def require_one_dataset(dataset: Any, where: str) -> None:
    """Raise a ValueError where several splits, or a table that is no dataset of rows, stand in the place of one.

    Args:
        dataset: what was given.
        where: what it should be: "training dataset".
    """
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"The {where}: expected one dataset, got a {type(dataset).__name__} of {list(dataset)}. Pick one: "
            f"splits[{next(iter(dataset), 'train')!r}]."
        )
    if isinstance(dataset, pd.DataFrame):
        raise ValueError(
            f"The {where}: expected a dataset of rows, got a pandas DataFrame. Turn it into one: "
            "datasets.Dataset.from_pandas(frame, preserve_index=False)."
        )


def require_columns(dataset: Any, columns: Sequence[str], option: str, where: str, advice: str) -> None:
    """Raise a ValueError that names the columns there are, unless all `columns` are among them.

    Args:
        dataset: any dataset of rows.
        columns: what it must have.
        option: the option that named the columns, for the message.
        where: what the dataset is: "training dataset".
        advice: what to do about it, a sentence.
    """
    names = column_names(dataset)
    if names is None:
        raise ValueError(
            f"The {where} ({type(dataset).__name__}) must yield dicts with the column(s) {list(columns)}, but yields "
            f"{type(dataset[0]).__name__}. Have __getitem__ return a dict with the model's inputs, the label and "
            "these columns, such as {'pixel_values': image, 'labels': label, 'group': group}."
        )
    missing = [name for name in columns if name not in names]
    if missing:
        hidden = [name for name in missing if name in (getattr(dataset, "column_names", None) or ())]
        meant = "" if hidden else "".join(did_you_mean(name, names, cutoff=0.75) for name in missing)
        hint = f" (set_format hides {hidden}: call dataset.reset_format() or list them)" if hidden else ""
        raise ValueError(
            f"{option}: expected a column {', '.join(map(repr, missing))} in the {where}, which has {names}{hint}."
            f"{meant} {advice}"
        )


def class_names_of(dataset: Any, name: str) -> tuple[str, ...] | None:
    """Names of the classes of a `ClassLabel` column, None for any other column."""
    features = getattr(dataset, "features", None)
    feature = features.get(name) if features else None
    return tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def read_columns(dataset: Any, names: Iterable[str]) -> dict[str, Column]:
    """Read whole columns of a map-style dataset. No random state moves.

    A `datasets.Dataset` (and a `Subset` or `ConcatDataset` of them) is read column by column, transforms left out.
    Any other dataset is walked through once, which decodes each of its own examples; rows that are None are left out.
    Parts of a `ConcatDataset` that number their classes differently are brought to one numbering, by name.

    Raises:
        KeyError: a column is missing.
    """
    names = list(dict.fromkeys(names))
    with undisturbed(dataset):
        return _read(dataset, names, None)


def _read(dataset: Any, names: list[str], indices: Sequence[int] | None) -> dict[str, Column]:
    if isinstance(dataset, datasets.Dataset):
        plain = dataset.with_format(None, columns=names)
        if indices is not None:
            plain = plain.select(indices)
        return {name: Column(_stored(plain, name), class_names_of(dataset, name)) for name in names}
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        own = [int(index) for index in dataset.indices]
        return _read(dataset.dataset, names, own if indices is None else [own[index] for index in indices])
    if isinstance(dataset, ConcatDataset) and type(dataset).__getitem__ is ConcatDataset.__getitem__:
        return _read_parts(dataset, names, indices)
    rows: Sequence[int] = range(len(dataset)) if indices is None else indices
    logger.info("Reading %s from %d examples, one by one.", ", ".join(map(repr, names)), len(rows))
    values: dict[str, list[Any]] = {name: [] for name in names}
    kept = []
    for place, index in enumerate(rows):
        example = dataset[index]
        if example is None:
            continue
        kept.append(place)
        for name in names:
            values[name].append(value_of(example, name))
    numbers = np.asarray(kept) if len(kept) < len(rows) else None
    return {name: Column(column, None, numbers) for name, column in values.items()}


def _read_parts(dataset: ConcatDataset, names: list[str], indices: Sequence[int] | None) -> dict[str, Column]:
    """Columns of a `ConcatDataset`: each part gives those of its rows that are asked for."""
    starts = np.asarray([0, *dataset.cumulative_sizes[:-1]])
    asked = np.arange(len(dataset)) if indices is None else np.asarray(indices, dtype=np.int64) % max(len(dataset), 1)
    owner = np.searchsorted(dataset.cumulative_sizes, asked, side="right")
    parts, places = [], []
    for number, part in enumerate(dataset.datasets):
        own = np.flatnonzero(owner == number)
        if len(own):
            parts.append(_read(part, names, None if indices is None else (asked[own] - starts[number]).tolist()))
            places.append(own)
    return {name: _joined([part[name] for part in parts], places) for name in names}


def _stored(plain: datasets.Dataset, name: str) -> Any:
    """An arrow array of single values, or a list of whatever else a column holds."""
    kind = plain.data.schema.field(name).type
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        return list(plain[name])
    with suppress(pa.ArrowException):
        values = plain.data.column(name).combine_chunks()
        # Asked for row by row, 200,000 rows of a shuffled dataset would come in as many chunks.
        chosen = getattr(plain, "_indices", None)
        values = values if chosen is None else values.take(chosen.column(0).combine_chunks())
        return values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])
    return list(plain[name])


def _joined(parts: list[Column], places: list[np.ndarray]) -> Column:
    """The columns of the parts of a dataset as one, with one numbering of their classes.

    Args:
        parts: one column each.
        places: of each part the places of its rows in the whole.
    """
    kept = [place if part.rows is None else place[part.rows] for part, place in zip(parts, places, strict=True)]
    numbers = np.concatenate(kept)
    order = np.argsort(numbers, kind="stable")
    rows = numbers[order] if len(numbers) < sum(map(len, places)) else None
    kinds = {part.class_names for part in parts}
    if len(kinds) == 1:
        stored = [part._given for part in parts]
        types = {array.type if isinstance(array, pa.ChunkedArray) else None for array in stored}
        if len(types) == 1 and None not in types:
            whole = pa.chunked_array([chunk for array in stored for chunk in array.chunks], types.pop()).take(order)
            return Column(whole, kinds.pop(), rows, any(part.renumbered for part in parts))
        values = [value for part in parts for value in part.values]
        return Column([values[i] for i in order], kinds.pop(), rows, any(part.renumbered for part in parts))
    union = list(dict.fromkeys(name for part in parts for name in part.class_names or ()))
    values = []
    for part in parts:
        union += [value for value in part.factors[0] if isinstance(value, str) and value not in union]
        place = {name: number for number, name in enumerate(union)}
        own = {number: place[name] for number, name in enumerate(part.class_names or ())} | place
        values += [own.get(value, value) if isinstance(value, (int, str)) else value for value in part.values]
    return Column([values[i] for i in order], union, rows, renumbered=True)


def numbers_in(dataset: Any, column: str, option: str, advice: str) -> np.ndarray:
    """The numbers of a training set's column, float64 [N].

    Args:
        dataset: access by index.
        column: its name.
        option: what asked for it, for the messages.
        advice: what to do where the column is missing, a sentence.

    Raises:
        ValueError: there is no such column, or it holds something else than numbers.
    """
    require_columns(dataset, [column], option, "training dataset", advice)
    values = read_columns(dataset, [column])[column].values
    try:
        return np.asarray([float(value) for value in values], dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{option}={column!r} must hold a number for each example, got {values[0]!r}, …") from None
