"""Models and data small enough to train in milliseconds."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer

predicts_one_class = pytest.mark.filterwarnings("ignore:A single class")
"""For tests that evaluate a network of a few steps: it says the same of every row, and a warning says so."""


def tiny_distilbert(num_labels: int = 2, dropout: float = 0.0, seed: int = 0, **config: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=64, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32,
            dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout, num_labels=num_labels, **config,
        )
    )  # fmt: skip


def with_lora(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """LoRA on the attention of a DistilBERT, its whole head trained along; B not zero, as it is at the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_lin", "v_lin"],
                        modules_to_save=["pre_classifier", "classifier"], lora_dropout=0.0)  # fmt: skip
    model = get_peft_model(model, config)
    return with_adapters_at_work(model, std=0.1)


def with_adapters_at_work(model: torch.nn.Module, std: float) -> torch.nn.Module:
    """The model with random numbers for the B of its LoRA, which is zero at the start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)
    return model


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


class NotedRows(torch.utils.data.Dataset):
    """Rows that tell which were read, in order."""

    def __init__(self, data: Dataset) -> None:
        self.data = data
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(int(index))
        return self.data[int(index)]


def parameters_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def image_dataset(size: int = 12, side: int = 32, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    return Dataset.from_dict(
        {
            "pixel_values": torch.randn(size, 3, side, side, generator=generator).tolist(),
            "labels": torch.randint(0, 2, (size,), generator=generator).tolist(),
            "group": [row % 2 for row in range(size)],
        }
    ).with_format("torch")


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]
