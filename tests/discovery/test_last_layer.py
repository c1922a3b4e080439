"""Last-layer retraining of whole models: the new head, the model that is saved, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import timm
import torch
from datasets import Dataset
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from tiny import text_dataset, text_rows, tiny_distilbert, with_lora
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
)

from hf_cgd import GroupRobustWarning, last_layer_retraining
from hf_cgd.discovery import example_features
from hf_cgd.discovery.balanced_regression import Trial

SIZE = 200


def texts(seed: int = 0, size: int = SIZE) -> Dataset:
    """The first token tells the class, the second the place, which is the class in four rows of five."""
    rows = text_rows(size, seed=seed)
    random = np.random.default_rng(seed)
    labels = np.arange(size) % 2
    places = np.where(random.random(size) < 0.8, labels, 1 - labels)
    for row, label, place in zip(rows["input_ids"], labels.tolist(), places.tolist(), strict=True):
        row[0], row[1] = 1 + label, 3 + place
    return Dataset.from_dict(rows | {"labels": labels, "group": [("sea", "land")[place] for place in places]})


def groups_of(data: Dataset) -> np.ndarray:
    return 2 * np.asarray(data["labels"][:]) + (np.asarray(data["group"][:]) == "sea")


def test_a_text_model_from_data_to_disk(tmp_path: Path) -> None:
    model, data = tiny_distilbert(seed=2), texts()
    body = {name: value.clone() for name, value in model.state_dict().items() if "classifier." not in name[:11]}
    result = last_layer_retraining(model, data, "group", train_dataset=texts(seed=9), subsamples=3)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in body.items())
    assert result.counts == {
        f"{label}, {place}": int((groups_of(data) == 2 * label + (place == "sea")).sum())
        for label in (0, 1)
        for place in ("land", "sea")
    }
    best = result.trials[0]
    assert best.worst > result.worst_before and best.inverse_penalty == result.inverse_penalty
    assert f"worst group {result.worst_before:.3f} -> {best.worst:.3f}" in str(result)
    many = replace(result, counts={str(size): size for size in range(20, 29)}, trials=(Trial(1.0, 0.5, 0.6), best))
    assert "9 cells of 20 to 28" in str(many) and "at the edge of what was tried" in str(many)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    fresh = texts(seed=1)
    first, second = (example_features(each, fresh) for each in (model, again))
    assert np.array_equal(first.logits, second.logits)
    cells = groups_of(fresh)
    right = first.predictions == first.labels
    assert min(right[cells == cell].mean() for cell in range(4)) > 0.75


def test_a_model_has_the_probabilities_of_scikit_learn() -> None:
    """Cells of one size and one draw: the regression on all rows, standardised by scikit-learn, is the oracle."""
    rows = text_rows(SIZE)
    rows |= {"labels": [row % 2 for row in range(SIZE)], "group": [row // 2 % 2 for row in range(SIZE)]}
    model, data = tiny_distilbert(seed=2), Dataset.from_dict(rows)
    seen = example_features(model, data)
    last_layer_retraining(model, data, "group", penalty="l2", inverse_penalties=[0.1], subsamples=1)
    scaler = StandardScaler().fit(seen.features.astype(np.float64))
    standard = scaler.transform(seen.features)
    oracle = LogisticRegression(C=0.1, max_iter=5000).fit(standard, seen.labels)
    assert softmax(example_features(model, data).logits, axis=1) == pytest.approx(
        oracle.predict_proba(standard), abs=1e-3
    )


def colours(size: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Brightness tells the class; the group is a column of its own."""
    pixels = torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return [
        {"pixel_values": pixels[row] + 2.0 * (row % 2), "labels": row % 2, "group": row // 2 % 2}
        for row in range(size)
    ]


def timm_network() -> nn.Module:
    return timm.create_model("test_resnet", num_classes=2)


def timm_wrapper() -> nn.Module:
    return TimmWrapperForImageClassification(TimmWrapperConfig(architecture="test_resnet", num_labels=2))


@pytest.mark.filterwarnings("ignore:Every balanced draw holds 15 rows")
@pytest.mark.parametrize("build", [timm_network, timm_wrapper])
def test_timm_networks(build: Any) -> None:
    torch.manual_seed(0)
    model, data = build(), colours()
    result = last_layer_retraining(model, data, "group", subsamples=2, inverse_penalties=[1.0, 0.1])
    assert [trial.inverse_penalty for trial in sorted(result.trials, key=lambda t: -t.inverse_penalty)] == [1.0, 0.1]
    fresh = example_features(model, colours(seed=1), not_inputs=["group"])
    assert (fresh.predictions == fresh.labels).mean() > 0.95


def test_a_head_without_bias() -> None:
    """GPT-2's, which runs on every token: the saved form has no place for a bias, so there is none."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        num_labels=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    # A random network hardly looks back, so the class stands at the end as well.
    data = texts().map(lambda row: {"input_ids": [*row["input_ids"][:-1], row["input_ids"][0]]})
    model = GPT2ForSequenceClassification(config)
    result = last_layer_retraining(model, data, "group", subsamples=2)
    assert model.score.bias is None and result.trials[0].worst > 0.5
    seen = example_features(model, data, not_inputs=["group"])
    assert seen.features @ model.score.weight.detach().numpy().T == pytest.approx(seen.logits, abs=1e-5)


def test_the_copy_of_a_head_that_peft_trains() -> None:
    model, data = with_lora(tiny_distilbert()), texts()
    before = example_features(model, data, not_inputs=["group"])
    result = last_layer_retraining(model, data, "group", subsamples=2)
    after = example_features(model, data, not_inputs=["group"])
    assert np.array_equal(before.features, after.features) and not np.allclose(before.logits, after.logits)
    assert result.trials[0].worst > result.worst_before


class Squashed(nn.Module):
    """Scores that are no linear function of the head's input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.classifier = nn.Embedding(64, 8), nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return 3 * self.classifier(self.embed(input_ids).mean(dim=1)).tanh()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.classifier = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first.weight = self.classifier.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.first(x))


def test_heads_of_another_kind_are_refused() -> None:
    data = texts(size=16)
    lora = peft.LoraConfig(r=2, target_modules=["q_lin", "classifier"])
    for model, message in [
        (Squashed(), "not a linear function of the head's input"),
        (Tied(), "tied to those of another layer"),
        (peft.get_peft_model(tiny_distilbert(), lora), "merge_and_unload"),
        (timm.create_model("test_byobnet", num_classes=0), "needs a head|one linear layer"),
        (nn.Sequential(nn.Conv2d(3, 2, 1)), "ends in Conv2d"),
    ]:
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(ValueError, match=message):
            last_layer_retraining(model, data, "group")
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_data_that_does_not_fit_is_refused() -> None:
    model, data = tiny_distilbert(3), texts(size=16)
    with pytest.raises(ValueError, match=r"has 3 classes, but no row of the dataset is of \['2'\]"):
        last_layer_retraining(model, data, "group")
    with pytest.raises(ValueError, match="group_column: expected a column 'place'"):
        last_layer_retraining(model, data, "place")
    single = text_dataset(6).remove_columns(["labels", "group"])
    single = single.add_column("labels", [0, 0, 0, 1, 1, 1]).add_column("group", ["a", "a", "b", "a", "a", "a"])
    with pytest.raises(ValueError, match=r"these have one: \['0, b'\]"):
        last_layer_retraining(tiny_distilbert(), single, "group")
    with pytest.raises(ValueError, match="inverse_penalties > 0"):
        last_layer_retraining(tiny_distilbert(), data, "group", inverse_penalties=[0.0])


def test_few_rows_are_warned_of() -> None:
    with pytest.warns(GroupRobustWarning, match=r"Every balanced draw holds \d+ rows .* for 32 features"):
        last_layer_retraining(tiny_distilbert(), texts(size=60), "group", inverse_penalties=[1.0], subsamples=1)


def test_rows_of_the_training_set_are_warned_of() -> None:
    """Found by their inputs, whatever ids, groups and labels stand beside them."""
    model, data = tiny_distilbert(), texts()
    train = texts(seed=5).select(range(20)).to_list() + [
        row | {"labels": 1 - row["labels"]} for row in data.select([4, 7])
    ]
    quick: dict[str, Any] = dict(inverse_penalties=[1.0], subsamples=1)
    with pytest.warns(GroupRobustWarning, match="2 of 200 rows are among those the model was trained on"):
        last_layer_retraining(model, data, "group", train_dataset=Dataset.from_list(train), **quick)
    with pytest.warns(GroupRobustWarning, match="no input column in common"):
        other = Dataset.from_dict({"text": ["a"], "labels": [0]})
        last_layer_retraining(model, data, "group", train_dataset=other, **quick)
