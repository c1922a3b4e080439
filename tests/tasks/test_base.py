"""The contract of benchmark tasks: one that a stranger adds here, and those of the registry held against it."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from made_files import made_mnist, write_mnist

from hf_cgd import GroupRobustConfig
from hf_cgd.cli import task_options
from hf_cgd.metrics import named_metrics
from hf_cgd.objectives import OBJECTIVES
from hf_cgd.tasks import TASKS, DataSource, Hyperparameters, Task, TaskInfo, build_task, colored_mnist, load_task

RECIPE_OPTIONS = {"model", "max_length"}


@dataclass(frozen=True, kw_only=True)
class Hospitals(Task):
    """Trained on hospitals, evaluated on wards that overlap, judged by a loss."""

    name = "hospitals"
    rows: int = 4

    @property
    def info(self) -> TaskInfo:
        return TaskInfo(
            name=self.name,
            group_columns=("hospital",),
            evaluation_group_columns=("surgery", "nights"),
            label_names=("well", "ill"),
            metric="worst_group_loss",
            splits=("train",),
            sources=("files", "demo"),
            licence="made up",
            citation="nobody",
            hyperparameters={
                "paper": Hyperparameters({"learning_rate": 0.1}, {"cgd": {"learning_rate": 0.2}}),
                "wilds1.2": Hyperparameters({"learning_rate": 0.3}),
            },
        )

    def _read(self, source: DataSource, data_dir: Path | None) -> DatasetDict:
        where = "made up" if data_dir is None else data_dir.name
        return DatasetDict(train=Dataset.from_dict({"text": [where] * self.rows, "label": [self.seed] * self.rows}))


def test_a_task_of_one_s_own() -> None:
    task = Hospitals(seed=1, rows=2)
    assert task.load("a/folder")["train"]["text"][:] == ["folder", "folder"]
    assert task.load(source="demo")["train"]["text"][:] == ["made up", "made up"]
    assert task.load("folder", "files")["train"]["label"][:] == [1, 1]
    assert task.hyperparameters(objective="cgd") == {"learning_rate": 0.2}
    assert task.hyperparameters(objective="erm") == {"learning_rate": 0.1}
    assert task.hyperparameters("wilds1.2", objective="cgd") == {"learning_rate": 0.3}
    assert task.info.lower_is_better
    options = task_options(task, "paper", "cgd")
    assert options["group_column"] == ["hospital"] and options["eval_group_column"] == ["surgery", "nights"]
    assert options["metric_for_best_model"] == "worst_group_loss" and options["learning_rate"] == 0.2
    config = GroupRobustConfig(use_cpu=True, report_to="none", **options)
    assert config.greater_is_better is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "source of hospitals must be one of 'files', 'demo', got 'hub'"),
        ({"source": "files"}, "data_dir is the folder .* got data_dir='None' with source='files'"),
        ({"data_dir": "x", "source": "demo"}, "got data_dir='x' with source='demo'"),
    ],
)
def test_sources_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hospitals().load(**arguments)


def test_names_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="task must be one of 'colored_mnist', .* got 'mnist'"):
        build_task("mnist")
    with pytest.raises(ValueError, match=r"settings of colored_mnist are seed, ratio, .* got rato\."):
        build_task("colored_mnist", rato=3)
    with pytest.raises(
        ValueError, match="hyperparameters of hospitals are those of 'paper', 'wilds1.2', got 'wilds2'"
    ):
        Hospitals().hyperparameters("wilds2", objective="cgd")


def test_load_task_gives_what_its_parts_give(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ratio": 4, "validation_size": 10, "seed": 3}
    splits, info = load_task("colored_mnist", write_mnist(tmp_path), **settings)
    expected = colored_mnist.splits_of(made_mnist(), **settings)
    assert {name: rows.with_format(None).to_dict() for name, rows in splits.items()} == {
        name: rows.with_format(None).to_dict() for name, rows in expected.items()
    }
    assert info.label_names == ("5-9", "0-4") and info.group_columns == ("group",)


@pytest.mark.parametrize("name", TASKS)
def test_the_registry_keeps_the_contract(name: str, tmp_path: Path) -> None:
    task = build_task(name)
    info = task.info
    assert info.name == task.name == name
    measured = named_metrics(np.array([0, 1]), np.array([0, 1]), np.array([0, 1]), ["a", "b"], losses=np.ones(2))
    assert info.metric in measured and not info.lower_is_better
    assert info.published.keys() <= OBJECTIVES.keys()
    options = {field.name for field in fields(GroupRobustConfig)} | RECIPE_OPTIONS
    for source in info.hyperparameters:
        for objective in ("erm", "cgd"):
            assert task_options(task, source, objective).keys() <= options


@pytest.mark.parametrize("name", [name for name in TASKS if "demo" in TASKS[name]().info.sources])
def test_made_up_data_has_the_promised_columns(name: str) -> None:
    splits, info = load_task(name, source="demo")
    assert tuple(splits) == info.splits
    for rows in splits.values():
        assert {"label", *info.group_columns} <= set(rows.column_names)
        assert tuple(rows.features["label"].names) == info.label_names
