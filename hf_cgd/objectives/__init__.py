"""The objectives by name; each is a small frozen dataclass whose fields are its knobs."""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from hf_cgd.objectives.base import GroupBatch, GroupStatistics, Objective, ObjectiveOutput
from hf_cgd.objectives.cgd import CGD
from hf_cgd.objectives.coral import CORAL
from hf_cgd.objectives.erm import ERM, ERMUW
from hf_cgd.objectives.group_dro import GroupDRO
from hf_cgd.objectives.irm import IRM
from hf_cgd.objectives.pgi import PGI
from hf_cgd.visible_text import did_you_mean

OBJECTIVES: dict[str, type[Objective]] = {cls.name: cls for cls in (ERM, ERMUW, GroupDRO, CGD, PGI, IRM, CORAL)}

KNOBS: tuple[str, ...] = tuple(dict.fromkeys(f.name for cls in OBJECTIVES.values() for f in fields(cls)))
"""Every knob that some objective has; `GroupRobustConfig` has a field for each."""

SEARCHED_KNOBS = ("step_size", "penalty_weight")


def objective_named(name: str) -> type[Objective] | Objective:
    """The class of that name; or what stands at an import path "package.module:Name", a class or an object.

    Raises:
        ValueError: an unknown name, or nothing of the kind at that path.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(
            f"objective must be one of {', '.join(map(repr, OBJECTIVES))}, or the import path of your own "
            f"('my_package.module:MyObjective'), got {name!r}.{did_you_mean(name.lower(), OBJECTIVES)}"
        )
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"objective={name!r} cannot be imported: {error}. The module has to be installed, or lie in a folder of "
            "PYTHONPATH."
        ) from error
    if not (isinstance(found, Objective) or (isinstance(found, type) and issubclass(found, Objective))):
        raise ValueError(f"objective={name!r} must be a subclass of hf_cgd.Objective or one's object, got {found!r}.")
    return found


def knobs_of(name: str) -> tuple[str, ...]:
    """The knobs of the objective of that name; none of an object, whose values are fixed.

    Raises:
        ValueError: an unknown name.
    """
    found = objective_named(name)
    return () if isinstance(found, Objective) else tuple(f.name for f in fields(found))


def build_objective(name: str, knobs: Mapping[str, Any] | None = None) -> Objective:
    """The objective of that name (see `objective_named`) with the knobs that are not None.

    Raises:
        ValueError: an unknown name, a knob that this objective does not have, or a value outside its range.
    """
    found, own = objective_named(name), knobs_of(name)
    given = {knob: value for knob, value in (knobs or {}).items() if value is not None}
    foreign = [knob for knob in given if knob not in own]
    if foreign:
        users = [known for known, kind in OBJECTIVES.items() if set(foreign) <= {f.name for f in fields(kind)}]
        of_others = f" ({', '.join(map(repr, users))} {'has' if len(users) == 1 else 'have'} it.)" if users else ""
        raise ValueError(
            f"objective={name!r} has no option {', '.join(map(repr, foreign))}; it has "
            f"{', '.join(own) if own else 'none'}.{of_others} Remove the option or choose another objective."
        )
    return found if isinstance(found, Objective) else found(**given)


def searched_knob(objective: str) -> str | None:
    """The knob of an objective whose value the CGD paper searches for all data sets, None where it has none."""
    own = knobs_of(objective)
    return next((knob for knob in SEARCHED_KNOBS if knob in own), None)


__all__ = [
    "CGD",
    "CORAL",
    "ERM",
    "ERMUW",
    "IRM",
    "KNOBS",
    "OBJECTIVES",
    "PGI",
    "GroupBatch",
    "GroupDRO",
    "GroupStatistics",
    "Objective",
    "ObjectiveOutput",
    "build_objective",
    "knobs_of",
    "objective_named",
    "searched_knob",
]
