"""Recipes as functions, and a tiny model for texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import RECIPES
from recipe_parts import recipe_parts
from tiny import tiny_distilbert

from hf_cgd.cli.tiny_networks import tiny_text_classifier
from hf_cgd.tasks import multinli_demo

Recipe = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Runs a recipe's main() on the CPU with its output in `tmp_path/out`; returns the trainer."""

    def main(name: str, *arguments: str | Path | int | float) -> Any:
        first = [a for a in arguments[:1] if str(a).endswith(".yaml")]
        quiet = ["--output_dir", tmp_path / "out", "--use_cpu", "--disable_tqdm", "true", "--max_steps", 2]
        quiet += ["--per_device_eval_batch_size", 200, "--pictures", "false"]
        line = [*first, *quiet, *arguments[len(first) :]]
        _, _, program = recipe_parts(RECIPES / f"{name}.py")
        return program([str(argument) for argument in line])

    return main


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    """A folder with a tiny DistilBERT and the tokenizer of the made-up corpus."""
    parts = multinli_demo.demo(sizes={"train": 400})["train"]
    _, tokenizer = tiny_text_classifier([parts["premise"][:], parts["hypothesis"][:]], multinli_demo.LABELS)
    tokenizer.save_pretrained(tmp_path / "text_model")
    tiny_distilbert().save_pretrained(tmp_path / "text_model")
    return tmp_path / "text_model"
