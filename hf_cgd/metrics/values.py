"""Metric values of any kind, in the forms that files and logs can have."""

import math
from collections.abc import Mapping
from typing import Any


def as_json(value: Any) -> Any:
    """A metric of any kind as JSON can have it: numbers that are not finite as None, what is unknown as its text."""
    if isinstance(value, Mapping):
        return {str(name): as_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [as_json(part) for part in value]
    if hasattr(value, "tolist"):
        return as_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def without_arrays(value: Any) -> Any:
    """A metric of any kind as the log can have it: arrays and tensors as lists and numbers, also inside of others."""
    if isinstance(value, Mapping):
        return {name: without_arrays(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_arrays(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value
