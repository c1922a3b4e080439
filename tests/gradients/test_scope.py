"""Which parameters are the last layers: the rule on well-known models, built from configs without weights."""

import re
from collections.abc import Callable

import pytest
import timm
import torch
import transformers as tf
from networks import BERT_LIKE, DEBERTA, SPECIAL
from tiny import tiny_distilbert
from torch import nn

from hf_cgd import gradient_scope


def from_timm(name: str) -> nn.Module:
    return timm.create_model(name, pretrained=False, num_classes=2)


# For each model: a pattern that the names in the scope of 3 layers match exactly, all others not.
TABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "BERT": (
        lambda: tf.BertForSequenceClassification(tf.BertConfig(**BERT_LIKE)),
        r"bert\.encoder\.layer\.[23]\.|bert\.pooler\.|classifier\.",
    ),
    "RoBERTa": (
        lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(**BERT_LIKE)),
        r"roberta\.encoder\.layer\.[23]\.|classifier\.(dense|out_proj)\.",
    ),
    "DistilBERT": (
        lambda: tf.DistilBertForSequenceClassification(
            tf.DistilBertConfig(vocab_size=99, dim=32, hidden_dim=64, n_layers=6, n_heads=4)
        ),
        r"distilbert\.transformer\.layer\.[45]\.|pre_classifier\.|classifier\.",
    ),
    "DeBERTa-v2": (
        lambda: tf.DebertaV2ForSequenceClassification(tf.DebertaV2Config(**DEBERTA)),
        r"deberta\.encoder\.layer\.[23]\.|pooler\.|classifier\.",
    ),
    "ModernBERT": (
        lambda: tf.ModernBertForSequenceClassification(tf.ModernBertConfig(**BERT_LIKE, **SPECIAL)),
        r"model\.layers\.[23]\.|model\.final_norm\.|head\.|classifier\.",
    ),
    "GPT-2": (
        lambda: tf.GPT2ForSequenceClassification(
            tf.GPT2Config(n_embd=32, n_layer=12, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=1)
        ),
        r"transformer\.h\.1[01]\.|transformer\.ln_f\.|score\.",
    ),
    "ViT": (
        lambda: tf.ViTForImageClassification(
            tf.ViTConfig(
                hidden_size=32,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=64,
                image_size=32,
                patch_size=8,
            )
        ),
        r"vit\.(encoder\.)?layers?\.[23]\.|vit\.layernorm\.|classifier\.",
    ),
    "HF ResNet": (
        lambda: tf.ResNetForImageClassification(
            tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 2])
        ),
        r"resnet\.encoder\.stages\.[23]\.|classifier\.",
    ),
    "timm resnet50": (lambda: from_timm("resnet50"), r"layer[34]\.|fc\."),
    "timm densenet121": (
        lambda: from_timm("densenet121"),
        r"features\.(denseblock3|transition3|denseblock4|norm5)\.|classifier\.",
    ),
    "timm vit": (lambda: from_timm("vit_tiny_patch16_224"), r"blocks\.1[01]\.|norm\.|head\."),
    "timm convnext": (lambda: from_timm("convnext_atto"), r"stages\.[23]\.|head\."),
    "timm swin": (lambda: from_timm("swin_tiny_patch4_window7_224"), r"layers\.[23]\.|norm\.|head\."),
    "timm efficientnet": (lambda: from_timm("efficientnet_b0"), r"blocks\.[56]\.|conv_head\.|bn2\.|classifier\."),
    "timm wrapper": (
        lambda: tf.TimmWrapperForImageClassification(
            tf.TimmWrapperConfig(architecture="test_vit", num_labels=2, do_pooling=True)
        ),
        r"timm_model\.blocks\.[45]\.|timm_model\.norm\.|timm_model\.head\.",
    ),
    "backbone and head": (
        lambda: nn.Sequential(timm.create_model("test_resnet", num_classes=0), nn.Linear(256, 2)),
        r"0\.layer[34]\.|1\.",
    ),
    "BERT of one layer": (
        lambda: tf.BertForSequenceClassification(tf.BertConfig(**{**BERT_LIKE, "num_hidden_layers": 1})),
        r"bert\.encoder\.layer\.0\.|bert\.pooler\.|classifier\.",
    ),
    "MLP": (
        lambda: nn.Sequential(
            nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2)
        ),
        r"[245]\.",
    ),
    "one Linear": (lambda: nn.Linear(3, 2), r"weight|bias"),
}


@pytest.mark.parametrize("name", TABLE)
def test_last_three_layers(name: str) -> None:
    build, pattern = TABLE[name]
    model = build()
    expected = [key for key, _ in model.named_parameters() if re.match(pattern, key)]
    assert list(gradient_scope(model, 3)) == expected
    assert expected


def test_fewer_layers_are_the_end_of_more() -> None:
    model = tiny_distilbert()
    assert all(re.match(r"(pre_)?classifier", name) for name in gradient_scope(model, 1))
    one, two = list(gradient_scope(model, 1)), list(gradient_scope(model, 2))
    assert two[-len(one) :] == one and any("layer.1" in name for name in two)
    assert not any("layer.0" in name for name in two)


def test_more_layers_than_there_are_stop_before_the_embeddings() -> None:
    assert not any("embeddings" in name for name in gradient_scope(tiny_distilbert(), 99))


def test_all_and_patterns() -> None:
    model = tiny_distilbert()
    assert list(gradient_scope(model, "all")) == [name for name, _ in model.named_parameters()]
    assert list(gradient_scope(model, [r"^classifier\.", r"layer\.1.*norm.*bias"])) == [
        "distilbert.transformer.layer.1.sa_layer_norm.bias",
        "distilbert.transformer.layer.1.output_layer_norm.bias",
        "classifier.weight",
        "classifier.bias",
    ]


@pytest.mark.parametrize("spelling", [1, "1", ["1"]])
def test_command_line_spelling_of_a_number(spelling: object) -> None:
    model = tiny_distilbert()
    assert list(gradient_scope(model, spelling)) == list(gradient_scope(model, 1))  # type: ignore[arg-type]


def test_frozen_parameters_are_left_out() -> None:
    model = tiny_distilbert()
    model.pre_classifier.requires_grad_(False)
    assert list(gradient_scope(model, 1)) == ["classifier.weight", "classifier.bias"]


def test_tied_weights_stand_once_whichever_name_is_chosen() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert list(gradient_scope(model, [r"^1\."])) == ["0.weight", "1.bias"]


def test_prefixes_of_wrappers_are_no_part_of_the_names() -> None:
    model = tiny_distilbert()
    compiled = torch.compile(model, backend="eager")
    assert list(gradient_scope(compiled, 3)) == list(gradient_scope(model, 3))
    assert list(gradient_scope(nn.DataParallel(model), 3)) == list(gradient_scope(model, 3))


def test_nothing_matches() -> None:
    with pytest.raises(ValueError, match=r"'blocks' matches no parameter of DistilBert.*pre_classifier, classifier"):
        gradient_scope(tiny_distilbert(), "blocks")


def test_nothing_is_trainable() -> None:
    model = tiny_distilbert()
    model.classifier.requires_grad_(False)
    with pytest.raises(ValueError, match=r"selects classifier, where no parameter is trainable.*pre_classifier"):
        gradient_scope(model, "^classifier")


@pytest.mark.parametrize("value", [0, -2, "", [], True, "(", ["a", "["]])
def test_invalid_values(value: object) -> None:
    with pytest.raises(ValueError, match="gradient_layers"):
        gradient_scope(nn.Linear(2, 2), value)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", ["head", ["head"]])
def test_the_head_alone_is_the_layer_that_gives_the_logits(layers: str | list[str]) -> None:
    bert = tf.BertForSequenceClassification(tf.BertConfig(**BERT_LIKE))
    assert list(gradient_scope(bert, layers)) == ["classifier.weight", "classifier.bias"]
    assert list(gradient_scope(from_timm("resnet18"), layers)) == ["fc.weight", "fc.bias"]
    # A name with "head" in it is none, nor is a layer that only stands at the end.
    roberta = tf.RobertaForSequenceClassification(tf.RobertaConfig(**BERT_LIKE))
    assert list(gradient_scope(roberta, layers)) == ["classifier.out_proj.weight", "classifier.out_proj.bias"]


def test_a_network_without_a_known_head_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="gradient_layers='head'.*regular expressions"):
        gradient_scope(nn.Sequential(nn.LSTM(2, 2)), "head")
    frozen = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is trainable"):
        gradient_scope(frozen, "head")
