"""Fixtures of all tests; nothing here touches the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import disable_progress_bars
from tiny import text_dataset, tiny_distilbert

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

disable_progress_bars()


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
