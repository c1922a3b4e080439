"""Read one column of a dataset without decoding the rest of it."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch.utils.data

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Column:
    """The values of one column, and the names of its classes where the dataset knows them (`ClassLabel`)."""

    values: list[Any]
    class_names: tuple[str, ...] | None = None


def column_names(dataset: Any) -> list[str] | None:
    """The columns a dataset shows to its readers, or None where only reading an example could tell."""
    if isinstance(dataset, datasets.Dataset):
        return list(dataset.format["columns"] or dataset.column_names)
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.column_names
    if isinstance(dataset, torch.utils.data.Subset):
        return column_names(dataset.dataset)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return column_names(dataset.datasets[0])
    if hasattr(dataset, "__len__") and len(dataset) > 0 and hasattr(dataset, "__getitem__"):
        first = dataset[0]
        return list(first) if isinstance(first, dict) else None
    return None


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
            f"{type(dataset[0]).__name__}."
        )
    missing = [name for name in columns if name not in names]
    if missing:
        hidden = [name for name in missing if name in (getattr(dataset, "column_names", None) or ())]
        hint = f" (set_format hides {hidden}: call dataset.reset_format() or list them)" if hidden else ""
        raise ValueError(
            f"{option}: expected a column {', '.join(map(repr, missing))} in the {where}, which has {names}{hint}. "
            f"{advice}"
        )


def class_names_of(dataset: Any, name: str) -> tuple[str, ...] | None:
    """Names of the classes of a `ClassLabel` column, None for any other column."""
    features = getattr(dataset, "features", None)
    feature = features.get(name) if features else None
    return tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def read_columns(dataset: Any, names: Iterable[str]) -> dict[str, Column]:
    """Read whole columns of a map-style dataset.

    A `datasets.Dataset` (and a `Subset` or `ConcatDataset` of them) is read column by column, transforms left out.
    Any other dataset of dicts is walked through once, which decodes each example.

    Raises:
        KeyError: a column is missing.
    """
    names = list(names)
    if isinstance(dataset, datasets.Dataset):
        plain = dataset.with_format(None, columns=names)
        return {name: Column(list(plain[name]), class_names_of(dataset, name)) for name in names}
    if isinstance(dataset, torch.utils.data.Subset):
        whole = read_columns(dataset.dataset, names)
        indices = [int(index) for index in dataset.indices]
        return {name: Column([c.values[i] for i in indices], c.class_names) for name, c in whole.items()}
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        parts = [read_columns(part, names) for part in dataset.datasets]
        return {
            name: Column([value for part in parts for value in part[name].values], parts[0][name].class_names)
            for name in names
        }
    logger.info("Reading %s from all %d examples, one by one.", ", ".join(map(repr, names)), len(dataset))
    values: dict[str, list[Any]] = {name: [] for name in names}
    for index in range(len(dataset)):
        example = dataset[index]
        for name in names:
            values[name].append(example[name])
    return {name: Column(column) for name, column in values.items()}
