"""What was found out about data sets, each of which is looked at once."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")


class ByDataset(Generic[Found]):
    """Something for each data set, for as long as the data set lives.

    A list of rows cannot be referred to weakly, and is cheap to read: it is looked at anew each time.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], Found]] = {}

    def of(self, dataset: Any, find: Callable[[Any], Found]) -> Found:
        """What `find` said of the data set when it was first asked, which is now where it never was."""
        known = self._found.get(id(dataset))
        # Another one may have its place in memory by now.
        if known is not None and known[0]() is dataset:
            return known[1]
        found = find(dataset)
        with suppress(TypeError):
            self._found[id(dataset)] = (weakref.ref(dataset), found)
        return found
