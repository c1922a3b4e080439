"""Image folders, whose metadata.csv is read as every other table is: "NA" is a text, and so is 007."""

import logging
from pathlib import Path

import datasets
import PIL.Image
from datasets import Dataset, DatasetDict, Image
from datasets.exceptions import DatasetsError

from hf_cgd.data.table_places import listed
from hf_cgd.data.tables import read_table, reason_of

logger = logging.getLogger(__name__)

FILE_NAME = "file_name"
"""Column of a metadata.csv that tells which image a row is of, relative to the table."""


def read_image_folder(folder: Path) -> DatasetDict:
    """The splits of an image folder: one folder for each class, or a metadata file beside the images.

    Raises:
        ValueError: a metadata.csv without the column `FILE_NAME`, with an image twice, without an image that it names,
            or that does not go with the images.
    """
    paths = sorted(folder.rglob("metadata.csv"))
    tables = [read_table(path) for path in paths]
    rows = _rows_by_image(paths, tables)
    try:
        splits = datasets.load_dataset("imagefolder", data_dir=str(folder))
    except DatasetsError as error:
        raise ValueError(
            f"{folder}: expected images, and a metadata.csv whose {FILE_NAME!r} are relative to its folder, but they "
            f"cannot be read: {reason_of(error)}."
        ) from error
    if not rows:
        return splits
    read = {name: _paths_in(split) for name, split in splits.items()}
    _tell_of_images_left_out(folder, {path for found in read.values() for path in found})
    return DatasetDict({name: _as_written(split, read[name], tables, rows) for name, split in splits.items()})


def _rows_by_image(paths: list[Path], tables: list[Dataset]) -> dict[str, tuple[int, int]]:
    """{path of an image: numbers of its table and row}."""
    rows: dict[str, tuple[int, int]] = {}
    for number, (path, table) in enumerate(zip(paths, tables, strict=True)):
        if FILE_NAME not in table.column_names:
            raise ValueError(
                f"{path}: expected a column {FILE_NAME!r} with the images' names, got {table.column_names}. Add it."
            )
        names = [str(name or "") for name in table[FILE_NAME][:]]
        _require_images(path, names)
        for row, name in enumerate(names):
            image = str((path.parent / name).resolve())
            if image in rows:
                raise ValueError(f"{path}: expected one row for each image, got two for {name!r}. Remove one.")
            rows[image] = number, row
    return rows


def _require_images(path: Path, names: list[str]) -> None:
    """Raise a ValueError unless each row of the table at `path` names an image that is there."""
    absolute = [name for name in names if Path(name).is_absolute()]
    missing = [name for name in names if not name or not (path.parent / name).is_file()]
    for problem, found in (("have a path that is not relative to its folder", absolute), ("have no image", missing)):
        if found:
            raise ValueError(
                f"{path}: expected in {FILE_NAME!r} the path of an image, relative to the table's folder. "
                f"{len(found)} of {len(names)} rows {problem}: {listed([repr(name) for name in found])}. "
                "Mend or remove them."
            )


def _tell_of_images_left_out(folder: Path, read: set[str | None]) -> None:
    endings = set(PIL.Image.registered_extensions())
    images = [path for path in folder.rglob("*") if path.suffix.lower() in endings]
    left = sorted(str(path.relative_to(folder)) for path in images if str(path.resolve()) not in read)
    if left:
        logger.info(
            "%s: %d of %d images have no row in a metadata.csv and are left out: %s",
            folder, len(left), len(images), listed(left),
        )  # fmt: skip


def _paths_in(rows: Dataset) -> list[str | None]:
    """Where the image of each row lies; None for one that is in the table itself."""
    name = next(name for name, feature in rows.features.items() if isinstance(feature, Image))
    images = rows.select_columns([name]).cast_column(name, Image(decode=False))[name]
    return [str(Path(image["path"]).resolve()) if image["path"] else None for image in images]


def _as_written(
    split: Dataset, paths: list[str | None], tables: list[Dataset], rows: dict[str, tuple[int, int]]
) -> Dataset:
    """The split, whose images lie at `paths`, with the columns of the tables as `read_table` gives them."""
    pictures = [name for name, feature in split.features.items() if isinstance(feature, Image)]
    of_tables = {name for table in tables for name in table.column_names}
    columns = [name for name in split.column_names if name in of_tables and name not in pictures]
    if not columns or len(pictures) != 1:
        return split
    places = [None if path is None else rows.get(path) for path in paths]
    for name in columns:
        given = split[name][:]
        cells = [table[name][:] if name in table.column_names else [None] * len(table) for table in tables]
        read = [value if at is None else cells[at[0]][at[1]] for value, at in zip(given, places, strict=True)]
        if list(map(repr, read)) != list(map(repr, given)):
            split = split.remove_columns(name).add_column(name, read)
    return split
