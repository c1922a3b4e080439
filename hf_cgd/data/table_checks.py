"""What is wrong with a table of examples: all of it at once, with the places in the files it was read from."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_cgd.data.columns import is_missing
from hf_cgd.data.table_places import Where, listed
from hf_cgd.data.values import group_name
from hf_cgd.visible_text import as_read

LISTED_GROUPS = 10
FEW = 10
"""Training groups with fewer examples are told of."""
MANY_VALUES = 20
"""A column with more different values than this is looked at: are they ids, or texts?"""
LONG = 40
"""Characters of a value beyond which it is a text and no name."""
SAID_TO_BE_MISSING = frozenset({"nan", "<na>", "nat", "null", "n/a", "#n/a"})
"""What programs write for a missing value; in capitals or not."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in words; `stops` where training on such data would be wrong or impossible."""

    text: str
    stops: bool = True


@dataclass(frozen=True)
class Table:
    """The columns of all splits that a run reads.

    Attributes:
        splits: by split, the values [N] of each column; "train" is there.
        where: tells the place of rows.
        class_names: names of the classes, for columns whose values are numbers of classes.
    """

    splits: Mapping[str, Mapping[str, Sequence[Any]]]
    where: Where
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def of(self, column: str) -> Iterator[tuple[str, Sequence[Any]]]:
        """The splits that have a column, with its values."""
        return ((split, columns[column]) for split, columns in self.splits.items() if column in columns)

    def name(self, column: str, value: Any) -> str:
        """What a value says; two that should be one may differ in it."""
        names = self.class_names.get(column)
        return repr(names[value]) if names and isinstance(value, int) and 0 <= value < len(names) else repr(value)

    def names(self, columns: Sequence[str], values: Sequence[Any]) -> list[str]:
        """The same without quotation marks, for one row of several columns."""
        found = [self.name(column, value) for column, value in zip(columns, values, strict=True)]
        return [name[1:-1] if name[:1] in "'\"" else name for name in found]


def problems_of(
    table: Table, label: str, groups: Sequence[str], texts: Sequence[str] = (), min_group_size: int = 2
) -> list[Problem]:
    """All that is wrong with labels, groups and texts, the worst first within each column.

    Args:
        table: before any example is held out.
        label: the column of the classes.
        groups: columns whose values, crossed, are the groups; columns that training lacks are passed over.
        texts: columns that must hold a text.
        min_group_size: smallest training group that is accepted.
    """
    groups = [column for column in groups if column in table.splits["train"]]
    problems = []
    for column in dict.fromkeys((label, *groups)):
        role = f"label_column {column!r}" if column == label else f"group_column {column!r}"
        problems += _missing(table, column, role, is_label=column == label)
        found, are_names = problems_of_names(table, column, role)
        problems += found
        if are_names and column == label:
            problems += _classes_not_in_training(table, column, role)
        if not are_names and column in groups:
            # Its groups would be told of one by one.
            groups.remove(column)
    for column in texts:
        problems += _not_texts(table, column)
    return problems + (_small_groups(table, groups, min_group_size) if groups else [])


def problems_of_names(table: Table, column: str, role: str) -> tuple[list[Problem], bool]:
    """What is wrong with values as names of classes or groups, and whether they are names at all.

    Args:
        table: with a split "train" that has the column.
        column: its name.
        role: how the messages begin: "group_column 'place'".
    """
    not_names = _not_names(table, column, role) or _ids_or_texts(table, column, role)
    return not_names or [*_nearly_equal(table, column, role), *_said_to_be_missing(table, column, role)], not not_names


def missing_files(table: Table, column: str, folder: Path) -> list[Problem]:
    """Paths in a column, relative to a folder, that lead nowhere, and rows without one."""
    problems = []
    for split, values in table.of(column):
        empty = [row for row, value in enumerate(values) if is_missing(value)]
        if empty:
            places = table.where(split, empty)
            problems.append(
                Problem(
                    f"image_column {column!r}: {len(empty):,} of {len(values):,} rows name no file ({places}). Fill "
                    "it in or drop these rows."
                )
            )
        rows = [
            row for row, value in enumerate(values)
            if isinstance(value, str) and not is_missing(value) and not (folder / value).is_file()
        ]  # fmt: skip
        if rows:
            places = table.where(split, rows)
            problems.append(
                Problem(
                    f"image_column {column!r}: {len(rows):,} of {len(values):,} files are not there under {folder}, "
                    f"such as {values[rows[0]]!r} ({places})."
                )
            )
    return problems


def _missing(table: Table, column: str, role: str, is_label: bool) -> list[Problem]:
    problems = []
    for split, values in table.of(column):
        unknown = is_label and column in table.class_names
        rows = [row for row, value in enumerate(values) if is_missing(value) or (unknown and value == -1)]
        if not rows or (is_label and split == "test" and len(rows) == len(values)):
            continue
        remedy = (
            "Drop these rows or fill in the class."
            if is_label
            else "Fill it in (for instance 'unknown') or drop these rows."
        )
        problems.append(
            Problem(
                f"{role}: {len(rows):,} of {len(values):,} rows have no value ({table.where(split, rows)}). {remedy}",
                stops=is_label or split == "train",
            )
        )
    return problems


def _not_names(table: Table, column: str, role: str) -> list[Problem]:
    """Decimal numbers and nested values cannot name a class or a group. Whole ones may be a gap's doing."""
    problems = []
    for split, values in table.of(column):
        has_gap = any(map(is_missing, values))
        rows = [
            row for row, value in enumerate(values)
            if not isinstance(value, (int, str)) and not is_missing(value)
            and not (has_gap and isinstance(value, float) and value.is_integer())
        ]  # fmt: skip
        if rows:
            problems.append(
                Problem(
                    f"{role}: {len(rows):,} of {len(values):,} values are no integers, texts or bools, such as "
                    f"{str(values[rows[0]])[:LONG]!r} ({table.where(split, rows)}). "
                    f"{_remedy([values[row] for row in rows])}"
                )
            )
    return problems


def _remedy(values: Sequence[Any]) -> str:
    if all(isinstance(value, float) and value.is_integer() for value in values):
        return "Write them as whole numbers (1 for 1.0), or cut them into classes."
    if all(isinstance(value, float) for value in values):
        return "Cut numbers into classes."
    if any(isinstance(value, (dict, list)) for value in values):
        return "Bring what is nested, or a list, into columns of single values."
    return "Write them as texts."


def _classes_not_in_training(table: Table, column: str, role: str) -> list[Problem]:
    """Classes of other splits that no model could learn: all of their rows count as wrong answers."""
    learned = {_plain(table, column, value) for value in set(table.splits["train"][column])}
    problems = []
    for split, values in table.of(column):
        names = {value: _plain(table, column, value) for value in set(values)}
        unknown = {value for value, name in names.items() if name not in learned and value != -1}
        rows = [row for row, value in enumerate(values) if value in unknown and not is_missing(value)]
        if rows:
            found = listed(list(dict.fromkeys(table.name(column, values[row]) for row in rows)))
            problems.append(
                Problem(
                    f"{role}: no training row is of {found}, which {len(rows):,} of {len(values):,} rows of the "
                    f"{split} split are ({table.where(split, rows)}). All of them will be answered wrongly.",
                    stops=False,
                )
            )
    return problems


def _plain(table: Table, column: str, value: Any) -> str:
    return table.names([column], [value])[0]


def _said_to_be_missing(table: Table, column: str, role: str) -> list[Problem]:
    """Texts such as "nan", which some program may have written for a missing value."""
    problems = []
    for split, values in table.of(column):
        rows = [
            r for r, value in enumerate(values) if isinstance(value, str) and value.casefold() in SAID_TO_BE_MISSING
        ]
        if rows:
            found = listed([repr(value) for value in dict.fromkeys(values[row] for row in rows)])
            problems.append(
                Problem(
                    f"{role}: {len(rows):,} of {len(values):,} rows say {found} ({table.where(split, rows)}), which "
                    "is a class or group of its own here. Drop these rows if it stands for a missing value.",
                    stops=False,
                )
            )
    return problems


def _ids_or_texts(table: Table, column: str, role: str) -> list[Problem]:
    values = [value for value in table.splits["train"][column] if not is_missing(value)]
    different = list(dict.fromkeys(values))
    if len(different) <= MANY_VALUES:
        return []
    length = sum(len(str(value)) for value in different) / len(different)
    if len(different) <= len(values) / 2 and length <= LONG:
        return []
    examples = listed([f"{str(value)[:LONG]!r}" for value in different], 3)
    kind = "texts" if length > LONG else "ids"
    return [
        Problem(
            f"{role}: {len(different):,} different values in {len(values):,} rows, {examples}. These look like "
            f"{kind}: a class or a group needs many examples. Name another column."
        )
    ]


def _nearly_equal(table: Table, column: str, role: str) -> list[Problem]:
    """Values that a person would read as one, over all splits together."""
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    keys: dict[str, str] = {}
    kinds = {type(value) for _, values in table.of(column) for value in values}
    for split, values in table.of(column):
        # By type too: 1 and True are equal, and a reader's two things.
        rows_of: dict[tuple[type, Any], list[int]] = defaultdict(list)
        for row, value in enumerate(values):
            rows_of[type(value), value].append(row)
        for (_, value), rows in rows_of.items():
            if not is_missing(value):
                name = table.name(column, value)
                places[name] += [(split, row) for row in rows]
                keys[name] = as_read(value if name == repr(value) else name[1:-1], numbers_too=True)
    alike = defaultdict(list)
    for name in sorted(places, key=lambda name: -len(places[name])):
        alike[keys[name]].append(name)
    problems = []
    for names in alike.values():
        if len(names) > 1:
            told = [f"{names[0]} ({len(places[names[0]]):,} rows)"]
            told += [f"{name} ({_places(table, places[name])})" for name in names[1:]]
            difference = _difference(names)
            problems.append(
                Problem(
                    f"{role}: {listed(told)} differ in {difference} only. Write them alike, or one group or "
                    "class becomes several.",
                    # Codes of one column may be what they are.
                    stops=difference != ZEROS or bool(kinds & {int, float}),
                )
            )
    return problems


ZEROS = "leading zeros"


def _difference(names: Sequence[str]) -> str:
    texts = [name[1:-1] if name[:1] in "'\"" else None for name in names]
    if None in texts:
        return "being a number or a text"
    plain = [str(text) for text in texts]
    if len({" ".join(text.split()) for text in plain}) == 1:
        return "spaces"
    if len({text.casefold() for text in plain}) == 1:
        return "capitals"
    if len({text.strip().lstrip("0") for text in plain}) == 1:
        return ZEROS
    return "spaces, capitals or the form of characters (unicode)"


def _places(table: Table, places: Sequence[tuple[str, int]]) -> str:
    by_split: dict[str, list[int]] = defaultdict(list)
    for split, row in places:
        by_split[split].append(row)
    return "; ".join(table.where(split, rows) for split, rows in by_split.items())


def _not_texts(table: Table, column: str) -> list[Problem]:
    problems = []
    for split, values in table.of(column):
        wrong = [row for row, value in enumerate(values) if not isinstance(value, str)]
        blank = [row for row, value in enumerate(values) if isinstance(value, str) and not value.strip()]
        if wrong:
            problems.append(
                Problem(
                    f"text column {column!r}: {len(wrong):,} of {len(values):,} rows hold no text, such as "
                    f"{values[wrong[0]]!r} ({table.where(split, wrong)}). Fill them in or drop them."
                )
            )
        if blank:
            places = table.where(split, blank)
            text = f"text column {column!r}: {len(blank):,} of {len(values):,} texts are empty ({places})."
            problems.append(Problem(text, stops=False))
    return problems


def _small_groups(table: Table, columns: Sequence[str], least: int) -> list[Problem]:
    train = table.splits["train"]
    counts = {
        values: count
        for values, count in Counter(zip(*(train[column] for column in columns), strict=True)).items()
        if not any(map(is_missing, values))
    }
    told = sorted((count, group_name(columns, table.names(columns, values))) for values, count in counts.items())
    problems = []
    for stops, found, text in (
        (
            True,
            [t for t in told if t[0] < least],
            f"fewer than {least} training examples (min_group_size). Merge or drop them",
        ),
        (
            False,
            [t for t in told if least <= t[0] < FEW],
            f"fewer than {FEW} training examples. What is learned of them is chance",
        ),
    ):
        if found:
            names = listed([f"{name} (n = {count})" for count, name in found], LISTED_GROUPS)
            problems.append(
                Problem(f"group_column: {len(found):,} of {len(told):,} groups have {text}: {names}.", stops)
            )
    return problems
