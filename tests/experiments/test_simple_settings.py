"""Noise-, Rotation- and Spurious-Simple: the data by its geometry and counts, training by a slow twin in NumPy."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import RECIPES
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from hf_cgd.experiments.studies import simple_settings as simple

RECIPE = RECIPES / "simple_settings.py"

# Step size 1 saturates the weights: that is what the settings show.
pytestmark = pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")


def of_group(points: simple.Points, group: int) -> tuple[np.ndarray, np.ndarray]:
    rows = points.group_ids == group
    return points.features[rows], points.labels[rows]


def agreement(points: simple.Points, group: int) -> float:
    """Share of a group whose label is that of its first two features."""
    features, labels = of_group(points, group)
    return float(((features[:, 0] > -features[:, 1]) == (labels == 1)).mean())


# ---- Data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", simple.SETTINGS)
def test_sizes_and_independent_draws(setting: str) -> None:
    sizes = {"train": simple.SETTINGS[setting].counts, "validation": (340, 330, 330), "test": (3400, 3300, 3300)}
    for split, counts in sizes.items():
        points = simple.draw(setting, split, 0)
        assert tuple(np.bincount(points.group_ids)) == counts
        assert points.features.shape == (sum(counts), 3 if setting == "spurious" else 2)
        assert set(points.labels) == {0, 1}
    assert sum(simple.SETTINGS[setting].counts) == 1000
    one, again, other = (simple.draw(setting, "train", seed).features for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    # Two draws of 1,000 normal pairs: correlations beyond 5 / sqrt(1000) would be no accident.
    for stranger in (
        other,
        simple.draw(setting, "test", 0).features[:1000],
        simple.draw("noise", "train", 5).features,
    ):
        assert abs(np.corrcoef(one[:, 0], stranger[:, 0])[0, 1]) < 5 / math.sqrt(1000)
    assert np.abs(simple.draw(setting, "test", 0).features[:, :2].mean(axis=0)).max() < 5 / math.sqrt(10_000)
    assert np.cov(simple.draw(setting, "test", 0).features[:, :2].T) == pytest.approx(np.eye(2), abs=0.08)


def test_noise_is_a_fifth_of_the_first_group_in_training_only() -> None:
    train = simple.draw("noise", "train", 3)
    assert [agreement(train, group) for group in range(3)] == [pytest.approx(0.8), 1, 1]
    for split in ("validation", "test"):
        assert [agreement(simple.draw("noise", split, 3), group) for group in range(3)] == [1, 1, 1]
    features, labels = of_group(train, 0)
    wrong = (features.sum(axis=1) > 0) != labels
    assert 25 < labels[wrong].sum() < 65, "both classes are hit: 45 +- 4 standard deviations of a fair draw"


@pytest.mark.parametrize("split", ["train", "test"])
def test_rotation_turns_the_rule_by_30_degrees(split: str) -> None:
    points = simple.draw("rotation", split, 1)
    plane = points.features[:, 0] + 1j * points.features[:, 1]
    turned_back = plane * np.exp(-1j * np.pi / 6 * points.group_ids)
    assert np.array_equal(points.labels == 1, turned_back.real > 0)


def test_center_rule_is_right_on_five_sixths_of_its_neighbours() -> None:
    """Two rules at 30 degrees disagree on two wedges of 30 degrees each, 60 of 360; at 60 degrees on a third."""
    points = simple.draw("rotation", "test", 0)
    center = points.features @ [math.cos(math.pi / 6), math.sin(math.pi / 6)] > 0
    rights = [(center == (points.labels == 1))[points.group_ids == group].mean() for group in range(3)]
    bound = 4 * math.sqrt(5 / 36 / 3300)
    assert rights == [pytest.approx(5 / 6, abs=bound), 1, pytest.approx(5 / 6, abs=bound)]
    left = points.features[:, 0] > 0
    assert (left == (points.labels == 1))[points.group_ids == 2].mean() == pytest.approx(2 / 3, abs=0.034)


def test_spurious_feature_and_misled_first_group() -> None:
    train, test = simple.draw("spurious", "train", 2), simple.draw("spurious", "test", 2)
    assert [agreement(train, group) for group in range(3)] == [pytest.approx(0.6), 1, 1]
    assert [agreement(test, group) for group in range(3)] == [1, 1, 1]
    for points in (train, test):
        shares = [(features[:, 2] == labels).mean() for features, labels in (of_group(points, g) for g in range(3))]
        bound = 4 * math.sqrt(0.24 / (points.group_ids == 1).sum())
        assert shares == [1, pytest.approx(0.6, abs=bound), 0]
        assert set(points.features[:, 2]) == {0, 1}
    overall = np.average([agreement(train, group) for group in range(3)], weights=[490, 490, 20])
    third = (train.features[:, 2] == train.labels).mean()
    assert (overall, third) == (pytest.approx(0.8, abs=0.01), pytest.approx(0.8, abs=0.06)), "as the paper says"


def test_best_classifiers_by_scikit_learn() -> None:
    """No classifier beats 80 % on the noisy training group; the best one there is the clean rule all the same."""
    features, labels = of_group(simple.draw("noise", "train", 0), 0)
    model = LogisticRegression(C=np.inf).fit(features, labels)
    assert model.score(features, labels) == pytest.approx(0.8, abs=0.02)
    direction = model.coef_[0] / np.linalg.norm(model.coef_)
    assert direction.sum() * math.sqrt(0.5) > math.cos(math.radians(15))
    features, labels = of_group(simple.draw("spurious", "train", 0), 0)
    assert LogisticRegression(C=np.inf).fit(features[:, :2], labels).score(features[:, :2], labels) < 0.66


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("noisy", "train", 0), "setting must be one of 'noise', 'rotation', 'spurious', got 'noisy'"),
        (("noise", "dev", 0), "split must be one of 'train', 'validation', 'test', got 'dev'"),
    ],
)
def test_unknown_names(arguments: tuple[str, str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simple.draw(*arguments)


# ---- Training -------------------------------------------------------------------------------------------------------


def numpy_twin(
    setting: str, objective: str, step: float, start: np.ndarray, epochs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Solutions and weights by the formulas of the paper, for two class scores with weights of opposite gradients."""
    points = simple.draw(setting, "train", 0)
    rows = np.column_stack([points.features, np.ones(len(points.labels))])
    theta, alpha = start.copy(), np.full(3, 1 / 3)
    solutions, weights = [theta.copy()], []
    for _ in range(epochs):
        chance = 1 / (1 + np.exp(-rows @ theta))
        losses = -np.log(np.where(points.labels == 1, chance, 1 - chance))
        group_losses = np.array([losses[points.group_ids == g].mean() for g in range(3)])
        errors = (chance - points.labels)[:, None] * rows
        gradients = np.stack([errors[points.group_ids == g].mean(axis=0) for g in range(3)])
        unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        roots = np.sqrt(group_losses)
        exponents = {
            "group_dro": group_losses,
            "cgd": np.array([sum(roots[i] * roots[j] * unit[i] @ unit[j] for j in range(3)) for i in range(3)]),
            "erm_uw": np.zeros(3),
        }[objective]
        alpha = alpha * np.exp(step * exponents)
        alpha /= alpha.sum()
        # Each of the two scores takes the step, in opposite directions.
        theta = theta - 2 * 0.1 * alpha @ gradients
        solutions.append(theta.copy())
        weights.append(alpha)
    return np.stack(solutions), np.stack(weights)


@pytest.mark.parametrize("setting", simple.SETTINGS)
@pytest.mark.parametrize("objective", ["group_dro", "cgd", "erm_uw"])
def test_training_is_that_of_the_formulas(setting: str, objective: str) -> None:
    value = None if objective == "erm_uw" else 0.5
    run = simple.fit(setting, objective, value, seed=0, epochs=20)
    solutions, weights = numpy_twin(setting, objective, 0.5, run.solutions[0], epochs=20)
    np.testing.assert_allclose(run.solutions, solutions, atol=2e-5)
    assert run.weights is not None
    np.testing.assert_allclose(run.weights, weights, atol=2e-5)


def test_erm_ends_where_scikit_learn_does() -> None:
    points = simple.draw("noise", "train", 0)
    run = simple.fit("noise", "erm", None, seed=0, epochs=400, learning_rate=3.0)
    model = LogisticRegression(C=np.inf, tol=1e-8).fit(points.features, points.labels)
    assert run.weights is None
    np.testing.assert_allclose(run.solutions[-1], [*model.coef_[0], model.intercept_[0]], rtol=1e-3, atol=1e-3)


def test_seeds_change_points_and_start() -> None:
    one, again, other = (simple.fit("noise", "erm", None, seed=seed, epochs=2).solutions for seed in (0, 0, 1))
    assert np.array_equal(one, again) and not np.allclose(one[0], other[0])


def test_every_objective_of_the_registry_can_be_searched() -> None:
    from hf_cgd.objectives import OBJECTIVES, searched_knob

    assert searched_knob("cgd") == searched_knob("group_dro") == "step_size"
    assert searched_knob("erm") is None and searched_knob("erm_uw") is None
    for objective in OBJECTIVES:
        for value in simple.search_values(objective, [0.1]):
            assert np.isfinite(simple.fit("spurious", objective, value, seed=0, epochs=2).solutions).all(), objective


def test_cgd_leaves_the_noisy_group_alone_and_group_dro_does_not() -> None:
    """The paper's Figure 1 and first column of its table, two seeds."""
    dro, cgd = (simple.evaluate("noise", objective, 0.1, [0, 1]) for objective in ("group_dro", "cgd"))
    dro_weights, cgd_weights = dro.mean_weights(), cgd.mean_weights()
    assert dro_weights is not None and cgd_weights is not None
    assert dro_weights[0] > 0.7 and cgd_weights[0] < 1 / 3
    assert (cgd.test < dro.test).all()


# ---- Numbers and tables ---------------------------------------------------------------------------------------------


def test_worst_group_loss_is_scikit_learn_s() -> None:
    points = simple.draw("spurious", "validation", 0)
    solutions = np.random.default_rng(0).normal(size=(2, 5, 4))
    found = simple.worst_group_loss(solutions, points)
    assert found.shape == (2, 5)
    for place in np.ndindex(2, 5):
        losses = []
        for group in range(3):
            features, labels = of_group(points, group)
            scores = features @ solutions[place][:3] + solutions[place][3]
            losses.append(log_loss(labels, 1 / (1 + np.exp(-scores))))
        assert found[place] == pytest.approx(max(losses))


def test_solution_variance_by_hand() -> None:
    """[1, .5] and [.5, 1] after scaling: a sample variance of 1/8 in each entry."""
    assert simple.solution_variance(np.array([[2.0, 1.0], [2.0, 4.0]])) == pytest.approx(0.25)


@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=3))
def test_solution_variance_ignores_the_scale_of_each_run(scales: list[float]) -> None:
    solutions = np.array([[1.0, -2.0, 0.5], [1.5, -1.0, 0.0], [0.1, 0.2, 0.3]])
    assert simple.solution_variance(solutions * np.array(scales)[:, None]) == pytest.approx(
        simple.solution_variance(solutions)
    )


def result(
    objective: str, value: float | None, validation: float, test: float, weights: list[float] | None
) -> simple.Result:
    run = simple.Fit(np.ones((3, 3)), None if weights is None else np.array([weights, weights]))
    solutions = np.array([[2.0, 1.0], [2.0, 4.0]])
    spread = np.array([-0.1, 0.1])
    return simple.Result("noise", objective, value, (run, run), solutions, validation + spread, test + spread)


def test_tables() -> None:
    results = [
        result("group_dro", 1.0, 0.5, 0.3, [0.9, 0.05, 0.05]),
        result("group_dro", 0.1, 0.4, 0.7, [0.5, 0.25, 0.25]),
        result("erm", None, 0.6, 0.6, None),
    ]
    best = simple.chosen(results)
    assert best == [results[1], results[2]], "validation decides, not test"
    assert simple.table(best).splitlines() == [
        "|                  | Noise-Simple variance | Noise-Simple worst loss |",
        "| ---------------- | --------------------: | ----------------------: |",
        "| group_dro        |                 0.250 |           0.700 (0.141) |",
        "| group_dro, paper |                  1.88 |             0.35 (0.03) |",
        "| erm              |                 0.250 |           0.600 (0.141) |",
    ]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in simple.search_table(results).splitlines()
    ]
    assert lines[2] == [
        "Noise-Simple",
        "group_dro",
        "1",
        "0.500 (0.141)",
        "0.300 (0.141)",
        "0.250",
        "0.90 / 0.05 / 0.05",
    ]
    assert lines[3][2] == "**0.1**" and lines[4][2] == lines[4][-1] == ""
    panels = simple.weight_panels(results)
    assert list(panels) == ["group_dro"] and list(panels["group_dro"]) == ["step size 1", "step size 0.1"]
    assert panels["group_dro"]["step size 1"][0][1] == {
        "step": 2, "group_weight/noisy majority": 0.9, "group_weight/clean majority": 0.05,
        "group_weight/clean minority": 0.05,
    }  # fmt: skip


def test_best_epoch_is_that_of_the_lowest_validation_loss() -> None:
    last = simple.evaluate("rotation", "group_dro", 1.0, [0], epochs=150)
    best = simple.evaluate("rotation", "group_dro", 1.0, [0], epochs=150, best_epoch=True)
    curve = simple.worst_group_loss(last.fits[0].solutions, simple.draw("rotation", "validation", 0))
    assert last.validation[0] == pytest.approx(curve[-1]) and best.validation[0] == pytest.approx(curve.min())
    assert curve.argmin() < 150 and best.validation[0] < last.validation[0]


# ---- The recipe -----------------------------------------------------------------------------------------------------


def test_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(RECIPE))["main"]
    results = main(["--fast", "--objectives", "cgd", "erm", "--output", str(tmp_path)])
    assert [(r.setting, r.objective, r.value, len(r.fits)) for r in results] == [
        (setting, objective, value, 2)
        for setting in simple.SETTINGS
        for objective, value in (("cgd", 1.0), ("erm", None))
    ]
    printed = capsys.readouterr().out
    assert simple.table(results) in printed and simple.search_table(results) in printed
    names = {"points", *(f"{setting}_weights" for setting in simple.SETTINGS)}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{end}" for name in names for end in ("png", "svg")}
    assert len(RECIPE.read_text().splitlines()) < 80


def test_recipe_says_what_is_wrong(tmp_path: Path) -> None:
    main = runpy.run_path(str(RECIPE))["main"]
    with pytest.raises(SystemExit, match="setting must be one of 'noise'"):
        main(["--settings", "noisy", "--fast", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="objective must be one of 'erm'"):
        main(["--objectives", "sgd", "--fast", "--output", str(tmp_path)])
