"""Where things are, whatever folder the tests are started from."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
BENCHMARKS = ROOT / "benchmarks"
SUPPORT = ROOT / "tests" / "support"
DATA = ROOT / "tests" / "data"
PYTHONPATH = os.pathsep.join([str(SUPPORT), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""For programs that tests start: they import the package of this folder and the helpers beside this file."""


def benchmark(name: str) -> ModuleType:
    """A script of the benchmarks as a module, of a name that no helper of the tests has."""
    if str(BENCHMARKS) not in sys.path:
        # Behind the tests' own helpers, which have a module `networks` as well.
        sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
