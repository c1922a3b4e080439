"""The three simple settings of the CGD paper (section 4, appendix C): a linear classifier on points, three groups.

Noise-Simple: one training label in five of the first group is wrong. Rotation-Simple: the rule that gives the label
turns by 30 degrees from group to group, and the last group has two examples. Spurious-Simple: a third feature is the
label in the first group, tells little in the second and is the opposite label in the third. Metric: the cross-entropy
of the worst group on 10,000 test points.

Not in the text, and as in the authors' released data code: validation and test in thirds, 1,000 and 10,000 points
(there the validation set of Noise-Simple is 200 points in the shares of training); two class scores; in validation
and test of Spurious-Simple the first two features give the label in all groups. Group sizes are exact here, as in the
text; the released code draws the group of each point.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from hf_cgd.data.groups import GroupInfo
from hf_cgd.metrics.tables import markdown, mean_and_deviation
from hf_cgd.models.example_losses import CLASSIFICATION, example_losses
from hf_cgd.objectives import build_objective, searched_knob
from hf_cgd.robust_loss.loss import GroupRobustLoss

EPOCHS = 400
LEARNING_RATE = 0.1
SEEDS = 6
SEARCH = (1.0, 0.1, 0.01)
"""Values tried for the one knob of an objective that the paper searches; the worst validation group decides."""

EVALUATION_COUNTS = MappingProxyType({"validation": (340, 330, 330), "test": (3400, 3300, 3300)})
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


@dataclass(frozen=True)
class Setting:
    """One of the settings: its three groups, their training sizes, and the paper's numbers by objective."""

    title: str
    groups: tuple[str, str, str]
    counts: tuple[int, int, int]
    published: Mapping[str, Published]


SETTINGS: Mapping[str, Setting] = MappingProxyType(
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


def draw(setting: str, split: str, seed: int) -> Points:
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
    counts = {"train": SETTINGS[setting].counts, **EVALUATION_COUNTS}
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


@dataclass(frozen=True)
class Fit:
    """One training run.

    Attributes:
        solutions: [E + 1, D + 1], before the first and after every epoch: weights of the features and the bias of the
            classifier that says 1 where `features @ weights + bias > 0`.
        weights: [E, K] group weights that made each epoch's step, None for an objective without weights.
    """

    solutions: np.ndarray
    weights: np.ndarray | None


def fit(
    setting: str,
    objective: str,
    value: float | None,
    seed: int,
    *,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
) -> Fit:
    """Train the linear classifier on all training points at once, by gradient descent.

    Args:
        setting: one of `SETTINGS`.
        objective: one of `hf_cgd.objectives.OBJECTIVES`.
        value: of its searched knob, None where it has none.
        seed: of the points and of the classifier's start.
        epochs: E, the number of steps.
        learning_rate: > 0.
    """
    points, info = draw(setting, "train", seed), SETTINGS[setting]
    features = torch.tensor(points.features, dtype=torch.float32)
    labels, group_ids = torch.tensor(points.labels), torch.tensor(points.group_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = torch.nn.Linear(features.shape[1], 2)
    class_counts = [
        np.bincount(points.group_ids[points.labels == label], minlength=len(info.groups)) for label in (0, 1)
    ]
    knob = searched_knob(objective)
    robust_loss = GroupRobustLoss(
        build_objective(objective, {} if knob is None else {knob: value}),
        GroupInfo(info.groups, info.counts, class_counts=tuple(tuple(counts.tolist()) for counts in class_counts)),
        list(classifier.parameters()),
    )
    optimizer = torch.optim.SGD(classifier.parameters(), lr=learning_rate)
    solutions, weights = [_solution(classifier)], []
    for _ in range(epochs):
        optimizer.zero_grad()
        scores = classifier(features)
        losses = example_losses(scores, labels, CLASSIFICATION)
        robust_loss(losses, group_ids, logits=scores, labels=labels, features=features).backward()
        optimizer.step()
        solutions.append(_solution(classifier))
        if robust_loss.alpha is not None:
            weights.append(robust_loss.alpha.numpy())
    return Fit(np.stack(solutions), np.stack(weights) if weights else None)


def _solution(classifier: torch.nn.Linear) -> np.ndarray:
    with torch.no_grad():
        weight, bias = classifier.weight.double(), classifier.bias.double()
        return torch.cat([weight[1] - weight[0], (bias[1] - bias[0])[None]]).numpy()


def worst_group_loss(solutions: np.ndarray, points: Points) -> np.ndarray:
    """Highest mean cross-entropy of a group, [...] for solutions [..., D + 1] as in `Fit`."""
    scores = solutions[..., :-1] @ points.features.T + solutions[..., -1:]
    losses = np.logaddexp(0, np.where(points.labels == 1, -scores, scores))
    means = [losses[..., points.group_ids == group].mean(axis=-1) for group in range(3)]
    return np.max(means, axis=0)


def solution_variance(solutions: np.ndarray) -> float:
    """Variance over runs of solutions [S, D + 1], each divided by its largest absolute entry; summed over entries."""
    normalised = solutions / np.abs(solutions).max(axis=-1, keepdims=True)
    return float(normalised.var(axis=0, ddof=1).sum())


@dataclass(frozen=True)
class Result:
    """All seeds of one objective in one setting, with one value of its knob.

    Attributes:
        value: of the searched knob, None where there is none.
        fits: S runs.
        solutions: [S, D + 1], those that were kept.
        validation, test: [S] worst group losses of these.
    """

    setting: str
    objective: str
    value: float | None
    fits: tuple[Fit, ...]
    solutions: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    def log_histories(self) -> list[list[dict[str, float]]]:
        """The group weights of each run in the form of a Trainer's log, for `hf_cgd.plots`."""
        keys = [f"group_weight/{name}" for name in SETTINGS[self.setting].groups]
        return [
            [{"step": epoch} | dict(zip(keys, row, strict=True)) for epoch, row in enumerate(run.weights, start=1)]
            for run in self.fits
            if run.weights is not None
        ]

    def mean_weights(self) -> np.ndarray | None:
        """Group weights [K], mean over epochs and seeds; None for an objective without weights."""
        weights = [run.weights for run in self.fits if run.weights is not None]
        return np.stack(weights).mean(axis=(0, 1)) if weights else None


def evaluate(
    setting: str,
    objective: str,
    value: float | None,
    seeds: Iterable[int],
    *,
    best_epoch: bool = False,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
) -> Result:
    """Train with every seed; keep the last epoch, or the best on validation (`best_epoch`). Arguments as in `fit`."""
    fits, kept, losses = [], [], []
    for seed in seeds:
        run = fit(setting, objective, value, seed, epochs=epochs, learning_rate=learning_rate)
        validation = worst_group_loss(run.solutions, draw(setting, "validation", seed))
        epoch = int(validation.argmin()) if best_epoch else epochs
        test = worst_group_loss(run.solutions[epoch], draw(setting, "test", seed))
        fits.append(run)
        kept.append(run.solutions[epoch])
        losses.append((validation[epoch], test))
    validations, tests = np.array(losses, dtype=float).T
    return Result(setting, objective, value, tuple(fits), np.stack(kept), validations, tests)


def search_values(objective: str, values: Sequence[float] = SEARCH) -> list[float | None]:
    """The values to try for an objective: `values` of its searched knob, or a single None where it has none."""
    return [None] if searched_knob(objective) is None else list(values)


def chosen(results: Iterable[Result]) -> list[Result]:
    """Of each setting and objective, the result with the lowest validation loss, mean over the seeds."""
    best: dict[tuple[str, str], Result] = {}
    for result in results:
        key = (result.setting, result.objective)
        if key not in best or result.validation.mean() < best[key].validation.mean():
            best[key] = result
    return list(best.values())


def table(results: Sequence[Result]) -> str:
    """The paper's Table 1 in Markdown: a row for each objective, under it the paper's where it has one.

    Args:
        results: at most one of each setting and objective, as `chosen` gives them.
    """
    settings = [name for name in SETTINGS if any(result.setting == name for result in results)]
    titles = [SETTINGS[name].title for name in settings]
    rows = [["", *(f"{title} {column}" for title in titles for column in ("variance", "worst loss"))]]
    for objective in dict.fromkeys(result.objective for result in results):
        own, papers = [objective], [f"{objective}, paper"]
        for name in settings:
            result = next((r for r in results if (r.setting, r.objective) == (name, objective)), None)
            own += (
                ["", ""]
                if result is None
                else [
                    f"{solution_variance(result.solutions):.3f}",
                    mean_and_deviation(result.test),
                ]
            )
            paper = SETTINGS[name].published.get(objective)
            papers += (
                ["", ""]
                if paper is None
                else [f"{paper.variance:.2f}", f"{paper.worst_loss:.2f} ({paper.deviation:.2f})"]
            )
        rows += [own, papers] if any(papers[1:]) else [own]
    return markdown(rows)


def search_table(results: Sequence[Result]) -> str:
    """Every value that was tried, in Markdown: losses on validation and test, and where the group weight went.

    The value that validation chooses is in bold. Group weights are means over epochs and seeds.
    """
    best = chosen(results)
    rows = [["setting", "objective", "value", "validation", "test", "variance", "group weights"]]
    for result in results:
        value = "" if result.value is None else f"{result.value:g}"
        weights = result.mean_weights()
        rows.append(
            [
                SETTINGS[result.setting].title,
                result.objective,
                f"**{value}**" if value and any(result is other for other in best) else value,
                mean_and_deviation(result.validation),
                mean_and_deviation(result.test),
                f"{solution_variance(result.solutions):.3f}",
                "" if weights is None else " / ".join(f"{weight:.2f}" for weight in weights),
            ]
        )
    return markdown(rows)


def weight_panels(results: Iterable[Result]) -> dict[str, dict[str, list[list[dict[str, float]]]]]:
    """Log histories by objective and value, for `hf_cgd.plots.weights_figure`; without objectives without weights."""
    panels: dict[str, dict[str, list[list[dict[str, float]]]]] = {}
    for result in results:
        if histories := result.log_histories():
            knob = (searched_knob(result.objective) or "").replace("_", " ")
            variant = "" if result.value is None else f"{knob} {result.value:g}"
            panels.setdefault(result.objective, {})[variant] = histories
    return panels


def point_panels(settings: Iterable[str], seed: int) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The first two features and the labels of the training points by setting and group, for `points_figure`."""
    panels: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for setting in settings:
        points = draw(setting, "train", seed)
        panels[SETTINGS[setting].title] = {
            group: (points.features[points.group_ids == place, :2], points.labels[points.group_ids == place])
            for place, group in enumerate(SETTINGS[setting].groups)
        }
    return panels
