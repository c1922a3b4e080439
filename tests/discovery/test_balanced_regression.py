"""The regression of the last layer: scikit-learn's own, with the standardisation in its weights."""

from typing import Any

import numpy as np
import pytest
import sklearn
from packaging.version import Version
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from hf_cgd.discovery.balanced_regression import (
    balanced_regression,
    choose_inverse_penalty,
    halves,
    worst_and_mean,
)


def blobs(classes: int, size: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = np.arange(size) % classes
    features = random.standard_normal((size, 5)) * [1, 10, 0.1, 3, 1] + np.array([5, -3, 0, 1, 2])
    features[:, 0] += 1.5 * labels
    return features, labels


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_cells_of_one_size_give_scikit_learns_solution(classes: int, intercept: bool, penalty: str) -> None:
    """The oracle is scikit-learn's pipeline on all rows: balanced cells leave nothing out."""
    features, labels = blobs(classes)
    fitted = balanced_regression(
        features, labels, labels, inverse_penalty=0.3, penalty=penalty, subsamples=1, intercept=intercept
    )
    lasso: dict[str, Any] = {"l1_ratio": 1.0} if Version(sklearn.__version__) >= Version("1.8") else {"penalty": "l1"}
    shape = {**lasso, "solver": "liblinear" if classes == 2 else "saga"} if penalty == "l1" else {}
    regression = LogisticRegression(C=0.3, fit_intercept=intercept, max_iter=5000, random_state=0, **shape)
    oracle = make_pipeline(StandardScaler(with_mean=intercept), regression).fit(features, labels)
    scores = features @ fitted.weight.T + fitted.bias
    assert softmax(scores, axis=1) == pytest.approx(oracle.predict_proba(features), abs=2e-3)
    assert np.array_equal(fitted.predict(features), oracle.predict(features))
    assert intercept or not fitted.bias.any()


def test_every_draw_holds_as_many_rows_of_each_cell_as_the_smallest_has(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = blobs(2, 100)
    cells = 2 * labels + (np.arange(100) < 80)
    features[:, 4] = cells
    seen = []
    fit = LogisticRegression.fit

    def note(self: LogisticRegression, rows: np.ndarray, *args: object) -> LogisticRegression:
        seen.append(np.unique(rows[:, 4], return_counts=True)[1].tolist())
        return fit(self, rows, *args)

    monkeypatch.setattr(LogisticRegression, "fit", note)
    balanced_regression(features, labels, cells, inverse_penalty=1.0, subsamples=3)
    assert seen == [[10] * 4] * 3


def test_draws_are_averaged() -> None:
    features, labels = blobs(2, 100)
    cells = 2 * labels + (np.arange(100) < 80)
    both = balanced_regression(features, labels, cells, inverse_penalty=1.0, penalty="l2", subsamples=2)
    one = balanced_regression(features, labels, cells, inverse_penalty=1.0, penalty="l2", subsamples=1)
    random = np.random.default_rng(0)
    members = [np.flatnonzero(cells == cell) for cell in range(4)]
    scaler = StandardScaler().fit(features)
    coefs = []
    for _ in range(2):
        rows = np.concatenate([random.permutation(part)[:10] for part in members])
        coefs.append(
            LogisticRegression(C=1.0, max_iter=5000).fit(scaler.transform(features)[rows], labels[rows]).coef_
        )
    assert (both.weight[1] - both.weight[0]) * scaler.scale_ == pytest.approx(np.mean(coefs, axis=0)[0], abs=1e-4)
    assert (one.weight[1] - one.weight[0]) * scaler.scale_ == pytest.approx(coefs[0][0], abs=1e-4)


def test_the_shortcut_loses_its_pull_where_it_is_balanced_away() -> None:
    """Feature 0 is the class with noise, feature 1 a clean shortcut that 90 % of the rows follow."""
    random = np.random.default_rng(0)
    labels = np.arange(2000) % 2
    shortcut = np.where(random.random(2000) < 0.9, labels, 1 - labels)
    features = np.stack([labels + 0.5 * random.standard_normal(2000), shortcut], axis=1)
    cells = 2 * labels + shortcut
    plain = balanced_regression(features, labels, np.zeros(2000, dtype=int), inverse_penalty=1.0)
    balanced = balanced_regression(features, labels, cells, inverse_penalty=1.0)
    worst = [worst_and_mean(fitted.predict(features) == labels, cells)[0] for fitted in (plain, balanced)]
    # By hand: the best threshold on feature 0 alone is right with probability Phi(1) = .841.
    assert worst[0] < 0.5 and worst[1] == pytest.approx(0.841, abs=0.04)


def test_a_constant_feature_has_no_say() -> None:
    features, labels = blobs(2)
    features[:, 3] = 7.0
    fitted = balanced_regression(features, labels, labels, inverse_penalty=1.0, subsamples=1)
    assert np.isfinite(fitted.weight).all() and not fitted.weight[:, 3].any()


def test_the_choice_is_by_the_worst_group_of_the_other_half() -> None:
    features, labels = blobs(2, 200)
    groups = (np.arange(200) % 4 > 1).astype(int)
    half = halves(2 * labels + groups)
    trials = choose_inverse_penalty(features, labels, labels, groups, half, values=[1.0, 1e-6, 0.1])
    for trial in trials:
        fitted = balanced_regression(features[half], labels[half], labels[half], inverse_penalty=trial.inverse_penalty)
        right = (fitted.predict(features) == labels)[~half]
        accuracies = [right[groups[~half] == group].mean() for group in (0, 1)]
        assert (trial.worst, trial.mean) == (min(accuracies), np.mean(accuracies))
    # So strong a penalty leaves no weight: one class, which is half of each group.
    assert trials[-1].inverse_penalty == 1e-6 and trials[-1].worst == 0.5
    assert [(t.worst, t.mean) for t in trials] == sorted([(t.worst, t.mean) for t in trials], reverse=True)


def test_halves_share_out_every_cell() -> None:
    cells = np.repeat([0, 1, 2], [2, 5, 8])
    half = halves(cells)
    assert [int(half[cells == cell].sum()) for cell in range(3)] == [1, 3, 4]
    assert not np.array_equal(half, halves(cells, seed=1))
