"""The recipe of language models: from sources to a report, a mixture, and a reference for the next run."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

Recipe = Callable[..., Any]
SMALL = ("--width", 16, "--depth", 1, "--heads", 2, "--vocab_size", 270, "--block_length", 8, "--eval_strategy",
         "steps", "--eval_steps", 1, "--save_strategy", "steps", "--save_steps", 1, "--per_device_train_batch_size",
         6)  # fmt: skip


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    (tmp_path / "counts.txt").write_text(
        "\n".join(f"{n} and {n + 1} and {n + 2}" for n in range(99)), encoding="utf-8"
    )
    (tmp_path / "letters.txt").write_text("\n".join("abcdefghij"[n % 5 :] * 2 for n in range(120)), encoding="utf-8")
    return [f"counts={tmp_path}/counts.txt", f"letters={tmp_path}/letters.txt"]


def test_from_sources_to_a_mixture_and_on_from_the_reference(
    recipe: Recipe, sources: list[str], tmp_path: Path
) -> None:
    trainer = recipe("language_model", "--sources", *sources, "--objective", "group_dro", "--step_size", 0.5, *SMALL)
    out = tmp_path / "out"
    mixture = json.loads((out / "mixture.json").read_text(encoding="utf-8"))
    assert mixture == trainer.mixture() and list(mixture) == ["counts", "letters"]
    metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    metrics = metrics.get("validation", metrics)
    for name in mixture:
        loss, perplexity = (metrics[f"eval_group_{kind}/{name}"] for kind in ("loss", "perplexity"))
        assert math.exp(loss) == pytest.approx(perplexity, rel=1e-5)
    assert metrics["eval_worst_group_loss"] == max(metrics[f"eval_group_loss/{name}"] for name in mixture)
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    text = "12 and 13"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == model.config.vocab_size
    reference = tmp_path / "reference"
    out.rename(reference)
    again = recipe(
        "language_model", "--sources", *sources, "--objective", "group_dro", "--step_size", 0.5, *SMALL,
        "--reference_model", reference, "--model", reference, "--group_sampling", "weights", "--learning_rate", 0,
    )  # fmt: skip
    # A model that is its own reference, and stays it, is behind in nothing.
    assert again.mixture() == pytest.approx({"counts": 0.5, "letters": 0.5})


def test_erm_has_no_mixture(recipe: Recipe, sources: list[str], tmp_path: Path) -> None:
    recipe("language_model", "--sources", *sources, "--objective", "erm", *SMALL)
    assert not (tmp_path / "out" / "mixture.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Name the sources"),
        (("--demo", "true", "--sources", "a=b"), "Name the sources"),
        (("--sources", "a=b"), "there is none at b"),
        (("--demo", "true", "--block_length", 1), "block_length must be at least 2"),
        (("--demo", "true", "--validation_share", 1), "validation_share must lie between 0 and 1"),
    ],
)
def test_what_cannot_be_run_ends_with_a_message(
    recipe: Recipe, words: tuple[Any, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        recipe("language_model", *words)
    assert message in str(end.value) + capsys.readouterr().err
