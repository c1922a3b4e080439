"""The group samplers: make-up of every batch, coverage, and an order fixed by seed and epoch."""

from collections import Counter
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hf_cgd.data.sampling import BalancedGroupSampler, GroupSampler, WeightedGroupSampler


def batches_of(sampler: GroupSampler) -> list[list[int]]:
    order = list(sampler)
    return [order[i : i + sampler.batch_size] for i in range(0, len(order), sampler.batch_size)]


def test_every_batch_is_balanced_and_the_majority_is_not_repeated() -> None:
    group_ids = np.array([0] * 90 + [1] * 10)
    sampler = BalancedGroupSampler(group_ids, 8, seed=0)
    batches = batches_of(sampler)
    assert len(batches) == 13 and len(sampler) == 104
    for batch in batches:
        assert Counter(group_ids[batch].tolist()) == {0: 4, 1: 4}
    drawn = Counter(row for batch in batches for row in batch)
    assert max(drawn[row] for row in range(90)) == 1
    minority = [drawn[row] for row in range(90, 100)]
    assert sum(minority) == 52 and max(minority) - min(minority) <= 1


def test_a_surplus_rotates() -> None:
    group_ids = np.arange(120) % 3
    per_batch = [
        Counter(group_ids[batch].tolist()) for batch in batches_of(BalancedGroupSampler(group_ids, 8, seed=1))
    ]
    assert all(sorted(counts.values()) == [2, 3, 3] for counts in per_batch)
    for start in range(len(per_batch) - 2):
        total = sum(per_batch[start : start + 3], Counter())
        assert set(total.values()) == {8}


def test_batches_smaller_than_the_number_of_groups_cover_all_groups_in_turn() -> None:
    group_ids = np.arange(100) % 5
    batches = batches_of(BalancedGroupSampler(group_ids, 4, seed=0))
    for first, second in pairwise(batches):
        assert set(group_ids[first]) | set(group_ids[second]) == set(range(5))
        assert len(set(group_ids[first])) == 4


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 9), st.booleans(), st.integers(0, 9))
def test_length_balance_and_coverage(groups: list[int], batch_size: int, drop_last: bool, seed: int) -> None:
    group_ids = np.array(groups)
    sampler = BalancedGroupSampler(group_ids, batch_size, seed, drop_last)
    order = list(sampler)
    assert len(order) == len(sampler)
    whole = len(groups) // batch_size if drop_last else -(-len(groups) // batch_size)
    assert len(order) == whole * batch_size
    counts = Counter(group_ids[order].tolist())
    if order:
        assert max(counts.values()) - min(counts.get(group, 0) for group in set(groups)) <= 1
    for group in set(groups):
        drawn = Counter(row for row in order if group_ids[row] == group)
        members = [drawn[row] for row in np.flatnonzero(group_ids == group)]
        assert max(members) - min(members) <= 1


@pytest.mark.parametrize("kind", [BalancedGroupSampler, WeightedGroupSampler])
def test_the_order_depends_on_seed_and_epoch_alone(kind: type[GroupSampler]) -> None:
    group_ids = np.array([0] * 30 + [1] * 3)
    first, second = kind(group_ids, 4, seed=3), kind(group_ids, 4, seed=3)
    np.random.seed(1)
    epoch_zero = list(first)
    np.random.seed(2)
    assert list(second) == epoch_zero == list(first)
    first.set_epoch(1)
    first.set_epoch(1)
    assert list(first) != epoch_zero
    second.set_epoch(1)
    assert list(second) == list(first)
    assert list(kind(group_ids, 4, seed=4)) != epoch_zero


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=70),
    st.sampled_from([(12, 1, 1), (6, 2, 1), (4, 3, 1), (6, 1, 2), (2, 3, 2), (1, 12, 1), (1, 1, 12)]),
    st.booleans(),
)
def test_a_step_is_of_the_same_examples_however_they_are_shared(
    groups: list[int], shares: tuple[int, int, int], drop_last: bool
) -> None:
    """Against one process with one batch of 12; what is shared ends with the last whole batches that it takes."""
    batch_size, processes, micro_batches = shares
    assert batch_size * processes * micro_batches == 12
    for kind in (BalancedGroupSampler, WeightedGroupSampler):
        whole = list(kind(np.array(groups), 12, seed=5))
        shared = kind(np.array(groups), batch_size, 5, drop_last, processes=processes, step_size=12)
        order, together = list(shared), batch_size * processes
        assert order == whole[: len(order)] and len(order) == len(shared)
        assert len(order) == (len(groups) // together + (not drop_last and len(groups) % together > 0)) * together


def test_weighted_draws_are_balanced_on_average() -> None:
    group_ids = np.array([0] * 970 + [1] * 20 + [7] * 10)
    order = [row for epoch in range(20) for row in _epoch(WeightedGroupSampler(group_ids, 10, seed=0), epoch)]
    shares = np.array([np.mean(group_ids[order] == group) for group in (0, 1, 7)])
    # Three standard errors of a share of 1/3 among 20,000 draws are 0.01.
    assert np.abs(shares - 1 / 3).max() < 0.01
    within = Counter(row for row in order if row >= 990)
    assert len(within) == 10 and max(within.values()) < 1.3 * min(within.values())


def _epoch(sampler: GroupSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)
