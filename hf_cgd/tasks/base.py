"""What every benchmark says of itself and gives: the contract that a task fulfils, one class a benchmark."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from datasets import DatasetDict

from hf_cgd.metrics import lower_is_better

DataSource = Literal["hub", "files", "demo"]
"""Where data comes from: the Hub, a folder with the benchmark's own files, or made up on the spot (tiny, offline)."""
DATA_SOURCES: tuple[DataSource, ...] = get_args(DataSource)


@dataclass(frozen=True)
class Hyperparameters:
    """Options of a recipe as one source states them: `shared` by all objectives, and more of single ones."""

    shared: Mapping[str, Any]
    by_objective: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskInfo:
    """What is known of a benchmark.

    Attributes:
        name: as in `hf_cgd.tasks.TASKS`.
        group_columns: columns whose values make the training groups.
        label_names: names of the classes in the order of their ids; () for a regression.
        metric: what a run is judged by, a name of `hf_cgd.metrics.group_metrics`.
        splits: names of the splits that `load` gives.
        sources: where its data can come from.
        licence, citation: of the data.
        hub_id: of the data on the Hub, None where it is not there.
        evaluation_group_columns: columns to evaluate by, None for the training groups. Several of them are columns of
            zeros and ones, one for each of the groups, which may overlap.
        hyperparameters: by the source that states them, "paper" for the CGD paper.
        published: the CGD paper's cells by objective, average and worst group.
    """

    name: str
    group_columns: tuple[str, ...]
    label_names: tuple[str, ...]
    metric: str
    splits: tuple[str, ...]
    sources: tuple[DataSource, ...]
    licence: str
    citation: str
    hub_id: str | None = None
    evaluation_group_columns: tuple[str, ...] | None = None
    hyperparameters: Mapping[str, Hyperparameters] = field(default_factory=dict)
    published: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def lower_is_better(self) -> bool:
        """The direction of the metric."""
        return lower_is_better(self.metric)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A benchmark with its settings, which are the fields of its class; `seed` is that of every draw of the data.

    A task is added as one file with one class, and one line in `hf_cgd.tasks.TASKS`. The class has `info` and `_read`.
    """

    name: ClassVar[str]
    seed: int = 0

    @property
    @abstractmethod
    def info(self) -> TaskInfo:
        """What is known of the benchmark in these settings; reads no data."""

    @abstractmethod
    def _read(self, source: DataSource, data_dir: Path | None) -> DatasetDict:
        """The splits from one of `info.sources`; `data_dir` is there for "files" and None for the others."""

    def load(self, data_dir: str | Path | None = None, source: DataSource | None = None) -> DatasetDict:
        """The splits `info.splits`, with the inputs, "label", the group columns and whatever else the data has.

        Args:
            data_dir: folder of the files, for the source "files".
            source: None for "files" with a `data_dir` and "hub" without. Nothing is downloaded for any but "hub".

        Raises:
            ValueError: a source that the task does not have, or that does not go with `data_dir`.
            FileNotFoundError, ConnectionError: data that is not there; the message says what to do.
        """
        source = source or ("hub" if data_dir is None else "files")
        if source not in self.info.sources:
            raise ValueError(f"source of {self.name} must be one of {_listed(self.info.sources)}, got {source!r}.")
        if (source == "files") != (data_dir is not None):
            raise ValueError(
                f"data_dir is the folder of the files of source='files', got data_dir={str(data_dir)!r} with "
                f"source={source!r}. Give both or neither."
            )
        return self._read(source, None if data_dir is None else Path(data_dir))

    def hyperparameters(self, source: str = "paper", *, objective: str) -> dict[str, Any]:
        """Settings of a run by the source that states them, as options of a recipe.

        Raises:
            ValueError: a source that states none for this task; the message lists those that do.
        """
        known = self.info.hyperparameters
        if source not in known:
            raise ValueError(f"hyperparameters of {self.name} are those of {_listed(known)}, got {source!r}.")
        return {**known[source].shared, **known[source].by_objective.get(objective, {})}


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
