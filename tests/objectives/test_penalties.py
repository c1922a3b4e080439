"""PGI, IRM and CORAL against hand values, slow references, finite differences and invariances."""

import itertools
import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hf_cgd import CORAL, ERM, ERMUW, IRM, PGI, GroupInfo, GroupRobustLoss, GroupRobustWarning, Objective
from hf_cgd.distributed.communication import Communication
from hf_cgd.functional import (
    alternating_halves,
    coral_distance,
    irm_penalty,
    log_sums_by_group,
    pgi_divergence,
    scale_gradients,
)
from hf_cgd.monitors import WINDOW

F64 = torch.float64


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def groups_with(class_counts: list[list[int]]) -> GroupInfo:
    """Groups "0", "1", … of a training set with these counts."""
    counts = torch.tensor(class_counts).sum(0).tolist()
    return GroupInfo([str(group) for group in range(len(counts))], counts, class_counts=class_counts)


def penalty_of(objective: Objective, groups: GroupInfo, group_ids: Tensor, **batch: Tensor) -> Tensor:
    """The loss of one batch less that of the objective without its penalty."""
    losses = batch.pop("losses", None)
    if losses is None:
        losses = cross_entropy(batch["logits"], batch["labels"])
    plain = type(objective)(penalty_weight=0.0)
    return GroupRobustLoss(objective, groups)(losses, group_ids, **batch) - GroupRobustLoss(plain, groups)(
        losses, group_ids, **batch
    )


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


# ---- PGI: hand values -----------------------------------------------------------------------------


def kl(q: list[float], p: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(q, p, strict=True))


def test_pgi_by_hand() -> None:
    """Two classes, three groups. Class 0: largest group 1, smaller 0 and 2; class 1: largest group 0, smaller 1."""
    probabilities = [[0.9, 0.1], [0.5, 0.5], [0.7, 0.3], [0.2, 0.8], [0.4, 0.6], [0.1, 0.9], [0.3, 0.7]]
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    group_ids = torch.tensor([0, 1, 1, 2, 0, 1, 1])
    groups = groups_with([[5, 20, 7], [30, 2, 0]])
    logits = torch.tensor(probabilities, dtype=F64).log().requires_grad_()
    class_0 = (kl([0.9, 0.1], [0.6, 0.4]) + kl([0.2, 0.8], [0.6, 0.4])) / 2
    class_1 = kl([0.2, 0.8], [0.4, 0.6])
    found = penalty_of(PGI(penalty_weight=3.0), groups, group_ids, logits=logits, labels=labels)
    assert found.item() == pytest.approx(3 * (class_0 + class_1), abs=1e-12)


def test_pgi_is_none_of_the_wrong_ones() -> None:
    """Published versions take logits for probabilities, or keep the last class alone; ours is told apart from both."""
    logits = torch.tensor([[2.0, 0.5], [1.0, 0.2], [0.3, 1.5], [0.1, 3.0]], dtype=F64, requires_grad=True)
    labels, group_ids = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    found = penalty_of(PGI(1.0), groups_with([[9, 1], [9, 1]]), group_ids, logits=logits, labels=labels).item()
    q, p = logits.detach().softmax(1)[[1, 3]], logits.detach().softmax(1)[[0, 2]]
    per_class = (q * (q / p).log()).sum(1)
    assert found == pytest.approx(per_class.sum().item(), abs=1e-12)
    of_logits = (logits[[1, 3]] * (logits[[1, 3]] / logits[[0, 2]]).log()).sum().item()
    assert abs(found - of_logits) > 0.1
    assert abs(found - per_class[-1].item()) > 0.01 and abs(found - per_class.mean().item()) > 0.01


def test_pgi_of_means_is_not_the_mean_of_divergences() -> None:
    """Two opposite examples average to what two undecided ones do."""
    logits = torch.tensor([[3.0, -3.0], [-3.0, 3.0], [0.0, 0.0]], dtype=F64, requires_grad=True)
    labels, group_ids = torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1])
    penalty = penalty_of(PGI(1.0), groups_with([[9, 1], [1, 1]]), group_ids, logits=logits, labels=labels)
    assert penalty.item() == pytest.approx(0, abs=1e-15)


def test_the_training_counts_decide_which_group_is_the_largest() -> None:
    """The batch holds more of group 1, the training set more of group 0; of equal groups the first is the largest."""
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=F64, requires_grad=True)
    labels, group_ids = torch.tensor([0, 0, 0]), torch.tensor([0, 1, 1])
    sharp, flat = [math.exp(2) / (math.exp(2) + 1), 1 / (math.exp(2) + 1)], [0.5, 0.5]
    for class_counts, expected in (
        ([[9, 2], [1, 1]], kl(flat, sharp)),
        ([[2, 9], [1, 1]], kl(sharp, flat)),
        ([[5, 5], [1, 1]], kl(flat, sharp)),
    ):
        penalty = penalty_of(PGI(1.0), groups_with(class_counts), group_ids, logits=logits, labels=labels)
        assert penalty.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "labels,group_ids",
    [
        ([0, 0, 1], [1, 1, 0]),  # class 0 lacks its largest group, class 1 its smaller one
        ([0, 0, 0], [0, 0, 0]),  # one group alone
        ([2, 2, 2], [0, 1, 1]),  # a class without training examples
    ],
)
def test_pgi_leaves_out_what_is_absent(labels: list[int], group_ids: list[int]) -> None:
    logits = torch.randn(3, 3, dtype=F64, requires_grad=True)
    groups = groups_with([[9, 1], [9, 1], [0, 0]])
    batch = dict(logits=logits, labels=torch.tensor(labels))
    assert penalty_of(PGI(1.0), groups, torch.tensor(group_ids), **batch).item() == 0


@pytest.mark.parametrize("scale", [50.0, 300.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saturated_logits_have_a_finite_and_living_gradient(scale: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[scale, -scale], [-scale, scale]], dtype=dtype, requires_grad=True)
    labels, group_ids = torch.tensor([0, 0]), torch.tensor([1, 0])
    penalty = penalty_of(PGI(1.0), groups_with([[9, 1], [1, 1]]), group_ids, logits=logits, labels=labels)
    assert penalty.item() == pytest.approx(2 * scale, rel=1e-2)
    (gradient,) = torch.autograd.grad(penalty, logits)
    assert gradient.float()[1].tolist() == pytest.approx([-1, 1], abs=1e-2)


def test_classes_that_are_ruled_out_do_no_harm() -> None:
    infinite = float("inf")
    logits = torch.tensor([[1.0, 0.0, -infinite], [0.0, 1.0, -infinite]], requires_grad=True)
    labels, group_ids = torch.tensor([0, 0]), torch.tensor([0, 1])
    penalty = penalty_of(PGI(1.0), groups_with([[9, 1], [1, 1]]), group_ids, logits=logits, labels=labels)
    (gradient,) = torch.autograd.grad(penalty, logits)
    assert penalty.item() == pytest.approx(kl(*(logits.detach()[:, :2].softmax(1).flip(0).tolist())), rel=1e-5)
    # By the logits of P it is P - Q.
    sharp = math.exp(1) / (1 + math.exp(1))
    assert gradient[0].tolist() == pytest.approx([2 * sharp - 1, 1 - 2 * sharp, 0], rel=1e-5)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    "logits,labels",
    [
        (torch.zeros(2, 1, requires_grad=True), torch.tensor([0, 0])),
        (torch.zeros(2, requires_grad=True), torch.tensor([0, 0])),
        (torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3)),
        (torch.zeros(2, 3, requires_grad=True), torch.zeros(2)),
    ],
)
def test_pgi_is_for_classes(logits: Tensor, labels: Tensor) -> None:
    robust_loss = GroupRobustLoss(PGI(), groups_with([[9, 1], [1, 1]]))
    with pytest.raises(ValueError, match=r"PGI compares predicted probabilities of classes: expected logits \[B, C\]"):
        robust_loss(logits.reshape(2, -1).sum(1), torch.tensor([0, 1]), logits=logits, labels=labels)


def test_a_class_without_a_count() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    labels = torch.tensor([0, 2])
    with pytest.raises(ValueError, match=r"classes in 0..1, for which there are training counts, got 2"):
        penalty_of(PGI(), groups_with([[9, 1], [1, 1]]), torch.tensor([0, 1]), logits=logits, labels=labels)


# ---- PGI: reference and properties -----------------------------------------------------------------


@st.composite
def classified(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, list[list[int]]]:
    """logits [B, C], labels [B], group ids [B] and training counts [C, K] that cover them."""
    size, classes, groups = draw(st.integers(1, 12)), draw(st.integers(2, 4)), draw(st.integers(1, 4))
    logits = draw(hnp.arrays(np.float64, (size, classes), elements=st.floats(-60, 60)))
    labels = draw(hnp.arrays(np.int64, size, elements=st.integers(0, classes - 1)))
    group_ids = draw(hnp.arrays(np.int64, size, elements=st.integers(0, groups - 1)))
    counts = draw(hnp.arrays(np.int64, (classes, groups), elements=st.integers(1, 30)))
    return (
        torch.as_tensor(logits).requires_grad_(),
        torch.as_tensor(labels),
        torch.as_tensor(group_ids),
        counts.tolist(),
    )


def slow_pgi(logits: Tensor, labels: Tensor, group_ids: Tensor, class_counts: list[list[int]]) -> float:
    total = 0.0
    for label in range(logits.shape[1]):
        means = {}
        for group in range(len(class_counts[0])):
            rows = [n for n in range(len(labels)) if labels[n] == label and group_ids[n] == group]
            if rows:
                means[group] = sum(logits[n].softmax(0) for n in rows) / len(rows)
        largest = max(range(len(class_counts[0])), key=lambda group: class_counts[label][group])
        if largest not in means:
            continue
        p = means.pop(largest)
        if means:
            total += sum((q * (q.log() - p.log())).sum().item() for q in means.values()) / len(means)
    return total


@settings(deadline=None)
@given(classified())
def test_pgi_equals_the_slow_reading_of_its_formula(batch: tuple) -> None:
    logits, labels, group_ids, class_counts = batch
    found = penalty_of(PGI(1.0), groups_with(class_counts), group_ids, logits=logits, labels=labels)
    assert found.item() == pytest.approx(slow_pgi(logits.detach(), labels, group_ids, class_counts), abs=1e-8)


@settings(deadline=None)
@given(classified(), st.booleans())
def test_pgi_is_never_negative_and_zero_for_equal_distributions(batch: tuple, equal: bool) -> None:
    logits, labels, group_ids, class_counts = batch
    logits = logits.detach().float()
    if equal:
        logits = logits[:1].expand_as(logits).clone()
    cells, place = torch.unique(labels * len(class_counts[0]) + group_ids, return_inverse=True)
    classes, groups = cells // len(class_counts[0]), cells % len(class_counts[0])
    largest = groups == torch.tensor(class_counts).argmax(1)[classes]
    means = log_sums_by_group(logits.log_softmax(1), place, len(cells)) - place.bincount()[:, None].log()
    found = pgi_divergence(means, classes, largest).item()
    assert found >= 0
    if equal:
        assert found < 1e-6
    compared = any(
        torch.allclose(means[i].exp(), means[j].exp(), atol=1e-2) is False
        for i, j in itertools.product(range(len(cells)), repeat=2)
        if classes[i] == classes[j] and largest[i] and not largest[j]
    )
    assert not compared or found > 0


def test_rounding_makes_no_divergence_negative_and_takes_no_gradient() -> None:
    """Distributions that differ by 1e-4: in float32 the plain sum is negative for some, the divergence is not."""
    generator = torch.Generator().manual_seed(0)
    negative = 0
    for _ in range(200):
        p = torch.randn(5, generator=generator)
        q = (p + 1e-4 * torch.randn(5, generator=generator)).requires_grad_()
        means = torch.stack([p, q]).log_softmax(1)
        negative += bool((means[1].exp() * (means[1] - means[0])).sum() < 0)
        found = pgi_divergence(means, torch.tensor([0, 0]), torch.tensor([True, False]))
        (gradient,) = torch.autograd.grad(found, q)
        assert found.item() >= 0 and gradient.abs().max() > 1e-7
    assert negative > 10


@settings(deadline=None)
@given(classified(), st.randoms())
def test_order_of_examples_and_of_groups_does_not_matter_to_pgi(batch: tuple, random: object) -> None:
    logits, labels, group_ids, class_counts = batch
    counts = torch.tensor(class_counts) * 10 + torch.arange(len(class_counts[0]))  # no two groups equally large
    rows, groups = list(range(len(labels))), list(range(counts.shape[1]))
    random.shuffle(rows)  # type: ignore[attr-defined]
    random.shuffle(groups)  # type: ignore[attr-defined]
    one = penalty_of(PGI(1.0), groups_with(counts.tolist()), group_ids, logits=logits, labels=labels)
    other = penalty_of(
        PGI(1.0),
        groups_with(counts[:, groups].tolist()),
        torch.tensor(groups).argsort()[group_ids[rows]],
        logits=logits.detach()[rows].requires_grad_(),
        labels=labels[rows],
    )
    assert other.item() == pytest.approx(one.item(), abs=1e-9)


# ---- IRM -----------------------------------------------------------------------------------------


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
    assert loss.item() == GroupRobustLoss(ERMUW(), groups)(losses, group_ids).item() == 3.5


def test_a_group_of_one_in_a_batch_gives_no_penalty() -> None:
    logits = tensor(1, 2, 3).requires_grad_()
    group_ids = torch.tensor([0, 0, 1])
    found = penalty_of(IRM(1.0), GroupInfo("abc", [5] * 3), group_ids, losses=logits**2, logits=logits)
    assert found.item() == pytest.approx(2 * 8)
    alone = penalty_of(IRM(1.0), GroupInfo("abc", [5] * 3), torch.tensor([0, 1, 2]), losses=logits**2, logits=logits)
    assert alone.item() == 0


@pytest.mark.parametrize("objective", [IRM(), CORAL()])
def test_a_training_group_of_one_is_refused(objective: Objective) -> None:
    name = type(objective).__name__
    with pytest.raises(ValueError, match=rf"{name} needs at least 2 training examples in each group.*fewer: b\."):
        GroupRobustLoss(objective, GroupInfo("ab", [5, 1]))


def test_halves_go_by_turns_within_each_group() -> None:
    group_ids = torch.tensor([0, 1, 0, 0, 1, 2])
    assert alternating_halves(group_ids, torch.tensor([0, 0, 0])).tolist() == [0, 0, 1, 0, 1, 0]
    assert alternating_halves(group_ids, torch.tensor([1, 2, 3])).tolist() == [1, 0, 0, 1, 1, 1]


@settings(deadline=None, max_examples=50)
@given(hnp.arrays(np.float64, st.integers(2, 6), elements=st.floats(-5, 5)))
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


# ---- CORAL ----------------------------------------------------------------------------------------


def test_coral_by_hand() -> None:
    """Group 0: (0,0), (2,0): mean (1,0), covariance diag(2,0). Group 1: (1,2), (1,6): mean (1,4), diag(0,8)."""
    features = torch.tensor([[0.0, 0], [1, 2], [2, 0], [1, 6]], dtype=F64, requires_grad=True)
    group_ids = torch.tensor([0, 1, 0, 1])
    expected = 4**2 / 2 + (2**2 + 8**2) / 4
    groups, losses = GroupInfo("abc", [5] * 3), torch.ones(4, dtype=F64, requires_grad=True)
    found = penalty_of(CORAL(penalty_weight=0.5), groups, group_ids, losses=losses, features=features)
    assert found.item() == pytest.approx(0.5 * expected)


def slow_coral(features: Tensor, group_ids: Tensor, num_groups: int) -> float:
    parts = [features[group_ids == group] for group in range(num_groups)]
    parts = [part for part in parts if len(part) > 1]
    distances = []
    for one, other in itertools.combinations(parts, 2):
        means = (one.mean(0) - other.mean(0)).square().mean()
        covariances = (torch.cov(one.T, correction=1) - torch.cov(other.T, correction=1)).square().mean()
        distances.append((means + covariances).item())
    return float(np.mean(distances)) if distances else 0.0


@st.composite
def featured(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """features [B, D], group ids [B] and K."""
    size, width, groups = draw(st.integers(1, 12)), draw(st.integers(2, 4)), draw(st.integers(2, 5))
    features = draw(hnp.arrays(np.float64, (size, width), elements=st.floats(-10, 10)))
    group_ids = draw(hnp.arrays(np.int64, size, elements=st.integers(0, groups - 1)))
    return torch.as_tensor(features).requires_grad_(), torch.as_tensor(group_ids), groups


def coral_of(features: Tensor, group_ids: Tensor, num_groups: int) -> float:
    groups = GroupInfo([str(group) for group in range(num_groups)], [9] * num_groups)
    losses = torch.ones(len(group_ids), dtype=F64, requires_grad=True)
    return penalty_of(CORAL(1.0), groups, group_ids, losses=losses, features=features).item()


@settings(deadline=None)
@given(featured(), st.randoms())
def test_coral_equals_the_slow_reading_whatever_the_order(batch: tuple, random: object) -> None:
    features, group_ids, groups = batch
    found = coral_of(features, group_ids, groups)
    assert found == pytest.approx(slow_coral(features.detach(), group_ids, groups), abs=1e-9)
    rows, renamed = list(range(len(group_ids))), list(range(groups))
    random.shuffle(rows)  # type: ignore[attr-defined]
    random.shuffle(renamed)  # type: ignore[attr-defined]
    assert coral_of(features[rows], torch.tensor(renamed)[group_ids[rows]], groups) == pytest.approx(found, abs=1e-9)


@settings(deadline=None)
@given(hnp.arrays(np.float64, (4, 3), elements=st.floats(-100, 100)), st.integers(2, 4), st.floats(-1e3, 1e3))
def test_coral_is_zero_for_identical_groups_and_blind_to_a_common_shift(
    rows: np.ndarray, groups: int, shift: float
) -> None:
    features = torch.as_tensor(rows).repeat(groups, 1).requires_grad_()
    group_ids = torch.arange(groups).repeat_interleave(4)
    assert coral_of(features, group_ids, groups) == pytest.approx(0, abs=1e-12)
    features = features * (1 + group_ids[:, None])
    assert coral_of(features + shift, group_ids, groups) == pytest.approx(
        coral_of(features, group_ids, groups), rel=1e-6, abs=1e-6
    )


def test_coral_of_one_group_is_zero() -> None:
    assert coral_distance(torch.ones(1, 3), torch.ones(1, 3, 3)).item() == 0


def test_coral_keeps_its_digits_far_from_the_origin() -> None:
    """Sums of squares less the square of sums would lose everything here."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(16, 3, generator=generator)
    group_ids = torch.arange(16) % 2
    far = coral_of((features + 1000).requires_grad_(), group_ids, 2)
    assert far == pytest.approx(coral_of(features.requires_grad_(), group_ids, 2), rel=1e-3)


# ---- All three ------------------------------------------------------------------------------------

GROUPS = groups_with([[20, 5, 3], [4, 18, 6], [7, 7, 9]])


def batch_of(seed: int = 0, size: int = 14) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, 4, generator=generator, dtype=F64)
    labels = torch.randint(0, 3, (size,), generator=generator)
    return {"features": features, "labels": labels}, torch.randint(0, 3, (size,), generator=generator)


@pytest.mark.parametrize("objective", [PGI(1.7), IRM(1.7), CORAL(1.7)])
def test_gradients_equal_finite_differences(objective: Objective) -> None:
    batch, group_ids = batch_of()
    head = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def loss(features: Tensor, head: Tensor) -> Tensor:
        logits = 2 * (features @ head).tanh()
        losses = cross_entropy(logits, batch["labels"])
        given = dict(logits=logits, labels=batch["labels"], features=features)
        return GroupRobustLoss(objective, GROUPS)(losses, group_ids, **given)

    features = batch["features"].requires_grad_()
    assert torch.autograd.gradcheck(loss, (features, head))
    (found,) = torch.autograd.grad(loss(features, head), features)
    objective = type(objective)(0.0)
    (without,) = torch.autograd.grad(loss(features, head), features)
    assert (found - without).abs().max() > 1e-3


@pytest.mark.parametrize(
    "objective,base", [(PGI(0.0), ERM()), (CORAL(0.0), ERM()), (IRM(0.0), ERMUW()), (IRM(0.0, 5), ERMUW())]
)
def test_without_weight_it_is_its_base(objective: Objective, base: Objective) -> None:
    batch, group_ids = batch_of()
    logits = batch["features"][:, :3].clone().requires_grad_()
    losses = cross_entropy(logits, batch["labels"])
    found = GroupRobustLoss(objective, GROUPS)(losses, group_ids, logits=logits, **batch)
    assert torch.equal(found, GroupRobustLoss(base, GROUPS)(losses, group_ids))


@pytest.mark.parametrize("objective", [PGI(3.0), IRM(3.0), CORAL(3.0)])
def test_with_one_group_it_is_erm(objective: Objective) -> None:
    batch, group_ids = batch_of()
    logits = batch["features"][:, :3].clone().requires_grad_()
    losses = cross_entropy(logits, batch["labels"])
    one = GroupInfo(["all"], [60], class_counts=[[20], [20], [20]])
    found = GroupRobustLoss(objective, one)(losses, torch.zeros_like(group_ids), logits=logits, **batch)
    assert found.item() == pytest.approx(losses.mean().item(), rel=1e-12)


@pytest.mark.parametrize("objective", [PGI(1.7), IRM(1.7), CORAL(1.7)])
def test_under_accumulation_the_penalty_is_the_mean_of_the_micro_batches(objective: Objective) -> None:
    batch, group_ids = batch_of(size=24)
    logits = batch["features"][:, :3].clone().requires_grad_()
    losses = cross_entropy(logits, batch["labels"])
    parts = [slice(0, 8), slice(8, 16), slice(16, 24)]
    given = {"logits": logits, **batch}
    windows = GroupRobustLoss(objective, GROUPS)
    windows.open_window([group_ids[part] for part in parts])
    total = sum(
        windows(
            cross_entropy(z, batch["labels"][part]),
            group_ids[part],
            logits=z,
            **{k: v[part] for k, v in batch.items()},
        )
        for part in parts
        for z in [logits[part]]
    ) / len(parts)
    penalties = [
        penalty_of(objective, GROUPS, group_ids[part], losses=cross_entropy(z, batch["labels"][part]), logits=z,
                   **{k: v[part] for k, v in batch.items()})
        for part in parts
        for z in [logits[part]]
    ]  # fmt: skip
    base = GroupRobustLoss(type(objective)(0.0), GROUPS)(losses, group_ids, **given)
    assert total.item() == pytest.approx((base + sum(penalties) / 3).item(), rel=1e-12)


@pytest.mark.parametrize("objective", [PGI(1.7), IRM(1.7), CORAL(1.7)])
@pytest.mark.parametrize("seed", range(5))
def test_processes_together_give_the_loss_and_gradient_of_one(objective: Objective, seed: int) -> None:
    """Three processes in turn, with the sums that a run of all would have: their gradients average to that of one."""
    batch, group_ids = batch_of(seed, size=18)
    labels = batch["labels"]
    features = batch["features"].requires_grad_()
    head = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    parts = [slice(0, 7), slice(7, 8), slice(8, 18)]

    def loss(robust_loss: GroupRobustLoss, part: slice) -> Tensor:
        logits = features[part] @ head
        return robust_loss(
            cross_entropy(logits, labels[part]),
            group_ids[part],
            logits=logits,
            labels=labels[part],
            features=features[part],
        )

    one = loss(GroupRobustLoss(objective, GROUPS), slice(0, 18))
    (expected,) = torch.autograd.grad(one, features)
    # All processes run until each collective is known: a first round fills in the tensors of one call after another.
    sums: list[Tensor] = []
    while True:
        calls: list[list[Tensor]] = []
        losses = []
        for index, part in enumerate(parts):
            mine: list[Tensor] = []

            def reduce(tensor: Tensor, mine: list[Tensor] = mine) -> Tensor:
                mine.append(tensor.clone())
                return sums[len(mine) - 1].clone() if len(mine) <= len(sums) else tensor.clone()

            communication = Communication(reduce, 3, index)
            losses.append(loss(GroupRobustLoss(objective, GROUPS, communication=communication), part))
            calls.append(mine)
        assert len({len(mine) for mine in calls}) == 1 or len(sums) < max(map(len, calls))
        if all(len(mine) == len(sums) for mine in calls):
            break
        place = len(sums)
        assert len({mine[place].shape for mine in calls}) == 1, "collectives differ in size"
        sums.append(sum(mine[place] for mine in calls))
    gradient = sum(torch.autograd.grad(part_loss, features)[0] for part_loss in losses) / 3
    assert torch.allclose(gradient, expected, atol=1e-12)
    assert sum(part_loss.item() for part_loss in losses) / 3 == pytest.approx(one.item(), rel=1e-12)


@pytest.mark.parametrize("objective", [PGI(1.7), IRM(1.7), CORAL(1.7)])
def test_autocast_takes_nothing_from_the_precision(objective: Objective) -> None:
    batch, group_ids = batch_of()
    features = (10 * batch["features"]).float()
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = features[:, :3].clone().requires_grad_()
            losses = cross_entropy(logits, batch["labels"])
            given = dict(logits=logits, labels=batch["labels"], features=features)
            found.append(GroupRobustLoss(objective, GROUPS)(losses, group_ids, **given).item())
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_several_processes_have_to_say_which_they_are() -> None:
    with pytest.raises(ValueError, match=r"num_processes=2 it has to be known which process this is: pass rank"):
        Communication(lambda tensor: tensor, 2)


@pytest.mark.parametrize(
    "objective,missing",
    [(PGI(), r"PGI needs logits and labels of the batch .*\(losses, group_ids, logits=..., labels=...\)"),
     (IRM(), r"IRM needs logits of the batch"), (CORAL(), r"CORAL needs features of the batch")],
)  # fmt: skip
def test_what_is_missing_is_named(objective: Objective, missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        GroupRobustLoss(objective, GROUPS)(torch.ones(2), torch.tensor([0, 1]))


def test_pgi_without_counts_of_classes() -> None:
    with pytest.raises(ValueError, match=r"PGI needs the number of training examples of each class .*class_counts="):
        GroupRobustLoss(PGI(), GroupInfo("ab", [5, 5]))


@pytest.mark.parametrize("objective", [PGI, IRM, CORAL])
def test_weights_out_of_range(objective: type) -> None:
    with pytest.raises(ValueError, match=r"penalty_weight must be a finite number >= 0, got -1"):
        objective(penalty_weight=-1.0)


def test_a_penalty_that_never_finds_anything_gives_one_warning() -> None:
    robust_loss = GroupRobustLoss(IRM(), GroupInfo("ab", [5, 5]))
    logits = tensor(1, 2).requires_grad_()
    with pytest.warns(GroupRobustWarning, match=r"objective='irm' had nothing to compare in 50 batches") as caught:
        for _ in range(2 * WINDOW):
            robust_loss(logits**2, torch.tensor([0, 1]), logits=logits)
    assert len(caught) == 1
