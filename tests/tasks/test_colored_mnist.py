"""Colored-MNIST: hand counts, and images that tell who they are."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from made_files import made_mnist, write_idx, write_mnist

from hf_cgd.tasks import colored_mnist, mnist


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files(tmp_path: Path, ending: str) -> None:
    data = mnist.load(write_mnist(tmp_path, ending))
    for name, (images, digits) in made_mnist().items():
        assert np.array_equal(data[name][0], images) and np.array_equal(data[name][1], digits)


def test_idx_errors(tmp_path: Path) -> None:
    array = np.zeros((2, 28, 28))
    wrong = write_idx(tmp_path / "a", array, magic=b"\x00\x00\x0d\x03")
    with pytest.raises(ValueError, match="starts with 00000803 .* got 00000d03"):
        mnist.read_idx(wrong, 3)
    with pytest.raises(ValueError, match="starts with 00000801"):
        mnist.read_idx(write_idx(tmp_path / "b", array), 1)
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(ValueError, match="got an empty file"):
        mnist.read_idx(tmp_path / "c", 1)
    (tmp_path / "d").write_bytes(write_idx(tmp_path / "b", array).read_bytes()[:-3])
    with pytest.raises(ValueError, match="expected 2 x 28 x 28 bytes after the header, got 1565"):
        mnist.read_idx(tmp_path / "d", 3)
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte or train-images-idx3-ubyte.gz"):
        mnist.load(tmp_path)
    folder = write_mnist(tmp_path)
    write_idx(folder / "t10k-labels-idx1-ubyte", np.zeros(3))
    with pytest.raises(ValueError, match=r"images \(20, 28, 28\) and labels \(3,\) in the test files"):
        mnist.load(folder)


def pixels(dataset: Dataset) -> torch.Tensor:
    return torch.stack([row["pixel_values"] for row in dataset])


def image_numbers(dataset: Dataset) -> list[int]:
    """Which of the images of `made_mnist` each row shows."""
    return (pixels(dataset).amax(dim=(1, 2, 3)) * 255).round().int().sub(1).tolist()


def test_colored_mnist_counts_and_colors() -> None:
    splits = colored_mnist.splits_of(made_mnist(), ratio=4, validation_size=10, seed=0)
    counts = {name: Counter(rows["group"][:]) for name, rows in splits.items()}
    assert counts["train"] == {"majority": 40, "minority": 10}
    assert counts["validation"] == {"majority": 5, "minority": 5}
    assert counts["test"] == {"majority": 10, "minority": 10}
    assert sorted(image_numbers(splits["train"])) == list(range(50))
    assert sorted(image_numbers(splits["validation"])) == list(range(50, 60))
    assert sorted(image_numbers(splits["test"])) == list(range(20))
    for rows in splits.values():
        images = pixels(rows)
        assert images.dtype == torch.float32 and images.shape[1:] == (3, 28, 28) and images.max() <= 1
        for number, row, image in zip(image_numbers(rows), rows, images, strict=True):
            label = int(number % 10 < 5)
            assert row["label"] == label
            red = (label == 0) == (row["group"] == "majority")
            channel = 0 if red else 2
            assert image[channel, :14].unique().tolist() == pytest.approx([(number + 1) / 255])
            assert image.sum() == image[channel, :14].sum()


def test_legacy_coloring_recolors_the_same_first_images() -> None:
    splits = colored_mnist.splits_of(made_mnist(), ratio=6, validation_size=10, legacy=True)
    train = splits["train"]
    assert image_numbers(train) == [*range(42), *range(7)]  # 50 * 6/7 and 50 / 7, rounded down
    assert image_numbers(splits["validation"]) == [*range(50, 55)] * 2
    assert image_numbers(splits["test"]) == [*range(10)] * 2
    image = pixels(train)[0]
    assert train[0]["group"] == "majority" and train[0]["label"] == 1 and train[0]["color"] == "magenta"
    assert image[1].max() == 0 and image[0, :, :14].min() > 0 and image[2, :, 14:].max() == 0


def test_published_sizes() -> None:
    assert colored_mnist.group_counts(50_000, 1000) == (49_950, 50)
    assert colored_mnist.group_counts(50_000, 1000, legacy=True) == (49_950, 49)
    assert (
        colored_mnist.group_counts(10_000, 1) == colored_mnist.group_counts(10_000, 1, legacy=True) == (5_000, 5_000)
    )


def test_train_size_keeps_the_ratio() -> None:
    splits = colored_mnist.splits_of(made_mnist(), ratio=4, validation_size=10, train_size=20, seed=1)
    assert Counter(splits["train"]["group"][:]) == {"majority": 16, "minority": 4}
    numbers = image_numbers(splits["train"])
    assert len(set(numbers)) == 20 and max(numbers) < 50
    again = colored_mnist.splits_of(made_mnist(), ratio=4, validation_size=10, train_size=20, seed=1)
    assert image_numbers(again["train"]) == numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 49}, r"50 training images at 49 to 1 leave 1 .* expected 2 or more. Use a train_size of 100"),
        ({"ratio": 0.5}, "ratio is majority to minority, so at least 1, got 0.5"),
        ({"train_size": 51}, "between 1 and 50"),
        ({"train_size": 0}, "between 1 and 50"),
        ({"validation_size": 60}, "between 0 and the 60 training images, got 60"),
    ],
)
def test_colored_mnist_sizes_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        colored_mnist.splits_of(made_mnist(), **{"validation_size": 10, "ratio": 4, **options})
