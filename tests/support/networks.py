"""Small networks of many kinds, whose group gradients the engines are compared on."""

from collections.abc import Callable
from typing import Any

import timm
import torch
import torch.nn.functional as F
import transformers as tf
from tiny import tiny_distilbert
from torch import Tensor, nn

BERT_LIKE = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, vocab_size=99, pad_token_id=0
)
DEBERTA = dict(
    BERT_LIKE, relative_attention=True, position_buckets=8, norm_rel_ebd="layer_norm", conv_kernel_size=3,
    conv_act="gelu", pos_att_type=["p2c", "c2p"], pooler_hidden_size=32,
)  # fmt: skip
SPECIAL = dict(bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
BATCH = 6


class Logits(nn.Module):
    """A text model as a function of ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        key = "pixel_values" if inputs.is_floating_point() else "input_ids"
        outputs = self.model(**{key: inputs}) if hasattr(self.model, "config") else self.model(inputs)
        return getattr(outputs, "logits", outputs)


class FrozenNorms(Logits):
    def train(self, mode: bool = True) -> "FrozenNorms":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 8)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0][:, -1])


class PooledEncoder(nn.Module):
    """An encoder without a head of its own."""

    def __init__(self, encoder: tf.PreTrainedModel) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.d_model, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(input_ids=ids).last_hidden_state.mean(dim=1))


class Perceptron(nn.Sequential):
    """Shared and tied layers, an in-place activation, and a parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.first, self.shared, self.again = (nn.Linear(8, 8) for _ in range(4))
        self.again.weight = self.shared.weight
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.relu(self.again(self.shared(self.relu(self.shared(self.first(x)))))))


def ids() -> Tensor:
    return torch.randint(3, 99, (BATCH, 9))


def images(side: int = 32) -> Tensor:
    return torch.randn(BATCH, 3, side, side)


def resnet() -> tf.PreTrainedModel:
    return tf.ResNetForImageClassification(
        tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, layer_type="basic")
    )


# Model, input, and whether the single pass is exact with a scope of three layers.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], bool]] = {
    "BERT": (lambda: Logits(tf.BertForSequenceClassification(tf.BertConfig(**BERT_LIKE))), ids, True),
    "RoBERTa": (lambda: Logits(tf.RobertaForSequenceClassification(tf.RobertaConfig(**BERT_LIKE))), ids, True),
    "DistilBERT": (lambda: Logits(tiny_distilbert(dropout=0.1)), lambda: ids() % 64, True),
    "DeBERTa-v2": (
        lambda: Logits(tf.DebertaV2ForSequenceClassification(tf.DebertaV2Config(**{**DEBERTA, "conv_kernel_size": 0}))),
        ids,
        False,
    ),
    "ModernBERT": (
        lambda: Logits(tf.ModernBertForSequenceClassification(tf.ModernBertConfig(**BERT_LIKE, **SPECIAL))),
        ids,
        True,
    ),
    "GPT-2": (
        lambda: Logits(
            tf.GPT2ForSequenceClassification(
                tf.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=1)
            )
        ),
        ids,
        True,
    ),
    # The first block's position biases go to all others, round the cut.
    "T5 encoder": (
        lambda: PooledEncoder(
            tf.T5EncoderModel(tf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, vocab_size=99))
        ),
        ids,
        False,
    ),
    "ViT": (
        lambda: Logits(
            tf.ViTForImageClassification(
                tf.ViTConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
                             image_size=32, patch_size=8)
            )
        ),
        images,
        True,
    ),
    "Swin": (
        lambda: Logits(
            tf.SwinForImageClassification(
                tf.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=2)
            )
        ),
        images,
        False,
    ),
    "ConvNeXt": (
        lambda: Logits(
            tf.ConvNextForImageClassification(tf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, image_size=32))
        ),
        images,
        True,
    ),
    "ResNet": (lambda: Logits(resnet()), lambda: images(64), False),
    "ResNet, frozen norms": (lambda: FrozenNorms(resnet()), lambda: images(64), True),
    # In-place activations behind the convolutions.
    "timm resnet, frozen norms": (
        lambda: FrozenNorms(timm.create_model("test_resnet", num_classes=2)),
        lambda: images(64),
        True,
    ),
    "timm resnet, channels last": (
        lambda: FrozenNorms(timm.create_model("test_resnet", num_classes=2)).to(memory_format=torch.channels_last),
        lambda: images(64),
        True,
    ),
    "timm vit": (lambda: timm.create_model("test_vit", num_classes=2, img_size=32), images, True),
    "timm convnext": (lambda: timm.create_model("test_convnext", num_classes=2), lambda: images(64), True),
    "timm efficientnet": (lambda: timm.create_model("test_efficientnet", num_classes=2), lambda: images(64), False),
    "timm resnet": (lambda: timm.create_model("test_resnet", num_classes=2), lambda: images(64), False),
    "LSTM": (Recurrent, ids, True),
    "MLP": (Perceptron, lambda: torch.randn(BATCH, 8), True),
    "Linear": (lambda: nn.Linear(8, 2), lambda: torch.randn(BATCH, 8), True),
}  # fmt: skip
GROUPS = {1: [3] * BATCH, 2: [0, 4, 4, 0, 4, 4], 3: [2, 1, 2, 0, 2, 1], 6: [5, 3, 1, 0, 2, 4]}


def losses_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), torch.tensor([0, 1, 1, 0, 1, 0]), reduction="none")


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, make_inputs, _ = MODELS[name]
    model, inputs = make().to(dtype).train(), make_inputs()
    return model, inputs.to(dtype) if inputs.is_floating_point() else inputs


def flat(gradients: Any, parameters: list[nn.Parameter]) -> Tensor:
    parts = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
    return torch.cat([part.flatten() for part in parts])


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    return bool((one - other).abs().max() <= tolerance * max(one.abs().max().item(), 1e-12))
