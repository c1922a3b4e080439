"""Benchmarks through the `wilds` package: its folders, splits and metadata, and never its download."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hf_cgd.tasks.base import TaskInfo
from hf_cgd.tasks.raw_files import data_missing

INSTALL = 'The source "wilds" reads through the wilds package: pip install "hf-cgd[wilds]"'

PACKAGE_WARNINGS = (
    "The given NumPy array is not writable|CombinatorialGrouper|Minimum metadata value|The 'future.infer_string'"
)


def wilds_dataset(info: TaskInfo, root: Path, **options: Any) -> Any:
    """The `WILDSDataset` of a benchmark, read from its folder in `root`.

    Args:
        options: of its class, such as `fold`.

    Raises:
        ImportError: the package is not installed.
        FileNotFoundError: its folder is not there, or not complete; nothing is downloaded or written.
        ValueError: the package cannot read what is there.
    """
    try:
        import wilds
        from wilds.datasets.wilds_dataset import WILDSDataset
    except ImportError as error:
        raise ImportError(INSTALL) from error
    assert info.wilds is not None
    # The package makes a folder that is missing, and asks for a download; both before it says so.
    if not root.is_dir():
        raise data_missing(info, root, f"the folder {info.wilds.name}_v… of the wilds package")
    with reading_with_wilds(info, root):
        dataset = wilds.get_dataset(info.wilds.name, root_dir=str(root), download=False, **options)
    assert isinstance(dataset, WILDSDataset)
    return dataset


@contextmanager
def reading_with_wilds(info: TaskInfo, folder: Path) -> Iterator[None]:
    """Goes around the making of one of the package's datasets; its errors are told in our words.

    Raises:
        ImportError, FileNotFoundError, ValueError: see `wilds_dataset`.
    """
    assert info.wilds is not None
    try:
        with warnings.catch_warnings():
            # Of the package's own groups and arrays, and of the option below.
            warnings.filterwarnings("ignore", message=PACKAGE_WARNINGS)
            # The package writes numbers into columns of texts, which the texts of pandas 3 do not take.
            with pd.option_context("future.infer_string", False):
                yield
    except ImportError as error:
        raise ImportError(f"{INSTALL} ({error})") from error
    except FileNotFoundError as error:
        wanted = error.filename or f"{info.wilds.name}_v… with its RELEASE_v….txt, which the wilds package wrote there"
        raise data_missing(info, folder, str(wanted)) from error
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(
            f"{info.name}: the wilds package cannot read what is in {folder} ({type(error).__name__}: {error}). Is "
            "the folder complete? Read it as files for a message that says more: pass the folder itself as source."
        ) from error


def metadata_of(dataset: Any) -> dict[str, np.ndarray]:
    """The metadata of all rows by the package's names, "y" among them."""
    array = np.asarray(dataset.metadata_array)
    return {name: array[:, place] for place, name in enumerate(dataset.metadata_fields)}


def split_names(info: TaskInfo, dataset: Any) -> dict[int, str]:
    """{number in `dataset.split_array`: our name} of the splits that `info.wilds` names."""
    assert info.wilds is not None
    return {dataset.split_dict[theirs]: ours for theirs, ours in info.wilds.splits.items()}
