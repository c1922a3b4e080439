"""What a recipe is made of: its options, its defaults and its program."""

import runpy
from pathlib import Path
from typing import Any


def recipe_parts(path: Path) -> tuple[type, Any, Any]:
    """Options (a dataclass), defaults (for `parse_command_line`) and program of a recipe, of either kind."""
    module = runpy.run_path(str(path))
    if "RECIPE" in module:
        recipe = module["RECIPE"]
        return recipe.options, recipe.defaults, recipe.main
    return module["Options"], module.get("defaults", module.get("DEFAULTS")), module["main"]
