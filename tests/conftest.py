"""Small models and data that every test can build in milliseconds; nothing here touches the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

disable_progress_bars()


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


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., GroupRobustConfig]:
    """A config for short, quiet runs on the CPU: batches of 4, SGD, constant learning rate, no clipping."""

    def build(**changes: Any) -> GroupRobustConfig:
        quiet = dict(
            output_dir=str(tmp_path / "out"), group_column="group", per_device_train_batch_size=4,
            per_device_eval_batch_size=4, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
            max_grad_norm=0, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, max_steps=3,
            disable_tqdm=True, seed=0,
        )  # fmt: skip
        return GroupRobustConfig(**{**quiet, **changes})

    return build


@pytest.fixture
def trainer(config: Callable[..., GroupRobustConfig]) -> Callable[..., GroupRobustTrainer]:
    """A trainer of a tiny DistilBERT on 16 rows in two groups; options of the config go in `args`."""

    def build(args: dict[str, Any] | None = None, **kwargs: Any) -> GroupRobustTrainer:
        parts: dict[str, Any] = {"train_dataset": text_dataset()}
        parts.update(kwargs)
        if "model" not in parts and "model_init" not in parts:
            parts["model"] = tiny_distilbert()
        return GroupRobustTrainer(args=config(**(args or {})), **parts)

    return build


def parameters_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])
