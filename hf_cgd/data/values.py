"""Which values of a column may name a group, and the name each of them gives."""

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_cgd.data.columns import Column, is_missing, listed_rows
from hf_cgd.monitors import GroupRobustWarning


def group_name(columns: Sequence[str], parts: Sequence[str]) -> str:
    """Name of a group, out of the names of its values."""
    if len(parts) == 1:
        return parts[0]
    return " ".join(f"{column}:{part}" for column, part in zip(columns, parts, strict=True))


def named_values(name: str, column: Column, class_names: Sequence[str] | None) -> tuple[list[str], np.ndarray]:
    """Names of the different values of a column, each once and in order, and the place of each row's among them [N].

    The order is that of the classes for a `ClassLabel`, else the sorted order of the values.

    Raises:
        ValueError: values that cannot name a group. Of missing ones all rows are counted.
    """
    different, codes = column.factors
    missing = column.rows_of([code for code, value in enumerate(different) if is_missing(value)])
    if missing:
        value = different[next(code for code, value in enumerate(different) if is_missing(value))]
        raise ValueError(_missing_message(f"Group column {name!r}, row {missing[0]}", value, missing, len(column)))
    names = []
    for code, value in enumerate(different):
        try:
            names.append(value_name(name, value, class_names, None))
        except ValueError:
            # The row is looked for only where the message needs it.
            value_name(name, value, class_names, column.rows_of([code])[0])
            raise
    first_value: dict[str, Any] = {}
    for text, value in zip(names, different, strict=True):
        known = first_value.setdefault(text, value)
        if not class_names and isinstance(known, str) != isinstance(value, str):
            warnings.warn(
                f"Group column {name!r} holds {known!r} and {value!r}, which are taken for one group {text!r}. Bring "
                "them to one type if they are two.",
                GroupRobustWarning,
                stacklevel=2,
            )
    if class_names:
        order = [text for text in class_names if text in first_value]
    else:
        mixed = len({isinstance(value, str) for value in first_value.values()}) > 1
        order = sorted(first_value, key=lambda text: text if mixed else first_value[text])
    place = {text: number for number, text in enumerate(order)}
    return order, np.asarray([place[text] for text in names], dtype=np.int64)[codes]


def _missing_message(where: str, value: Any, missing: Sequence[int] = (), total: int = 0) -> str:
    count = f" ({listed_rows(missing, total)} lack it)" if missing else ""
    return (
        f"{where}: expected an integer, a string or a bool, got {value!r}{count}. Every example needs a "
        "group: fill in the missing values (for instance with 'unknown') or drop these rows."
    )


def value_name(column: str, value: Any, class_names: Sequence[str] | None, row: int | None) -> str:
    """The name a value gives to its group; the one place that decides which values may be groups.

    Raises:
        ValueError: None, NaN, blank text, floats, negative integers, lists, a number that is none of the classes.
    """
    where = f"Group column {column!r}" + ("" if row is None else f", row {row}")
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if is_missing(value):
        raise ValueError(_missing_message(where, value))
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, numbers.Integral):
        number = int(value)
        if number < 0:
            raise ValueError(
                f"{where}: expected integers >= 0, got {number}. Negative numbers usually mark missing values: "
                "give those rows a group of their own or drop them."
            )
        if class_names is not None:
            if number >= len(class_names):
                raise ValueError(
                    f"{where}: expected a class in 0..{len(class_names) - 1} ({list(class_names)}), got {number}."
                )
            return class_names[number]
        return str(number)
    if isinstance(value, numbers.Real):
        raise ValueError(
            f"{where}: expected an integer, a string or a bool, got the float {float(value)!r}. Cut a continuous "
            f"column into bins, or cast it: dataset.cast_column({column!r}, Value('int64'))."
        )
    raise ValueError(
        f"{where}: expected one integer, string or bool per example, got {type(value).__name__} ({str(value)[:60]}). "
        "Name several columns to cross them, in place of one column that holds lists."
    )


def crossed(codes: Sequence[np.ndarray]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The combinations of several columns' codes that occur, in sorted order, and the place of each row's among them.

    Args:
        codes: one [N] of each column.
    """
    first = codes[0]
    for column in codes[1:]:
        # Numbers of the combinations so far are at most N, so that the product cannot overflow.
        _, first = np.unique(first, return_inverse=True)
        first = first * (int(column.max(initial=0)) + 1) + column
    _, starts, places = np.unique(first, return_index=True, return_inverse=True)
    return [tuple(int(column[start]) for column in codes) for start in starts], places
