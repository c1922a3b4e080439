"""What the CGD paper (section 5.2, appendices C to E) tried on its benchmarks.

Stated there: learning rate {1e-3, 1e-5}, weight decay {1e-4, 0.1, 1}, step size and penalty weight {1, 0.1, 1e-2,
1e-3}, three seeds, values and epoch by validation; C in [0, 20] for Waterbirds, CelebA and MultiNLI, 0 elsewhere. On
the benchmarks of WILDS only the step is searched, everything else is as in the examples of that package (version 1.2).
Not stated, and chosen here: which points of [0, 20].
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hf_cgd.objectives import SEARCHED_KNOBS
from hf_cgd.tasks.base import Search

STEPS = (1, 0.1, 0.01, 0.001)
"""Step sizes of Group-DRO and CGD, penalty weights of PGI."""
OPTIMIZATION: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"learning_rate": (1e-3, 1e-5), "weight_decay": (1e-4, 0.1, 1)}
)
ADJUSTMENTS = (0, 1, 2, 3, 5, 10, 20)
"""Points of [0, 20] for C; the first ones are those of Sagawa et al. (2020)."""
BALANCED = {name: {"group_sampling": "weighted"} for name in ("group_dro", "cgd")}
"""Group-DRO's authors, and the CGD paper after them, draw the groups equally often, with replacement."""
TABLE_3 = ("erm", "erm_uw", "pgi", "group_dro", "cgd")
"""Objectives of the table of the benchmarks outside of WILDS, in its order."""
TABLE_WILDS = ("coral", "irm", "erm", "group_dro", "cgd")
"""Objectives of the table of the benchmarks of WILDS, in its order."""


def searched(**more: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Learning rate, weight decay, step and penalty weight, and `more`."""
    return {**OPTIMIZATION, **dict.fromkeys(SEARCHED_KNOBS, STEPS), **more}


WITHOUT_ADJUSTMENT = Search(TABLE_3, searched())
WITH_ADJUSTMENT = Search(TABLE_3, searched(adjustment=ADJUSTMENTS))
ON_WILDS = Search(TABLE_WILDS, {"step_size": STEPS})
"""Replace `seeds`: each benchmark of WILDS has a number of its own."""
