"""A run for the tests of this folder, and a Hub on localhost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hub_server import HubServer, at_this_hub
from tiny import text_rows, tiny_distilbert

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

NAMES = ('a|b "q"', "c: $5$ `d`", "éü: - [x](y)", "<script>alert(1)</script>\nnext")
"""Group names that are markup in some language."""


def named_groups(size: int = 32, seed: int = 0) -> Dataset:
    rows = text_rows(size, groups=len(NAMES), seed=seed)
    return Dataset.from_dict(rows | {"group": [NAMES[group] for group in rows["group"]]})


def build_trainer(folder: Path, args: dict[str, Any] | None = None, **kwargs: Any) -> GroupRobustTrainer:
    """A trainer of a tiny DistilBERT with names for its classes, on groups with names that are markup."""
    config = GroupRobustConfig(
        **{
            "output_dir": str(folder), "group_column": "group", "objective": "cgd", "step_size": 0.5,
            "per_device_train_batch_size": 8, "learning_rate": 0.01, "max_steps": 4, "save_strategy": "no",
            "use_cpu": True, "report_to": [], "disable_tqdm": True, **(args or {}),
        }
    )  # fmt: skip
    if "model" not in kwargs:
        labels = {"id2label": {0: "no", 1: "yes | $"}, "label2id": {"no": 0, "yes | $": 1}}
        kwargs["model"] = tiny_distilbert(**labels)
    data = {"train_dataset": named_groups(), "eval_dataset": named_groups(seed=1)}
    return GroupRobustTrainer(args=config, **{**data, **kwargs})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupRobustTrainer]:
    """A trainer after training, evaluation and its card."""
    trainer = build_trainer(tmp_path_factory.mktemp("runs") / "my model: $1|2")
    trainer.train()
    trainer.evaluate()
    trainer.create_model_card()
    yield trainer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub on localhost that huggingface_hub takes for the real one."""
    with at_this_hub(monkeypatch, tmp_path) as server:
        yield server


Hub = HubServer
Build = Callable[..., GroupRobustTrainer]
