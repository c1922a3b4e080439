"""Names of a package that are imported when they are first asked for, so that small programs start at once."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def names_on_demand(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: names from where they are defined, and the package's own modules.

    Args:
        package: `__name__` of the package.
        places: the module that defines each name.
    """

    def get(name: str) -> Any:
        if name in places:
            return getattr(import_module(places[name]), name)
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
