"""The head and its input on every kind of network: the features times the head's weight are the logits."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import timm
import torch
from tiny import tiny_distilbert
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from hf_cgd.models.head import HeadInput, classification_heads

SMALL = dict(
    vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3,
    max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
)  # fmt: skip


def text() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (4, 9), generator=generator)
    ids[:, -1] = 2
    mask = torch.ones_like(ids)
    ids[1, 6:], mask[1, 6:] = torch.tensor([2, 0, 0]), torch.tensor([1, 0, 0])
    ids[2, 3:], mask[2, 3:] = torch.tensor([2, 0, 0, 0, 0, 0]), torch.tensor([1, 0, 0, 0, 0, 0])
    return {"input_ids": ids, "attention_mask": mask}


def images(side: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(0))}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def gpt2() -> nn.Module:
    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=64, n_positions=40, n_embd=16, n_layer=2, n_head=2, num_labels=3, pad_token_id=0,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def bart() -> nn.Module:
    return BartForSequenceClassification(
        BartConfig(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                   decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_labels=3, dropout=0.0,
                   max_position_embeddings=40, pad_token_id=0, eos_token_id=2, bos_token_id=1,
                   decoder_start_token_id=2, forced_eos_token_id=None)
    )  # fmt: skip


def lora(model: nn.Module, **options: Any) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, **options))


def timm_wrapper() -> nn.Module:
    return TimmWrapperForImageClassification(TimmWrapperConfig(architecture="test_resnet", num_labels=3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "bert": (lambda: BertForSequenceClassification(BertConfig(**SMALL)), text),
    "distilbert": (lambda: tiny_distilbert(3), text),
    "roberta": (lambda: RobertaForSequenceClassification(RobertaConfig(**{**SMALL, "pad_token_id": 1})), text),
    "gpt2": (gpt2, text),
    "bart": (bart, text),
    "xlnet": (lambda: XLNetForSequenceClassification(
        XLNetConfig(vocab_size=64, d_model=16, n_layer=1, n_head=2, d_inner=32, num_labels=3, dropout=0.0)), text),
    "vit": (lambda: ViTForImageClassification(
        ViTConfig(**{k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")},
                  image_size=32, patch_size=16)), images),
    "hf resnet": (lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)), images),
    "timm wrapper": (timm_wrapper, images),
    "timm resnet": (lambda: timm.create_model("test_resnet", num_classes=3), lambda: {"x": images()["pixel_values"]}),
    "timm vit": (lambda: timm.create_model("test_vit", num_classes=3), lambda: {"x": images(160)["pixel_values"]}),
    "timm convnext": (lambda: timm.create_model("test_convnext", num_classes=3),
                      lambda: {"x": images()["pixel_values"]}),
    "mlp": (MLP, lambda: {"x": torch.randn(4, 6)}),
    "bert with lora": (lambda: lora(BertForSequenceClassification(BertConfig(**SMALL))), text),
    "roberta with lora": (
        lambda: lora(RobertaForSequenceClassification(RobertaConfig(**{**SMALL, "pad_token_id": 1}))), text),
    "gpt2 with lora": (lambda: lora(gpt2()), text),
    "distilbert with lora on its head": (
        lambda: lora(tiny_distilbert(3), target_modules=["q_lin", "classifier"], modules_to_save=["pre_classifier"]),
        text),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_features_times_weight_are_the_logits(name: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    num_outputs = getattr(getattr(model, "config", None), "num_labels", None) or 3
    head = HeadInput(model, num_outputs)
    with head.recording():
        outputs = model(**inputs())
    logits = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    features = head.features(logits)
    assert features.ndim == 2 and features.requires_grad
    (layer,) = head.heads
    assert torch.allclose(layer(features), logits, atol=1e-5)
    assert not any(module._forward_hooks for module in model.modules())
    gradients = torch.autograd.grad(features.square().sum(), [p for p in model.parameters() if p.requires_grad],
                                    allow_unused=True)  # fmt: skip
    assert any(gradient is not None and bool((gradient != 0).any()) for gradient in gradients)


@pytest.mark.parametrize("name", ["bert", "timm resnet", "gpt2", "mlp"])
def test_the_number_of_outputs_need_not_be_known(name: str) -> None:
    model = MODELS[name][0]()
    assert classification_heads(model) == classification_heads(model, 3)


def test_a_head_before_other_layers_and_among_others_of_its_size() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
            self.body = nn.Linear(6, 8)
            self.side = nn.Linear(8, 3)

    model = Odd()
    assert classification_heads(model, 3) == [model.classifier[1]]
    assert classification_heads(model, 8) == [model.classifier[0]]


def test_two_heads_of_timm_are_taken_together() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, depth=1, img_size=32).train()
    head = HeadInput(model, 3)
    with head.recording():
        logits = model(images()["pixel_values"])
    assert head.heads == [model.head, model.head_dist]
    of_class, of_distillation = head.features(logits).chunk(2, dim=1)
    assert torch.allclose((model.head(of_class) + model.head_dist(of_distillation)) / 2, logits, atol=1e-5)


def test_a_head_that_is_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = HeadInput(model, 2)
    with head.recording():
        logits = model(images()["pixel_values"])
    features = head.features(logits)
    assert features.shape == (4, 5)
    assert torch.allclose(head.heads[0](features[:, :, None, None]).flatten(1), logits, atol=1e-5)


def test_a_head_whose_scores_are_averaged_over_positions() -> None:
    class Average(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).mean(dim=1)

    model = Average()
    head = HeadInput(model, 3)
    with head.recording():
        logits = model(torch.randn(4, 5, 6))
    assert torch.allclose(head.heads[0](head.features(logits)), logits, atol=1e-6)


def test_a_pass_in_parts_is_put_in_the_order_of_the_batch() -> None:
    model, x = MLP(), torch.randn(4, 6)
    head = HeadInput(model, 3)
    with head.recording():
        model(x)
    whole = head.features(model(x))
    with head.recording():
        model(x[[1, 3]])
        model(x[[0, 2]])
    # Batches of other sizes may be multiplied by other kernels.
    in_parts = head.features(model(x), torch.tensor([2, 0, 3, 1]))
    assert torch.allclose(in_parts, whole, rtol=1e-6, atol=1e-6 * whole.abs().max().item())
    assert (whole - whole.roll(1, 0)).abs().max() > 1e-2


class HeadFirst(nn.Module):
    """The layer that stands last in the code is not the last that runs."""

    def __init__(self, width: int, temperature: float = 1.0) -> None:
        super().__init__()
        self.out, self.projection, self.temperature = nn.Linear(width, 2), nn.Linear(6, width), temperature

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.projection(x).tanh()) / self.temperature


class InParts(MLP):
    """Its last layer runs on the rows of one kind, then on those of the other."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, kind = self.layers[:-1](x), torch.arange(len(x)) % 2 == 0
        logits = hidden.new_zeros(len(x), 3)
        logits[kind], logits[~kind] = self.layers[-1](hidden[kind]), self.layers[-1](hidden[~kind])
        return logits


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (HeadFirst(5), r"not clear which layer is the head: projection gives scores \(4, 5\) that are not the logits"),
        (HeadFirst(2), r"not clear which layer is the head: projection gives scores \(4, 2\) that are not the logits"),
        (InParts(), "runs 2 times in a forward pass, and what it gives is not the logits in the order of the batch"),
    ],
)
def test_features_of_another_layer_or_of_other_rows_are_refused(model: nn.Module, message: str) -> None:
    head = HeadInput(model)
    with head.recording():
        logits = model(torch.randn(4, 6))
    with pytest.raises(ValueError, match=message):
        head.features(logits)


def test_scores_that_are_scaled_behind_the_only_head_are_fine() -> None:
    model, x = HeadFirst(5, temperature=0.5), torch.randn(4, 6)
    head = HeadInput(model, 2)
    with head.recording():
        logits = model(x)
    assert torch.allclose(model.out(head.features(logits)) / 0.5, logits)


def test_what_cannot_be_right_is_refused() -> None:
    model, x = MLP(), torch.randn(4, 6)
    with pytest.raises(
        ValueError, match=r"MLP to end in a linear layer with 7 outputs.*: layers\.0 \(8\), layers\.2 \(3\)"
    ):
        HeadInput(model, 7)
    with pytest.raises(ValueError, match=r"Sequential to end in a linear layer with some outputs.*: none"):
        HeadInput(nn.Sequential(nn.ReLU()))
    head = HeadInput(model, 3)
    with head.recording():
        pass
    with pytest.raises(ValueError, match="Linear did not run"):
        head.features(model(x))
    with head.recording():
        model(x)
        model(x)
    with pytest.raises(ValueError, match="the 4 examples of the batch, got 8 rows"):
        head.features(model(x))
    with head.recording():
        model(x[:, None].expand(4, 5, 6) * torch.arange(5)[:, None])
    with pytest.raises(ValueError, match="runs on 5 positions per example"):
        head.features(torch.full((4, 3), 50.0))
    model.layers[0].requires_grad_(False)
    with head.recording():
        model(x)
    with pytest.raises(ValueError, match="do not depend on any trainable parameter"):
        head.features(model(x))
