"""Groups that were found: a column to train on, and what there is to be said against it."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np

from hf_cgd.data.columns import column_names, read_columns, require_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.discovery.trust import LEAST_RECALL, LEAST_STABILITY, Agreement, Stability, agreement
from hf_cgd.monitors import GroupRobustWarning

FOUND_COLUMN = "found_group"
"""Name of the new column unless another is asked for."""
FEW_ROWS = 20
"""A found group below this size is warned of."""


@dataclass(frozen=True)
class FoundGroups:
    """Groups that nobody has labelled. `print` it before you train on them.

    Args:
        dataset: the rows with the new column of names.
        column: its name, for `group_column`.
        names: of the groups, all different.
        ids: [N] the place of each row's group among them.
        how: how they were found, a sentence.
        stability: do they come out again; None where they were found only once.
        agreement: are they the true ones; None where these are not known.
        cautions: what speaks against training on them, sentences; empty does not mean that they are right.
    """

    dataset: datasets.Dataset
    column: str
    names: tuple[str, ...]
    ids: np.ndarray
    how: str
    stability: Stability | None
    agreement: Agreement | None
    cautions: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each group."""
        return dict(zip(self.names, np.bincount(self.ids, minlength=len(self.names)).tolist(), strict=True))

    def __str__(self) -> str:
        lines = [self.how, *(f"  {name}: {count:,} rows" for name, count in self.counts.items())]
        if self.stability is None:
            lines.append("Stability: not measured, they were found once.")
        elif math.isnan(self.stability.mean):
            lines.append("Stability: no class is split, so there is nothing to come out again.")
        else:
            found = self.stability
            lines.append(
                f"Stability: {found.mean:.2f} on average, {found.least:.2f} at least, over {found.repeats} "
                f"{found.of_what} (adjusted Rand index within the classes; 1 the same groups, 0 chance)."
            )
        if self.agreement is None:
            lines.append("Agreement with true groups: not known. They may be anything.")
        else:
            lines.append(
                f"Agreement with true groups: {self.agreement.adjusted_rand:.2f} (adjusted Rand index within the "
                "classes)."
            )
            for group in self.agreement.groups:
                precision = "none is read as it" if group.precision is None else f"precision {group.precision:.2f}"
                lines.append(
                    f"  {group.name} (n = {group.count}): recall {group.recall:.2f} ({group.by_chance:.2f} by "
                    f"chance), {precision}"
                )
        return "\n".join([*lines, *(f"Caution: {text}" for text in self.cautions)])


def found_groups(
    dataset: datasets.Dataset,
    column: str,
    names: Sequence[str],
    ids: np.ndarray,
    how: str,
    stable: Stability | None,
    agrees: Agreement | None,
    cautions: Sequence[str],
) -> FoundGroups:
    """Put the groups into the dataset, add the cautions that follow from the numbers, and warn of all of them once.

    Args:
        dataset: the rows.
        column: name of the new column.
        names: all groups there may be; those without a row are dropped.
        ids: [N].
        how, stable, agrees: see `FoundGroups`.
        cautions: those that follow from the way they were found.
    """
    present = np.unique(ids)
    kept = tuple(names[number] for number in present)
    ids = np.searchsorted(present, ids)
    said = [*cautions]
    small = [f"{name!r} ({n})" for name, n in zip(kept, np.bincount(ids), strict=True) if n < FEW_ROWS]
    if small:
        said.append(f"Groups of fewer than {FEW_ROWS} rows, on which training overfits: {', '.join(small)}.")
    if stable is not None and stable.mean < LEAST_STABILITY:
        said.append(
            f"The groups do not come out again over {stable.of_what} (adjusted Rand index {stable.mean:.2f}, below "
            f"{LEAST_STABILITY}): another run would train on others."
        )
    known = () if agrees is None else agrees.groups
    lucky = [one for one in known if one.recall >= LEAST_RECALL and not one.above_chance and one.by_chance < 1]
    if lucky:
        listed = ", ".join(f"{one.name!r} (recall {one.recall:.2f}, by chance {one.by_chance:.2f})" for one in lucky)
        said.append(f"Groups that are drawn at random find these true groups about as well: {listed}.")
    if agrees is not None and agrees.worst.recall < LEAST_RECALL:
        worst = agrees.worst
        said.append(
            f"The true group {worst.name!r} (n = {worst.count}) is found to {worst.recall:.0%} only "
            f"({worst.by_chance:.0%} would be chance): the groups do not stand in for the true ones."
        )
    if said:
        warnings.warn("Groups that were found: " + " ".join(said), GroupRobustWarning, stacklevel=3)
    return FoundGroups(
        _with_column(dataset, column, [kept[number] for number in ids.tolist()]),
        column, kept, ids, how, stable, agrees, tuple(said),
    )  # fmt: skip


def require_room(dataset: Any, column: str) -> None:
    """Raise a ValueError unless a column of that name can be added."""
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(
            f"Expected a datasets.Dataset, to which a column can be added, got {type(dataset).__name__}. "
            "datasets.Dataset.from_list makes one of rows."
        )
    if column in dataset.column_names:
        raise ValueError(f"The dataset has a column {column!r} already: remove it, or choose another name by column=.")


def with_true_groups(
    validation: Any, true_group_column: str | Sequence[str], label_column: str, found: np.ndarray, classes: np.ndarray
) -> Agreement:
    """Compare groups of validation rows with the true ones, which are crossed with the class.

    Args:
        validation: the rows.
        true_group_column: column(s) of the true groups.
        label_column: of the classes.
        found: [N] numbers of the found groups.
        classes: [N].

    Raises:
        ValueError: no such column, values that cannot name a group, or a single true group in each class.
    """
    columns = [true_group_column] if isinstance(true_group_column, str) else list(true_group_column)
    require_columns(validation, columns, "true_group_column", "validation part", "Name the column of the true groups.")
    read = read_columns(validation, [label_column, *columns])
    own = GroupInfo.from_columns({name: read[name] for name in columns})
    crossed = GroupInfo.from_columns(read)
    # Groups that tell the class already keep their names.
    true = own if len(own) == len(crossed) else crossed
    return agreement(found, true.encode_columns(read), true.names, classes)


def _with_column(dataset: datasets.Dataset, column: str, values: list[str]) -> datasets.Dataset:
    shown = column_names(dataset) or []
    hides = set(shown) != set(dataset.column_names)
    wider = dataset.add_column(column, values)
    if not hides:
        return wider
    form = dataset.format
    return wider.with_format(
        form["type"], columns=[*shown, column], output_all_columns=form["output_all_columns"], **form["format_kwargs"]
    )
