"""Who is in which group: names, counts, and the way from a dataset's values to group ids."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_cgd.data.columns import Column
from hf_cgd.data.values import crossed, group_name, named_values, value_name
from hf_cgd.html import Html, interval_bar, tag
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.visible_numbers import per_cent
from hf_cgd.visible_text import as_read

UNKNOWN_GROUP = -1
"""Group id of an evaluation example whose group is not known."""
UNCOUNTED = -100
"""Group id of a training example that does not count, because it has no label (its class is -100)."""


@dataclass(frozen=True)
class GroupInfo:
    """The K groups of a dataset: names, counts, and how a row's values give its group.

    Args:
        names: one name per group, all different. A group of one column is named by the column's value (`"land"`); one
            of several crossed columns by all of them (`"label:1 place:land"`).
        counts: training examples of each group, all positive; None where nobody has counted (streams).
        columns: the column or columns the groups come from.
        class_names: for a column of integers that stand for classes (`datasets.ClassLabel`), the names of these.
        class_counts: [C, K] training examples of each class (of the labels) in each group, for PGI; None where nobody
            has counted.

    Raises:
        ValueError: no names, a blank one, a name twice, or counts that do not fit.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...] | None = None
    columns: tuple[str, ...] = ("group",)
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_counts: tuple[tuple[int, ...], ...] | None = None
    _seen: dict[Any, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(str(name) for name in self.names))
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "class_names", {k: tuple(v) for k, v in self.class_names.items()})
        if not self.names:
            raise ValueError("Expected at least one group, got none.")
        if not all(name.strip() for name in self.names):
            raise ValueError(
                f"Expected a visible name for every group, got {list(self.names)}. Give the blank one a name."
            )
        if len(set(self.names)) != len(self.names):
            twice = [name for name, times in Counter(self.names).items() if times > 1]
            raise ValueError(f"Group names must be different, but {twice} stand more than once.")
        if self.counts is not None:
            object.__setattr__(self, "counts", tuple(int(count) for count in self.counts))
            if len(self.counts) != len(self.names) or min(self.counts) < 1:
                raise ValueError(
                    f"Expected one positive count for each of the {len(self.names)} groups {list(self.names)}, "
                    f"got {list(self.counts)}."
                )
        if self.class_counts is not None:
            rows = tuple(tuple(int(count) for count in row) for row in self.class_counts)
            object.__setattr__(self, "class_counts", rows)
            totals = tuple(sum(column) for column in zip(*rows, strict=False))
            fits = bool(rows) and all(len(row) == len(self.names) and min(row) >= 0 for row in rows)
            if not fits or (self.counts is not None and any(a > b for a, b in zip(totals, self.counts, strict=True))):
                raise ValueError(
                    f"Expected class_counts with one row of {len(self.names)} numbers >= 0 per class, whose sums over "
                    f"the classes are at most the counts {self.counts and list(self.counts)}, got "
                    f"{list(map(list, rows))}."
                )

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def from_columns(cls, columns: Mapping[str, Column]) -> "GroupInfo":
        """Groups of one column, or of several crossed ones (only the combinations that occur).

        The order of the groups is that of the classes for a `ClassLabel`, else the sorted order of the values.

        Raises:
            ValueError: no rows, or values that cannot name a group (None, NaN, floats, negative integers, lists).
        """
        class_names = {name: column.class_names for name, column in columns.items() if column.class_names}
        if len(next(iter(columns.values()))) == 0:
            raise ValueError(
                f"Expected examples with the group column(s) {list(columns)}, but the dataset is empty. "
                "Check the split or the filter that made it."
            )
        named = {name: named_values(name, column, column.class_names) for name, column in columns.items()}
        keys, places = crossed([codes for _, codes in named.values()])
        texts = [names for names, _ in named.values()]
        for name, (found, _) in named.items():
            _warn_of_look_alikes(name, found)
        return cls(
            names=tuple(
                group_name(tuple(columns), [names[code] for names, code in zip(texts, key, strict=True)])
                for key in keys
            ),
            counts=tuple(np.bincount(places).tolist()),
            columns=tuple(columns),
            class_names=class_names,
        )

    def name_of(self, values: Sequence[Any], row: int | None = None) -> str:
        """Name of the group that the values of one row (one per column) stand for, whether or not it is among `names`.

        Raises:
            ValueError: a value that cannot name a group; `row` is named in the message.
        """
        parts = [
            value_name(column, value, self.class_names.get(column), row)
            for column, value in zip(self.columns, values, strict=True)
        ]
        return group_name(self.columns, parts)

    def encode(self, rows: Iterable[Sequence[Any]]) -> np.ndarray:
        """Group ids [N] (int64) of rows of values, one value per column.

        Raises:
            ValueError: a value that cannot name a group, or a group that is not among `names`.
        """
        ids = []
        for row, values in enumerate(rows):
            # The type is a part of the key since True and 1 are equal, yet other groups.
            key = tuple([(type(value), value) for value in values])
            try:
                place = self._seen.get(key)
            except TypeError:
                place = None
            if place is None:
                name = self.name_of(values, row)
                if name not in self.names:
                    raise self._unknown(name, row)
                place = self.names.index(name)
                if all(isinstance(value, (str, int, np.generic)) for value in values):
                    self._seen[key] = place
            ids.append(place)
        return np.asarray(ids, dtype=np.int64)

    def encode_columns(self, columns: Mapping[str, Column]) -> np.ndarray:
        """Group ids [N] of whole columns; a column's own class names are used where it has any."""
        named = [
            named_values(name, columns[name], columns[name].class_names or self.class_names.get(name))
            for name in self.columns
        ]
        keys, places = crossed([codes for _, codes in named])
        index = {name: i for i, name in enumerate(self.names)}
        texts = [names for names, _ in named]
        names = [group_name(self.columns, [own[code] for own, code in zip(texts, key, strict=True)]) for key in keys]
        for place, name in enumerate(names):
            if name not in index:
                first = int(np.flatnonzero(places == place)[0])
                raise self._unknown(name, columns[self.columns[0]].row(first))
        return np.asarray([index[name] for name in names], dtype=np.int64)[places]

    def _unknown(self, name: str, row: int) -> ValueError:
        numbers = (
            ""
            if not name.isdigit() or self.class_names
            else (" If these numbers stand for classes, say which: GroupInfo(..., class_names={column: names}).")
        )
        return ValueError(
            f"Row {row} belongs to group {name!r}, which is not one of the known groups {list(self.names)}. Add the "
            f"group to the training data (or to `groups=`), or leave the row out.{numbers}"
        )

    def extended(self, names: Iterable[str]) -> "GroupInfo":
        """These groups followed by the `names` that are new, without counts."""
        new = tuple(name for name in dict.fromkeys(names) if name not in set(self.names))
        if new:
            _warn_of_look_alikes(" x ".join(self.columns), (*self.names, *new))
        return GroupInfo(self.names + new, None, self.columns, self.class_names)

    def counts_tensor(self) -> torch.Tensor:
        """Counts [K] as float64; ones where the counts are not known."""
        return torch.tensor(self.counts or [1] * len(self.names), dtype=torch.float64)

    def _repr_html_(self) -> Html:
        """What a notebook shows: counts and shares of the groups, the smallest one in bold."""
        total, smallest = sum(self.counts or ()), min(self.counts or (0,))
        rows = []
        for name, count in zip(self.names, self.counts or [None] * len(self), strict=True):
            share = None if count is None else count / total
            cells = [
                tag("td", name, style="text-align:left;"),
                tag("td", "not counted" if count is None else f"{count:,}"),
                tag("td", "" if share is None else per_cent(share)),
                tag("td", None if share is None else interval_bar(share, None, None)),
            ]
            rows.append(tag("tr", cells, style="font-weight:bold;" if count == smallest else None))
        title = f"{len(self)} groups by {', '.join(self.columns)}"
        head = tag("tr", [tag("th", text) for text in ("group", "examples", "share", "")])
        return tag("div", tag("div", title), tag("table", tag("thead", head), tag("tbody", rows)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` gives the same groups back."""
        return {
            "names": list(self.names),
            "counts": None if self.counts is None else list(self.counts),
            "columns": list(self.columns),
            "class_names": {name: list(classes) for name, classes in self.class_names.items()},
            "class_counts": None if self.class_counts is None else [list(row) for row in self.class_counts],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "GroupInfo":
        """Inverse of `to_dict`."""
        return cls(**data)


def _warn_of_look_alikes(where: str, names: Sequence[str]) -> None:
    """Warn of names that a reader takes for one, of which each has a row of its own."""
    alike = defaultdict(list)
    for name in names:
        alike[as_read(name)].append(name)
    told = [" and ".join(map(repr, found)) for found in alike.values() if len(found) > 1]
    if told:
        warnings.warn(
            f"Group column {where!r}: {'; '.join(told[:5])}{'; …' if len(told) > 5 else ''} look alike, but are "
            "different groups with counts, weights and metrics of their own. Write them alike if they are one.",
            GroupRobustWarning,
            stacklevel=3,
        )
