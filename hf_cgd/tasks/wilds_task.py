"""Benchmarks whose own layout is that of the `wilds` package, which splits and groups them."""

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import DatasetDict, Features

from hf_cgd.tasks.base import Task
from hf_cgd.tasks.raw_files import base_folder, by_split
from hf_cgd.tasks.wilds_source import reading_with_wilds, split_names, wilds_dataset

SAMPLED: Mapping[str, Mapping[str, Any]] = {
    **{name: {"group_sampling": "weighted"} for name in ("group_dro", "cgd")},
    "irm": {"group_sampling": "balanced", "penalty_weight": 1.0},
    "coral": {"group_sampling": "balanced", "penalty_weight": 0.1},
}
"""Groups drawn equally often, with replacement; for penalties as many of each in every batch. (The package draws a few
whole groups for a batch of these: 8 countries, 8 years, 2 hospitals.)"""


@dataclass(frozen=True, kw_only=True)
class WildsTask(Task):
    """A task with `metadata`, `folders`, `wilds_class`, `_check` and `_columns`.

    Both "wilds" (a folder as the package unpacks it, in its root) and "files" (the same files in a folder of any name)
    go through the class of the package, so that splits and metadata are the package's own.
    """

    metadata: ClassVar[str]
    """The file with the table."""
    folders: ClassVar[tuple[str, ...]]
    """Names of the unpacked archive, which may lie in the folder that was given."""
    wilds_class: ClassVar[tuple[str, str]]
    """Module and name of the class."""

    @property
    def _wilds_options(self) -> dict[str, Any]:
        """Of that class."""
        return {}

    @abstractmethod
    def _check(self, folder: Path) -> None:
        """Raise a ValueError that names the row where the package would take what stands there for something else."""

    @abstractmethod
    def _columns(self, dataset: Any) -> tuple[Mapping[str, Any], Features]:
        """The columns of all rows, and their types."""

    def _from_wilds(self, root: Path) -> DatasetDict:
        folder = root / self.folders[0]
        if (folder / self.metadata).is_file():
            # Before the package stumbles over it, or does not.
            self._check(folder)
        return self._splits(wilds_dataset(self.info, root, **self._wilds_options))

    def _from_files(self, folder: Path) -> DatasetDict:
        folder = base_folder(self.info, folder, self.metadata, self.folders)
        self._check(folder)
        module, name = self.wilds_class
        with reading_with_wilds(self.info, folder):
            kind: Any = getattr(importlib.import_module(module), name)
            # The package asks for a folder of a certain name with a file that says its version, and makes it.
            in_place = type(name, (kind,), {"initialize_data_dir": lambda *_: str(folder)})
            dataset = in_place(**self._wilds_options)
        return self._splits(dataset)

    def _splits(self, dataset: Any) -> DatasetDict:
        columns, features = self._columns(dataset)
        names = split_names(self.info, dataset)
        split = np.asarray(dataset.split_array).astype(np.int64)
        # Rows of no split, such as training images of later years.
        rows = np.flatnonzero(split >= 0)
        if len(rows) < len(split):
            columns = {name: _taken(values, rows) for name, values in columns.items()}
        return by_split(columns, split[rows], names, features, dataset.data_dir)


def _taken(values: Any, rows: np.ndarray) -> Any:
    return values.take(rows) if hasattr(values, "take") else [values[row] for row in rows]
