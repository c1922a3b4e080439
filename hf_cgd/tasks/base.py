"""What every benchmark says of itself and gives: the contract that a task fulfils, one class a benchmark."""

import logging
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from datasets import DatasetDict

from hf_cgd.data.columns import read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.image_preparation import ImagePreparation
from hf_cgd.data.images import opened_image
from hf_cgd.metrics import lower_is_better
from hf_cgd.monitors import GroupRobustWarning

logger = logging.getLogger(__name__)

DataSource = Literal["hub", "wilds", "files", "demo"]
"""Where data comes from: the Hub, the `wilds` package's folder, a folder in the benchmark's own layout, or made up."""
DATA_SOURCES: tuple[DataSource, ...] = get_args(DataSource)
InputKind = Literal["text", "image", "pixels"]
"""What the inputs are: texts, images that are opened on reading, or `pixel_values` that the dataset itself gives."""
WILDS_ROOT = "data"
"""Where the `wilds` package looks for its folders unless it is told otherwise."""
_DEMO_FOLDERS: list[Any] = []


@dataclass(frozen=True)
class HubData:
    """A dataset on the Hub: its id, its configuration, and the commit that is read (None: the newest)."""

    id: str
    config: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class WildsData:
    """A dataset of the `wilds` package: its name there, and its splits {their name: our name}."""

    name: str
    splits: Mapping[str, str]


@dataclass(frozen=True)
class Hyperparameters:
    """Options of a recipe as one source states them: `shared` by all objectives, and more of single ones.

    `images` is how that source prepares images, None where there are none to prepare.
    """

    shared: Mapping[str, Any]
    by_objective: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    images: ImagePreparation | None = None


@dataclass(frozen=True)
class Published:
    """Numbers that a source reports, as it prints them.

    Attributes:
        metrics: one for each cell; of the test split, or of another one, "id_test:worst_group_pearson".
        cells: {objective: cells}, "" for one that is not reported.
    """

    metrics: tuple[str, ...]
    cells: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Search:
    """What the CGD paper tried on a benchmark.

    Attributes:
        objectives: of its table, in its order.
        values: {option: values}, one of which is chosen by validation.
        seeds: how many runs it averages over.
        options: further options of a recipe, the same in all runs.
    """

    objectives: tuple[str, ...]
    values: Mapping[str, tuple[Any, ...]]
    seeds: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskInfo:
    """What is known of a benchmark.

    Attributes:
        name: as in `hf_cgd.tasks.TASKS`.
        group_columns: columns whose values make the training groups.
        label_names: names of the classes in the order of their ids; () for a regression.
        metric: what a run is judged by, a name of `hf_cgd.metrics.named_metrics`.
        splits: names of the splits that `load` gives: "train", "validation", "test" and further ones to report.
        sources: where its data can come from.
        licence, citation: of the data.
        kind: what the inputs are.
        inputs: columns of the inputs, two for pairs of texts.
        image_format: of "pixels" in timm's terms (`input_size`, `mean`, `std`, `crop_pct`); of "image" `in_chans`.
        average_metric: what the benchmark reports as the average.
        evaluation_group_columns: columns to evaluate by, None for the training groups. Several of them are columns of
            zeros and ones, one for each of the groups, which may overlap; an example may be in none.
        hub: the data on the Hub, None where it is not there.
        wilds: the data in the `wilds` package, None where that does not have it.
        layout: the files of the source "files", and how they lie.
        places: where they can be had.
        size: of the data, in rows and bytes.
        train_counts: published sizes of the training groups by name, None where there are none. Other sizes are warned
            of, except of made-up data.
        split_counts: published sizes of splits by name, in rows; warned of in the same way.
        hyperparameters: by the source that states them: "paper" (the CGD paper), "group_dro" (the code of Sagawa et
            al.), "wilds1.2" and "wilds2.0" (the examples of that version), "demo".
        published: numbers by the source that reports them; "paper" is the CGD paper.
        caveat: what keeps numbers in these settings from comparing with the published ones, "" for nothing.
        search: what the CGD paper tried, None where it does not say.
    """

    name: str
    group_columns: tuple[str, ...]
    label_names: tuple[str, ...]
    metric: str
    splits: tuple[str, ...]
    sources: tuple[DataSource, ...]
    licence: str
    citation: str
    kind: InputKind = "text"
    inputs: tuple[str, ...] = ("text",)
    image_format: Mapping[str, Any] = field(default_factory=dict)
    average_metric: str = "accuracy"
    evaluation_group_columns: tuple[str, ...] | None = None
    hub: HubData | None = None
    wilds: WildsData | None = None
    layout: str = ""
    places: tuple[str, ...] = ()
    size: str = ""
    train_counts: Mapping[str, int] | None = None
    split_counts: Mapping[str, int] = field(default_factory=dict)
    hyperparameters: Mapping[str, Hyperparameters] = field(default_factory=dict)
    published: Mapping[str, Published] = field(default_factory=dict)
    caveat: str = ""
    search: Search | None = None

    @property
    def lower_is_better(self) -> bool:
        """The direction of the metric."""
        return lower_is_better(self.metric)

    @property
    def presets(self) -> tuple[str, ...]:
        """The sources of hyperparameters, without that of made-up data; the first is a recipe's default."""
        return tuple(name for name in self.hyperparameters if name != "demo")


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A benchmark with its settings, which are the fields of its class; `seed` is that of every draw of the data.

    A task is added as one file with one class, and one line in `hf_cgd.tasks.TASKS`. The class has `info`, and of
    `_from_hub`, `_from_wilds`, `_from_files` and `_write_demo` those that `info.sources` names.
    """

    name: ClassVar[str]
    seed: int = 0

    @property
    @abstractmethod
    def info(self) -> TaskInfo:
        """What is known of the benchmark in these settings; reads no data."""

    @property
    def run_name(self) -> str:
        """Name of the folder of runs in these settings."""
        return self.name

    def _from_hub(self, folder: Path | None) -> DatasetDict:
        """The splits from the Hub, or from a folder that holds what the Hub's repository holds."""
        raise NotImplementedError

    def _from_wilds(self, root: Path) -> DatasetDict:
        """The splits through the `wilds` package, whose folders lie in `root`; never downloads."""
        raise NotImplementedError

    def _from_files(self, folder: Path) -> DatasetDict:
        """The splits from the benchmark's own files."""
        raise NotImplementedError

    def _write_demo(self, folder: Path) -> None:
        """Write made-up data in the benchmark's own layout: tiny, drawn by `seed`, something that can be learned."""
        raise NotImplementedError

    def load(self, source: DataSource | str | Path | None = None, data_dir: str | Path | None = None) -> DatasetDict:
        """The splits `info.splits`, with the inputs, "label", the group columns and whatever else the data has.

        Args:
            source: "hub", "wilds", "demo", or the path of a folder in the benchmark's own layout ("files" with
                `data_dir` is the same). None is "files" with a `data_dir` and "hub" without.
            data_dir: for "wilds" the folder in which that package's folders lie (`WILDS_ROOT` by default); for "hub" a
                copy of the Hub's repository, None for the Hub itself; for "demo" a new folder to write to, None for a
                temporary one. Nothing is downloaded for any source but "hub" without a `data_dir`.

        Raises:
            ValueError: a source that the task does not have, a folder where there must be none, or data that is wrong.
            FileNotFoundError, ConnectionError: data that is not there; the message says what to do.
            ImportError: the source "wilds" without that package.
        """
        kind, folder = self._resolved(source, data_dir)
        if kind == "hub":
            splits = self._from_hub(folder)
        elif kind == "wilds":
            splits = self._from_wilds(folder or Path(WILDS_ROOT))
        elif kind == "demo":
            splits = self._from_demo(folder)
        else:
            assert folder is not None
            splits = self._from_files(folder)
        if kind != "demo":
            self._warn_of_other_counts(splits)
        return splits

    def _resolved(self, source: Any, data_dir: Any) -> tuple[DataSource, Path | None]:
        info = self.info
        if source is None:
            source = "hub" if data_dir is None else "files"
        if source not in DATA_SOURCES:
            if data_dir is not None:
                raise ValueError(
                    f"source={str(source)!r} is the folder of the data and so is data_dir={str(data_dir)!r}. Give one."
                )
            if not Path(source).is_dir():
                raise FileNotFoundError(
                    f"source: expected one of {_listed(info.sources)} or a folder with the files of {info.name}, but "
                    f"there is no folder {str(source)!r}.{self._advice()}"
                )
            source, data_dir = "files", source
        if source not in info.sources:
            raise ValueError(
                f"source of {self.name} must be one of {_listed(info.sources)}, got {source!r}.{self._advice()}"
            )
        if source == "files" and data_dir is None:
            raise ValueError("data_dir is the folder of the files of source='files', got none. Pass its path.")
        return source, None if data_dir is None else Path(data_dir)

    def _advice(self) -> str:
        layout = f"\nLay it out like this: {self.info.layout}" if self.info.layout else ""
        return layout + "".join(f"\nA place to get it: {place}" for place in self.info.places)

    def _from_demo(self, folder: Path | None) -> DatasetDict:
        if folder is None:
            # Images are read from it as long as the process lives.
            _DEMO_FOLDERS.append(tempfile.TemporaryDirectory(prefix=f"{self.name}_"))
            folder = Path(_DEMO_FOLDERS[-1].name)
        elif folder.exists() and any(folder.iterdir()):
            raise ValueError(f"data_dir={folder} is not empty; made-up data wants a new folder. Name another one.")
        folder.mkdir(parents=True, exist_ok=True)
        self._write_demo(folder)
        return self._from_files(folder)

    def _warn_of_other_counts(self, splits: DatasetDict) -> None:
        expected, rows = self.info.train_counts, {name: len(rows) for name, rows in splits.items()}
        told = ""
        if expected is not None and rows["train"]:
            groups = GroupInfo.from_columns(read_columns(splits["train"], self.info.group_columns))
            found = dict(zip(groups.names, groups.counts or (), strict=True))
            if found != dict(expected):
                told = f"training groups of {self.name} have {found} examples; the published data has {dict(expected)}"
        if not told and any(rows.get(name) != size for name, size in self.info.split_counts.items()):
            told = f"splits of {self.name} have {rows} rows; the published data has {dict(self.info.split_counts)}"
        if told:
            warnings.warn(
                f"The {told}. It is a part or another version of it, and numbers do not compare.",
                GroupRobustWarning,
                stacklevel=3,
            )

    def open_image(self, value: Any) -> Any:
        """What stands in the input column of an image task as a PIL image in RGB, or as an array [channels, H, W].

        Raises:
            ValueError: a file that cannot be decoded; the message names it.
        """
        return opened_image(value)

    def hyperparameters(self, source: str = "paper", *, objective: str) -> dict[str, Any]:
        """Settings of a run by the source that states them, as options of a recipe.

        Raises:
            ValueError: a source that states none for this task; the message lists those that do.
        """
        stated = self._stated_by(source)
        return {**stated.shared, **stated.by_objective.get(objective, {})}

    def image_preparation(self, source: str = "paper") -> ImagePreparation:
        """How the source prepares images; as they are where it says nothing."""
        return self._stated_by(source).images or ImagePreparation()

    def _stated_by(self, source: str) -> Hyperparameters:
        known = self.info.hyperparameters
        if source not in known:
            raise ValueError(f"hyperparameters of {self.name} are those of {_listed(known)}, got {source!r}.")
        return known[source]


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
