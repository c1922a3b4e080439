"""The points of the simple settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

SettingName = Literal["noise", "rotation", "spurious"]
SplitName = Literal["train", "validation", "test"]

EVALUATION_COUNTS: Mapping[SplitName, tuple[int, int, int]] = MappingProxyType(
    {"validation": (340, 330, 330), "test": (3400, 3300, 3300)}
)
WRONG_LABELS = 0.2
"""Share of wrong training labels in the first group of Noise-Simple."""
TURN = 30
"""Degrees between the labelling rules of neighbouring groups of Rotation-Simple."""
MISLED = 0.4
"""Share of the first group of Spurious-Simple whose first two features point to the other label, in training."""
LEAK = 0.6
"""Probability that the third feature is the label in the second group of Spurious-Simple."""


@dataclass(frozen=True)
class Published:
    """What the paper's Table 1 says of one objective in one setting (standard deviation over six seeds)."""

    variance: float
    worst_loss: float
    deviation: float

    def cells(self) -> list[str]:
        """Variance, and worst loss with its deviation, as a table shows them."""
        return [f"{self.variance:.2f}", f"{self.worst_loss:.2f} ({self.deviation:.2f})"]


@dataclass(frozen=True)
class Setting:
    """One of the settings: its three groups, their training sizes, and the paper's numbers by objective."""

    title: str
    groups: tuple[str, str, str]
    counts: tuple[int, int, int]
    published: Mapping[str, Published]


SETTINGS: Mapping[SettingName, Setting] = MappingProxyType(
    {
        "noise": Setting(
            "Noise-Simple",
            ("noisy majority", "clean majority", "clean minority"),
            (450, 450, 100),
            {"group_dro": Published(1.88, 0.35, 0.03), "cgd": Published(0.32, 0.25, 0.02)},
        ),
        "rotation": Setting(
            "Rotation-Simple",
            ("left", "center", "right"),
            (499, 499, 2),
            {"group_dro": Published(0.41, 0.77, 0.14), "cgd": Published(0.08, 0.59, 0.05)},
        ),
        "spurious": Setting(
            "Spurious-Simple",
            ("spurious majority", "clean majority", "spurious minority"),
            (490, 490, 20),
            {"group_dro": Published(0.17, 0.70, 0.16), "cgd": Published(0.04, 0.43, 0.06)},
        ),
    }
)


@dataclass(frozen=True)
class Points:
    """Examples of one split: features float64 [N, D], labels [N] of 0 and 1, group ids [N] in {0, 1, 2}."""

    features: np.ndarray
    labels: np.ndarray
    group_ids: np.ndarray


def draw(setting: SettingName, split: SplitName, seed: int) -> Points:
    """The points of a split; other splits and seeds are independent of them.

    Args:
        setting: one of `SETTINGS`.
        split: "train", "validation" or "test".
        seed: >= 0.

    Raises:
        ValueError: an unknown setting or split.
    """
    if setting not in SETTINGS:
        raise ValueError(f"setting must be one of {', '.join(map(repr, SETTINGS))}, got {setting!r}.")
    counts: dict[SplitName, tuple[int, int, int]] = {"train": SETTINGS[setting].counts, **EVALUATION_COUNTS}
    if split not in counts:
        raise ValueError(f"split must be one of {', '.join(map(repr, counts))}, got {split!r}.")
    random = np.random.default_rng([seed, list(SETTINGS).index(setting), list(counts).index(split)])
    group_ids = np.repeat(np.arange(3), counts[split])
    features = random.standard_normal((len(group_ids), 2))
    first = random.permutation(counts[split][0])
    training = split == "train"
    if setting == "rotation":
        angles = np.radians(TURN * group_ids)
        labels = (np.cos(angles) * features[:, 0] + np.sin(angles) * features[:, 1] > 0).astype(int)
        return Points(features, labels, group_ids)
    labels = (features.sum(axis=1) > 0).astype(int)
    if setting == "noise" and training:
        wrong = first[: round(WRONG_LABELS * len(first))]
        labels[wrong] = 1 - labels[wrong]
    if setting == "spurious":
        if training:
            # The mirror image is as likely a point, and its label was that of the other side.
            features[first[: round(MISLED * len(first))]] *= -1
        leaks = np.choose(group_ids, [1.0, LEAK, 0.0]) > random.random(len(group_ids))
        features = np.column_stack([features, np.where(leaks, labels, 1 - labels)])
    return Points(features, labels, group_ids)
