"""Training on the simple settings, and what comes of it: losses and the variance of the solutions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_cgd.data.groups import GroupInfo
from hf_cgd.experiments.studies.simple_settings.data import SETTINGS, Points, SettingName, draw
from hf_cgd.models.example_losses import CLASSIFICATION, example_losses
from hf_cgd.objectives import build_objective, searched_knob
from hf_cgd.robust_loss.loss import GroupRobustLoss

EPOCHS = 400
LEARNING_RATE = 0.1
SEEDS = 6
SEARCH = (1.0, 0.1, 0.01)
"""Values tried for the one knob of an objective that the paper searches; the worst validation group decides."""


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
    setting: SettingName,
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

    setting: SettingName
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
    setting: SettingName,
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
