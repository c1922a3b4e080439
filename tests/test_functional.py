"""The formulas against hand values, slow references and invariances."""

import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hf_cgd.functional import (
    adjustment_terms,
    cgd_step,
    cosine_gram,
    exponentiated_step,
    group_counts_of,
    group_dro_step,
    group_means,
    require_nonnegative,
    upweights,
)

F64 = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


# ---- Hand values --------------------------------------------------------------------------------


def test_group_means_by_hand() -> None:
    means, counts = group_means(tensor(1, 3, 5), torch.tensor([0, 0, 2]), 4)
    assert means.tolist() == [2, 0, 5, 0]
    assert counts.tolist() == [2, 0, 1, 0]


def test_group_means_carry_gradients() -> None:
    losses = tensor(1, 3, 5).requires_grad_()
    means, _ = group_means(losses, torch.tensor([0, 0, 1]), 2)
    (means * tensor(1, 10)).sum().backward()
    assert losses.grad is not None and losses.grad.tolist() == [0.5, 0.5, 10]


def test_group_counts() -> None:
    assert group_counts_of(torch.tensor([2, 0, 2]), 3).tolist() == [1, 0, 2]


def test_adjustment_and_upweights_by_hand() -> None:
    assert adjustment_terms(tensor(4, 25), 10.0).tolist() == [5, 2]
    expected = math.exp(5) / (math.exp(5) + math.exp(2))
    assert upweights(tensor(4, 25), 10.0)[0].item() == pytest.approx(expected, abs=1e-12)
    assert upweights(tensor(4, 25)).tolist() == [0.5, 0.5]


def test_cosines_by_hand() -> None:
    gradients = torch.tensor([[3.0, 4.0], [6.0, 8.0], [-4.0, 3.0], [0.0, 0.0]], dtype=F64)
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert torch.allclose(cosine_gram(gradients @ gradients.T), torch.tensor(expected, dtype=F64))


def test_cosines_with_the_floor_of_the_released_code() -> None:
    # A gradient of norm 3e-3 against itself: 9e-6 / 1e-3.
    assert cosine_gram(torch.tensor([[9e-6]], dtype=F64), norm_floor=1e-3).item() == pytest.approx(0.009)


def test_group_dro_step_by_hand() -> None:
    alpha = group_dro_step(tensor(0.5, 0.5), tensor(1, 2), step_size=0.1, adjustments=tensor(0.5, 0))
    expected = math.exp(0.15) / (math.exp(0.15) + math.exp(0.2))
    assert alpha[0].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("interaction,divisor", [("sum", 1), ("mean", 2)])
def test_cgd_step_by_hand(interaction: str, divisor: int) -> None:
    # Losses 1 and 4, cosine 1/2: exponents eta (1 + sqrt(4)/2) = 2 eta and eta (4 + 1) = 5 eta.
    gram = torch.tensor([[1.0, 1.0], [1.0, 4.0]], dtype=F64)
    alpha = cgd_step(tensor(0.5, 0.5), tensor(1, 4), gram, step_size=0.1, interaction=interaction)
    low, high = math.exp(0.2 / divisor), math.exp(0.5 / divisor)
    assert alpha.tolist() == pytest.approx([low / (low + high), high / (low + high)], abs=1e-12)


def test_cgd_gradient_scaling_by_hand() -> None:
    # Equation 3: exponents eta (1 + 1) and eta (1 + 4); losses do not matter.
    gram = torch.tensor([[1.0, 1.0], [1.0, 4.0]], dtype=F64)
    alpha = cgd_step(tensor(0.5, 0.5), tensor(-7, 9), gram, step_size=0.1, scaling="gradient")
    low, high = math.exp(0.2), math.exp(0.5)
    assert alpha.tolist() == pytest.approx([low / (low + high), high / (low + high)], abs=1e-12)


def test_cgd_adjustment_enters_every_loss_of_the_exponent() -> None:
    gram = torch.tensor([[1.0, 0.3], [0.3, 1.0]], dtype=F64)
    adjusted = cgd_step(tensor(0.5, 0.5), tensor(1, 2), gram, step_size=0.1, adjustments=tensor(3, 0.25))
    plain = cgd_step(tensor(0.5, 0.5), tensor(4, 2.25), gram, step_size=0.1)
    assert torch.equal(adjusted, plain)


def test_negative_loss_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"group 'sea' is -0.1.*non-negative loss"):
        require_nonnegative(tensor(1, -0.1), ["land", "sea"])
    with pytest.raises(ValueError, match="number 1"):
        cgd_step(tensor(0.5, 0.5), tensor(1, -0.1), torch.eye(2, dtype=F64), step_size=0.1)


# ---- Absent groups --------------------------------------------------------------------------------


def test_absent_group_keeps_its_weight_and_takes_no_part() -> None:
    alpha = tensor(0.2, 0.3, 0.5)
    present = torch.tensor([True, False, True])
    losses = tensor(1, 123, 2)
    gram = torch.tensor([[1.0, 9.0, 0.2], [9.0, 100.0, 9.0], [0.2, 9.0, 1.0]], dtype=F64)
    moved = cgd_step(alpha, losses, gram, step_size=0.5, present=present)
    assert moved[1].item() == 0.3
    among = cgd_step(tensor(0.2, 0.5) / 0.7, losses[[0, 2]], gram[[0, 2]][:, [0, 2]], step_size=0.5)
    assert torch.allclose(moved[[0, 2]], 0.7 * among)


def test_no_group_present_changes_nothing() -> None:
    alpha = tensor(0.2, 0.8)
    nobody = torch.zeros(2, dtype=torch.bool)
    assert torch.equal(exponentiated_step(alpha, tensor(5, 1), nobody, 0.0), alpha)


# ---- Equivalences --------------------------------------------------------------------------------


def test_orthogonal_gradients_give_group_dro() -> None:
    alpha, losses = tensor(0.1, 0.2, 0.7), tensor(0.3, 1.2, 0.4)
    gram = torch.diag(tensor(1e-6, 3, 1e6))
    cgd = cgd_step(alpha, losses, gram, step_size=0.3, exponent=0.5)
    assert torch.allclose(cgd, group_dro_step(alpha, losses, step_size=0.3), atol=1e-15)


@pytest.mark.parametrize("cosine", [-0.9, 0.0, 0.7])
def test_two_groups_give_group_dro_whatever_their_gradients(cosine: float) -> None:
    """The cross term (l_1 l_2)^p cos is the same for both and cancels; that of a third group does not."""
    alpha, losses = tensor(0.3, 0.7), tensor(2.0, 0.5)
    gram = torch.tensor([[4.0, 6 * cosine], [6 * cosine, 9.0]], dtype=F64)
    two = cgd_step(alpha, losses, gram, step_size=0.3, adjustments=tensor(0.1, 1.0))
    assert torch.allclose(two, group_dro_step(alpha, losses, step_size=0.3, adjustments=tensor(0.1, 1.0)))
    third = torch.tensor([[4.0, 6 * cosine, 2.0], [6 * cosine, 9.0, -3.0], [2.0, -3.0, 4.0]], dtype=F64)
    three = tensor(0.3, 0.3, 0.4), tensor(2.0, 0.5, 1.0)
    own, other = cgd_step(*three, third, step_size=0.3), group_dro_step(*three, step_size=0.3)
    assert (own[0] / own[1]).item() != pytest.approx((other[0] / other[1]).item(), rel=1e-3)


def test_one_group_has_weight_one() -> None:
    one, loss = tensor(1), tensor(0.7)
    assert group_dro_step(one, loss, step_size=5).tolist() == [1]
    assert cgd_step(one, loss, torch.tensor([[2.0]], dtype=F64), step_size=5).tolist() == [1]


def test_the_slow_reading_of_equation_five() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(4, 9, generator=generator, dtype=F64)
    losses = torch.rand(4, generator=generator, dtype=F64)
    alpha = torch.softmax(torch.randn(4, generator=generator, dtype=F64), 0)
    weights = []
    for i in range(4):
        exponent = 0.0
        for j in range(4):
            cosine = torch.nn.functional.cosine_similarity(gradients[i], gradients[j], dim=0).item()
            exponent += math.sqrt(losses[i].item() * losses[j].item()) * cosine
        weights.append(alpha[i].item() * math.exp(0.4 * exponent))
    expected = [weight / sum(weights) for weight in weights]
    assert cgd_step(alpha, losses, gradients @ gradients.T, step_size=0.4).tolist() == pytest.approx(
        expected, abs=1e-12
    )


# ---- Properties --------------------------------------------------------------------------------


@st.composite
def states(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """alpha [K], losses [K], gradients [K, 5], present [K] with somebody present."""
    groups = draw(st.integers(1, 8))
    floats = st.floats(-1e3, 1e3, width=32)
    raw = draw(hnp.arrays(np.float64, groups, elements=st.floats(1e-4, 1)))
    losses = draw(hnp.arrays(np.float64, groups, elements=st.floats(0, 50)))
    gradients = draw(hnp.arrays(np.float64, (groups, 5), elements=floats))
    present = draw(hnp.arrays(np.bool_, groups))
    present[draw(st.integers(0, groups - 1))] = True
    return (
        torch.as_tensor(raw / raw.sum()),
        torch.as_tensor(losses),
        torch.as_tensor(gradients),
        torch.as_tensor(present),
    )


STEPS = st.floats(0, 10)


def cgd(
    alpha: Tensor, losses: Tensor, gradients: Tensor, present: Tensor, step_size: float, **kwargs: float
) -> Tensor:
    return cgd_step(alpha, losses, gradients @ gradients.T, step_size=step_size, present=present, **kwargs)


@given(states(), STEPS)
def test_weights_stay_a_distribution_and_absent_ones_stay_put(state: tuple[Tensor, ...], step_size: float) -> None:
    alpha, losses, gradients, present = state
    floor = 1e-5 / len(alpha)
    for moved in (
        cgd(alpha, losses, gradients, present, step_size, min_weight=floor),
        group_dro_step(alpha, losses, step_size=step_size, present=present, min_weight=floor),
    ):
        assert abs(moved.sum().item() - 1) < 1e-12
        assert torch.equal(moved[~present], alpha[~present])
        assert bool((moved[present] >= 0.9 * floor * alpha[present].sum()).all())


@given(states(), STEPS, st.randoms())
def test_order_of_groups_does_not_matter(state: tuple[Tensor, ...], step_size: float, random: object) -> None:
    alpha, losses, gradients, present = state
    order = list(range(len(alpha)))
    random.shuffle(order)  # type: ignore[attr-defined]
    there = cgd(alpha, losses, gradients, present, step_size)[order]
    here = cgd(alpha[order], losses[order], gradients[order], present[order], step_size)
    assert torch.allclose(there, here, atol=1e-9)


@given(states(), STEPS, st.floats(-12, 12))
def test_scale_of_gradients_does_not_matter(state: tuple[Tensor, ...], step_size: float, power: float) -> None:
    alpha, losses, gradients, present = state
    gradients = torch.where(gradients.abs() < 1e-2, torch.zeros_like(gradients), gradients)
    scaled = cgd(alpha, losses, gradients * 10**power, present, step_size)
    assert torch.allclose(cgd(alpha, losses, gradients, present, step_size), scaled, atol=1e-9)


@given(states())
def test_cosines_are_cosines(state: tuple[Tensor, ...]) -> None:
    _, _, gradients, _ = state
    cosines = cosine_gram(gradients @ gradients.T)
    assert bool((cosines.abs() <= 1).all())
    # A product with the own transpose need not be symmetric to the last bit.
    assert torch.allclose(cosines, cosines.T, rtol=0, atol=1e-12)
    nonzero = (gradients**2).sum(1) > 0
    assert torch.allclose(cosines.diagonal()[nonzero], torch.ones(int(nonzero.sum()), dtype=F64))
    assert bool((cosines[~nonzero] == 0).all())


@given(states(), STEPS)
def test_group_dro_moves_weight_towards_higher_losses(state: tuple[Tensor, ...], step_size: float) -> None:
    alpha, losses, _, _ = state
    moved = group_dro_step(alpha, losses, step_size=step_size)
    ratio = (moved / alpha).log()
    order = losses.argsort()
    assert bool((ratio[order].diff() >= -1e-9).all())


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_weights_sum_to_one_after_a_thousand_updates(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.full((7,), 1 / 7, dtype=F64)
    for _ in range(1000):
        losses = torch.rand(7, generator=generator, dtype=F64) * 3
        gradients = torch.randn(7, 20, generator=generator, dtype=F64)
        present = torch.rand(7, generator=generator) < 0.6
        alpha = cgd(alpha, losses, gradients, present, 1.0, min_weight=1e-5 / 7)
    assert abs(alpha.sum().item() - 1) < 1e-9


@pytest.mark.parametrize("weight", [1e-16, 3e-17, 1e-30, 0.0])
def test_a_tiny_weight_whose_group_comes_alone_stays(weight: float) -> None:
    alpha = tensor(weight, 0.1, 0.2, 0.7)
    moved = exponentiated_step(alpha, tensor(0, 0, 0, 0), torch.tensor([True, False, False, False]), 0.0)
    assert moved.tolist() == pytest.approx(alpha.tolist(), rel=1e-12, abs=0)


@pytest.mark.parametrize("size", [4, 64, 500])
def test_a_weight_at_the_floor_stays_there_in_float32(size: int) -> None:
    floor = 1e-5 / size
    alpha = torch.rand(size, generator=torch.Generator().manual_seed(0))
    alpha[0] = 0
    alpha = alpha / alpha.sum() * (1 - floor)
    alpha[0] = floor
    present = torch.zeros(size, dtype=torch.bool)
    present[0] = True
    for _ in range(5):
        alpha = exponentiated_step(alpha, torch.zeros(size), present, floor)
        assert alpha[0].item() == pytest.approx(floor, rel=1e-6)
