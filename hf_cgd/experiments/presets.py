"""The CGD paper's grids: one for each benchmark, of what it tried there (`hf_cgd.tasks.paper`), and appendix E.

Chosen here and not stated there: which ratios of appendix E. What a benchmark's own grid leaves open, its task says.
By the released code: batches drawn with replacement, all groups equally likely, for all but ERM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hf_cgd.experiments.grid import Grid
from hf_cgd.experiments.summary import COLUMNS, Published
from hf_cgd.tasks import TASKS
from hf_cgd.tasks.base import Task, TaskInfo
from hf_cgd.tasks.colored_mnist import ColoredMNIST
from hf_cgd.tasks.mnist_settings import GROUPS, MNISTSettings
from hf_cgd.tasks.paper import STEPS, TABLE_3, searched

RATIOS = (2, 10, 50, 100, 500, 1000)
ONE_STEP: Mapping[str, tuple[float, ...]] = MappingProxyType({"step_size": (0.1,), "penalty_weight": (1,)})
FEW_DIGITS: Mapping[str, Any] = MappingProxyType(
    {"num_train_epochs": 2, "per_device_train_batch_size": 128, "validation_size": 2000, "train_size": 5005}
)
"""A small Colored-MNIST, for `fast`."""


@dataclass(frozen=True)
class Preset:
    """A grid and how it is shown.

    Attributes:
        grid: what the paper says.
        fast: fields of the grid to replace for a run that only shows whether everything works; `options` are added.
        columns: metrics of the table.
        published: the paper's cells, see `result_rows`.
    """

    grid: Grid
    fast: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = COLUMNS
    published: Published = field(default_factory=dict)

    def quick(self) -> "Preset":
        """The same with the fields of `fast`, and without the paper's numbers, which are of other runs."""
        options = {**self.grid.options, **self.fast.get("options", {})}
        return replace(self, grid=replace(self.grid, **{**self.fast, "options": options}), published={})


def _of_paper(kind: type[Task], fast: Mapping[str, Any] | None = None) -> Preset:
    """The paper's grid of a benchmark; its small version is made-up data, unless `fast` says otherwise."""
    info = kind().info
    search, published = info.search, info.published["paper"]
    assert search is not None
    grid = Grid(
        f"recipes/{info.name}_cgd.py",
        search.objectives,
        search.values,
        seeds=tuple(range(search.seeds)),
        options={"preset": "paper", **search.options},
        objective_options={name: {"group_sampling": _sampling_of(info, name)} for name in search.objectives},
        metric=info.metric,
    )
    few = {name: values for name, values in ONE_STEP.items() if name in search.values}
    small = fast or {"values": few, "seeds": (0,), "options": {"demo": True}}
    cells = {("", objective): row for objective, row in published.cells.items()}
    return Preset(grid, small, columns=published.metrics, published=cells)


def _sampling_of(info: TaskInfo, objective: str) -> str:
    """What the task states for the objective, else the released code's."""
    stated = info.hyperparameters["paper"].by_objective.get(objective, {})
    return str(stated.get("group_sampling", "none" if objective == "erm" else "weighted"))


_SMALL_MNIST = {"values": ONE_STEP, "seeds": (0,), "options": FEW_DIGITS}
_OWN: Mapping[str, Preset] = {
    "colored_mnist": _of_paper(ColoredMNIST, _SMALL_MNIST),
    "colored_mnist_ratios": Preset(
        Grid(
            "recipes/colored_mnist_cgd.py",
            TABLE_3,
            {name: choices for name, choices in searched().items() if name != "weight_decay"},
            {"ratio": RATIOS},
            options={"weight_decay": 0},
            metric=ColoredMNIST().info.metric,
        ),
        {**_SMALL_MNIST, "conditions": {"ratio": (2, 50, 1000)}},
        columns=("worst_group_accuracy",),
    ),
    "mnist_settings": Preset(
        Grid(
            "recipes/mnist_settings.py",
            ("group_dro", "cgd"),
            {"step_size": STEPS},
            {"setting": tuple(GROUPS)},
            metric=MNISTSettings().info.metric,
        ),
        {
            "values": {"step_size": (0.1,)},
            "seeds": (0,),
            "options": {"num_train_epochs": 1, "per_device_train_batch_size": 128},
        },
        published={
            (f"setting={setting}", objective): cells
            for setting in GROUPS
            for objective, cells in MNISTSettings(setting=setting).info.published["paper"].cells.items()
        },
    ),
}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {**_OWN, **{name: _of_paper(kind) for name, kind in TASKS.items() if name not in _OWN and kind().info.search}}
)
"""Every grid by name: those of the benchmarks have the name of the benchmark."""
