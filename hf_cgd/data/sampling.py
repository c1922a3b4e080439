"""Index samplers that look at groups: the same order on every process, fixed by seed and epoch."""

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
from torch.utils.data import Sampler

GroupSampling = Literal["none", "balanced", "weighted", "weights"]
GROUP_SAMPLINGS: tuple[GroupSampling, ...] = get_args(GroupSampling)


class GroupSampler(Sampler[int]):
    """Base of the group samplers: an index order that depends on seed, epoch and the examples of a step alone.

    So the steps of an epoch are the same however their examples are shared among processes and micro-batches. How many
    are drawn depends on that sharing; the order is drawn for whole steps, and ends earlier where fewer are.

    Args:
        group_ids: [N] group of each example, negative for examples that must not be drawn.
        batch_size: examples of one batch on one device. Batches are runs of this many indices, so a loader that deals
            whole batches out to several processes gives each of them batches of the promised make-up.
        seed: fixes the order together with the epoch.
        drop_last: leave last batches out that cannot be filled, in place of filling them up with further draws.
        processes: that take a batch each at a time, so that each of them is dealt as many.
        step_size: examples of an optimizer step over all micro-batches and processes; None for one batch of each.
    """

    def __init__(
        self,
        group_ids: np.ndarray,
        batch_size: int,
        seed: int,
        drop_last: bool = False,
        *,
        processes: int = 1,
        step_size: int | None = None,
    ) -> None:
        self.group_ids = np.asarray(group_ids)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        together = batch_size * processes
        self.step_size = together if step_size is None else step_size
        size = len(self.group_ids)
        self.length = (size // together if drop_last else -(-size // together)) * together
        self._whole_steps = -(-size // self.step_size) * self.step_size
        """Examples that the order is drawn for, of which the first `length` are given out."""

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is drawn next; calling it twice changes nothing."""
        self.epoch = epoch

    def _generator(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.epoch])


class BalancedGroupSampler(GroupSampler):
    """Every batch holds the same number of examples of each group.

    Groups take turns, so that in any run of K batches all groups have equal shares; where `batch_size` is not a
    multiple of K, the counts within a batch differ by at most one and the surplus rotates, and a batch smaller than K
    covers all groups within ceil(K / batch_size) batches. Within a group every example is drawn before one is drawn
    again. An epoch has as many batches as without this sampler; the last ones are filled up.
    """

    def __iter__(self) -> Iterator[int]:
        generator = self._generator()
        groups = np.unique(self.group_ids[self.group_ids >= 0])
        members = [np.flatnonzero(self.group_ids == group) for group in groups]
        turns = -(-self._whole_steps // len(groups))
        columns = []
        for rows in members:
            rounds = max(1, -(-turns // len(rows)))
            columns.append(np.concatenate([generator.permutation(rows) for _ in range(rounds)])[:turns])
        order = np.stack([columns[group] for group in generator.permutation(len(groups))], axis=1).ravel()
        yield from order[: self.length].tolist()


class WeightedGroupSampler(GroupSampler):
    """Examples are drawn with replacement, all groups equally likely: batches are balanced on average."""

    def __iter__(self) -> Iterator[int]:
        generator = self._generator()
        order = np.argsort(self.group_ids, kind="stable")
        order = order[self.group_ids[order] >= 0]
        _, starts, counts = np.unique(self.group_ids[order], return_index=True, return_counts=True)
        groups = generator.integers(len(counts), size=self._whole_steps)
        yield from order[starts[groups] + generator.integers(counts[groups])][: self.length].tolist()
