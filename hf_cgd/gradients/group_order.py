"""The examples of a batch in the order of their groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_cgd.arithmetic import moved


@dataclass(frozen=True)
class GroupOrder:
    """The examples of a batch, sorted by group.

    Attributes:
        permutation: [B] the examples' places in the batch, sorted; None where they already stand in order.
        bounds: where each of the G groups begins and ends in the sorted batch.
        first: [G] the place in the batch of one example of each group.
    """

    permutation: Tensor | None
    bounds: list[tuple[int, int]]
    first: Tensor
    _kept: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def by_group(cls, group_ids: Tensor, groups: Sequence[int], device: torch.device | None = None) -> "GroupOrder":
        """Sort by the ids [B]. `groups` are all that are present, in ascending order.

        `device` is that of the examples; None for that of the ids, which are best on the host.
        """
        device = group_ids.device if device is None else device
        numbers = group_ids.numpy(force=True)
        if (numbers[1:] >= numbers[:-1]).all():
            starts = first = numbers.searchsorted(groups)
            permutation = None
        else:
            places = numbers.argsort(kind="stable")
            starts = np.searchsorted(numbers[places], groups)
            first, permutation = places[starts], moved(torch.from_numpy(places), device)
        bounds = list(pairwise([*starts.tolist(), len(numbers)]))
        return cls(permutation, bounds, moved(torch.from_numpy(first), device))

    def members_of(self, positions: int) -> Tensor:
        """[positions, G, 1] which positions of the sorted batch are whose, where each example has as many of them."""
        kept = self._kept.get(positions)
        if kept is None:
            each = positions // max(self.bounds[-1][1], 1)
            numbers = np.repeat(np.arange(len(self.bounds)), [each * (end - start) for start, end in self.bounds])
            places = numbers[:, None, None] == np.arange(len(self.bounds))[:, None]
            kept = self._kept[positions] = moved(torch.from_numpy(places), self.first.device)
        return kept

    def zero_of(self, dtype: torch.dtype) -> Tensor:
        """A zero of that type, where the examples are."""
        if dtype not in self._kept:
            self._kept[dtype] = torch.zeros((), dtype=dtype, device=self.first.device)
        return self._kept[dtype]

    @classmethod
    def one_group(cls, batch: int, device: torch.device) -> "GroupOrder":
        """All examples as one group."""
        return cls(None, [(0, batch)], torch.zeros(1, dtype=torch.long, device=device))

    @classmethod
    def one_group_per_example(cls, batch: int, device: torch.device) -> "GroupOrder":
        """Every example as a group of its own. No shape depends on a value."""
        return cls(None, [(place, place + 1) for place in range(batch)], torch.arange(batch, device=device))

    def sorted(self, tensor: Tensor) -> Tensor:
        """The tensor [B, …] in the order of the groups."""
        return tensor if self.permutation is None else tensor.index_select(0, self.permutation)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The rows of each group of a tensor [B, …], group by group."""
        return self.parts(self.sorted(tensor))

    def parts(self, in_order: Tensor) -> list[Tensor]:
        """The same of a tensor in the order of the groups."""
        return [in_order[start:end] for start, end in self.bounds]

    @property
    def is_even(self) -> bool:
        """Whether all groups have as many examples."""
        return len({end - start for start, end in self.bounds}) == 1

    def sums(self, values: Tensor) -> Tensor:
        """Sum [G, …] over the examples of each group of values [B, …]."""
        return torch.stack([rows.sum(dim=0) for rows in self.split(values)])

    def examples_of(self, group: int) -> Tensor:
        """Places in the batch of the examples of one group; `group` counts from 0 to G - 1."""
        start, end = self.bounds[group]
        if self.permutation is not None:
            return self.permutation[start:end]
        return torch.arange(start, end, device=self.first.device)


def products_of_groups(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], order: GroupOrder, dtype: torch.dtype
) -> Tensor:
    """Each group's sums of left_p right_p^T over its examples and their positions p: [G, L, r * r] in that type.

    Args:
        lefts, rights: L tensors [B, N, r] each.
        order: the groups.
        dtype: of the result.
    """
    left, right = (torch.stack([order.sorted(part) for part in parts]) for parts in (lefts, rights))
    products = [
        torch.bmm(left[:, start:end].flatten(1, 2).mT, right[:, start:end].flatten(1, 2))
        for start, end in order.bounds
    ]
    return torch.stack(products).flatten(2).to(dtype)
