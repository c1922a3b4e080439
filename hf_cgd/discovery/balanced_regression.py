"""Logistic regression on balanced subsamples: what deep feature reweighting does with the features of a network.

Kirichenko, Izmailov & Wilson (2023), "Last Layer Re-Training is Sufficient for Robustness to Spurious Correlations".
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Penalty = Literal["l1", "l2"]
INVERSE_PENALTIES = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)
"""Values of scikit-learn's C that are tried (those of the paper)."""
SUBSAMPLES = 10
"""Balanced subsamples whose regressions are averaged (as in the paper)."""
ITERATIONS = 2000
TOLERANCE_OF_SAGA = 1e-3
"""At scikit-learn's own 1e-4 features that are nearly collinear take it all iterations."""


@dataclass(frozen=True)
class LinearMap:
    """Scores = features @ weight.T + bias.

    Args:
        weight: [C, D] float64.
        bias: [C]; zeros for a head without bias.
    """

    weight: np.ndarray
    bias: np.ndarray

    def predict(self, features: np.ndarray) -> np.ndarray:
        """[N] classes of features [N, D]."""
        return np.asarray((features @ self.weight.T + self.bias).argmax(axis=1))


@dataclass(frozen=True)
class Trial:
    """How one value of C did on the held-out half.

    Args:
        inverse_penalty: C.
        worst: lowest accuracy of a group.
        mean: mean accuracy of the groups.
    """

    inverse_penalty: float
    worst: float
    mean: float


def balanced_regression(
    features: np.ndarray,
    labels: np.ndarray,
    cells: np.ndarray,
    *,
    inverse_penalty: float,
    penalty: Penalty = "l1",
    subsamples: int = SUBSAMPLES,
    intercept: bool = True,
    seed: int = 0,
) -> LinearMap:
    """Mean of the logistic regressions on `subsamples` draws that hold as many rows of every cell as the smallest has.

    The features are standardised over all rows; the result takes features as they are. L1 with two classes is
    liblinear's, as in the paper, which draws the intercept towards 0 as well.

    Args:
        features: [N, D].
        labels: [N] classes in [0, C); every one occurs.
        cells: [N] numbers of the cells that are balanced.
        inverse_penalty: scikit-learn's C, > 0.
        penalty: "l1" or "l2" on the weights.
        subsamples: >= 1.
        intercept: False for a head without bias; the features are then scaled and not centred.
        seed: of the draws.
    """
    features = features.astype(np.float64)
    mean = features.mean(axis=0) if intercept else np.zeros(features.shape[1])
    deviation = features.std(axis=0)
    scale = np.where(deviation > 0, deviation, 1.0)
    standard = (features - mean) / scale
    random = np.random.default_rng(seed)
    members = [np.flatnonzero(cells == cell) for cell in np.unique(cells)]
    size = min(map(len, members))
    weights, biases = [], []
    for draw in range(subsamples):
        rows = np.concatenate([random.permutation(of_cell)[:size] for of_cell in members])
        model = _regression(inverse_penalty, penalty, intercept, len(np.unique(labels)), seed + draw)
        model.fit(standard[rows], labels[rows])
        weights.append(model.coef_)
        biases.append(np.broadcast_to(model.intercept_, len(model.coef_)))
    weight, bias = np.mean(weights, axis=0), np.mean(biases, axis=0)
    if len(weight) == 1:
        # The odds of class 1, as the difference of two scores.
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    weight = weight / scale
    return LinearMap(weight, bias - weight @ mean)


def choose_inverse_penalty(
    features: np.ndarray,
    labels: np.ndarray,
    cells: np.ndarray,
    groups: np.ndarray,
    half: np.ndarray,
    *,
    values: Sequence[float] = INVERSE_PENALTIES,
    **options: Any,
) -> list[Trial]:
    """Each value of C, fitted on one half and judged by the groups of the other; the best first.

    Args:
        features, labels, cells: see `balanced_regression`.
        groups: [N] numbers of the groups whose accuracies count.
        half: [N] True for the rows to fit on.
        values: of C.
        **options: see `balanced_regression`.

    The best has the highest worst accuracy, then the highest mean, then the strongest penalty.
    """
    trials = []
    for value in values:
        fitted = balanced_regression(features[half], labels[half], cells[half], inverse_penalty=value, **options)
        right = fitted.predict(features[~half]) == labels[~half]
        trials.append(Trial(float(value), *worst_and_mean(right, groups[~half])))
    return sorted(trials, key=lambda trial: (-trial.worst, -trial.mean, trial.inverse_penalty))


def worst_and_mean(right: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Lowest and mean accuracy of the groups, from whether each answer is right."""
    accuracies = [float(right[groups == group].mean()) for group in np.unique(groups)]
    return min(accuracies), float(np.mean(accuracies))


def halves(cells: np.ndarray, seed: int = 0) -> np.ndarray:
    """[N] True for a random half of every cell, the larger one where it is odd."""
    random = np.random.default_rng(seed)
    half = np.zeros(len(cells), dtype=bool)
    for cell in np.unique(cells):
        rows = random.permutation(np.flatnonzero(cells == cell))
        half[rows[: (len(rows) + 1) // 2]] = True
    return half


def _regression(inverse_penalty: float, penalty: Penalty, intercept: bool, classes: int, seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression

    options: dict[str, Any] = {}
    if penalty == "l1":
        # Its name changed in scikit-learn 1.8.
        old = inspect.signature(LogisticRegression).parameters["l1_ratio"].default is None
        options = {"penalty": "l1"} if old else {"l1_ratio": 1.0}
        options |= {"solver": "liblinear"} if classes == 2 else {"solver": "saga", "tol": TOLERANCE_OF_SAGA}
    elif penalty != "l2":
        raise ValueError(f"penalty: expected 'l1' or 'l2', got {penalty!r}.")
    return LogisticRegression(
        C=inverse_penalty, fit_intercept=intercept, max_iter=ITERATIONS, random_state=seed, **options
    )
