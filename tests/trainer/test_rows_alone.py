"""Networks whose batches are of unusual form, against a reference that runs each row alone through its own loss."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from datasets import Dataset
from tiny import parameters_of
from tiny_tokens import COMMON
from torch import Tensor, nn

from hf_cgd import GroupRobustConfig, GroupRobustTrainer, gradient_scope

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
WORDS, CHOICES, ROWS, BATCH, STEP_SIZE, RATE = 32, 4, 12, 6, 0.1, 0.05
GROUPS = [0, 1, 2, 0, 2, 2, 1, 1, 0, 2, 0, 1]


def choices() -> tuple[nn.Module, dict[str, Tensor]]:
    """Four answers to each example, padded; `num_labels` of the config is 2 and means nothing."""
    mask = (torch.arange(7) < torch.randint(3, 8, (ROWS, CHOICES, 1))).long()
    ids = torch.randint(3, WORDS, (ROWS, CHOICES, 7)) * mask
    network = tf.BertForMultipleChoice(tf.BertConfig(vocab_size=WORDS, max_position_embeddings=16, **SIZES))
    return network, {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(ROWS) % CHOICES}


def speech() -> tuple[nn.Module, dict[str, Tensor]]:
    """An encoder and decoder that do not tell how the decoder's inputs are made."""
    config = tf.WhisperConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=4, max_source_positions=10,
        max_target_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    labels = torch.randint(3, WORDS, (ROWS, 6)).masked_fill(torch.arange(6) >= torch.randint(2, 7, (ROWS, 1)), -100)
    return tf.WhisperForConditionalGeneration(config), {"input_features": torch.randn(ROWS, 4, 20), "labels": labels}


def videos() -> tuple[nn.Module, dict[str, Tensor]]:
    """As many frames as rows of a batch."""
    config = tf.TimesformerConfig(image_size=8, patch_size=4, num_frames=BATCH, **SIZES)
    pixels = torch.randn(ROWS, BATCH, 3, 8, 8)
    return tf.TimesformerForVideoClassification(config), {"pixel_values": pixels, "labels": torch.arange(ROWS) % 2}


NETWORKS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "choices": choices, "speech": speech, "videos": videos,
}  # fmt: skip


def trained_by_hand(network: nn.Module, rows: dict[str, Tensor], objective: str) -> tuple[Tensor, list[float]]:
    """Parameters and weights after two steps of SGD."""
    network = copy.deepcopy(network).train()
    scope = list(gradient_scope(network, 3).values())
    alpha = [1 / 3] * 3
    for start in range(0, ROWS, BATCH):
        ids = torch.tensor(GROUPS[start : start + BATCH])
        losses = torch.stack(
            [
                network(**{name: part[n : n + 1] for name, part in rows.items()})["loss"]
                for n in range(start, start + BATCH)
            ]
        )
        means = [losses[ids == group].mean() for group in range(3)]
        exponents = [mean.item() for mean in means]
        if objective == "cgd":
            grads = [torch.autograd.grad(mean, scope, retain_graph=True, allow_unused=True) for mean in means]
            flat = [torch.cat([part.flatten() for part in own if part is not None]).double() for own in grads]
            pairs = list(zip(exponents, flat, strict=True))
            exponents = [
                sum(math.sqrt(a * b) * torch.cosine_similarity(x, y, dim=0).item() for b, y in pairs) for a, x in pairs
            ]
        alpha = [own * math.exp(STEP_SIZE * exponent) for own, exponent in zip(alpha, exponents, strict=True)]
        alpha = [own / sum(alpha) for own in alpha]
        network.zero_grad()
        torch.stack([own * mean for own, mean in zip(alpha, means, strict=True)]).sum().backward()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    return parameters_of(network), alpha


@pytest.mark.parametrize("objective", ["group_dro", "cgd"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_run_is_that_of_rows_alone(tmp_path: Path, name: str, objective: str) -> None:
    torch.manual_seed(0)
    network, rows = NETWORKS[name]()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.5)
    weights, alpha = trained_by_hand(network, rows, objective)
    data = Dataset.from_dict({**{name: part.tolist() for name, part in rows.items()}, "group": GROUPS})
    options = {**COMMON, "per_device_train_batch_size": BATCH, "max_steps": 2, "learning_rate": RATE}
    args = GroupRobustConfig(str(tmp_path), objective=objective, step_size=STEP_SIZE, group_column="group", **options)
    run = GroupRobustTrainer(model=network, args=args, train_dataset=data)
    run.train()
    assert run.group_weights.tolist() == pytest.approx(alpha, rel=1e-6)
    torch.testing.assert_close(parameters_of(network), weights, rtol=1e-5, atol=1e-6)


def test_a_label_behind_the_last_choice_is_refused(tmp_path: Path) -> None:
    network, rows = choices()
    rows["labels"][3] = CHOICES
    data = Dataset.from_dict({**{name: part.tolist() for name, part in rows.items()}, "group": GROUPS})
    args = GroupRobustConfig(str(tmp_path), group_column="group", use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"row 3 of the training dataset: expected a class in 0\.\.3, got 4"):
        GroupRobustTrainer(model=network, args=args, train_dataset=data)
