"""`CGD(cross_terms="consensus")`: by hand, beside loops over pairs and halves, at its two ends, in windows, in runs."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import parameters_of, text_dataset

from hf_cgd import CGD, GroupInfo, GroupRobustLoss, GroupRobustTrainer
from hf_cgd.functional import SMALLEST_SIGNAL, cgd_exponents, cgd_step, consensus_cosines, group_dro_step
from hf_cgd.gradients import TensorHookEngine

Build = Callable[..., GroupRobustTrainer]
F64 = torch.float64


def by_loops(gram: np.ndarray, products: np.ndarray, present: np.ndarray) -> np.ndarray:
    """The formula, one pair at a time."""
    size = len(gram)
    shares = [
        max(SMALLEST_SIGNAL, min(1.0, products[i] / gram[i, i])) if gram[i, i] > 0 else SMALLEST_SIGNAL
        for i in range(size)
    ]
    found = np.zeros((size, size))
    cosines = np.zeros((size, size))
    for i, j in itertools.permutations(range(size), 2):
        if gram[i, i] > 0 and gram[j, j] > 0:
            cosines[i, j] = gram[i, j] / (gram[i, i] * gram[j, j]) ** 0.5 / (shares[i] * shares[j]) ** 0.5
    for i in range(size):
        others = [j for j in range(size) if j != i and present.all()]
        pairs = [max(-1.0, min(1.0, cosines[j, k])) for j, k in itertools.combinations(others, 2)]
        agreed = max(0.0, sum(pairs) / len(pairs)) if pairs else 0.0
        found[i] = agreed * cosines[i]
        found[i, i] = (1 - agreed * (1 - shares[i])) * (gram[i, i] > 0)
    return found


# ---- The formula ----------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """Squared norms 4, 1, 1 with shares 1/4, 1, 1; the second and third agree by 1/2, the first opposes both.

    Cosines of the first: -1/4 each, over sqrt(1/4) -1/2. So A = (1/2, 0, 0): the pairs of the others of the second and
    third are at -1/2. Losses 4, 1, 1: the first has 4 · (1 - 1/2 · 3/4) + 1/2 · (2 · -1/2) · 2, the others their loss.
    """
    gram = torch.tensor([[4.0, -0.5, -0.5], [-0.5, 1.0, 0.5], [-0.5, 0.5, 1.0]], dtype=F64)
    products, losses = torch.tensor([1.0, 1.0, 1.0], dtype=F64), torch.tensor([4.0, 1.0, 1.0], dtype=F64)
    found = cgd_exponents(losses, gram, self_products=products, consensus=True)
    assert found.tolist() == pytest.approx([1.5, 1.0, 1.0])
    alpha = torch.full((3,), 1 / 3, dtype=F64)
    moved = cgd_step(alpha, losses, gram, step_size=0.5, self_products=products, consensus=True)
    assert torch.allclose(moved, torch.softmax(0.5 * torch.tensor([1.5, 1.0, 1.0], dtype=F64), dim=0))
    assert CGD(step_size=0.5).statistics < CGD(step_size=0.5, cross_terms="consensus").statistics


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10_000))
def test_the_formula_is_that_of_loops_over_pairs(size: int, dimensions: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(size, dimensions)) * random.integers(0, 3, size=(size, 1))
    gram, present = rows @ rows.T, random.random(size) < 0.8
    products = gram.diagonal() * random.uniform(-0.5, 1.2, size)
    tensors = (torch.from_numpy(gram), torch.from_numpy(products), torch.from_numpy(present))
    assert consensus_cosines(*tensors).numpy() == pytest.approx(by_loops(gram, products, present), abs=1e-9)
    stacked = consensus_cosines(*(torch.stack([part, part]) for part in tensors))
    assert torch.allclose(stacked[1], consensus_cosines(*tensors))
    everyone = consensus_cosines(tensors[0], tensors[1])
    assert torch.equal(everyone, consensus_cosines(tensors[0], tensors[1], torch.ones(size, dtype=torch.bool)))


@given(st.integers(2, 5), st.integers(0, 10_000))
def test_no_length_of_a_gradient_and_no_order_matters(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(size, 4, generator=generator, dtype=F64)
    gram, shares = rows @ rows.T, torch.rand(size, generator=generator, dtype=F64)
    lengths, order = (
        0.1 + 3 * torch.rand(size, generator=generator, dtype=F64),
        torch.randperm(size, generator=generator),
    )
    plain = consensus_cosines(gram, shares * gram.diagonal())
    scaled = gram * torch.outer(lengths, lengths)
    assert torch.allclose(consensus_cosines(scaled, shares * scaled.diagonal()), plain)
    turned = gram[order][:, order]
    assert torch.allclose(consensus_cosines(turned, shares[order] * turned.diagonal()), plain[order][:, order])


def test_where_nobody_agrees_it_is_group_dro() -> None:
    """Two groups; groups of two labels, each with its like against the two others; three at right angles."""
    alpha, losses = torch.full((4,), 0.25, dtype=F64), torch.tensor([0.2, 0.9, 0.4, 2.0], dtype=F64)
    sides = torch.tensor([[1.0, 0.1], [-1.0, 0.1], [1.0, -0.1], [-1.0, -0.1]], dtype=F64)
    for rows in (
        torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=F64),
        sides,
        torch.eye(3, dtype=F64),
    ):
        size = len(rows)
        gram = rows @ rows.T
        start = alpha[:size] / alpha[:size].sum()
        found = cgd_step(
            start, losses[:size], gram, step_size=0.3, self_products=0.4 * gram.diagonal(), consensus=True
        )
        assert torch.allclose(found, group_dro_step(start, losses[:size], step_size=0.3), rtol=0, atol=1e-12)


def test_where_all_agree_without_noise_it_is_cgd() -> None:
    rows = torch.tensor([[1.0, 2.0], [2.0, 4.0], [0.5, 1.0], [3.0, 6.0]], dtype=F64)
    gram, losses = rows @ rows.T, torch.tensor([0.2, 0.9, 0.4, 2.0], dtype=F64)
    found = cgd_exponents(losses, gram, self_products=gram.diagonal(), consensus=True)
    assert torch.allclose(found, cgd_exponents(losses, gram))


def test_cosines_of_small_batches_are_those_of_large_ones_on_average() -> None:
    """Noise at right angles to the signal, of three times its squared length: cosines between groups stay at 1/2."""
    generator = torch.Generator().manual_seed(0)
    signals = torch.zeros(3, 2000, dtype=F64)
    signals[:, 0] = 1
    signals[0, 1] = signals[1, 2] = signals[2, 3] = 1
    noise = torch.randn(3, 2, 2000, generator=generator, dtype=F64) * (2 * 3 * 2 / 2000) ** 0.5
    halves = signals[:, None] + noise
    rows, products = halves.mean(dim=1), halves.prod(dim=1).sum(dim=1)
    gram = rows @ rows.T
    assert 0.5 * (products / gram.diagonal()).mean().item() == pytest.approx(1 / 8, abs=0.02), "the shrunken cosine"
    # A = 1/2 for all, so that what stands at other groups is 1/4.
    assert consensus_cosines(gram, products)[~torch.eye(3, dtype=torch.bool)].mean().item() == pytest.approx(
        1 / 4, abs=0.04
    )


# ---- The step and the run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [False, True])
def test_a_step_of_the_loss_is_that_of_gradients_by_hand(absent: bool) -> None:
    """Group 1 has one example; the others' examples take turns between halves, over micro-batches too.

    With a further group that has none the step is Group-DRO's.
    """
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(14, 4, generator=generator, dtype=F64) + 1
    values = torch.rand(14, generator=generator, dtype=F64)
    ids = torch.tensor([2, 0, 0, 1, 0, 2, 2, 0, 0, 3, 2, 3, 3, 2])
    rows, products, losses = torch.zeros(4, 4, dtype=F64), torch.zeros(4, dtype=F64), torch.zeros(4, dtype=F64)
    for group in range(4):
        own = gradients[ids == group]
        rows[group], losses[group] = own.mean(dim=0), values[ids == group].mean()
        products[group] = own[::2].mean(dim=0) @ own[1::2].mean(dim=0) if len(own) > 1 else own[0] @ own[0]
    size = 5 if absent else 4
    matrix = by_loops((rows @ rows.T).numpy(), products.numpy(), np.ones(4, dtype=bool))
    exponents = torch.from_numpy(matrix) @ losses.sqrt() * losses.sqrt()
    moves = torch.softmax(0.7 * (losses if absent else exponents), dim=0)
    expected = [*(4 / size * moves).tolist(), *([0.2] if absent else [])]
    objectives = CGD(step_size=0.7, cross_terms="consensus"), CGD(step_size=0.7, self_term="split_half")
    for windows in ([slice(0, 14)], [slice(0, 1), slice(1, 6), slice(6, 14)]):
        found = []
        for objective in objectives:
            parameter = torch.nn.Parameter(torch.zeros(4, dtype=F64))
            robust_loss = GroupRobustLoss(
                objective, GroupInfo("abcde"[:size], [9] * size), [parameter], weight_timing="next"
            )
            robust_loss.open_window([ids[rows_of] for rows_of in windows])
            for rows_of in windows:
                robust_loss(values[rows_of] + gradients[rows_of] @ parameter, ids[rows_of])
            found.append(robust_loss.alpha)
        assert found[0].tolist() == pytest.approx(expected, abs=1e-9)
        assert (found[0] - found[1]).abs().max() > 0.005, "a case that tells them apart"


def test_engines_agree(trainer: Build) -> None:
    data = text_dataset(40, groups=3)
    runs = {}
    for engine in ("per_group", "single_pass"):
        options: dict[str, Any] = {"cross_terms": "consensus", "step_size": 0.5, "max_steps": 3}
        runs[engine] = trainer({**options, "gradient_engine": engine}, train_dataset=data)
        runs[engine].train()
    assert torch.allclose(runs["single_pass"].group_weights, runs["per_group"].group_weights, atol=1e-5)
    assert torch.allclose(parameters_of(runs["single_pass"].model), parameters_of(runs["per_group"].model), atol=1e-5)
    assert runs["per_group"].group_weights.std() > 1e-3


def test_a_checkpoint_from_before_the_option_is_one_with_its_default() -> None:
    groups, parameter = GroupInfo("ab", [1, 1]), torch.nn.Parameter(torch.zeros(2))

    def state_of(objective: CGD) -> tuple[GroupRobustLoss, dict[str, Any]]:
        robust_loss = GroupRobustLoss(objective, groups, [parameter])
        return robust_loss, robust_loss.state_dict()

    robust_loss, saved = state_of(CGD(step_size=0.3))
    del saved["objective"]["knobs"]["cross_terms"]
    robust_loss.load_state_dict(saved)
    changed, _ = state_of(CGD(step_size=0.3, cross_terms="consensus"))
    with pytest.raises(ValueError, match="cross_terms 'all' -> 'consensus'"):
        changed.load_state_dict(saved)
    del saved["objective"]["knobs"]["step_size"]
    with pytest.raises(ValueError, match=r"step_size 0.01 -> 0.3"):
        robust_loss.load_state_dict(saved)


# ---- Refusals -------------------------------------------------------------------------------------------------------


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="cross_terms must be one of 'all', 'consensus', got 'some'"):
        CGD(cross_terms="some")  # type: ignore[arg-type]
    for knob in ({"self_term": "split_half"}, {"interaction_momentum": 0.9}, {"scaling": "gradient"}):
        (name,) = knob
        with pytest.raises(ValueError, match=f"{name} cannot be set with cross_terms='consensus'"):
            CGD(cross_terms="consensus", **knob)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cross_terms cannot be set with variant='reference'"):
        CGD(cross_terms="consensus", variant="reference")
    parameter, model = torch.nn.Parameter(torch.zeros(4)), torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="cross_terms='consensus' want those of halves"):
        GroupRobustLoss(
            CGD(cross_terms="consensus"),
            GroupInfo("ab", [2, 2]),
            [parameter],
            weight_timing="next",
            engine=TensorHookEngine(model, list(model.parameters())),
        )
    with pytest.raises(ValueError, match="needs self_products"):
        cgd_exponents(torch.ones(2), torch.eye(2), consensus=True)
