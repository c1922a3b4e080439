"""Index samplers that look at groups: the same order on every process, fixed by seed and epoch."""

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
from torch.utils.data import Sampler

GroupSampling = Literal["none", "balanced", "weighted", "weights"]
GROUP_SAMPLINGS: tuple[GroupSampling, ...] = get_args(GroupSampling)


class GroupSampler(Sampler[int]):
    """Base of the group samplers: an index order that depends on seed and epoch alone.

    Args:
        group_ids: [N] group of each example, negative for examples that must not be drawn.
        batch_size: examples of one batch on one device. Batches are runs of this many indices, so a loader that deals
            whole batches out to several processes gives each of them batches of the promised make-up.
        seed: fixes the order together with the epoch.
        drop_last: leave a last incomplete batch out in place of filling it up with further draws.
    """

    def __init__(self, group_ids: np.ndarray, batch_size: int, seed: int, drop_last: bool = False) -> None:
        self.group_ids = np.asarray(group_ids)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        batches = len(self.group_ids) // batch_size if drop_last else -(-len(self.group_ids) // batch_size)
        self.length = batches * batch_size

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
    again. An epoch has as many batches as without this sampler; the last one is filled up.
    """

    def __iter__(self) -> Iterator[int]:
        generator = self._generator()
        groups = np.unique(self.group_ids[self.group_ids >= 0])
        members = [np.flatnonzero(self.group_ids == group) for group in groups]
        turns = -(-self.length // len(groups))
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
        groups = generator.integers(len(counts), size=self.length)
        yield from order[starts[groups] + generator.integers(counts[groups])].tolist()
