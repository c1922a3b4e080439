"""IRM against hand values, a slow reference and finite differences."""

import itertools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from penalties import F64, cross_entropy, penalty_of, tensor

from hf_cgd import ERMUW, IRM, GroupInfo, GroupRobustLoss, GroupRobustWarning
from hf_cgd.functional import alternating_halves, irm_penalty, scale_gradients
from hf_cgd.monitors import WINDOW


def test_scale_gradients_are_derivatives_by_a_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=generator, dtype=F64, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 0, 1])
    found = scale_gradients(cross_entropy(logits, labels), logits)
    step = 1e-6
    differences = (cross_entropy(logits * (1 + step), labels) - cross_entropy(logits * (1 - step), labels)) / (
        2 * step
    )
    assert torch.allclose(found, differences, atol=1e-8)
    # For squared errors: d (w z - y)^2 / dw = 2 z (z - y).
    values = tensor(1.0, -2.0).requires_grad_()
    assert scale_gradients((values - tensor(3.0, 1.0)) ** 2, values).tolist() == [-4.0, 12.0]
    # A process may hold no example with a label, while others do.
    none = logits[:0]
    assert scale_gradients(cross_entropy(none, labels[:0]), none).shape == (0,)


def test_irm_by_hand() -> None:
    """Squared errors with targets 0: derivative 2 z^2. Group 0: halves (1, 3) and (2); group 1: (1) and (4)."""
    logits = tensor(1, 1, 2, 3, 4).requires_grad_()
    group_ids = torch.tensor([0, 1, 0, 0, 1])
    first = (2 * 1 + 2 * 9) / 2 * (2 * 4)
    second = (2 * 1) * (2 * 16)
    groups = GroupInfo("ab", [5, 5])
    found = penalty_of(IRM(penalty_weight=0.5), groups, group_ids, losses=logits**2, logits=logits)
    assert found.item() == pytest.approx(0.5 * (first + second) / 2)


def test_irm_starts_from_the_mean_of_the_group_means() -> None:
    losses, group_ids = tensor(1, 3, 5).requires_grad_(), torch.tensor([0, 0, 1])
    groups = GroupInfo("abc", [5, 5, 5])
    loss = GroupRobustLoss(IRM(penalty_weight=0.0), groups)(losses, group_ids, logits=losses)
    assert loss.item() == pytest.approx(3.5, rel=1e-12)
    assert GroupRobustLoss(ERMUW(), groups)(losses, group_ids).item() == pytest.approx(3.5, rel=1e-12)


def test_a_group_of_one_in_a_batch_gives_no_penalty() -> None:
    logits = tensor(1, 2, 3).requires_grad_()
    group_ids = torch.tensor([0, 0, 1])
    found = penalty_of(IRM(1.0), GroupInfo("abc", [5] * 3), group_ids, losses=logits**2, logits=logits)
    assert found.item() == pytest.approx(2 * 8)
    alone = penalty_of(IRM(1.0), GroupInfo("abc", [5] * 3), torch.tensor([0, 1, 2]), losses=logits**2, logits=logits)
    assert alone.item() == 0


def test_halves_go_by_turns_within_each_group() -> None:
    group_ids = torch.tensor([0, 1, 0, 0, 1, 2])
    assert alternating_halves(group_ids, torch.tensor([0, 0, 0])).tolist() == [0, 0, 1, 0, 1, 0]
    assert alternating_halves(group_ids, torch.tensor([1, 2, 3])).tolist() == [1, 0, 0, 1, 1, 1]


@settings(deadline=None, max_examples=50)
@given(hnp.arrays(np.float64, st.integers(2, 5), elements=st.floats(-5, 5)))
def test_the_product_of_halves_is_unbiased(derivatives: np.ndarray) -> None:
    """Its mean over all orders is the mean over all pairs of different examples; the plain square is larger."""
    d = torch.as_tensor(derivatives)
    estimates = []
    for order in itertools.permutations(range(len(d))):
        halves = alternating_halves(torch.zeros(len(d), dtype=torch.long), torch.tensor([0]))
        sums = torch.zeros(2, dtype=F64).index_add(0, halves, d[list(order)])
        estimates.append(irm_penalty(sums[:, None], halves.bincount()[:, None]).item())
    pairs = [d[i].item() * d[j].item() for i in range(len(d)) for j in range(len(d)) if i != j]
    assert np.mean(estimates) == pytest.approx(np.mean(pairs), abs=1e-9)


def test_the_slow_reading_of_irm() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(11, 4, generator=generator, dtype=F64, requires_grad=True)
    labels = torch.randint(0, 4, (11,), generator=generator)
    group_ids = torch.randint(0, 3, (11,), generator=generator)
    expected = []
    for group in range(3):
        rows = (group_ids == group).nonzero().flatten().tolist()
        halves = []
        for part in (rows[0::2], rows[1::2]):
            w = torch.ones((), dtype=F64, requires_grad=True)
            risk = cross_entropy(logits[part] * w, labels[part]).mean()
            halves.append(torch.autograd.grad(risk, w)[0].item())
        expected.append(halves[0] * halves[1])
    found = penalty_of(IRM(1.0), GroupInfo("abc", [9] * 3), group_ids, logits=logits, labels=labels)
    assert found.item() == pytest.approx(np.mean(expected), abs=1e-12)


def test_annealing() -> None:
    logits = tensor(1, 2).requires_grad_()
    robust_loss = GroupRobustLoss(IRM(penalty_weight=10.0, penalty_anneal_steps=2), GroupInfo("ab", [5, 5]))
    group_ids, base, penalty = torch.tensor([0, 0]), 2.5, 2 * 8
    found = [robust_loss(logits**2, group_ids, logits=logits).item() for _ in range(4)]
    assert found == pytest.approx([base + penalty, base + penalty, base + 10 * penalty, base + 10 * penalty])
    assert robust_loss.steps == 4
    restored = GroupRobustLoss(robust_loss.objective, GroupInfo("ab", [5, 5]))
    restored.load_state_dict(robust_loss.state_dict())
    assert restored.steps == 4
    restored.reset()
    assert restored.steps == 0
    # A weight below 1 is not raised for the start.
    assert [IRM(0.1, 2).weight_at(step) for step in range(3)] == [0.1] * 3
    assert [IRM(5.0, 2).weight_at(step) for step in range(3)] == [1.0, 1.0, 5.0]


def test_steps_are_optimizer_steps_not_micro_batches() -> None:
    logits = tensor(1, 2).requires_grad_()
    robust_loss = GroupRobustLoss(IRM(penalty_weight=10.0, penalty_anneal_steps=1), GroupInfo("ab", [5, 5]))
    ids = torch.tensor([0, 0])
    robust_loss.open_window([ids, ids])
    first, second = (robust_loss(logits**2, ids, logits=logits).item() for _ in range(2))
    assert first == second and robust_loss.steps == 1


def test_losses_that_do_not_come_from_the_logits_are_refused() -> None:
    robust_loss = GroupRobustLoss(IRM(), GroupInfo("ab", [5, 5]))
    losses, group_ids = tensor(1, 2).requires_grad_(), torch.tensor([0, 0])
    with pytest.raises(ValueError, match="they do not depend on them"):
        robust_loss(losses, group_ids, logits=tensor(1, 2).requires_grad_())
    with pytest.raises(ValueError, match="got a detached tensor"):
        GroupRobustLoss(IRM(), GroupInfo("ab", [5, 5]))(losses, group_ids, logits=tensor(1, 2))


def test_a_penalty_that_never_finds_anything_gives_one_warning() -> None:
    robust_loss = GroupRobustLoss(IRM(), GroupInfo("ab", [5, 5]))
    logits = tensor(1, 2).requires_grad_()
    with pytest.warns(GroupRobustWarning, match=r"objective='irm' had nothing to compare in 50 batches") as caught:
        for _ in range(2 * WINDOW):
            robust_loss(logits**2, torch.tensor([0, 1]), logits=logits)
    assert len(caught) == 1
