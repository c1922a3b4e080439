"""From the rows of a table to what a network takes: texts as tokens, images as pixels."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, DatasetDict
from PIL import Image
from tqdm.auto import tqdm

from hf_cgd.data.image_preparation import AREA, SHAPE, Augmentation
from hf_cgd.data.image_reading import undecoded
from hf_cgd.data.images import DEPTH_16, opened_image
from hf_cgd.data.table_places import listed
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.config import GroupOptions
from hf_cgd.trainer.reference_losses import column_of

THREADS = 8
"""That look at files, which mostly wait."""
SAMPLE, FEW_BITS = 32, 2**13
"""Of images of 16 bits: those that are decoded, and a value that some of them should reach."""


CUT = "was cut (hf_cgd)"
"""A column that holds, while texts are made tokens, whether there were too many."""


def tokenized(
    splits: DatasetDict, columns: Sequence[str], tokenizer: Any, max_length: int, num_proc: int | None = None
) -> tuple[DatasetDict, dict[str, np.ndarray]]:
    """The splits with the tokens of one column of texts, or of two as pairs; longer ones are cut.

    Also which rows of each split were cut, bool [N].

    Args:
        splits: with the texts.
        columns: one, or two.
        tokenizer: of the network.
        max_length: tokens that a row may have.
        num_proc: processes that do it; None for this one.

    Raises:
        ValueError: a `max_length` below 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: expected at least one token of each text.")

    def encode(rows: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [rows[column] for column in columns]
        found = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**found, CUT: _were_cut(tokenizer, texts, found, max_length)}

    found = splits.map(encode, batched=True, num_proc=num_proc)
    cut = {split: np.asarray(rows.with_format(None)[CUT][:], dtype=bool) for split, rows in found.items()}
    return found.remove_columns([CUT]), cut


def _were_cut(tokenizer: Any, texts: Sequence[list[str]], found: Any, max_length: int) -> list[bool]:
    encodings = getattr(found, "encodings", None)
    if encodings is not None:
        return [bool(encoding.overflowing) for encoding in encodings]
    # A tokenizer in plain Python does not tell; only rows of full length may have been cut.
    full = [row for row, ids in enumerate(found["input_ids"]) if len(ids) >= max_length]
    cut = [False] * len(found["input_ids"])
    if full:
        whole = tokenizer(*([column[row] for row in full] for column in texts), verbose=False)["input_ids"]
        for row, ids in zip(full, whole, strict=True):
            cut[row] = len(ids) > len(found["input_ids"][row])
    return cut


def require_images(splits: DatasetDict, column: str) -> None:
    """Check that every file of a column of images is one, by its first bytes; a bar shows how far that is.

    A file that ends too early is found, and named, when it is read.

    Args:
        splits: with images that lie in files; others are passed over.
        column: of the images.

    Raises:
        ValueError: the first files that are no images, and how many there are.
    """
    paths = []
    for rows in splits.values():
        stored = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False))[column]
        paths += [image["path"] for image in stored if image and image["bytes"] is None and image["path"]]
    with ThreadPoolExecutor(THREADS) as pool:
        looked = tqdm(pool.map(_mode_of, paths), "Looking at images", len(paths), disable=None, leave=False)
        modes = dict(zip(paths, looked, strict=True))
    wrong = [path for path in paths if modes[path] is None]
    if wrong:
        raise ValueError(
            f"image_column {column!r}: {len(wrong):,} of {len(paths):,} files are no images, or broken ones: "
            f"{listed(wrong)}. Fetch them again, or take their rows out."
        )
    deep = [path for path in paths if (modes[path] or "").startswith("I")]
    if deep:
        _warn_of_unused_bits(deep)


def _mode_of(path: str) -> str | None:
    try:
        with Image.open(path) as image:
            return image.mode
    except (OSError, SyntaxError, Image.DecompressionBombError):
        return None


def _warn_of_unused_bits(paths: Sequence[str]) -> None:
    """Warn where greys of 16 bits use few of these, as those of many scanners: in 8 bits they are nearly black."""
    chosen = [paths[place] for place in np.linspace(0, len(paths) - 1, min(len(paths), SAMPLE)).astype(int)]
    greatest = 0
    for path in chosen:
        with suppress(OSError, SyntaxError), Image.open(path) as image:
            greatest = max(greatest, int(np.asarray(image).max()))
    if 0 < greatest < FEW_BITS:
        warnings.warn(
            f"Images of 16 bits: the greatest value in {len(chosen)} of {len(paths):,} of them is {greatest}, where "
            f"{DEPTH_16} is white. Networks get 8 of these bits, which leaves {(greatest + 128) // 257 + 1} shades. "
            "Scale the values to the whole range when the images are written.",
            GroupRobustWarning,
            stacklevel=3,
        )


def columns_beside_images(config: GroupOptions) -> list[str]:
    """The columns that a batch of images has beside its pixels: labels, groups, weights and reference losses."""
    groups = [*(config.group_column or ()), *(config.eval_group_column or ())]
    beside = [config.example_weight_column, column_of(None, config)]
    return ["label", *groups, *(name for name in beside if name is not None)]


def with_pixel_values(
    rows: Dataset, column: str, kept: Sequence[str], processor: Any, augmentation: Augmentation = "none"
) -> Dataset:
    """Rows whose images are opened when they are read; one that cannot be is named then.

    Args:
        rows: with a column of images.
        column: its name.
        kept: further columns that a batch shall have, where there are any.
        processor: of the network.
        augmentation: of training images, drawn anew each time that a row is read.
    """
    pixels = partial(processor, return_tensors="pt") if augmentation == "none" else _random_parts(processor)

    def read(batch: dict[str, list[Any]]) -> dict[str, Any]:
        found = {name: batch[name] for name in kept if name in batch}
        if column not in batch:
            return found
        return {**pixels([opened_image(value) for value in batch[column]]), **found}

    return undecoded(rows, column).with_transform(read)


def _random_parts(processor: Any) -> Callable[[list[Image.Image]], dict[str, Any]]:
    """From images to the `pixel_values` of random parts of them, half of them mirrored, in the processor's size."""
    data_config = getattr(processor, "data_config", None)
    if data_config is not None:
        from timm.data import create_transform

        own: dict[str, Any] = {"scale": AREA, "ratio": SHAPE, "hflip": 0.5, "color_jitter": None}
        steps = create_transform(**data_config, **own, is_training=True)
        return lambda images: {"pixel_values": torch.stack([steps(image) for image in images])}
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise ImportError('Images are augmented by torchvision: pip install "hf-cgd[vision]"') from error
    height, width = processor([Image.new("RGB", (64, 64))], return_tensors="pt")["pixel_values"].shape[-2:]
    stated = getattr(processor, "resample", None)
    interpolation = v2.InterpolationMode(_INTERPOLATIONS[2 if stated is None else int(stated)])
    part = v2.Compose([v2.RandomResizedCrop((height, width), AREA, SHAPE, interpolation), v2.RandomHorizontalFlip()])
    # They have their size; what is left is the scale of the values.
    left_out = {name: False for name in ("do_resize", "do_center_crop") if hasattr(processor, name)}
    return lambda images: dict(processor([part(image) for image in images], return_tensors="pt", **left_out))


_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Torchvision's names by the numbers of PIL, which a processor of transformers states."""
