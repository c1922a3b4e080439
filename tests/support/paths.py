"""Where things are, whatever folder the tests are started from."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
BENCHMARKS = ROOT / "benchmarks"
SUPPORT = ROOT / "tests" / "support"
DATA = ROOT / "tests" / "data"
PYTHONPATH = os.pathsep.join([str(SUPPORT), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""For programs that tests start: they import the package of this folder and the helpers beside this file."""
