"""CORAL against hand values, a slow reference and invariances."""

import itertools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from penalties import F64, penalty_of
from torch import Tensor

from hf_cgd import CORAL, GroupInfo
from hf_cgd.functional import coral_distance


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
