"""How many entries the lists of a column have."""

import numpy as np
import pyarrow.compute
from datasets import Dataset

BATCH = 1024
"""Rows that are held at a time."""


def lengths_of(rows: Dataset, column: str) -> np.ndarray:
    """Entries of each row's list, int64 [N]; no list is made of them."""
    stored = rows.select_columns([column]).with_format("arrow")
    found = [pyarrow.compute.list_value_length(batch.column(column)) for batch in stored.iter(batch_size=BATCH)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *(one.to_numpy() for one in found)]).astype(np.int64)
