"""Groups drawn by weight: shares, coverage, an order that can be resumed, and how far a loader may read ahead."""

import json
from collections import Counter
from itertools import islice

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.data import BatchSampler, DataLoader

from hf_cgd.data.weight_sampling import DrawnGroups, GroupWeightSampler, steps_ahead


def memory_of(weights: list[float], ahead: int = 1, follows: bool = True) -> DrawnGroups:
    memory = DrawnGroups(len(weights), ahead)
    memory.begin(torch.tensor(weights, dtype=torch.float64), follows)
    return memory


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=5).filter(lambda weights: sum(weights) > 1e-6),
    st.integers(1, 40), st.integers(0, 5),
)  # fmt: skip
def test_a_step_holds_each_groups_share_up_to_one_example(weights: list[float], size: int, seed: int) -> None:
    weights = (np.asarray(weights) / sum(weights)).tolist()
    group_ids = np.arange(10 * len(weights)) % len(weights)
    memory = memory_of(weights, follows=False)
    sampler = GroupWeightSampler(group_ids, size, seed, step_size=size, memory=memory)
    order = list(sampler)
    assert len(order) == len(sampler)
    for start in range(0, len(order), size):
        counts = np.bincount(group_ids[order[start : start + size]], minlength=len(weights))
        assert (np.abs(counts - size * np.asarray(weights)) <= 1 + 1e-6).all()
        assert counts.sum() == size


def test_the_expected_share_is_the_weight() -> None:
    """Unbiased however small the batch: 3 examples of 4 groups."""
    weights, group_ids = [0.02, 0.13, 0.25, 0.6], np.arange(40) % 4
    drawn = np.zeros(4)
    for seed in range(300):
        memory = memory_of(weights, follows=False)
        order = list(GroupWeightSampler(group_ids, 3, seed, step_size=3, memory=memory))
        drawn += np.bincount(group_ids[order], minlength=4)
    # 12,600 draws; independent ones would have a standard error of .0012 to .0044.
    assert np.abs(drawn / drawn.sum() - weights).max() < 0.005


def test_the_mean_loss_of_a_draw_is_unbiased_for_the_weighted_group_means() -> None:
    weights, group_ids = np.array([0.1, 0.3, 0.6]), np.array([0] * 50 + [1] * 8 + [2] * 2)
    losses = np.random.default_rng(0).exponential(size=60)
    means = np.array([losses[group_ids == group].mean() for group in range(3)])
    memory = memory_of(weights.tolist(), follows=False)
    sampler = GroupWeightSampler(group_ids, 5, 0, step_size=5, memory=memory)
    drawn = []
    for epoch in range(200):
        sampler.set_first_step(12 * epoch)
        drawn.append(losses[list(sampler)].mean())
    error = np.std(drawn) / np.sqrt(len(drawn))
    assert abs(np.mean(drawn) - (weights * means).sum()) < 4 * error and error < 0.01


def test_every_example_of_a_group_is_drawn_before_one_is_drawn_again_over_epochs_too() -> None:
    group_ids = np.array([0] * 30 + [1] * 7 + [2] * 3 + [-1] * 2)
    memory = memory_of([0.2, 0.3, 0.5], follows=False)
    sampler = GroupWeightSampler(group_ids, 6, 0, step_size=12, memory=memory)
    order = []
    for epoch in range(5):
        sampler.set_first_step(4 * epoch)
        order += list(sampler)
        counts = Counter(order)
        for group in range(3):
            own = [counts[row] for row in np.flatnonzero(group_ids == group)]
            assert max(own) - min(own) <= 1
    assert not set(order) & {40, 41}


def run(sampler: GroupWeightSampler, weights: list[torch.Tensor], steps: range, loader_ahead: int) -> list[list[int]]:
    """Rows of each step of an epoch as a loader that reads ahead would ask for them, weights told after each step."""
    memory, rows = sampler.memory, iter(sampler)
    taken: list[list[int]] = []
    for step in steps:
        wanted = min(step - steps.start + 1 + loader_ahead, len(steps))
        while len(taken) < wanted:
            taken.append(list(islice(rows, sampler.step_size)))
        memory.note(step + 1, weights[step + 1])
    return taken


@pytest.mark.parametrize("ahead", [1, 3])
def test_an_order_depends_on_seed_step_and_weights_and_is_resumed(ahead: int) -> None:
    group_ids, size = np.arange(60) % 3, 6
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(3, generator=generator, dtype=torch.float64) for _ in range(21)]
    weights = [alpha / alpha.sum() for alpha in weights]

    def sampler_of(seed: int = 0) -> GroupWeightSampler:
        memory = memory_of(weights[0].tolist(), ahead)
        return GroupWeightSampler(group_ids, 3, seed, step_size=size, memory=memory)

    straight = sampler_of()
    first = run(straight, weights, range(10), ahead)
    saved = {}
    for step in range(10):
        again = sampler_of()
        run(again, weights, range(step), ahead)
        saved[step] = json.loads(json.dumps(again.memory.state_dict(step)))
    straight.set_first_step(10)
    second = run(straight, weights, range(10, 20), ahead)
    assert first != second and run(sampler_of(1), weights, range(10), ahead) != first
    # Less of the reading ahead changes nothing.
    assert run(sampler_of(), weights, range(10), 1) == first
    for step, taken in enumerate(first):
        used = weights[max(0, step - ahead)].numpy()
        counts = np.bincount(group_ids[taken], minlength=3)
        assert (np.abs(counts - size * used) <= 1 + 1e-9).all()
    for step in range(1, 10):
        resumed = sampler_of()
        resumed.memory.load_state_dict(saved[step], [0, 1, 2], weights[0])
        rows = iter(resumed)
        skipped = [list(islice(rows, size)) for _ in range(step)]
        assert len(skipped) == step
        rest = []
        for number in range(step, 10):
            rest.append(list(islice(rows, size)))
            resumed.memory.note(number + 1, weights[number + 1])
        assert rest == first[step:]
    backwards = memory_of([1 / 3] * 3, ahead)
    backwards.load_state_dict(saved[9], [2, 1, 0], weights[0])
    whole = sampler_of().memory
    whole.load_state_dict(saved[9], [0, 1, 2], weights[0])
    assert backwards.proportions(9) == pytest.approx(whole.proportions(9)[::-1])
    assert backwards.drawn_before(9).tolist() == whole.drawn_before(9)[::-1].tolist()


@pytest.mark.parametrize(("workers", "prefetch"), [(0, None), (1, None), (2, 3)])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_loader_never_reads_further_ahead_than_is_told(
    workers: int, prefetch: int | None, micro_batches: int
) -> None:
    """The loader of torch with the one batch that accelerate reads more; and it does read that far."""
    ahead = steps_ahead(micro_batches, workers, prefetch)
    group_ids, steps = np.arange(96) % 2, 16 // micro_batches
    memory = memory_of([0.5, 0.5], ahead)
    sampler = GroupWeightSampler(group_ids, 6, 0, step_size=6 * micro_batches, memory=memory)
    farthest: list[int] = []
    original = memory.proportions
    done = 0

    def noting(step: int) -> np.ndarray:
        farthest.append(step - done)
        return original(step)

    memory.proportions = noting  # type: ignore[method-assign]
    rows: list[int] = list(range(96))
    loader = DataLoader(
        rows, batch_sampler=BatchSampler(sampler, 6, False), num_workers=workers, prefetch_factor=prefetch
    )
    batches = iter(loader)
    next(batches)
    for step in range(steps):
        for _ in range(micro_batches):
            next(batches, None)
        done = step + 1
        memory.note(done, torch.tensor([0.5, 0.5]))
    assert max(farthest) == ahead


def test_a_loader_that_reads_further_is_told_so() -> None:
    sampler = GroupWeightSampler(np.arange(20) % 2, 5, 0, step_size=5, memory=memory_of([0.5, 0.5]))
    with pytest.raises(RuntimeError, match=r"asks for step 2 before step 1 is over.*further ahead than 1 step"):
        list(sampler)
    aside = GroupWeightSampler(np.arange(20) % 2, 5, 0, step_size=5, memory=sampler.memory.still())
    assert len(list(aside)) == 20
