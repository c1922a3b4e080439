"""Fixtures of all tests. conftest.py loads them where tests are run."""

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine
import numpy as np
import pytest
import torch
from datasets import disable_progress_bars
from tiny import text_dataset, tiny_distilbert

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

disable_progress_bars()
torch.set_num_threads(machine.THREADS)


@pytest.fixture(autouse=True, scope="module")
def freeze_what_is_left() -> Iterator[None]:
    """What a file's tests imported stays, and need not be looked through either."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Random numbers do not depend on which tests ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


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
