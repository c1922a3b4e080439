"""The settings that the study trains on, and the start of their networks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hf_cgd.experiments.studies import simple_settings as simple
from hf_cgd.tasks import colored_mnist, mnist, mnist_settings


@dataclass(frozen=True)
class Split:
    """Examples of S seeds: features [S, N, D] with a last column of ones, labels and group ids [S, N]."""

    features: Tensor
    labels: Tensor
    group_ids: np.ndarray


@dataclass(frozen=True)
class StudyTask:
    """A setting.

    Attributes:
        title: for tables and pictures.
        watched: the groups whose weight is told, and what to call them.
        splits: "train", "validation" and "test".
        layers: the first parameters [S, in + 1, out] of each layer, the bias last, on S different seeds.
    """

    title: str
    watched: tuple[list[int], str]
    splits: dict[str, Split]
    layers: tuple[Tensor, ...]


def first_layers(sizes: Sequence[int], seeds: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """PyTorch's start of linear layers of these sizes [in, …, out], for each seed."""
    starts = []
    for seed in seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [torch.nn.Linear(*pair) for pair in pairwise(sizes)]
        starts.append([torch.cat([layer.weight.T, layer.bias[None]]).detach().to(dtype) for layer in layers])
    return tuple(torch.stack(layer) for layer in zip(*starts, strict=True))


def with_ones(features: Tensor) -> Tensor:
    """Features [..., D + 1] with a last column of ones, which stands for the bias."""
    return torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)


WATCHED = {"noise": 0, "rotation": 1, "spurious": 1}
"""The noisy group, which deserves no weight; the center and the clean majority, which serve the others as well."""


def simple_task(setting: simple.SettingName, seeds: Sequence[int]) -> StudyTask:
    """One of the paper's simple settings."""
    info, splits = simple.SETTINGS[setting], {}
    for name in get_args(simple.SplitName):
        points = [simple.draw(setting, name, seed) for seed in seeds]
        features = torch.from_numpy(np.stack([drawn.features for drawn in points]))
        labels = torch.from_numpy(np.stack([drawn.labels for drawn in points]))
        splits[name] = Split(with_ones(features), labels, np.stack([drawn.group_ids for drawn in points]))
    watched = WATCHED[setting]
    dimensions = splits["train"].features.shape[-1] - 1
    layers = first_layers([dimensions, 2], seeds, torch.float64)
    return StudyTask(info.title, ([watched], info.groups[watched]), splits, layers)


MNIST_COUNTS, MNIST_VALIDATION, MNIST_TEST, MNIST_HIDDEN, MNIST_POOL = (980, 980, 40), 1000, 3000, 16, 4
SHORTCUT_RATIO = 20
MNISTStudyName = Literal["noise", "rotation", "spurious", "shortcut"]
MNIST_SETTINGS: tuple[MNISTStudyName, ...] = get_args(MNISTStudyName)


def mnist_task(setting: MNISTStudyName, seeds: Sequence[int], data: mnist.Digits) -> StudyTask:
    """A small one of the MNIST settings: a fifth of the digits, 7 x 7 pixels (red and blue), one hidden layer.

    "shortcut" is Colored-MNIST at 20 to 1, in four groups (label x colour): its rare groups deserve weight.
    """
    data = {"train": data["train"], "test": (data["test"][0][:MNIST_TEST], data["test"][1][:MNIST_TEST])}
    parts: dict[str, list[tuple[Tensor, Tensor, np.ndarray]]] = {"train": [], "validation": [], "test": []}
    for seed in seeds:
        if setting == "shortcut":
            counts: Any = {"train_size": sum(MNIST_COUNTS), "validation_size": MNIST_VALIDATION}
            splits = colored_mnist.splits_of(data, ratio=SHORTCUT_RATIO, seed=seed, **counts)
        else:
            sizes: Any = {"train_counts": MNIST_COUNTS, "validation_size": MNIST_VALIDATION}
            splits = mnist_settings.splits_of(data, setting, seed=seed, **sizes)
        for name, drawn in parts.items():
            rows = splits[name][:]
            images = torch.nn.functional.avg_pool2d(rows["pixel_values"][:, ::2], MNIST_POOL).flatten(1)
            labels = torch.as_tensor(rows["label"])
            if setting == "shortcut":
                ids = np.array([2 * colored_mnist.GROUPS.index(group) for group in rows["group"]]) + labels.numpy()
            else:
                ids = np.array([mnist_settings.GROUPS[setting].index(group) for group in rows["group"]])
            drawn.append((images, labels, ids))
    stacked = {}
    for name, drawn in parts.items():
        features, targets, groups = zip(*drawn, strict=True)
        stacked[name] = Split(with_ones(torch.stack(features)), torch.stack(targets), np.stack(groups))
    dimensions = stacked["train"].features.shape[-1] - 1
    layers = first_layers([dimensions, MNIST_HIDDEN, 2], seeds, torch.float32)
    if setting == "shortcut":
        return StudyTask("Shortcut-MNIST, small", ([2, 3], "rare groups"), stacked, layers)
    watched = WATCHED[setting]
    title = f"{setting.capitalize()}-MNIST, small"
    return StudyTask(title, ([watched], mnist_settings.GROUPS[setting][watched]), stacked, layers)
