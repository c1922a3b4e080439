"""The cosine study: its estimators by hand and by averaging, its training beside the library's own loop."""

import itertools
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_files import write_idx
from paths import BENCHMARKS

from hf_cgd import CGD, GroupDRO, GroupInfo, GroupRobustLoss
from hf_cgd.experiments.studies import cosines
from hf_cgd.experiments.studies import simple_settings as simple
from hf_cgd.functional import cosine_gram, exponentiated_step
from hf_cgd.objectives import Objective

SCRIPT = BENCHMARKS / "cosine_study.py"
F64 = torch.float64
study: dict[str, Any] = {**vars(cosines), **runpy.run_path(str(SCRIPT))}

pytestmark = pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")


def statistics(halves: torch.Tensor, sizes: list[list[float]], losses: list[float], squares: list[float]) -> Any:
    """Of one run: [1, K, ...]."""
    parts = [torch.tensor(part, dtype=F64)[None] for part in (losses, sizes, squares)]
    return study["Statistics"](parts[0], halves[None], parts[1], parts[2])


def random_statistics(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    halves = torch.randn(3, 2, 4, generator=generator, dtype=F64)
    losses = torch.rand(3, generator=generator, dtype=F64).tolist()
    return statistics(halves, [[2.0, 1.0]] * 3, losses, [5.0] * 3)


# ---- Estimators -----------------------------------------------------------------------------------------------------


def test_self_products_by_hand() -> None:
    """Group 0: halves (3, 0) of two examples and (1, 2) of one; group 1: halves (1, 0) and (0, 1) of one each."""
    halves = torch.tensor([[[3.0, 0.0], [1.0, 2.0]], [[1.0, 0.0], [0.0, 1.0]]], dtype=F64)
    # Group 0's examples: (4, 1), (2, -1), (1, 2), with squared norms 17, 5 and 5.
    given = statistics(halves, [[2.0, 1.0], [1.0, 1.0]], [0.25, 1.0], [27.0, 2.0])
    gradients = torch.tensor([[7 / 3, 2 / 3], [0.5, 0.5]], dtype=F64)
    assert torch.allclose(given.gradients[0], gradients)
    assert study["split_self_products"](given)[0].tolist() == [3, 0]
    # (4, 1)·(2, -1) = 7, (4, 1)·(1, 2) = 6, (2, -1)·(1, 2) = 0.
    assert study["pair_self_products"](given)[0].tolist() == pytest.approx([13 / 3, 0])
    cross = (7 / 3 + 2 / 3) * 0.5 / ((53 / 9) ** 0.5 * 0.5**0.5)
    for name, diagonal in (
        ("paper", (1, 1)), ("split_half", (27 / 53, 0)), ("all_pairs", (39 / 53, 0)), ("no_self_term", (0, 0)),
    ):  # fmt: skip
        losses, cosines = study[name](given, {})
        assert losses[0].tolist() == [0.25, 1.0]
        expected = torch.tensor([[diagonal[0], cross], [cross, diagonal[1]]], dtype=F64)
        assert torch.allclose(cosines[0], expected), name


def test_a_self_term_never_turns_negative() -> None:
    given = statistics(
        torch.tensor([[[1.0, 0.0], [-0.5, 0.0]]] * 2, dtype=F64), [[1.0, 1.0]] * 2, [1.0] * 2, [1.25] * 2
    )
    assert study["split_self_products"](given)[0, 0] == -0.5
    for name in ("split_half", "all_pairs"):
        assert study[name](given, {})[1][0].diagonal().tolist() == [0, 0]


def test_all_pairs_are_the_average_over_all_splits() -> None:
    examples = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = []
    for first in itertools.combinations(range(6), 3):
        chosen = torch.zeros(6, dtype=torch.bool)
        chosen[list(first)] = True
        halves = torch.stack([examples[chosen].mean(dim=0), examples[~chosen].mean(dim=0)])[None]
        given = statistics(halves, [[3.0, 3.0]], [1.0], [examples.square().sum().item()])
        found.append(study["split_self_products"](given).item())
        pairs = study["pair_self_products"](given).item()
    slow = sum(examples[i] @ examples[j] for i in range(6) for j in range(6) if i != j).item() / 30
    assert np.mean(found) == pytest.approx(slow) and pairs == pytest.approx(slow)


def test_self_products_of_independent_examples_are_unbiased() -> None:
    """Mean gradient (1, 2), unit noise in each of two directions, eight examples: <g, g> is 2/8 too large on average."""
    generator = torch.Generator().manual_seed(0)
    draws = 40_000
    examples = torch.randn(draws, 8, 2, generator=generator, dtype=F64) + torch.tensor([1.0, 2.0], dtype=F64)
    halves = torch.stack([examples[:, :4].mean(dim=1), examples[:, 4:].mean(dim=1)], dim=1)[:, None]
    given = study["Statistics"](
        torch.ones(draws, 1), halves, torch.full((draws, 1, 2), 4.0), examples.square().sum(dim=(1, 2))[:, None]
    )
    for values, expected in (
        (study["split_self_products"](given), 5), (study["pair_self_products"](given), 5),
        (given.gradients.square().sum(dim=-1), 5.25),
    ):  # fmt: skip
        # Standard deviations are about 1.7: five standard errors.
        assert values.mean().item() == pytest.approx(expected, abs=5 * values.std().item() / draws**0.5)


def test_running_averages_equal_a_loop() -> None:
    beta, steps = 0.7, [random_statistics(seed) for seed in range(4)]
    grams = [given.gradients[0] @ given.gradients[0].T for given in steps]
    products = [study["pair_self_products"](given)[0] for given in steps]

    def averaged(values: list[torch.Tensor]) -> torch.Tensor:
        """Explicit weights: beta^3, (1 - beta) beta^2, (1 - beta) beta, 1 - beta."""
        shares = [beta**3, *((1 - beta) * beta ** (3 - step) for step in (1, 2, 3))]
        return sum((share * value for share, value in zip(shares, values, strict=True)), torch.zeros_like(values[0]))

    rows = averaged([given.gradients[0] for given in steps])
    gram = averaged(grams)
    floored = torch.maximum(averaged(products), 0.1 * gram.diagonal())
    corrected = gram - torch.diag(gram.diagonal()) + torch.diag(floored)
    for name, expected in (
        ("gram_average", cosine_gram(gram)),
        ("gradient_average", cosine_gram(rows @ rows.T)),
        ("corrected_norms", cosine_gram(corrected)),
    ):
        memory: dict[str, torch.Tensor] = {}
        estimate = study[name](beta)
        for given in steps:
            losses, cosines = estimate(given, memory)
        assert torch.allclose(cosines[0], expected) and torch.allclose(
            losses[0], averaged([given.losses[0] for given in steps])
        )


def test_self_term_from_the_last_step() -> None:
    memory: dict[str, torch.Tensor] = {}
    first, second = random_statistics(0), random_statistics(1)
    ones = torch.ones(3, dtype=F64)
    assert torch.allclose(study["last_step"](first, memory)[1][0].diagonal(), ones), "no step before"
    found = study["last_step"](second, memory)[1][0].diagonal()
    similar = torch.nn.functional.cosine_similarity(first.gradients[0], second.gradients[0])
    assert torch.allclose(found, similar.clamp_min(0)) and bool((similar < 0).any()), "a case where the clamp works"


def test_weights_move_as_in_the_library() -> None:
    alpha = torch.tensor([[0.2, 0.8], [1e-9, 1 - 1e-9]], dtype=F64)
    exponents = torch.tensor([[0.3, -0.2], [-50.0, 0.0]], dtype=F64)
    for present in ([True, True], [False, True]):
        there = torch.tensor(present)
        found = study["next_weights"](alpha, exponents, there.expand(2, 2))
        for row, own, exponent in zip(found, alpha, exponents, strict=True):
            assert torch.allclose(row, exponentiated_step(own, exponent, there, min_weight=1e-5 / 2))


# ---- Batches and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 0])
def test_batches_are_dealt_to_groups_and_halves(size: int) -> None:
    ids = np.repeat([0, 1, 2], (9, 9, 2))
    both = np.stack([ids, np.random.default_rng(0).permutation(ids)])
    orders = np.stack([study["orders_of"](own, size, 3, seed) for seed, own in enumerate(both)])
    assert orders.shape == (2, 3, size or 20)
    for step in range(3):
        rows, taken = study["places_of"](orders[:, step], both)
        for seed in range(2):
            dealt = rows[seed][taken[seed]].numpy()
            assert sorted(dealt) == sorted(orders[seed, step]), "each example of the batch has one place"
            for group in range(3):
                members = rows[seed, group][taken[seed, group]].numpy()
                assert set(both[seed][members]) == {group}
                first, second = taken[seed, group].sum(dim=-1).tolist()
                assert first - second in (0, 1)
                if size:
                    assert first + second in (5, 6)


@pytest.mark.parametrize("hidden", [[], [4]])
def test_statistics_are_those_of_autograd(hidden: list[int]) -> None:
    ids = np.repeat([0, 1], (4, 3))[None]
    random = np.random.default_rng(0)
    features = study["with_ones"](torch.from_numpy(random.standard_normal((1, 7, 3))))
    labels = torch.from_numpy(random.integers(0, 2, (1, 7)))
    layers = [layer[:, None].repeat(1, 2, 1, 1) for layer in study["first_layers"]([3, *hidden, 2], [0], F64)]
    layers[0][:, 1] *= -1.5
    rows, taken = study["places_of"](np.arange(7)[None], ids)
    found, sizes = study["statistics_of"](layers, features[0][rows], labels[0][rows], taken)
    for run in range(2):
        parameters = [layer[0, run].clone().requires_grad_() for layer in layers]
        outputs = features[0]
        for number, layer in enumerate(parameters):
            outputs = (study["with_ones"](outputs.relu()) if number else outputs) @ layer
        losses = torch.nn.functional.cross_entropy(outputs, labels[0], reduction="none")

        def gradient(loss: torch.Tensor, parameters: list[torch.Tensor] = parameters) -> torch.Tensor:
            return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, retain_graph=True)])

        assert sum(sizes) == len(gradient(losses[0]))
        for group in range(2):
            members = [rows[0, group, half][taken[0, group, half]] for half in range(2)]
            everyone = torch.cat(members)
            assert found.losses[0, run, group].item() == pytest.approx(losses[everyone].mean().item())
            for half in range(2):
                assert torch.allclose(found.halves[0, run, group, half], gradient(losses[members[half]].mean()))
            assert torch.allclose(found.gradients[0, run, group], gradient(losses[everyone].mean()))
            squares = sum(gradient(loss).square().sum().item() for loss in losses[everyone])
            assert found.squares[0, run, group].item() == pytest.approx(squares)


# ---- Training beside the library's ----------------------------------------------------------------------------------

TWINS: dict[str, tuple[Objective, str]] = {
    "equal weights": (Objective(), "current"),
    "group_dro": (GroupDRO(step_size=0.5), "current"),
    "cgd": (CGD(step_size=0.5), "current"),
    "cgd, weight_timing next": (CGD(step_size=0.5), "next"),
    "split-half self term": (CGD(step_size=0.5, self_term="split_half"), "current"),
    "consensus": (CGD(step_size=0.5, cross_terms="consensus"), "current"),
    "gradient average": (CGD(step_size=0.5, interaction_momentum=0.9), "current"),
}


@pytest.mark.parametrize("balanced", [True, False], ids=["balanced", "ordinary"])
@pytest.mark.parametrize("name", TWINS)
def test_runs_are_those_of_the_library(name: str, balanced: bool) -> None:
    """The weights of two seeds over twelve steps of 32; under "next" each step is a window of four micro-batches.

    Every other ordinary batch lacks the third group or holds one example of it.
    """
    task = study["simple_task"]("spurious", [0, 1])
    data = task.splits["train"]
    orders = np.stack([study["orders_of"](own, 32, 12, seed, balanced) for seed, own in enumerate(data.group_ids)])
    if not balanced:
        counts = {
            np.bincount(own[batch], minlength=3)[2]
            for own, batches in zip(data.group_ids, orders, strict=True)
            for batch in batches
        }
        assert {0, 1, 2} <= counts and len(np.unique(orders[0])) == 12 * 32
    methods = [method for method in study["methods_of"](False, [0.9]) if method.name in ("cgd", name)]
    outcomes = study["train"](task, methods, [0.0, 0.5], orders)
    (outcome,) = [o for o in outcomes if o.method.name == name and o.step_size == 0.5]
    objective, timing = TWINS[name]
    for seed in range(2):
        torch.manual_seed(seed)
        classifier = torch.nn.Linear(3, 2).double()
        groups = GroupInfo("abc", [490, 490, 20])
        robust_loss = GroupRobustLoss(objective, groups, list(classifier.parameters()), weight_timing=timing)
        optimizer = torch.optim.SGD(classifier.parameters(), lr=simple.LEARNING_RATE)
        weights = []
        for batch in orders[seed]:
            windows = np.split(batch, 4) if timing == "next" else [batch]
            ids = [torch.from_numpy(data.group_ids[seed, window]) for window in windows]
            before = robust_loss.alpha
            robust_loss.open_window(ids)
            optimizer.zero_grad()
            for window, own in zip(windows, ids, strict=True):
                scores = classifier(data.features[seed, window, :-1])
                losses = torch.nn.functional.cross_entropy(scores, data.labels[seed, window], reduction="none")
                (robust_loss(losses, own) / len(windows)).backward()
            optimizer.step()
            weights.append(before if timing == "next" else robust_loss.alpha)
        assert outcome.weights[seed] == pytest.approx(torch.stack(weights).mean(dim=0).numpy(), abs=1e-8)
        assert outcome.last_weights[seed] == pytest.approx(robust_loss.alpha.numpy(), abs=1e-8)
        solution = torch.cat(
            [classifier.weight[1] - classifier.weight[0], (classifier.bias[1] - classifier.bias[0])[None]]
        )
        test = simple.worst_group_loss(solution.detach().numpy(), simple.draw("spurious", "test", seed))
        assert outcome.test[seed] == pytest.approx(float(test), abs=1e-8)


def test_full_batches_are_the_simple_settings_themselves() -> None:
    task = study["simple_task"]("noise", [0, 1])
    orders = np.stack(
        [study["orders_of"](own, 0, 25, seed) for seed, own in enumerate(task.splits["train"].group_ids)]
    )
    methods = [method for method in study["methods_of"](False, []) if method.name in ("cgd", "full-data cosines")]
    for outcome in study["train"](task, methods, [1.0], orders):
        for seed in range(2):
            twin = simple.fit("noise", "cgd", 1.0, seed, epochs=25)
            assert twin.weights is not None
            assert outcome.weights[seed] == pytest.approx(twin.weights.mean(axis=0), abs=1e-4), "float32 there"
            loss = simple.worst_group_loss(twin.solutions[-1], simple.draw("noise", "validation", seed))
            assert outcome.validation[seed] == pytest.approx(float(loss), abs=1e-4)


def test_cosine_errors_are_those_on_the_same_path() -> None:
    """Full batches have none; in small ones the self term of the paper's form stays 1 and that of halves does not."""
    task = study["simple_task"]("noise", [0])
    ids = task.splits["train"].group_ids
    methods = study["methods_of"](False, [])
    errors = {}
    for size in (0, 32):
        orders = np.stack([study["orders_of"](own, size, 20, seed) for seed, own in enumerate(ids)])
        errors[size] = {o.method.name: o for o in study["train"](task, methods, [0.0], orders)}
    assert errors[0]["cgd"].cross_error[0] == pytest.approx(0, abs=1e-9)
    assert errors[32]["cgd"].cross_error[0] > 0.05
    assert errors[32]["cgd"].self_bias[0] == pytest.approx(0) and errors[32]["no self term"].self_bias[0] == -1
    assert -0.9 < errors[32]["split-half self term"].self_bias[0] < -0.02
    assert errors[32]["split-half self term"].cross_error[0] == pytest.approx(errors[32]["cgd"].cross_error[0])


# ---- The script -----------------------------------------------------------------------------------------------------


def test_choice_is_made_on_the_first_seeds_only() -> None:
    method = next(method for method in study["methods_of"](False) if method.name == "cgd")

    def outcome(step_size: float, validation: list[float]) -> Any:
        nothing = np.zeros(7)
        return study["Outcome"](method, step_size, nothing, nothing, np.array(validation), *[nothing] * 6)

    worse_later = outcome(0.1, [0.1] * 5 + [9.0, 9.0])
    others = [outcome(0.0, [0.0] * 7), outcome(1.0, [0.2] * 5 + [0.0, 0.0])]
    assert study["chosen"]([*others, worse_later], "cgd") is worse_later, "nor is step size 0 a choice"


def test_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = study["main"](["--fast", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert [task.title for task, _ in results] == [info.title for info in simple.SETTINGS.values()]
    for task, outcomes in results:
        assert study["fixed_table"](task, outcomes, False) in printed
        assert study["chosen_table"](outcomes, False) in printed
        assert study["cosine_table"](outcomes) in printed
    assert (tmp_path / "cosines_simple.png").stat().st_size > 10_000


def test_script_on_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stem, size in (("train", 3000), ("t10k", 300)):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte", np.full((size, 28, 28), 200))
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte", np.arange(size) % 10)
    line = [
        "mnist",
        "--fast",
        "--settings",
        "noise",
        "shortcut",
        "--data_dir",
        str(tmp_path),
        "--output",
        str(tmp_path),
    ]
    results = study["main"](line)
    (noise, _), (shortcut, outcomes) = results
    counts = [np.bincount(own).tolist() for own in noise.splits["train"].group_ids]
    assert counts == [[980, 980, 40]] * 6 and noise.splits["train"].features.shape == (6, 2000, 2 * 7 * 7 + 1)
    data = shortcut.splits["train"]
    # Colour follows the label in groups 0 and 1 and is the other one in 2 and 3; red comes before blue.
    red = data.features[..., :49].sum(dim=-1) > 0
    assert torch.equal(red, (data.labels == 0) == torch.from_numpy(data.group_ids < 2))
    assert torch.equal(data.labels, torch.from_numpy(data.group_ids % 2))
    assert sum((data.group_ids >= 2).sum(axis=1)) == 6 * round(2000 / 21)
    assert {len(o.weights) for o in outcomes[16]} == {6} and {o.weights.shape[1] for o in outcomes[16]} == {4}
    assert "Shortcut-MNIST" in capsys.readouterr().out
