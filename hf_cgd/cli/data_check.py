"""A recipe's data: loaded and checked before anything is trained on it."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Image

from hf_cgd.cli.own_data_options import DataCheck
from hf_cgd.data import sources
from hf_cgd.data.columns import read_columns
from hf_cgd.data.table_checks import (
    LISTED_GROUPS,
    Problem,
    Table,
    group_name,
    missing_files,
    problems_of,
)
from hf_cgd.data.table_places import Where, listed, places_in_files
from hf_cgd.metrics.intervals import wilson_of_share
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.config import GroupRobustConfig

WIDEST = 0.25
"""A group whose accuracy validation tells less closely than by an interval of this width is told of."""
TYPICAL = 0.8
"""The accuracy at which that width is told."""


def load_checked(
    dataset: str | None,
    dataset_config: str | None,
    columns: Mapping[str, str | None],
    config: GroupRobustConfig,
    check: DataCheck = "stop",
    texts: Sequence[str] = (),
) -> DatasetDict:
    """What `hf_cgd.data.sources.load_labelled` gives, checked before and after a validation split is held out.

    Args:
        dataset, dataset_config, columns: see `load_labelled`; an "image_column" of paths is looked up.
        config: of the run; tells the group columns, the seed and the smallest group.
        check: see `DataCheck`. What is no fault of the data, such as small groups, is only warned of.
        texts: columns that must hold texts.

    Raises:
        ValueError: the data is wrong; the message lists everything that was found.
        FileNotFoundError, ConnectionError: see `load_labelled`.
    """
    groups = list(config.group_column or ())

    def look(splits: DatasetDict) -> None:
        assert dataset is not None and columns["label_column"] is not None
        label, image = columns["label_column"], columns.get("image_column")
        sizes = {split: len(rows) for split, rows in splits.items()}
        where = places_in_files(files_of(dataset), sizes)
        table = table_of(splits, [label, *groups, *texts, *([image] if image else [])], where)
        problems = problems_of(table, label, groups, texts, config.min_group_size)
        if image:
            source = Path(dataset)
            problems += missing_files(table, image, source.parent if source.is_file() else source)
        tell(problems, dataset, check, config.process_index == 0)

    loaded = sources.load_labelled(
        dataset, dataset_config, columns, groups, config.seed, check=None if check == "off" else look
    )
    if check != "off":
        tell(hold_out_problems(loaded, groups), str(dataset), check, config.process_index == 0)
    return loaded


def table_of(splits: Mapping[str, Dataset], columns: Sequence[str], where: Where) -> Table:
    """Some columns of all splits; columns of images are left out.

    Args:
        splits: as they were read.
        columns: those that a run reads, as far as a split has them.
        where: tells the place of rows.
    """
    values: dict[str, dict[str, Any]] = {}
    own: dict[str, dict[str, tuple[str, ...]]] = {}
    for split, rows in splits.items():
        here = [column for column in dict.fromkeys(columns) if column in rows.column_names]
        here = [column for column in here if not isinstance(rows.features[column], Image)]
        read = read_columns(rows, here)
        values[split] = {column: read[column].values for column in here}
        own[split] = {column: found for column in here if (found := read[column].class_names) is not None}
    names = {column: found for split in own.values() for column, found in split.items()}
    for column in [column for column in names if len({split.get(column) for split in own.values()}) > 1]:
        # Splits that number their classes differently hold the names of these in the place of numbers.
        del names[column]
        for split, known in own.items():
            if column in known:
                found = known[column]
                values[split][column] = [
                    found[v] if isinstance(v, int) and 0 <= v < len(found) else None for v in values[split][column]
                ]
    return Table(values, where, names)


def files_of(dataset: str) -> dict[str, Path]:
    """The table that each split was read from, as `hf_cgd.data.sources.load_splits` finds it; {} for the Hub."""
    path = Path(dataset)
    if path.is_file():
        return {"train": path}
    if not path.is_dir():
        return {}
    found = sources.find_tables(path, [alias for aliases in sources.SPLIT_NAMES.values() for alias in aliases])
    by_split = {
        split: next((found[alias] for alias in aliases if alias in found), None)
        for split, aliases in sources.SPLIT_NAMES.items()
    }
    return {split: table for split, table in by_split.items() if table is not None}


def hold_out_problems(splits: Mapping[str, Dataset], columns: Sequence[str]) -> list[Problem]:
    """Groups that the validation split holds too few examples of to choose values or epochs by them.

    With n and the 95 % interval that an accuracy of .8 would have.
    """
    if "validation" not in splits or not columns or not set(columns) <= set(splits["validation"].column_names):
        return []
    counts = {split: _group_counts(splits[split], columns) for split in ("train", "validation")}
    told = []
    for group in sorted(counts["train"], key=lambda group: counts["validation"][group]):
        n = counts["validation"][group]
        low, high = wilson_of_share(TYPICAL, n) if n else (0.0, 1.0)
        if high - low > WIDEST:
            known = f"{TYPICAL:g} is known to {low:.2f}-{high:.2f}" if n else "it has no say"
            told.append(f"{group_name(columns, group)} (n = {n}: {known})")
    if not told:
        return []
    text = (
        f"validation: {len(told):,} of {len(counts['train']):,} groups are too small to choose by: "
        f"{listed(told, LISTED_GROUPS)}. A choice among values or epochs by the worst group is mostly chance here."
    )
    return [Problem(text, stops=False)]


def tell(problems: Sequence[Problem], dataset: str, check: DataCheck, speaks: bool = True) -> None:
    """Stop with the list of problems, or warn of it.

    Args:
        problems: what was found.
        dataset: where.
        check: see `DataCheck`.
        speaks: whether this process warns.

    Raises:
        ValueError: problems that stop, under "stop".
    """
    if not problems:
        return
    ordered = sorted(problems, key=lambda problem: not problem.stops)
    lines = "\n".join(f"  {number}. {problem.text}" for number, problem in enumerate(ordered, start=1))
    if check == "stop" and any(problem.stops for problem in problems):
        raise ValueError(
            f"{dataset}: {len(problems)} problem{'s' * (len(problems) > 1)} in the data:\n{lines}\n"
            "Correct the data, or set data_check='warn' to train on it as it is."
        )
    if speaks:
        warnings.warn(f"{dataset}: what to know of the data:\n{lines}", GroupRobustWarning, stacklevel=3)


def _group_counts(rows: Dataset, columns: Sequence[str]) -> Counter[tuple[str, ...]]:
    read = read_columns(rows, columns)

    def names(column: str) -> list[str]:
        known = read[column].class_names
        return [str(value) if known is None or value is None else known[value] for value in read[column].values]

    return Counter(zip(*map(names, columns), strict=True))
