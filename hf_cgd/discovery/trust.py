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
DRAWS = 500
"""Random groupings that show what recall chance gives."""
MOST_BY_CHANCE = 0.05
"""Share of these that may find the true groups of a class as well as the groups that were found."""


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
        by_chance: mean recall of groups of the same sizes whose rows are drawn at random. They are read by these rows
            as well, so that of a small true group, or of many found ones, it is far above one in the number of groups.
        above_chance: whether fewer than `MOST_BY_CHANCE` of such draws find the true groups of the class as well, by
            their mean recall. (A large found group has a high recall of whatever it is read as.)
    """

    name: str
    count: int
    recall: float
    precision: float | None
    by_chance: float
    above_chance: bool


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
        _, of_part = np.unique(found[rows], return_inverse=True)
        if len(cells) < 2:
            continue
        table = _table(of_cell, of_part)
        sizes = table.sum(axis=1)
        hits, covered = _read(table)
        recalls = hits / sizes
        random = np.random.default_rng(0)
        drawn = np.array(
            [_read(_table(of_cell, random.permutation(of_part)))[0] / sizes for _ in range(DRAWS)]
        )  # [DRAWS, cells]
        as_good = float((drawn.mean(axis=1) >= recalls.mean() - 1e-9).mean())
        for place, cell in enumerate(cells):
            groups.append(
                TrueGroup(
                    names[cell],
                    int(sizes[place]),
                    int(hits[place]) / int(sizes[place]),
                    int(hits[place]) / int(covered[place]) if covered[place] else None,
                    float(drawn[:, place].mean()),
                    as_good < MOST_BY_CHANCE,
                )
            )
    if not groups:
        raise ValueError(
            f"Expected several true groups within a class of the validation part, got one in each: {list(names)}. "
            "There is nothing to be found within the classes."
        )
    several = np.isin(true, [names.index(group.name) for group in groups])
    return Agreement(rand_within_classes(found[several], true[several], classes[several]), tuple(groups))


def _table(of_cell: np.ndarray, of_part: np.ndarray) -> np.ndarray:
    """Rows of each true group in each found one, [cells, parts]."""
    table = np.zeros((of_cell.max() + 1, of_part.max() + 1), dtype=np.int64)
    np.add.at(table, (of_cell, of_part), 1)
    return table


def _read(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each true group, [cells]: its rows in found groups that are read as it, and all rows of these."""
    sizes = table.sum(axis=1)
    largest_first = np.argsort(-sizes, kind="stable")
    rates = table / sizes[:, None]
    own = largest_first[rates[largest_first].argmax(axis=0)] == np.arange(len(table))[:, None]
    return (table * own).sum(axis=1), (table.sum(axis=0) * own).sum(axis=1)
