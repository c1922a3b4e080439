"""How far groups that were found can be trusted: do they come out again, and are they the true ones?

All comparisons are made within the classes. Groups that are crossed with the class agree about the class by
construction, and counting that would flatter them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_STABILITY = 0.7
"""Mean adjusted Rand index between repetitions below which groups are called chance."""
LEAST_RECALL = 0.7
"""Share of a true group that has to be found for the groups to stand in for it."""


@dataclass(frozen=True)
class Stability:
    """Do the groups come out again?

    Args:
        mean: mean adjusted Rand index (Hubert & Arabie 1985) within the classes, between the groups and each
            repetition: 1 for the same groups, 0 for chance; NaN where no class is split in two.
        least: the lowest of them.
        repeats: number of repetitions.
        of_what: what a repetition is, in words.
    """

    mean: float
    least: float
    repeats: int
    of_what: str


@dataclass(frozen=True)
class TrueGroup:
    """How well one true group is found.

    Args:
        name: the group, with its class.
        count: rows of it on the validation part.
        recall: share of them in the found groups that are read as it.
        precision: share of it among the rows of those found groups; None where none is read as it.
        by_chance: recall that found groups of chance would have: one in the number of true groups of the class.
    """

    name: str
    count: int
    recall: float
    precision: float | None
    by_chance: float


@dataclass(frozen=True)
class Agreement:
    """Are the groups the true ones, on a part where these are known?

    A found group is read as the true group of its class whose rows fall into it at the highest rate; a tie goes to the
    larger. So a class that is left whole is read as its majority, and the recall of its minority is 0.

    Args:
        adjusted_rand: within the classes, 1 for the same groups, 0 for chance.
        groups: the true groups of those classes that have several.
    """

    adjusted_rand: float
    groups: tuple[TrueGroup, ...]

    @property
    def worst(self) -> TrueGroup:
        """The true group of the lowest recall."""
        return min(self.groups, key=lambda group: group.recall)


def rand_within_classes(first: np.ndarray, second: np.ndarray, classes: np.ndarray) -> float:
    """Adjusted Rand index of two groupings [N] in each class, averaged by the classes' sizes.

    A class that both leave whole is left out, since there is nothing to agree about. NaN where that holds for all.
    """
    from sklearn.metrics import adjusted_rand_score

    values, sizes = [], []
    for number in np.unique(classes):
        rows = classes == number
        if len(np.unique(first[rows])) > 1 or len(np.unique(second[rows])) > 1:
            values.append(adjusted_rand_score(first[rows], second[rows]))
            sizes.append(rows.sum())
    return float(np.average(values, weights=sizes)) if values else float("nan")


def stability(found: np.ndarray, again: Sequence[np.ndarray], classes: np.ndarray, of_what: str) -> Stability:
    """See `Stability`.

    Args:
        found: [N] numbers of the groups.
        again: those of at least one repetition, [N] each.
        classes: [N].
        of_what: what a repetition is.
    """
    values = [rand_within_classes(found, other, classes) for other in again]
    return Stability(float(np.mean(values)), float(np.min(values)), len(values), of_what)


def agreement(found: np.ndarray, true: np.ndarray, names: Sequence[str], classes: np.ndarray) -> Agreement:
    """See `Agreement`.

    Args:
        found: [N] numbers of the found groups.
        true: [N] numbers of the true groups, each within one class.
        names: of the true groups.
        classes: [N].

    Raises:
        ValueError: no class has several true groups.
    """
    groups: list[TrueGroup] = []
    for number in np.unique(classes):
        rows = classes == number
        cells, of_cell = np.unique(true[rows], return_inverse=True)
        parts, of_part = np.unique(found[rows], return_inverse=True)
        if len(cells) < 2:
            continue
        table = np.zeros((len(cells), len(parts)), dtype=np.int64)
        np.add.at(table, (of_cell, of_part), 1)
        sizes = table.sum(axis=1)
        largest_first = np.argsort(-sizes, kind="stable")
        rates = table / sizes[:, None]
        read_as = largest_first[rates[largest_first].argmax(axis=0)]
        for place, cell in enumerate(cells):
            own = read_as == place
            hits, covered = int(table[place, own].sum()), int(table[:, own].sum())
            groups.append(
                TrueGroup(
                    names[cell],
                    int(sizes[place]),
                    hits / int(sizes[place]),
                    hits / covered if covered else None,
                    1 / len(cells),
                )
            )
    if not groups:
        raise ValueError(
            f"Expected several true groups within a class of the validation part, got one in each: {list(names)}. "
            "There is nothing to be found within the classes."
        )
    several = np.isin(true, [names.index(group.name) for group in groups])
    return Agreement(rand_within_classes(found[several], true[several], classes[several]), tuple(groups))
