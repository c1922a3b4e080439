"""MNIST itself, which two benchmarks are made of: its files, its images as rows of a dataset, its hyperparameters."""

import gzip
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Value

from hf_cgd.tasks.base import HubData, Hyperparameters, TaskInfo
from hf_cgd.tasks.hub_source import hub_splits, in_our_classes

HUB_ID = "ylecun/mnist"
BINARY_LABELS = ("5-9", "0-4")
"""The two classes of the benchmarks: class 1 is a digit below 5."""
COLORS = {"red": (1, 0, 0), "blue": (0, 0, 1), "cyan": (0, 1, 1), "magenta": (1, 0, 1), "white": (1, 1, 1)}
"""Share of the digit's brightness that each channel gets."""

SIDE = 28
IMAGE_FORMAT: Mapping[str, Any] = {
    "input_size": (3, SIDE, SIDE), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "crop_pct": 1.0
}  # fmt: skip
"""What a network is given, in timm's terms."""

IDX_FILES = {"train": "train", "test": "t10k"}
IDX_UNSIGNED_BYTES = 0x08

Digits = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Images [N, 28, 28] and digits [N] (uint8) of "train" and "test"."""

INFO = TaskInfo(
    name="mnist",
    group_columns=("group",),
    label_names=BINARY_LABELS,
    metric="worst_group_accuracy",
    splits=("train", "validation", "test"),
    sources=("hub", "files"),
    licence="MIT, by the card of its copy on the Hub",
    citation="LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition. Proceedings of "
    "the IEEE, 1998.",
    kind="pixels",
    inputs=("pixel_values",),
    image_format=IMAGE_FORMAT,
    hub=HubData(HUB_ID, revision="77f3279092a1c1579b2250db8eafed0ad422088c"),
    layout="the four IDX files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte, plain or .gz.",
    places=("https://huggingface.co/datasets/ylecun/mnist", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    size="70,000 images of 28 x 28; 12 MB packed",
    hyperparameters={
        # Those of the CGD paper for its Colored-MNIST. SGD and batch 1024 as stated. It searched learning rate
        # {1e-3, 1e-5}, weight decay {1e-4, 0.1, 1} (0 in its study of ratios) and step size {1, 0.1, 0.01, 0.001},
        # with C = 0; group gradients over all parameters. Momentum and schedule are not stated: 0.9 and constant are
        # those of the procedure that it follows (Sagawa et al., 2020). 100 epochs are those of the example in its
        # released code, and so is how batches are drawn: with replacement, all groups equally likely, but for ERM.
        "paper": Hyperparameters(
            {
                "model": "resnet18", "optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 1e-3,
                "weight_decay": 1e-4, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "num_train_epochs": 100,
                "per_device_train_batch_size": 1024, "per_device_eval_batch_size": 1024,
                "group_sampling": "weighted",
            },
            {"cgd": {"gradient_layers": ["all"]}, "erm": {"group_sampling": "none"}},
        )
    },
)  # fmt: skip
"""What the benchmarks that are made of MNIST share."""


def from_hub(folder: Path | None) -> Digits:
    """The same as `load` from the Hub, or from a copy of its repository.

    Raises:
        ConnectionError: the Hub cannot be reached; three lines say what to pass instead.
        FileNotFoundError, ValueError: see `hub_splits`.
    """
    advice = "Pass data_dir= with a folder of the four IDX files (train-images-idx3-ubyte, … plain or .gz)."
    digits = hub_splits(INFO, folder, {name: name for name in IDX_FILES}, ("image", "label"), advice)
    return {
        name: (
            np.stack([np.asarray(image) for image in rows["image"]]),
            in_our_classes(rows, "label", list(map(str, range(10))), f"{folder or HUB_ID}, {name} split"),
        )
        for name, rows in digits.items()
    }


def load(data_dir: str | Path | None = None) -> Digits:
    """Images [N, 28, 28] and digits [N] (uint8) of "train" and "test".

    Args:
        data_dir: a folder with the four IDX files of MNIST, plain or `.gz`; None for the Hub.

    Raises:
        FileNotFoundError: a file that is missing.
        ValueError: a file that is not what its name says.
        ConnectionError: the Hub cannot be reached.
    """
    if data_dir is None:
        return from_hub(None)
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
