"""The objectives by name; each is a small frozen dataclass whose fields are its knobs."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hf_cgd.objectives.base import GroupBatch, GroupStatistics, Objective, ObjectiveOutput
from hf_cgd.objectives.cgd import CGD
from hf_cgd.objectives.coral import CORAL
from hf_cgd.objectives.erm import ERM, ERMUW
from hf_cgd.objectives.group_dro import GroupDRO
from hf_cgd.objectives.irm import IRM
from hf_cgd.objectives.pgi import PGI

OBJECTIVES: dict[str, type[Objective]] = {cls.name: cls for cls in (ERM, ERMUW, GroupDRO, CGD, PGI, IRM, CORAL)}

KNOBS: tuple[str, ...] = tuple(dict.fromkeys(f.name for cls in OBJECTIVES.values() for f in fields(cls)))
"""Every knob that some objective has; `GroupRobustConfig` has a field for each."""

SEARCHED_KNOBS = ("step_size", "penalty_weight")


def knobs_of(name: str) -> tuple[str, ...]:
    """The knobs of the objective of that name.

    Raises:
        ValueError: an unknown name.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(map(repr, OBJECTIVES))}, got {name!r}.")
    return tuple(f.name for f in fields(OBJECTIVES[name]))


def build_objective(name: str, knobs: Mapping[str, Any] | None = None) -> Objective:
    """The objective of that name with the knobs that are not None.

    Raises:
        ValueError: an unknown name, a knob that this objective does not have, or a value outside its range.
    """
    own = knobs_of(name)
    given = {knob: value for knob, value in (knobs or {}).items() if value is not None}
    foreign = [knob for knob in given if knob not in own]
    if foreign:
        raise ValueError(
            f"objective={name!r} has no option {', '.join(map(repr, foreign))}; it has "
            f"{', '.join(own) if own else 'none'}. Remove the option or choose another objective."
        )
    return OBJECTIVES[name](**given)


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
    "searched_knob",
]
