"""A user's own data: from a Hub id, a file or a folder to labelled splits whose groups are known."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Image

from hf_cgd.data.columns import class_names_of, listed_rows, read_columns, require_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.image_folders import read_image_folder
from hf_cgd.data.tables import READERS, read_table

logger = logging.getLogger(__name__)

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test",),
}
"""The splits, and the names under which each is looked for, the first found wins."""


def load_labelled(
    dataset: str | None,
    config_name: str | None,
    columns: Mapping[str, str | None],
    group_columns: Sequence[str] | None,
    seed: int = 0,
    check: Callable[[DatasetDict], None] | None = None,
) -> DatasetDict:
    """Splits "train", "validation" and, where there is one, "test", with classes in "label".

    Args:
        dataset: see `load_splits`; None is an error.
        config_name: configuration of a dataset on the Hub.
        columns: {argument: column} that every split must have, "label_column" among them; None for none.
        group_columns: columns that the training split must have; None for none.
        seed: of the draw of a validation split, see `with_validation`.
        check: looks at the splits as they were read, before classes are formed and examples held out.

    Raises:
        ValueError: a column that is missing or does not hold classes.
        FileNotFoundError, ConnectionError: see `load_splits`.
    """
    if dataset is None:
        raise ValueError(
            "dataset: expected a CSV, JSONL or Parquet file, a folder or the id of a dataset on the Hub, got nothing."
        )
    splits = load_splits(dataset, config_name)
    require_columns_in_splits(splits, columns)
    for column in group_columns or ():
        require_columns_in_splits({"train": splits["train"]}, {"group_column": column})
    label_column = columns["label_column"]
    assert label_column is not None
    if check is not None:
        check(splits)
    splits = with_class_labels(splits, label_column)
    return with_validation(splits, group_columns or ["label"], seed=seed)


def name_of_file(dataset: str | None) -> str | None:
    """What data of this machine is called, without its path; None for data of the Hub, and for none."""
    return Path(dataset).resolve().name if dataset and Path(dataset).exists() else None


def load_splits(dataset: str, config_name: str | None = None) -> DatasetDict:
    """Splits "train" and, where there are any, "validation" and "test".

    Args:
        dataset: a table (`READERS` lists the endings), which becomes "train"; a folder with one table for each split,
            found by its stem; an image folder (`metadata.csv` with a `file_name` column, or one folder per class); or
            the id of a dataset on the Hub.
        config_name: configuration of a dataset on the Hub that has several.

    Raises:
        FileNotFoundError: a file that does not exist, or a folder without training data.
        ConnectionError: the Hub has no such dataset, or cannot be reached.
    """
    path = Path(dataset)
    if path.is_file():
        return DatasetDict({"train": read_table(path)})
    if path.is_dir():
        names = {alias: split for split, aliases in SPLIT_NAMES.items() for alias in reversed(aliases)}
        tables = find_tables(path, names)
        if tables:
            return _by_split({stem: read_table(table) for stem, table in tables.items()}, str(path))
        if not any(path.rglob("metadata.*")) and not any(child.is_dir() for child in path.iterdir()):
            raise FileNotFoundError(
                f"{path}: expected train, validation and test tables ({', '.join(READERS)}), or images with a "
                f"metadata.csv, found {sorted(child.name for child in path.iterdir())[:10]}. Rename the files, or "
                "pass the path of a single table."
            )
        return _by_split(read_image_folder(path), str(path))
    if path.suffix in READERS or path.is_absolute() or dataset.count("/") > 1:
        raise FileNotFoundError(
            f"Expected a file, a folder or the id of a dataset on the Hub, but there is no {dataset!r} (looked in "
            f"{Path.cwd()}). Correct the path."
        )
    advice = "Check the id, or pass the path of a CSV, JSONL or Parquet file or of a folder."
    return _by_split(load_from_hub(dataset, advice, config_name), dataset)


def load_from_hub(
    hub_id: str, advice: str, config_name: str | None = None, revision: str | None = None
) -> DatasetDict:
    """A dataset of the Hub, of that commit (None: the newest).

    Raises:
        ConnectionError: it cannot be had; three lines say what, why, and what to do, of which `advice` is the last.
    """
    try:
        return datasets.load_dataset(hub_id, config_name, revision=revision)
    except OSError as error:
        reason = " ".join(str(error).split())
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0") else ""
        raise ConnectionError(
            f"Expected to load {hub_id!r} from the Hugging Face Hub, which needs a connection or a cached copy.\n"
            f"It failed: {reason}.{offline}\n{advice}"
        ) from error


def find_tables(folder: str | Path, stems: Mapping[str, Any] | Sequence[str]) -> dict[str, Path]:
    """The tables in a folder whose stem (file name without ending) is among `stems`, {stem: path} in their order.

    Raises:
        ValueError: two tables of one stem.
    """
    found: dict[str, Path] = {}
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in READERS and path.stem in stems:
            if path.stem in found:
                raise ValueError(
                    f"{folder}: expected one table named {path.stem!r}, found {found[path.stem].name} and "
                    f"{path.name}. Remove one."
                )
            found[path.stem] = path
    return {stem: found[stem] for stem in stems if stem in found}


def _by_split(found: Mapping[str, Dataset], where: str) -> DatasetDict:
    splits = DatasetDict()
    for split, aliases in SPLIT_NAMES.items():
        name = next((alias for alias in aliases if alias in found), None)
        if name is not None:
            splits[split] = found[name]
    left = [name for name in found if all(found[name] is not rows for rows in splits.values())]
    if left and "train" in splits:
        logger.info("%s: not read: %s. The splits are %s.", where, ", ".join(map(str, left)), ", ".join(splits))
    if "train" not in splits:
        raise FileNotFoundError(
            f"{where}: expected a split named 'train', found {sorted(found)}. Rename the training data."
        )
    return splits


def require_columns_in_splits(splits: Mapping[str, Dataset], options: Mapping[str, str | None]) -> None:
    """Check that the column that each option names is in every split; {option: column}, None for one that is not set.

    Raises:
        ValueError: a missing column; tells the option, the split and the columns there are.
    """
    for split, rows in splits.items():
        for option, column in options.items():
            if column is not None:
                require_columns(rows, [column], option, f"{split} split", f"Pass {option}= with one of these.")


def require_text(splits: Mapping[str, Dataset], columns: Sequence[str | None]) -> None:
    """Check that the columns hold a string in every row; entries that are None are passed over.

    Raises:
        ValueError: anything else; tells the split and the row.
    """
    for split, rows in splits.items():
        for column in filter(None, columns):
            for row, value in enumerate(rows[column][:]):
                if not isinstance(value, str):
                    raise ValueError(
                        f"Column {column!r}, {split} row {row}: expected a text, got {value!r}. Fill in or drop such "
                        "rows, or name another column."
                    )


def with_class_labels(splits: DatasetDict, column: str) -> DatasetDict:
    """The same splits with a column "label" of classes 0..C-1 that knows their names.

    A `ClassLabel` keeps its classes. Of any other column the classes are the values that occur in any of the splits,
    in sorted order. A test split without labels (all -1 or None) is left out.

    Raises:
        ValueError: values that are not integers, strings or bools, fewer than two classes, or a column "label" in the
            way.
    """
    if column != "label" and "label" in splits["train"].column_names:
        raise ValueError(
            f"The labels are to come from {column!r}, but the data has a column 'label' too, which the model would be "
            "trained on. Remove or rename it."
        )
    splits = DatasetDict(splits)
    values = {split: read_columns(rows, [column])[column].values for split, rows in splits.items()}
    if "test" in splits and all(value in (-1, None) for value in values["test"]):
        logger.info("The test split has no labels and is left out.")
        del splits["test"], values["test"]
    names = class_names_of(splits["train"], column)
    for split, labels in values.items():
        own = class_names_of(splits[split], column)
        # A class is its name: 1 and "1", which other files may hold, are the same one.
        for row, value in enumerate(labels):
            if not isinstance(value, (int, str)) or ((names or own) is not None and value == -1):
                raise ValueError(
                    f"Column {column!r}, {split} row {row}: expected a class (an integer, a string or a bool), got "
                    f"{value!r}. Drop rows without a label; cut numbers into classes."
                )
        values[split] = [own[value] if own and not isinstance(value, str) else str(value) for value in labels]
    found = list(dict.fromkeys(name for labels in values.values() for name in labels))
    classes = sorted(found, key=_by_number) if names is None else list(names)
    if len(classes) < 2:
        raise ValueError(
            f"Column {column!r}: expected at least two classes, got only {classes}. Is it the right column of labels?"
        )
    unknown = [name for name in found if name not in classes]
    if unknown:
        raise ValueError(
            f"Column {column!r}: expected the classes of the training split, {classes}, got {unknown[:5]} in another."
        )
    feature, codes = ClassLabel(names=classes), {name: code for code, name in enumerate(classes)}
    for split, labels in values.items():
        rest = splits[split].remove_columns([column])
        for name in dict.fromkeys((column, "label")):
            rest = rest.add_column(name, [codes[label] for label in labels], feature=feature)
        splits[split] = rest
    return splits


def in_class_order(splits: DatasetDict, columns: Sequence[str], names: Sequence[str]) -> DatasetDict:
    """The same splits with the classes of some `ClassLabel` columns, all of which are among `names`, in that order."""
    splits, feature = DatasetDict(splits), ClassLabel(names=list(names))
    for split, rows in splits.items():
        for column in columns:
            codes = [feature.str2int(name) for name in class_names_of(rows, column) or ()]
            values = [codes[value] for value in read_columns(rows, [column])[column].values]
            rows = rows.remove_columns([column]).add_column(column, values, feature=feature)
        splits[split] = rows
    return splits


def _by_number(name: str) -> tuple[bool, int, str]:
    is_number = name.isdecimal() and str(int(name)) == name
    return not is_number, int(name) if is_number else 0, name


def with_validation(
    splits: DatasetDict, group_columns: Sequence[str], fraction: float = 0.1, seed: int = 0
) -> DatasetDict:
    """The same splits, and where "validation" is missing, a random part of each training group in its place.

    Every group gives `fraction` of its examples, rounded, and one at least; groups of one or two give none.
    """
    if "validation" in splits:
        return splits
    columns = read_columns(splits["train"], group_columns)
    ids = GroupInfo.from_columns(columns).encode_columns(columns)
    generator = np.random.default_rng(seed)
    held_out = np.zeros(len(ids), dtype=bool)
    for group in np.unique(ids):
        rows = generator.permutation(np.flatnonzero(ids == group))
        held_out[rows[: max(1, round(fraction * len(rows))) if len(rows) > 2 else 0]] = True
    logger.info(
        "No validation split: %d of the %d training examples (%g %% of every group of %s, seed %d) are held out.",
        held_out.sum(), len(ids), 100 * fraction, " x ".join(group_columns), seed,
    )  # fmt: skip
    train = splits["train"]
    rest = {split: rows for split, rows in splits.items() if split != "train"}
    return DatasetDict(
        train=train.select(np.flatnonzero(~held_out)), validation=train.select(np.flatnonzero(held_out)), **rest
    )


def with_images(splits: DatasetDict, column: str, source: str | Path) -> DatasetDict:
    """The same splits with `column` as images: paths, relative to the table, are opened when an example is read.

    Args:
        splits: what `load_splits` gives.
        column: holds images, or paths of image files.
        source: the table, or the folder with the tables.

    Raises:
        ValueError: a column that holds neither images nor paths.
        FileNotFoundError: a path that leads nowhere; the first one is named.
    """
    folder = Path(source).parent if Path(source).is_file() else Path(source)
    splits = DatasetDict(splits)
    for split, rows in splits.items():
        if isinstance(rows.features[column], Image):
            continue
        names = read_columns(rows, [column])[column].values
        empty = [row for row, name in enumerate(names) if name is None]
        if empty and len(empty) < len(names):
            raise ValueError(
                f"Column {column!r} of the {split} split: {listed_rows(empty, len(names))} name no image. Fill the "
                "paths in, or drop these rows."
            )
        if not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"Column {column!r} of the {split} split: expected images or paths of image files, got "
                f"{rows.features[column]}. Name another column, one of {rows.column_names}."
            )
        paths = [str(folder / name) for name in names]
        missing = [path for path in paths if not Path(path).is_file()]
        if missing:
            raise FileNotFoundError(
                f"Column {column!r} of the {split} split: expected image files under {folder}, but {len(missing)} of "
                f"{len(paths)} are missing, such as {missing[0]}. Paths are taken relative to the table."
            )
        splits[split] = rows.remove_columns([column]).add_column(column, paths).cast_column(column, Image())
    return splits
