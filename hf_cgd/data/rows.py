"""One row of a dataset, whatever it is: a dict, another mapping, a dataclass, or None for one that cannot be read."""

import copy
import random
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
SEARCH_DEPTH = 4
"""How deep a dataset's own attributes are searched for generators of random numbers."""


def names_in(row: Any) -> list[str] | None:
    """Names of the values of a row, None for one that has no names (a tuple, a tensor, a string, None)."""
    if isinstance(row, Mapping):
        return list(row)
    fields = getattr(row, "__dict__", None)
    return list(fields) if fields and not isinstance(row, torch.Tensor) else None


def has_value(row: Any, name: str) -> bool:
    """Whether a row has a value of that name."""
    return name in row if isinstance(row, Mapping) else name in (names_in(row) or ())


def value_of(row: Any, name: str) -> Any:
    """The value of that name.

    Raises:
        KeyError: there is none.
    """
    if isinstance(row, Mapping):
        return row[name]
    if not has_value(row, name):
        raise KeyError(name)
    return getattr(row, name)


def with_values(row: Any, values: Mapping[str, Any]) -> Any:
    """A row of the same kind with these values in addition, or in place of its own; the row itself stays as it is."""
    if isinstance(row, dict) and type(row) is dict:
        return {**row, **values}
    if isinstance(row, Mapping) and not isinstance(row, MutableMapping):
        return {**row, **values}
    changed = copy.copy(row)
    for name, value in values.items():
        if isinstance(changed, MutableMapping):
            changed[name] = value
        else:
            object.__setattr__(changed, name, value)
    return changed


class RandomState:
    """The state of every generator that Python, numpy and torch share, and of those that a dataset owns.

    Args:
        owner: an object whose attributes are searched for generators; None for none.
    """

    def __init__(self, owner: Any = None) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._own = [(generator, _state_of(generator)) for generator in _generators_in(owner, SEARCH_DEPTH)]

    def restore(self) -> None:
        """Put everything back to where it was."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._own:
            _set_state(generator, state)


@contextmanager
def undisturbed(owner: Any = None) -> Iterator[None]:
    """Within, random numbers may be drawn; afterwards every generator stands where it stood (see `RandomState`)."""
    state = RandomState(owner)
    try:
        yield
    finally:
        state.restore()


def _generators_in(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, GENERATORS):
        yield value
    elif isinstance(value, (list, tuple)) and len(value) <= 100:
        for part in value if depth else ():
            yield from _generators_in(part, depth - 1)
    elif depth and not isinstance(value, (type, torch.Tensor, np.ndarray, torch.nn.Module)):
        for part in list(getattr(value, "__dict__", {}).values()):
            yield from _generators_in(part, depth - 1)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
