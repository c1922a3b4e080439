"""Rows that two datasets have in common."""

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_cgd.data.columns import column_names, read_columns


def shared_rows(first: Any, second: Any, inputs: Sequence[str], not_inputs: Sequence[str]) -> list[int] | None:
    """Numbers of the rows of `first` whose inputs `second` holds as well, as they are stored, before any transform.

    Args:
        first, second: map-style datasets.
        inputs: columns that are compared where both have one of them.
        not_inputs: columns that are not compared; all others that both have are, where none of `inputs` is there.

    Returns:
        None where the two have no column in common to compare.
    """
    theirs = set(column_names(second) or [])
    common = [name for name in column_names(first) or [] if name in theirs and name not in not_inputs]
    common = [name for name in inputs if name in common] or common
    if not common:
        return None
    known = set(_digests(second, common))
    return [row for row, digest in enumerate(_digests(first, common)) if digest in known]


def _digests(dataset: Any, names: Sequence[str]) -> list[bytes]:
    columns = [column.values for column in read_columns(dataset, names).values()]
    return [
        hashlib.sha256(pickle.dumps([_plain(value) for value in row])).digest() for row in zip(*columns, strict=True)
    ]


def _plain(value: Any) -> Any:
    """Equal values in a form whose bytes are equal."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return np.asarray(value).tolist()
    if isinstance(value, dict):
        # An image that is stored as bytes: its path may differ.
        return value["bytes"] if value.get("bytes") is not None else sorted(value.items(), key=str)
    return value
