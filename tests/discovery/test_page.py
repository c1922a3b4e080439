"""The examples of docs/unlabelled_groups.md run, one after another, as they stand there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import predicts_one_class
from torch import Tensor, nn

PAGE = Path(__file__).parents[2] / "docs/unlabelled_groups.md"


class Network(nn.Module):
    """A linear classifier whose features are the rows, with the loss that a plain Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 2)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.classifier(x)
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return loss | {"logits": logits}

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), folder)


def birds(share: float, size: int, seed: int) -> Dataset:
    """Feature 0 is the class, feature 1 the place, which is the class in a share of the rows and much larger."""
    random = np.random.default_rng(seed)
    labels = np.arange(size) % 2
    places = np.where(random.random(size) < share, labels, 1 - labels)
    x = 0.5 * random.standard_normal((size, 4))
    x[:, 0] += 2 * labels - 1
    x[:, 1] += 5 * (2 * places - 1)
    names = [("land", "water")[place] for place in places]
    return Dataset.from_dict({"x": x.astype(np.float32), "labels": labels, "place": names})


@predicts_one_class
def test_the_examples(
    config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "model": Network(), "new_model": Network(), "tokenizer": None, "args": config(max_steps=2, group_column=None),
        "train": birds(0.85, 400, seed=0), "validation": birds(0.5, 200, seed=1),
    }  # fmt: skip
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    # The first model follows the place, and is wrong where the place misleads; the clusters are the places.
    true = np.array([place == "water" for place in names["train"]["place"]]) != np.array(names["train"]["labels"])
    assert np.array_equal(names["answers"].wrong, true)
    assert names["found"].agreement.worst.recall == 1.0
    result = names["result"]
    # By hand: the best threshold on feature 0 is right with probability Phi(2) = .977.
    assert result.worst_before < 0.1 and result.trials[0].worst > 0.9
    assert set(torch.load("robust")) == {"classifier.weight", "classifier.bias"}
    printed = capsys.readouterr().out
    assert "0 (wrong)" in printed and "0 (cluster 2)" in printed and "Last layer fitted anew" in printed
