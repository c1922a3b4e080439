"""The CGD paper's grids (section 5.2, appendices C to E), one for each data set that a recipe trains on.

Stated there: learning rate {1e-3, 1e-5}, weight decay {1e-4, 0.1, 1}, step size and penalty weight {1, 0.1, 1e-2,
1e-3}, three seeds, values and epoch by validation; C in [0, 20] for Waterbirds, CelebA and MultiNLI, 0 elsewhere. By
the released code: batches drawn with replacement, all groups equally likely, for all but ERM. Not
stated, and chosen here: which points of [0, 20], which ratios of appendix E, momentum .9 and a constant learning rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hf_cgd.experiments.grid import Grid
from hf_cgd.experiments.summary import COLUMNS, Published
from hf_cgd.objectives import SEARCHED_KNOBS
from hf_cgd.tasks.colored_mnist import ColoredMNIST
from hf_cgd.tasks.mnist_settings import GROUPS, MNISTSettings
from hf_cgd.tasks.multinli import MultiNLI

STEPS = (1, 0.1, 0.01, 0.001)
"""Step sizes of Group-DRO and CGD, penalty weights of PGI."""
OPTIMIZATION: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"learning_rate": (1e-3, 1e-5), "weight_decay": (1e-4, 0.1, 1)}
)
ADJUSTMENTS = (0, 1, 2, 3, 5, 10, 20)
"""Points of [0, 20] for C; the first ones are those of Sagawa et al. (2020)."""
TABLE_3 = ("erm", "erm_uw", "pgi", "group_dro", "cgd")
"""Objectives of Table 3, in its order."""
RATIOS = (2, 10, 50, 100, 500, 1000)


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


def _searched(**more: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    return {**OPTIMIZATION, **dict.fromkeys(SEARCHED_KNOBS, STEPS), **more}


_COLORED_MNIST, _MNIST_SETTINGS, _MULTINLI = ColoredMNIST().info, MNISTSettings().info, MultiNLI().info
_FEW_DIGITS = {"num_train_epochs": 2, "per_device_train_batch_size": 128, "validation_size": 2000}
_BALANCED = {"group_sampling": "weighted"}
_ORDINARY = {"erm": {"group_sampling": "none"}}
_IMAGES = {
    "model": "resnet50", "optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}  # fmt: skip


def _images(dataset: dict[str, Any], batch_size: int, epochs: int, published: Mapping[str, Sequence[str]]) -> Preset:
    """A pretrained ResNet-50 on a data set of the Hub."""
    batches = {"per_device_train_batch_size": batch_size, "num_train_epochs": epochs}
    options = {**_IMAGES, **_BALANCED, **dataset, **batches}
    values = _searched(adjustment=ADJUSTMENTS)
    grid = Grid("recipes/image_classification.py", TABLE_3, values, options=options, objective_options=_ORDINARY)
    fast = {"values": {}, "seeds": (0,), "options": {"num_train_epochs": 1}}
    return Preset(grid, fast, published=_only_condition(published))


def _only_condition(published: Mapping[str, Sequence[str]]) -> Published:
    """The paper's cells by objective, for a grid without conditions."""
    return {("", objective): cells for objective, cells in published.items()}


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "colored_mnist": Preset(
            Grid("recipes/colored_mnist_cgd.py", TABLE_3, _searched(), metric=_COLORED_MNIST.metric),
            {
                "values": {"step_size": (0.1,), "penalty_weight": (1,)},
                "seeds": (0,),
                "options": {**_FEW_DIGITS, "train_size": 5005},
            },
            published=_only_condition(_COLORED_MNIST.published),
        ),
        "colored_mnist_ratios": Preset(
            Grid(
                "recipes/colored_mnist_cgd.py",
                TABLE_3,
                {name: choices for name, choices in _searched().items() if name != "weight_decay"},
                {"ratio": RATIOS},
                options={"weight_decay": 0},
                metric=_COLORED_MNIST.metric,
            ),
            {
                "values": {"step_size": (0.1,), "penalty_weight": (1,)},
                "conditions": {"ratio": (2, 50, 1000)},
                "seeds": (0,),
                "options": {**_FEW_DIGITS, "train_size": 5005},
            },
            columns=("worst_group_accuracy",),
        ),
        "mnist_settings": Preset(
            Grid(
                "recipes/mnist_settings.py",
                ("group_dro", "cgd"),
                {"step_size": STEPS},
                {"setting": tuple(GROUPS)},
                metric=_MNIST_SETTINGS.metric,
            ),
            {
                "values": {"step_size": (0.1,)},
                "seeds": (0,),
                "options": {"num_train_epochs": 1, "per_device_train_batch_size": 128},
            },
            published={
                (f"setting={setting}", objective): cells
                for setting in GROUPS
                for objective, cells in MNISTSettings(setting=setting).info.published.items()
            },
        ),
        "multinli": Preset(
            Grid(
                "recipes/multinli_cgd.py",
                TABLE_3,
                _searched(adjustment=ADJUSTMENTS),
                options={"preset": "paper", "resplit": True, **_BALANCED},
                objective_options=_ORDINARY,
                metric=_MULTINLI.metric,
            ),
            {"values": {"step_size": (0.1, 0.01), "penalty_weight": (1,)}, "seeds": (0,), "options": {"demo": True}},
            published=_only_condition(_MULTINLI.published),
        ),
        "waterbirds": _images(
            {"dataset": "grodino/waterbirds", "group_column": ["label", "place"]},
            batch_size=128,
            epochs=300,
            published={
                "erm": ("85.2 (0.8)", "61.2 (1.4)"),
                "erm_uw": ("91.8 (0.2)", "86.9 (0.5)"),
                "pgi": ("89.0 (1.8)", "85.8 (1.8)"),
                "group_dro": ("90.1 (0.5)", "85.0 (1.5)"),
                "cgd": ("91.3 (0.6)", "88.9 (0.8)"),
            },
        ),
        "celeba": _images(
            {
                "dataset": "flwrlabs/celeba",
                "dataset_config": "img_align+identity+attr",
                "label_column": "Blond_Hair",
                "group_column": ["label", "Male"],
            },
            batch_size=64,
            epochs=50,
            published={
                "erm": ("95.2 (0.2)", "45.2 (0.9)"),
                "erm_uw": ("92.8 (0.1)", "84.3 (0.7)"),
                "pgi": ("92.9 (0.2)", "83.0 (1.3)"),
                "group_dro": ("92.9 (0.3)", "86.1 (0.9)"),
                "cgd": ("92.5 (0.2)", "90.0 (0.8)"),
            },
        ),
    }
)
