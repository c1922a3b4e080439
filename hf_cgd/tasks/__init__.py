"""The benchmarks, a file with a class each: data, groups, metric, published numbers and hyperparameters."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from datasets import DatasetDict

from hf_cgd.tasks.base import DataSource, HubData, Hyperparameters, Published, Search, Task, TaskInfo, WildsData
from hf_cgd.tasks.camelyon17 import Camelyon17
from hf_cgd.tasks.celeba import CelebA
from hf_cgd.tasks.civilcomments import CivilComments
from hf_cgd.tasks.colored_mnist import ColoredMNIST
from hf_cgd.tasks.fmow import FMoW
from hf_cgd.tasks.mnist_settings import MNISTSettings
from hf_cgd.tasks.multinli import MultiNLI
from hf_cgd.tasks.povertymap import PovertyMap
from hf_cgd.tasks.waterbirds import Waterbirds

TASKS: Mapping[str, type[Task]] = MappingProxyType(
    {
        ColoredMNIST.name: ColoredMNIST,
        MNISTSettings.name: MNISTSettings,
        MultiNLI.name: MultiNLI,
        Waterbirds.name: Waterbirds,
        CelebA.name: CelebA,
        CivilComments.name: CivilComments,
        PovertyMap.name: PovertyMap,
        FMoW.name: FMoW,
        Camelyon17.name: Camelyon17,
    }
)
"""Every benchmark by name."""


def build_task(name: str, **settings: Any) -> Task:
    """A benchmark in these settings, the fields of its class.

    Raises:
        ValueError: an unknown name or setting; the message lists what there is.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(map(repr, TASKS))}, got {name!r}.")
    known = [field.name for field in fields(TASKS[name])]
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        raise ValueError(f"The settings of {name} are {', '.join(known)}, got {', '.join(unknown)}.")
    return TASKS[name](**settings)


def load_task(
    name: str,
    source: DataSource | str | Path | None = None,
    data_dir: str | Path | None = None,
    **settings: Any,
) -> tuple[DatasetDict, TaskInfo]:
    """The splits of a benchmark and what is known of it, see `Task.load` and `TaskInfo`.

        splits, info = load_task("colored_mnist", "my/mnist", ratio=100)
        splits, info = load_task("waterbirds", "wilds", "my/wilds/folders")

    Raises:
        ValueError, FileNotFoundError, ConnectionError, ImportError: see `build_task` and `Task.load`.
    """
    task = build_task(name, **settings)
    return task.load(source, data_dir), task.info


__all__ = [
    "TASKS",
    "DataSource",
    "HubData",
    "Hyperparameters",
    "Published",
    "Search",
    "Task",
    "TaskInfo",
    "WildsData",
    "build_task",
    "load_task",
]
