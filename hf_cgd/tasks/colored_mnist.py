"""Colored-MNIST of the CGD paper (Piratla et al., 2022): a colour that gives the label away, but for 1 image in 1,001.

MNIST digits 0-4 against 5-9. In the majority group the colour of the digit follows the label, in the minority group it
is the other one; r majority examples to one of the minority in training, as many of each to validate and to test. The
metric is the accuracy of the worse group. ("Colored MNIST" of IRM, DomainBed and SubpopBench is another data set:
labels with 25 % noise, other shares.)

The authors' released code (`legacy`) does it in another way: the minority recolours the *first* of the images that the
majority uses too, the colours are cyan and magenta (one channel is left out), images are transposed, and sizes are
rounded down (49,950 + 49 at ratio 1000; half of each evaluation split is not used).
"""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict

from hf_cgd.tasks import mnist
from hf_cgd.tasks.base import Published, Task, TaskInfo
from hf_cgd.tasks.paper import WITHOUT_ADJUSTMENT

GROUPS = ("majority", "minority")
RATIO = 1000
VALIDATION_SIZE = 10_000

INFO = replace(
    mnist.INFO,
    name="colored_mnist",
    search=WITHOUT_ADJUSTMENT,
    # First column of the paper's Table 3: per cent, three seeds.
    published={
        "paper": Published(
            ("accuracy", "worst_group_accuracy"),
            {
                "erm": ("50 (0.0)", "0 (0.0)"),
                "erm_uw": ("53.6 (0.1)", "7.2 (2.1)"),
                "pgi": ("52.5 (1.7)", "44.4 (1.5)"),
                "group_dro": ("73.5 (5.3)", "48.5 (11.5)"),
                "cgd": ("78.6 (0.5)", "65.6 (5.9)"),
            },
        )
    },
)


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class ColoredMNIST(Task):
    """Colored-MNIST; the settings are explained at `splits_of`."""

    name = INFO.name
    ratio: float = _setting(RATIO, "Majority examples for each of the minority in training.")
    train_size: int | None = _setting(None, "Train on this many images, at the same ratio.")
    validation_size: int = _setting(VALIDATION_SIZE, "Training images that are kept to validate.")
    legacy: bool = _setting(
        False, "As the authors' released code: the minority recolours images of the majority, cyan/magenta."
    )
    min_group_size: int = 2

    @property
    def info(self) -> TaskInfo:
        """The same in all settings; the published cells are of a ratio of 1000."""
        return INFO

    def _from_hub(self, folder: Path | None) -> DatasetDict:
        return splits_of(mnist.from_hub(folder), **asdict(self))

    def _from_files(self, folder: Path) -> DatasetDict:
        return splits_of(mnist.load(folder), **asdict(self))


def splits_of(
    data: mnist.Digits,
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
        data: what `mnist.load` gives.
        ratio: majority examples for each one of the minority in training, >= 1.
        train_size: use this many training images, at the same ratio; None for all.
        validation_size: training images that are kept to validate.
        legacy: as the authors' released code does it, see above.
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
    """Rows of `mnist.image_rows`; label 1 is a digit below 5.

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
    return mnist.image_rows(
        images, palette[labels ^ is_minority].tolist(), labels, mnist.BINARY_LABELS, groups.tolist()
    )
