"""Which runs an experiment consists of: objectives, values to choose among, conditions to compare, seeds."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_cgd.metrics.group_metrics import lower_is_better, tells_direction
from hf_cgd.objectives import KNOBS, knobs_of, objective_named

GREATER = "greater_is_better"
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")
"""As a command line takes them."""
Setting = tuple[tuple[str, Any], ...]
"""Options and their values, in the order of the grid."""


@dataclass(frozen=True)
class Run:
    """One training run: what sets it apart from the others of its grid."""

    condition: Setting
    objective: str
    point: Setting
    seed: int

    @property
    def name(self) -> str:
        """Folder of the run below that of the experiment: condition / objective and values / seed."""
        parts = [setting_name(self.condition)] if self.condition else []
        parts.append(" ".join([self.objective, setting_name(self.point)]).strip())
        return "/".join([*(_as_folder(part) for part in parts), f"seed-{self.seed}"])


@dataclass(frozen=True)
class Grid:
    """Runs of one recipe: each objective with each combination of the values that it has, for each seed.

    Attributes:
        recipe: path of a script that takes the options of `GroupRobustConfig` and writes `group_report.json` to its
            `output_dir`, as those that end with `hf_cgd.cli.run` do.
        objectives: names among `hf_cgd.objectives.OBJECTIVES`, or import paths of your own (`objective_named`). Behind
            a name may stand options that hold for it alone and tell it from the others of its kind:
            "cgd self_term=split_half".
        values: {option: values}. One of them is chosen by validation. A knob of some objectives (`step_size`,
            `adjustment`, `penalty_weight`, …) is searched for those that have it, any other option for all.
        conditions: {option: values} that are compared, not chosen among: data sets, ratios, batch sizes. Each
            combination has a choice of its own.
        seeds: of the runs that are reported.
        search_seeds: seeds that the values are chosen on; None for `seeds`. Fewer of them are cheaper: only what was
            chosen is then run with all `seeds`.
        options: further options of the recipe, the same for all runs.
        objective_options: {objective: options} of its runs alone.
        metric: what is chosen by, on the validation split, and the best epoch too: a metric of
            `hf_cgd.metrics.group_metrics`. Where its name does not say which direction is better, or the
            wrong one, `options` hold `greater_is_better`.

    Raises:
        ValueError: an unknown objective, an empty or repeated list of values, an option that is given twice, values
            of a knob that none of the objectives has, or a metric of unknown direction.
    """

    recipe: str
    objectives: tuple[str, ...] = ("erm", "erm_uw", "group_dro", "cgd")
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    conditions: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    search_seeds: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    objective_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metric: str = "worst_group_accuracy"

    def __post_init__(self) -> None:
        for name in ("objectives", "seeds", "search_seeds"):
            if getattr(self, name) is not None:
                _require_distinct(name, getattr(self, name))
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in (*self.objectives, *self.objective_options):
            objective_named(_base(name))
        for name in self.objectives:
            foreign = [option for option in _own_options(name) if not has_option(name, option)]
            if foreign:
                raise ValueError(f"{name!r}: {_base(name)} has no option {', '.join(foreign)}. Remove it.")
        for name, choices in (*self.values.items(), *self.conditions.items()):
            _require_distinct(name, choices)
        self._require_direction()
        named = [_own_options(name) for name in self.objectives]
        sources = [self.values, self.conditions, self.options, *self.objective_options.values(), *named]
        reserved = {"objective", "seed", "output_dir", "resume_from_checkpoint"}
        taken = [name for source in sources for name in source]
        twice = sorted(
            {name for name in self.values if name in self.conditions or name in self.options}
            | {name for name in self.conditions if name in self.options}
            | reserved.intersection(taken)
        )
        if twice:
            raise ValueError(
                f"Each option can be given once, and {', '.join(sorted(reserved))} are set by the grid itself, got "
                f"{', '.join(twice)} again. Keep it in one of values, conditions and options."
            )
        idle = [name for name in self.values if not any(has_option(o, name) for o in self.objectives)]
        if idle:
            raise ValueError(
                f"None of {', '.join(self.objectives)} has {', '.join(idle)}. Remove these values, or add an "
                "objective that has them."
            )

    @property
    def lower_is_better(self) -> bool:
        """The direction of `metric`: what `greater_is_better` of the options says, else its name."""
        greater = self.options.get(GREATER)
        return lower_is_better(self.metric) if greater is None else str(greater).lower() in FALSE

    def _require_direction(self) -> None:
        greater = self.options.get(GREATER)
        if greater is None and not tells_direction(self.metric):
            raise ValueError(
                f"metric={self.metric!r}: nothing says whether higher or lower values of it are better. Say it in the "
                f"options: {GREATER}: true, or false."
            )
        if greater is not None and str(greater).lower() not in (*TRUE, *FALSE):
            raise ValueError(f"{GREATER} must be true or false, got {greater!r}.")
        others = (self.values, self.conditions, *self.objective_options.values())
        if any(GREATER in options for options in others):
            raise ValueError(f"{GREATER} is one for all runs, which are compared by one metric: keep it in options.")

    @property
    def chosen_on(self) -> tuple[int, ...]:
        """The seeds that values are chosen on."""
        return self.seeds if self.search_seeds is None else self.search_seeds

    def all_conditions(self) -> list[Setting]:
        """Every combination of the conditions, a single empty one where there are none."""
        return _combinations(self.conditions)

    def points(self, objective: str) -> list[Setting]:
        """Every combination of the values that this objective has, a single empty one where it has none."""
        fixed = self._particular(objective)
        searched = {
            name: choices for name, choices in self.values.items() if has_option(objective, name) and name not in fixed
        }
        return _combinations(searched)

    def search_runs(self) -> list[Run]:
        """All combinations, with the seeds that values are chosen on."""
        return [
            run
            for condition in self.all_conditions()
            for objective in self.objectives
            for point in self.points(objective)
            for run in runs_of(condition, objective, point, self.chosen_on)
        ]

    def all_runs(self) -> list[Run]:
        """Those and whatever may be chosen, with the seeds that are reported, each once."""
        seeds = dict.fromkeys((*self.chosen_on, *self.seeds))
        return list(dict.fromkeys(replace(run, seed=seed) for run in self.search_runs() for seed in seeds))

    def options_of(self, run: Run) -> dict[str, Any]:
        """Options of the recipe for one run, without its folder."""
        common = {name: value for name, value in self.options.items() if has_option(run.objective, name)}
        given = {**common, **self._particular(run.objective), **dict(run.condition), **dict(run.point)}
        return {"objective": _base(run.objective), "seed": run.seed, **given}

    def _particular(self, objective: str) -> dict[str, Any]:
        """Options of this objective alone; what stands in its name comes last."""
        given = self.objective_options
        return {**given.get(_base(objective), {}), **given.get(objective, {}), **_own_options(objective)}


def has_option(objective: str, name: str) -> bool:
    """Whether an option is for this objective: its own knobs, and all that is no knob."""
    return name not in KNOBS or name in knobs_of(_base(objective))


def _base(objective: str) -> str:
    """The objective's own name, without options behind it."""
    return objective.split(" ")[0]


def _own_options(objective: str) -> dict[str, str]:
    """The options behind an objective's name.

    Raises:
        ValueError: something else than name=value stands there.
    """
    words = [word.partition("=") for word in objective.split(" ")[1:]]
    if not all(name and value for name, _, value in words):
        raise ValueError(
            f"Expected an objective and options as name=value, one space between them, got {objective!r}."
        )
    return {name: value for name, _, value in words}


def runs_of(condition: Setting, objective: str, point: Setting, seeds: Sequence[int]) -> list[Run]:
    """The same run with each of the seeds."""
    return [Run(condition, objective, point, seed) for seed in seeds]


def setting_name(setting: Setting) -> str:
    """`step_size=0.1 weight_decay=1`, in the order of the grid."""
    return " ".join(f"{name}={value_name(value)}" for name, value in setting)


def value_name(value: Any) -> str:
    """A value as a person would write it."""
    if isinstance(value, (list, tuple)):
        return "+".join(map(value_name, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _as_folder(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+=-]+", "_", name)


def _combinations(choices: Mapping[str, Sequence[Any]]) -> list[Setting]:
    return [tuple(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def _require_distinct(name: str, choices: Sequence[Any]) -> None:
    folders = [_as_folder(value_name(choice)) for choice in choices]
    if isinstance(choices, str) or not folders or len(set(folders)) < len(folders):
        raise ValueError(f"{name}: expected a list of one or more different values, got {choices!r}.")
