"""Benchmarks from the Hub, or from a folder that holds what the Hub's repository holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import datasets
from datasets import DatasetDict

from hf_cgd.data.sources import load_from_hub
from hf_cgd.tasks.base import TaskInfo
from hf_cgd.tasks.raw_files import data_missing


def hub_splits(
    info: TaskInfo, folder: Path | None, names: Mapping[str, str], columns: Sequence[str], advice: str = ""
) -> DatasetDict:
    """The splits of a dataset of the Hub under our names.

    Args:
        folder: a copy of its repository; None for the Hub itself.
        names: {their name: our name}.
        columns: what every split must have.
        advice: last line of the message where the Hub cannot be reached; by default what a folder would have to hold.

    Raises:
        ConnectionError: the Hub cannot be reached; the message says what to pass instead.
        FileNotFoundError: no such folder, or one without the data.
        ValueError: a split or a column that is missing.
    """
    assert info.hub is not None
    if folder is None:
        advice = advice or f"Pass data_dir= with a folder: {info.layout or 'the files of the benchmark'}"
        found = load_from_hub(info.hub.id, advice, info.hub.config, info.hub.revision)
    else:
        if not folder.is_dir():
            raise data_missing(info, folder, f"a copy of {info.hub.id} of the Hub")
        try:
            found = datasets.load_dataset(str(folder), info.hub.config)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise data_missing(info, folder, f"a copy of {info.hub.id} of the Hub ({reason})") from error
    where = str(folder or info.hub.id)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{where}: expected the splits {list(names)}, got {list(found)}. Is it {info.hub.id}?")
    for name in names:
        lacking = [column for column in columns if column not in found[name].column_names]
        if lacking:
            raise ValueError(
                f"{where}: expected the column(s) {lacking} in the {name} split, got {found[name].column_names}. Is "
                f"it {info.hub.id}?"
            )
    return DatasetDict({ours: found[theirs] for theirs, ours in names.items()})
