"""Colored-MNIST of the CGD paper (Piratla et al., 2022): a colour that gives the label away, but for 1 image in 1,001.

MNIST digits 0-4 against 5-9. In the majority group the colour of the digit follows the label, in the minority group it
is the other one; r majority examples to one of the minority in training, as many of each to validate and to test. The
metric is the accuracy of the worse group. ("Colored MNIST" of IRM, DomainBed and SubpopBench is another data set:
labels with 25 % noise, other shares.)
"""

import gzip
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_cgd.data.sources import load_from_hub

HUB_ID = "ylecun/mnist"
GROUP_COLUMNS = ("group",)
METRIC = "worst_group_accuracy"
LABELS = ("5-9", "0-4")
GROUPS = ("majority", "minority")
COLORS = {"red": (1, 0, 0), "blue": (0, 0, 1), "cyan": (0, 1, 1), "magenta": (1, 0, 1), "white": (1, 1, 1)}
"""Share of the digit's brightness that each channel gets."""

PUBLISHED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "erm": ("50 (0.0)", "0 (0.0)"),
        "erm_uw": ("53.6 (0.1)", "7.2 (2.1)"),
        "pgi": ("52.5 (1.7)", "44.4 (1.5)"),
        "group_dro": ("73.5 (5.3)", "48.5 (11.5)"),
        "cgd": ("78.6 (0.5)", "65.6 (5.9)"),
    }
)
"""First column of the paper's Table 3 by objective: average and worst group accuracy in per cent, three seeds."""

SIDE = 28
IMAGE_FORMAT = {"input_size": (3, SIDE, SIDE), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "crop_pct": 1.0}
"""What a network is given, in timm's terms."""

RATIO = 1000
VALIDATION_SIZE = 10_000

IDX_FILES = {"train": "train", "test": "t10k"}
IDX_UNSIGNED_BYTES = 0x08


def hyperparameters(objective: str) -> dict[str, Any]:
    """The paper's settings, as options of a recipe.

    SGD and batch 1024 as stated. It searched learning rate {1e-3, 1e-5}, weight decay {1e-4, 0.1, 1} (0 in its study
    of ratios) and step size {1, 0.1, 0.01, 0.001}, with C = 0; group gradients over all parameters. Momentum and
    schedule are not stated: 0.9 and constant are those of the procedure that it follows (Sagawa et al., 2020). 100
    epochs are those of the example in its released code.
    """
    settings: dict[str, Any] = {
        "model": "resnet18", "optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 1e-3,
        "weight_decay": 1e-4, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "num_train_epochs": 100,
        "per_device_train_batch_size": 1024, "per_device_eval_batch_size": 1024,
    }  # fmt: skip
    return settings | ({"gradient_layers": ["all"]} if objective == "cgd" else {})


def load(data_dir: str | Path | None = None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images [N, 28, 28] and digits [N] (uint8) of "train" and "test".

    Args:
        data_dir: a folder with the four IDX files of MNIST, plain or `.gz`; None for the Hub.

    Raises:
        FileNotFoundError: a file that is missing.
        ValueError: a file that is not what its name says.
        ConnectionError: the Hub cannot be reached; three lines say what to pass instead.
    """
    if data_dir is None:
        advice = "Pass --data_dir with a folder of the four IDX files (train-images-idx3-ubyte, … plain or .gz)."
        digits = load_from_hub(HUB_ID, advice)
        return {
            name: (
                np.stack([np.asarray(image) for image in digits[name]["image"]]),
                np.asarray(digits[name]["label"][:]),
            )
            for name in IDX_FILES
        }
    found = {}
    for name, stem in IDX_FILES.items():
        images = read_idx(_find_idx(data_dir, f"{stem}-images", 3), 3)
        digits = read_idx(_find_idx(data_dir, f"{stem}-labels", 1), 1)
        if len(images) != len(digits) or images.shape[1:] != (SIDE, SIDE):
            raise ValueError(
                f"{data_dir}: expected one label for each image of {SIDE} x {SIDE}, got images {images.shape} and "
                f"labels {digits.shape} in the {name} files. Fetch the files again."
            )
        found[name] = (images, digits)
    return found


def read_idx(path: str | Path, dimensions: int) -> np.ndarray:
    """The array of unsigned bytes in an IDX file, plain or gzipped (told by its first bytes).

    Raises:
        ValueError: no IDX file of bytes with that many dimensions, or one that was cut off.
    """
    content = Path(path).read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    magic = bytes([0, 0, IDX_UNSIGNED_BYTES, dimensions])
    if content[:4] != magic:
        raise ValueError(
            f"{path}: expected an IDX file that starts with {magic.hex()} (bytes, {dimensions} dimension(s)), got "
            f"{content[:4].hex() or 'an empty file'}. Fetch the file again."
        )
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], dtype=">u4").astype(int)
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path}: expected {' x '.join(map(str, shape))} bytes after the header, got {len(content) - start}. "
            "Fetch the file again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _find_idx(folder: str | Path, stem: str, dimensions: int) -> Path:
    names = [f"{stem}{dot}idx{dimensions}-ubyte{ending}" for dot in "-." for ending in ("", ".gz")]
    path = next((path for path in (Path(folder) / name for name in names) if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"Expected {names[0]} or {names[1]} in {folder}, but neither is there. Pass the folder of the four IDX "
            "files of MNIST, or leave it out to load them from the Hub."
        )
    return path


def splits_of(
    data: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    ratio: float = RATIO,
    train_size: int | None = None,
    validation_size: int = VALIDATION_SIZE,
    legacy: bool = False,
    min_group_size: int = 2,
    seed: int = 0,
) -> DatasetDict:
    """Train, validation and test, with columns image, color, label and group, and `pixel_values` on reading.

    The last `validation_size` training images validate, the ones before train. Each image is in one group only, drawn
    at random.

    Args:
        data: what `load` gives.
        ratio: majority examples for each one of the minority in training, >= 1.
        train_size: use this many training images, at the same ratio; None for all.
        validation_size: training images that are kept to validate.
        legacy: as the authors' released code does it: the minority recolours the *first* of the images that the
            majority uses too, the colours are cyan and magenta (one channel is left out), images are transposed, and
            sizes are rounded down (49,950 + 49 at ratio 1000; half of each evaluation split is not used).
        min_group_size: smallest minority that makes sense.
        seed: of the draw of the minority.

    Raises:
        ValueError: sizes that do not fit, or too small a minority.
    """
    images, digits = data["train"]
    if not 0 < validation_size < len(images):
        raise ValueError(
            f"validation_size must lie between 0 and the {len(images)} training images, got {validation_size}."
        )
    if ratio < 1:
        raise ValueError(f"ratio is majority to minority, so at least 1, got {ratio}.")
    available = len(images) - validation_size
    size = available if train_size is None else train_size
    if not 0 < size <= available:
        raise ValueError(
            f"train_size must lie between 1 and {available} ({len(images)} less {validation_size} to validate), "
            f"got {train_size}."
        )
    sizes = {"train": (size, ratio), "validation": (validation_size, 1), "test": (len(data["test"][0]), 1)}
    sources = {
        "train": (images[:available], digits[:available]),
        "validation": (images[available:], digits[available:]),
        "test": data["test"],
    }
    splits = DatasetDict()
    for offset, (name, (total, majority_share)) in enumerate(sizes.items()):
        counts = group_counts(total, majority_share, legacy)
        if name == "train" and counts[1] < min_group_size:
            raise ValueError(
                f"{total} training images at {ratio:g} to 1 leave {counts[1]} in the minority group; expected "
                f"{min_group_size} or more. Use a train_size of {math.ceil(min_group_size * (ratio + 1))} "
                "or more, or a smaller ratio."
            )
        if legacy:
            rows = np.concatenate([np.arange(count) for count in counts])
        else:
            rows = np.random.default_rng([seed, offset]).permutation(len(sources[name][0]))[:total]
        is_minority = np.repeat([False, True], counts)
        splits[name] = colored(sources[name][0][rows], sources[name][1][rows], is_minority, legacy)
    return splits


def group_counts(total: int, ratio: float, legacy: bool = False) -> tuple[int, int]:
    """Sizes of majority and minority at `ratio` to 1: they add up to `total`, unless both are rounded down."""
    share = 1 / (ratio + 1)
    if legacy:
        return int((1 - share) * total), int(share * total)
    minority = round(share * total)
    return total - minority, minority


def colored(images: np.ndarray, digits: np.ndarray, is_minority: np.ndarray, legacy: bool = False) -> Dataset:
    """Rows of `image_rows`; label 1 is a digit below 5.

    Majority: red (legacy: cyan) for label 0, blue (magenta) for label 1; minority: the other way round.

    Args:
        images: uint8 [N, 28, 28].
        digits: [N].
        is_minority: bool [N].
        legacy: cyan and magenta on transposed images.
    """
    labels = (digits < 5).astype(int)
    palette = np.asarray(["cyan", "magenta"] if legacy else ["red", "blue"])
    images = images.transpose(0, 2, 1) if legacy else images
    groups = np.asarray(GROUPS)[is_minority.astype(int)]
    return image_rows(images, palette[labels ^ is_minority].tolist(), labels, LABELS, groups.tolist())


def image_rows(
    images: np.ndarray, colors: Sequence[str], labels: np.ndarray, label_names: Sequence[str], groups: Sequence[str]
) -> Dataset:
    """Rows with the grey image (784 bytes), its color, label and group; reading a row gives `pixel_values` instead.

    `pixel_values` is float32 [3, 28, 28] in [0, 1].

    Args:
        images: uint8 [N, 28, 28].
        colors: N names among `COLORS`.
        labels: [N] integers, places in `label_names`.
        label_names: names of the classes.
        groups: N names.
    """
    features = Features(
        image=Value("binary"), color=Value("string"), label=ClassLabel(names=list(label_names)), group=Value("string")
    )
    columns = {"image": [image.tobytes() for image in images], "color": colors, "label": labels, "group": groups}
    return Dataset.from_dict(columns, features=features).with_transform(_with_pixels)


def _with_pixels(batch: dict[str, list[Any]]) -> dict[str, Any]:
    """The columns of a batch, the color applied to the grey images; a batch without images is left as it is."""
    if "image" not in batch:
        return batch
    grey = torch.from_numpy(np.frombuffer(b"".join(batch["image"]), dtype=np.uint8).reshape(-1, 1, SIDE, SIDE).copy())
    channels = torch.tensor([COLORS[name] for name in batch["color"]], dtype=torch.float32)[:, :, None, None]
    rest = {name: values for name, values in batch.items() if name != "image"}
    return {"pixel_values": grey.float() / 255 * channels, **rest}
