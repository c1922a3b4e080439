"""Recipes as functions, and a tiny model for texts."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import RECIPES
from tiny import tiny_distilbert
from transformers import PreTrainedTokenizerFast

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
        return runpy.run_path(str(RECIPES / f"{name}.py"))["main"]([str(argument) for argument in line])

    return main


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    """A folder with a tiny DistilBERT and the tokenizer of the made-up corpus."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=multinli_demo.demo_tokenizer(), pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip
    tokenizer.save_pretrained(tmp_path / "text_model")
    tiny_distilbert().save_pretrained(tmp_path / "text_model")
    return tmp_path / "text_model"
