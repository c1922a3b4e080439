"""Whose training helps whom: the cosines between the groups' gradients, averaged over a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_cgd.arithmetic import HOST, Arithmetic
from hf_cgd.functional import cosine_gram

MAX_GROUPS = 64
"""Groups up to which interactions are kept, since all K^2 of them go into every checkpoint."""
PENDING = 64
"""Updates that are kept until they are added up together."""


class GroupInteractions:
    """Mean cosines between the gradients of the K groups, over the weight updates in which both took part.

    A positive cosine says that a small step down the loss of one group lowers that of the other as well.

    Args:
        num_groups: K.
        arithmetic: where the sums are kept.
    """

    def __init__(self, num_groups: int, arithmetic: Arithmetic = HOST) -> None:
        self._arithmetic = arithmetic
        self._sums = arithmetic.zeros(num_groups, num_groups)
        self._counts = torch.zeros_like(self._sums)
        self._observed: list[tuple[Tensor, Tensor]] = []
        """Updates that the sums do not hold yet; many at once cost hardly more than one."""
        self._most = 1 if arithmetic.fixed_shapes else PENDING

    def observe(self, gram: Tensor, present: Tensor) -> None:
        """Count one update: inner products [K, K] of the groups' gradients, and who took part, [K] booleans."""
        self._observed.append((gram, present))
        if len(self._observed) >= self._most:
            self._add_up()

    def _add_up(self) -> None:
        if not self._observed:
            return
        grams, present = (torch.stack(parts) for parts in zip(*self._observed, strict=True))
        self._observed = []
        together = present[:, :, None] & present[:, None, :]
        cosines = torch.where(together, cosine_gram(grams), 0.0)
        # One after the other (numpy's sum over the first of several dimensions is), so that it makes no difference to
        # any digit when they are added. Not in place: a copy may hold the same sums.
        if self._arithmetic.reads_values:
            self._sums = torch.from_numpy(np.add.reduce(np.concatenate([self._sums[None], cosines])))
        else:
            for each in cosines.unbind():
                self._sums = self._sums + each
        self._counts = self._counts + together.sum(dim=0)

    def copy(self) -> "GroupInteractions":
        """The sums as they are now, whatever becomes of these."""
        twin = GroupInteractions.__new__(GroupInteractions)
        twin.__dict__.update(self.__dict__, _observed=self._observed.copy())
        return twin

    @property
    def cosines(self) -> Tensor:
        """Means [K, K], float64 in [-1, 1]; NaN for two groups that were never seen in the same update."""
        self._add_up()
        return self._sums.to("cpu", torch.float64) / self._counts.to("cpu", torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready and exact."""
        self._add_up()
        return {"sums": self._sums.tolist(), "counts": self._counts.tolist()}

    def load_state_dict(self, state: Mapping[str, Any], order: Sequence[int]) -> None:
        """Inverse of `state_dict`; group i of this object is group `order[i]` of the saved one."""
        places, self._observed = torch.tensor(order), []
        for name in ("sums", "counts"):
            saved = torch.tensor(state[name], dtype=torch.float64)[places[:, None], places[None, :]]
            setattr(self, f"_{name}", self._arithmetic.move(saved))
