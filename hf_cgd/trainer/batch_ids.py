"""Group ids beside a step's batches: whoever overrides a method of the trainer never sees them."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class BatchIds:
    """Takes the ids out of batches, and finds them again for whatever is still made of one of their tensors."""

    def __init__(self) -> None:
        self._known: list[tuple[list[Tensor], Any]] = []

    def forget(self) -> None:
        """A step begins."""
        self._known = []

    def take(self, batch: Any, key: str) -> Any:
        """The batch without its ids, in a copy of the same type; the ids are remembered."""
        batch, ids = without(batch, key)
        self.remember(batch, ids)
        return batch

    def remember(self, batch: Any, ids: Any) -> None:
        """These are the ids of that batch."""
        if ids is not None and isinstance(batch, Mapping):
            self._known.append(([value for value in batch.values() if isinstance(value, Tensor)], ids))

    def find(self, batch: Mapping[str, Any]) -> Any:
        """The ids of the latest batch that shares a tensor with this one, None for none."""
        tensors = [value for value in batch.values() if isinstance(value, Tensor)]
        for known, ids in reversed(self._known):
            if any(tensor is other for tensor in tensors for other in known):
                return ids
        return None


def without(batch: Any, key: str) -> tuple[Any, Any]:
    """A copy of a batch without what it has under that name, and this; None where it has none."""
    if not isinstance(batch, Mapping) or key not in batch:
        return batch, None
    if hasattr(batch, "pop") and not hasattr(batch, "to_tuple"):
        rest: Any = copy.copy(batch)
        return rest, rest.pop(key)
    kept = dict(batch)
    return kept, kept.pop(key)
