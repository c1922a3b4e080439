"""Which examples are in which group."""

from itertools import pairwise

import numpy as np


def rows_of_groups(group_ids: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Places of the examples of each of K groups, in the order of the examples.

    Args:
        group_ids: [N] integers, those outside of 0 … K - 1 stand for no known group; or a table [N, K] of zeros and
            ones, where an example may belong to several groups.
        num_groups: K.
    """
    if group_ids.ndim == 2:
        return [np.flatnonzero(column) for column in group_ids.T]
    order = np.argsort(group_ids, kind="stable")
    bounds = np.searchsorted(group_ids, np.arange(num_groups + 1), sorter=order)
    return [order[start:end] for start, end in pairwise(bounds)]
