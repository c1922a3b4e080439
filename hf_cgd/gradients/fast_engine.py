"""What an engine is that has to be checked, and tells what a check needs to know."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hf_cgd.gradients.autograd import Cut
from hf_cgd.gradients.base import GradientEngine, GroupGradients


class FastEngine(GradientEngine):
    """An engine that is exact for some networks only: `AutoEngine` checks it on the first step.

    Attributes:
        forms_sketches: whether the rows are random sketches, so that their cosines are estimates.
    """

    forms_sketches: ClassVar[bool] = False

    @property
    def cut(self) -> Cut | None:
        """What flows into the scope in the recorded pass; None where nothing does."""
        return None

    @property
    def computed_in(self) -> torch.dtype | None:
        """The least precise type that the scope was computed in; None where that is the type of the losses."""
        return None

    def in_row(self, place: int, gradient: Tensor) -> Tensor:
        """How the gradient of parameter number `place` stands in a row: [numel], or a sketch."""
        return gradient.flatten()

    @abstractmethod
    def group_gradients(
        self, losses: Tensor, group_ids: Tensor, groups: Sequence[int], keep_graph: bool = False
    ) -> GroupGradients:
        """See `GradientEngine.group_gradients`; the graph of the scope is used up unless `keep_graph`.

        `keep_graph` is for checks: an engine then looks more closely at whether it is exact.

        Raises:
            NotExactError: the engine cannot give this step's gradients.
        """
