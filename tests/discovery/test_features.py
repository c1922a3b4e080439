"""One pass over a dataset gives, for each row in place, what the model itself gives for that row."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from datasets import ClassLabel, Dataset
from tiny import image_dataset, text_dataset, tiny_distilbert
from torch import nn
from transformers import DistilBertForTokenClassification, default_data_collator

from hf_cgd.discovery import example_features


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_distilbert(3, dropout=0.5, seed=1).train()


def direct_logits(model: nn.Module, dataset: Dataset) -> torch.Tensor:
    rows = dataset.with_format("torch")[:]
    with torch.no_grad():
        scores = model.eval()(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    model.train()
    return scores


def test_text(model: nn.Module) -> None:
    """Groups of strings get in nobody's way; dropout is off; the model is in training mode again."""
    data = text_dataset().add_column("place", ["sea", "land"] * 8)
    found = example_features(model, data, batch_size=5, not_inputs=["place"])
    assert model.training
    assert found.logits == pytest.approx(direct_logits(model, data).numpy(), abs=1e-5)
    head = model.classifier
    assert found.features @ head.weight.detach().numpy().T + head.bias.detach().numpy() == pytest.approx(
        found.logits, abs=1e-5
    )
    assert found.labels.tolist() == data["labels"][:] and found.class_names == ("0", "1", "2")
    assert np.array_equal(found.predictions, found.logits.argmax(axis=1))


def test_a_collator_that_turns_the_rows_round(model: nn.Module) -> None:
    data = text_dataset()
    found = example_features(
        model, data, batch_size=5, data_collator=lambda rows: default_data_collator(list(reversed(rows)))
    )
    assert found.logits == pytest.approx(direct_logits(model, data).numpy(), abs=1e-5)


def test_a_collator_that_loses_rows_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"left out 4 of 16 rows: 3, 7, 11, 15"):
        example_features(
            model, text_dataset(), batch_size=4, data_collator=lambda rows: default_data_collator(rows[:3])
        )


def test_rows_of_a_transform_and_plain_lists(model: nn.Module) -> None:
    data = text_dataset()
    stored = data.remove_columns(["input_ids", "attention_mask"]).add_column("row", list(range(16)))

    def tokens(rows: dict[str, Any]) -> dict[str, Any]:
        own = [data[row] for row in rows["row"]]
        return {name: [row[name] for row in own] for name in ("input_ids", "attention_mask")} | rows

    for given in (stored.with_transform(tokens), [data[row] for row in range(16)]):
        assert example_features(model, given).logits == pytest.approx(direct_logits(model, data).numpy(), abs=1e-5)


def test_a_timm_network_whose_argument_is_not_named_like_the_column() -> None:
    torch.manual_seed(0)
    network, data = timm.create_model("test_resnet", num_classes=2), image_dataset()
    found = example_features(network, data, not_inputs=["group"])
    with torch.no_grad():
        assert found.logits == pytest.approx(network.eval()(data[:]["pixel_values"]).numpy(), abs=1e-5)
    assert found.features.shape == (12, network.num_features)


@pytest.mark.parametrize(
    "labels,message",
    [
        ([0, 1, 2, 5] * 4, "expected a class in 0..2, got 5"),
        ([0, 1, 2, -100] * 4, "4 of 16 rows: 3, 7, 11, 15 have no label"),
        (["a", "b"] * 8, "class_encode_column"),
        ([[0.0, 1.0, 1.0]] * 16, "expected one class per row"),
    ],
)
def test_labels_that_are_no_classes_are_refused(model: nn.Module, labels: list[Any], message: str) -> None:
    data = text_dataset().remove_columns("labels").add_column("labels", labels)
    with pytest.raises(ValueError, match=message):
        example_features(model, data)


def test_what_has_no_labels_or_no_head_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="label_column: expected a column 'labels'"):
        example_features(model, text_dataset().remove_columns("labels"))
    with pytest.raises(ValueError, match="DistilBertForTokenClassification does not give one answer"):
        example_features(DistilBertForTokenClassification(model.config), text_dataset())
    with pytest.raises(ValueError, match="under problem_type='regression'"):
        example_features(tiny_distilbert(1), text_dataset().map(lambda row: {"labels": 0}))


def test_classes_in_another_order_than_the_models_are_refused() -> None:
    """Its answers are numbers: the right ones would count as errors."""
    data = text_dataset().cast_column("labels", ClassLabel(names=["no", "yes"]))
    swapped = tiny_distilbert(id2label={0: "yes", 1: "no"}, label2id={"yes": 0, "no": 1})
    with pytest.raises(
        ValueError, match=r"classes are \['yes', 'no'\], those of column 'labels' \['no', 'yes'\]: 'no' is"
    ):
        example_features(swapped, data)
    aligned = data.align_labels_with_mapping(swapped.config.label2id, "labels")
    assert example_features(swapped, aligned).labels.tolist() == [1 - label for label in data["labels"][:]]
