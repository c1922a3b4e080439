"""Models and data small enough to train in milliseconds."""

from typing import Any

import torch
from datasets import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification


def tiny_distilbert(num_labels: int = 2, dropout: float = 0.0, seed: int = 0, **config: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=64, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32,
            dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout, num_labels=num_labels, **config,
        )
    )  # fmt: skip


def text_rows(size: int = 16, length: int = 8, groups: int = 2, seed: int = 0) -> dict[str, list[Any]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, 64, (size, length), generator=generator).tolist(),
        "attention_mask": [[1] * length] * size,
        "labels": torch.randint(0, 2, (size,), generator=generator).tolist(),
        "group": [row % groups for row in range(size)],
    }


def text_dataset(size: int = 16, **kwargs: Any) -> Dataset:
    return Dataset.from_dict(text_rows(size, **kwargs))


def parameters_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])
