"""What travels beside a step's batches: group ids and example weights, which no model takes."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class BesideBatches:
    """Takes columns out of batches, and finds them again for whatever still holds one of a batch's tensors.

    So whoever overrides a method of the trainer sees batches as those of the plain one.
    """

    def __init__(self) -> None:
        self._known: list[tuple[list[Tensor], Mapping[str, Any]]] = []

    def forget(self) -> None:
        """A step begins."""
        self._known = []

    def take(self, batch: Any, keys: Sequence[str]) -> Any:
        """The batch without these keys, in a copy of the same type; what they held is remembered."""
        rest, taken = without(batch, keys)
        self.remember(rest, taken)
        return rest

    def remember(self, batch: Any, taken: Mapping[str, Any]) -> None:
        """This belongs to that batch."""
        if taken and isinstance(batch, Mapping):
            self._known.append(([value for value in batch.values() if isinstance(value, Tensor)], taken))

    def find(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was taken out of the latest batch that shares a tensor with this one; {} for nothing."""
        tensors = [value for value in batch.values() if isinstance(value, Tensor)]
        for known, taken in reversed(self._known):
            if any(tensor is other for tensor in tensors for other in known):
                return taken
        return {}


def without(batch: Any, keys: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """A copy of a batch without what it has under these keys, and this."""
    there = [key for key in keys if key in batch] if isinstance(batch, Mapping) else []
    if not there:
        return batch, {}
    # Of the same type, for code that reads batch.labels. Outputs of models (`to_tuple`) let nothing be taken out.
    rest: Any = copy.copy(batch) if hasattr(batch, "pop") and not hasattr(batch, "to_tuple") else dict(batch)
    return rest, {key: rest.pop(key) for key in there}
