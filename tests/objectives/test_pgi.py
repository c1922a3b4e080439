"""PGI against hand values, a slow reference and invariances."""

import itertools
import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from penalties import F64, groups_with, penalty_of
from torch import Tensor

from hf_cgd import PGI, GroupInfo, GroupRobustLoss
from hf_cgd.functional import log_sums_by_group, pgi_divergence

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


def test_pgi_without_counts_of_classes() -> None:
    with pytest.raises(ValueError, match=r"PGI needs the number of training examples of each class .*class_counts="):
        GroupRobustLoss(PGI(), GroupInfo("ab", [5, 5]))
