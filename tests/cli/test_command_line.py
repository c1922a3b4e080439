"""Options of a recipe: its defaults, a file, the command line."""

from pathlib import Path
from typing import Any

import pytest
from paths import RECIPES
from recipe_parts import recipe_parts

from hf_cgd.cli import parse_command_line


def test_precedence_of_defaults_file_and_command_line(tmp_path: Path) -> None:
    options, defaults, _ = recipe_parts(RECIPES / "multinli_cgd.py")

    def parse(*arguments: str) -> tuple[Any, Any]:
        return parse_command_line(options, defaults, [*arguments, "--use_cpu"])

    own, config = parse()
    assert (own.model, config.learning_rate, config.group_column) == ("bert-base-uncased", 2e-5, ["label", "negation"])
    own, config = parse("--preset", "paper")
    assert (own.model, config.optim, config.learning_rate) == ("distilbert-base-uncased", "sgd", 1e-3)
    path = tmp_path / "a.yaml"
    path.write_text("preset: paper\nlearning_rate: 3e-4\ngroup_column: negation\nseed: 5")
    own, config = parse(str(path), "--seed", "6")
    assert (config.optim, config.learning_rate, config.group_column, config.seed) == ("sgd", 3e-4, ["negation"], 6)
    path.write_text("preset: paper\nlerning_rate: 3e-4")
    with pytest.raises(SystemExit, match="no such option: lerning_rate. Did you mean learning_rate"):
        parse(str(path))
    path.write_text("- preset")
    with pytest.raises(SystemExit, match="expected lines of the form `option: value`"):
        parse(str(path))
