"""The contract of benchmark tasks: one that a stranger adds here, and those of the registry held against it."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from made_files import made_mnist, write_mnist

from hf_cgd import GroupRobustConfig, GroupRobustWarning
from hf_cgd.cli import task_options
from hf_cgd.metrics.group_metrics import metric_names
from hf_cgd.objectives import OBJECTIVES
from hf_cgd.tasks import TASKS, Hyperparameters, Task, TaskInfo, build_task, colored_mnist, load_task

RECIPE_OPTIONS = {"model", "max_length", "pretrained", "lr_decay_per_epoch"}
KNOWN_METRICS = set(metric_names(None, ["a"]))


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

    def _from_files(self, folder: Path) -> DatasetDict:
        where = (folder / "text").read_text() if (folder / "text").exists() else folder.name
        rows = {"text": [where] * self.rows, "label": [self.seed] * self.rows, "hospital": ["a"] * self.rows}
        return DatasetDict(train=Dataset.from_dict(rows))

    def _write_demo(self, folder: Path) -> None:
        (folder / "text").write_text("made up")


def test_a_task_of_one_s_own(tmp_path: Path) -> None:
    task = Hospitals(seed=1, rows=2)
    folder = tmp_path / "own"
    folder.mkdir()
    for splits in (task.load(folder), task.load(data_dir=folder), task.load("files", folder), task.load(str(folder))):
        assert splits["train"]["text"][:] == ["own", "own"] and splits["train"]["label"][:] == [1, 1]
    assert task.load("demo")["train"]["text"][:] == ["made up", "made up"]
    assert task.load("demo", tmp_path / "new")["train"]["text"][:] == ["made up", "made up"]
    assert task.load(tmp_path / "new")["train"]["text"][:] == ["made up", "made up"], "written to be read again"
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
        ({"source": "wilds"}, "source of hospitals must be one of 'files', 'demo', got 'wilds'"),
        ({"source": "files"}, "data_dir is the folder of the files of source='files', got none"),
        ({"source": "FOLDER", "data_dir": "FOLDER"}, "is the folder of the data and so is data_dir="),
        ({"source": "demo", "data_dir": "FOLDER"}, "FOLDER is not empty; made-up data wants a new folder"),
    ],
)
def test_sources_that_do_not_fit(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER/mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=message):
        Hospitals().load(**arguments)
    assert [path.name for path in (tmp_path / "FOLDER").iterdir()] == ["mine.txt"]


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected one of 'files', 'demo' or a folder .* no folder 'wlids'"):
        Hospitals().load("wlids")
    assert not list(tmp_path.iterdir())


def test_other_sizes_than_published_are_warned_of(tmp_path: Path) -> None:
    class Counted(Hospitals):
        @property
        def info(self) -> TaskInfo:
            return replace(super().info, train_counts={"a": 4})

    Counted(rows=4).load(tmp_path)
    with pytest.warns(GroupRobustWarning, match=r"have \{'a': 3\} examples; the published data has \{'a': 4\}"):
        Counted(rows=3).load(tmp_path)
    Counted(rows=3).load("demo")


def test_other_splits_than_published_are_warned_of(tmp_path: Path) -> None:
    class Counted(Hospitals):
        @property
        def info(self) -> TaskInfo:
            return replace(super().info, split_counts={"train": 4})

    Counted(rows=4).load(tmp_path)
    with pytest.warns(GroupRobustWarning, match=r"have \{'train': 3\} rows; the published data has \{'train': 4\}"):
        Counted(rows=3).load(tmp_path)
    Counted(rows=3).load("demo")


ROWS = {
    ("povertymap", "fold", "A"): 19_669 - 1_000,
    ("multinli", "split", "group_dro"): 412_349,
    ("multinli", "split", "genres"): 412_349,
}
"""By task and setting; of PovertyMap without the split of which copies have other numbers."""


@pytest.mark.parametrize(("name", "setting", "value"), ROWS)
def test_published_splits_of_a_setting_are_all_rows(name: str, setting: str, value: str) -> None:
    info = build_task(name, **{setting: value}).info
    assert sum(info.split_counts.values()) == ROWS[name, setting, value]
    left_out = {"id_validation"} if name == "povertymap" else set()
    assert set(info.split_counts) == set(info.splits) - left_out


def test_settings_without_published_splits_warn_of_none() -> None:
    for name, options in (("povertymap", {"fold": "B"}), ("multinli", {"split": "regenerated"})):
        assert build_task(name, **options).info.split_counts == {}
    (size,) = build_task("fmow").info.split_counts.values()
    assert f"of which {size:,} train" in build_task("fmow").info.size


SIZES = {"waterbirds": 11_788, "celeba": 202_599, "civilcomments": 448_000, "camelyon17": 455_954}


@pytest.mark.parametrize("name", SIZES)
def test_published_splits_are_all_rows_and_their_training_groups(name: str) -> None:
    info = build_task(name).info
    assert sum(info.split_counts.values()) == SIZES[name] and f"{SIZES[name]:,}" in info.size
    assert set(info.split_counts) == set(info.splits)
    assert info.train_counts is None or sum(info.train_counts.values()) == info.split_counts["train"]


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
def test_the_registry_keeps_the_contract(name: str) -> None:
    task = build_task(name)
    info = task.info
    assert info.name == task.name == name
    assert {info.metric, info.average_metric} <= KNOWN_METRICS and not info.lower_is_better
    assert "files" in info.sources and info.splits[0] == "train" and {"validation", "test"} <= set(info.splits)
    assert ("hub" in info.sources) == (info.hub is not None) and ("wilds" in info.sources) == (info.wilds is not None)
    assert info.licence and info.citation and info.layout and info.places and info.size and info.presets
    assert "paper" in info.published
    for published in info.published.values():
        assert published.cells.keys() <= OBJECTIVES.keys()
        assert all(len(cells) == len(published.metrics) for cells in published.cells.values())
        for named in published.metrics:
            split, _, metric = named.rpartition(":")
            assert metric in KNOWN_METRICS and (split or "test") in info.splits
    options = {field.name for field in fields(GroupRobustConfig)} | RECIPE_OPTIONS
    for source in info.hyperparameters:
        for objective in ("erm", "cgd"):
            assert task_options(task, source, objective).keys() <= options


@pytest.mark.parametrize("name", [name for name in TASKS if "demo" in TASKS[name]().info.sources])
def test_made_up_data_has_the_promised_columns(name: str) -> None:
    splits, info = load_task(name, source="demo")
    assert tuple(splits) == info.splits
    for rows in splits.values():
        assert {"label", *info.group_columns, *(info.evaluation_group_columns or ())} <= set(rows.column_names)
        if info.label_names:
            assert tuple(rows.features["label"].names) == info.label_names
