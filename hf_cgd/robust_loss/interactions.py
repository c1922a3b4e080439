"""Whose training helps whom: the cosines between the groups' gradients, averaged over a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cgd.functional import cosine_gram

MAX_GROUPS = 64
"""Groups up to which interactions are kept, since all K^2 of them go into every checkpoint."""


class GroupInteractions:
    """Mean cosines between the gradients of the K groups, over the weight updates in which both took part.

    A positive cosine says that a small step down the loss of one group lowers that of the other as well.

    Args:
        num_groups: K.
        device, dtype: where the sums are kept.
    """

    def __init__(
        self, num_groups: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64
    ) -> None:
        self._sums = torch.zeros(num_groups, num_groups, dtype=dtype).to(device)
        self._counts = torch.zeros_like(self._sums)

    def observe(self, gram: Tensor, present: Tensor) -> None:
        """Count one update: inner products [K, K] of the groups' gradients, and who took part, [K] booleans."""
        together = present[:, None] & present[None, :]
        self._sums += torch.where(together, cosine_gram(gram), 0.0)
        self._counts += together

    def copy(self) -> "GroupInteractions":
        """The sums as they are now, whatever becomes of these."""
        twin = GroupInteractions(len(self._sums), self._sums.device, self._sums.dtype)
        twin._sums, twin._counts = self._sums.clone(), self._counts.clone()
        return twin

    @property
    def cosines(self) -> Tensor:
        """Means [K, K], float64 in [-1, 1]; NaN for two groups that were never seen in the same update."""
        return self._sums.to("cpu", torch.float64) / self._counts.to("cpu", torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready and exact."""
        return {"sums": self._sums.tolist(), "counts": self._counts.tolist()}

    def load_state_dict(self, state: Mapping[str, Any], order: Sequence[int]) -> None:
        """Inverse of `state_dict`; group i of this object is group `order[i]` of the saved one."""
        places = torch.tensor(order)
        for mine, name in ((self._sums, "sums"), (self._counts, "counts")):
            saved = torch.tensor(state[name], dtype=torch.float64)
            mine.copy_(saved[places[:, None], places[None, :]])
