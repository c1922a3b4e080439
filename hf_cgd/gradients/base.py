"""What a gradient engine is, and what it gives."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal

from torch import Tensor, nn

from hf_cgd.gradients.gram import inner_products

Timing = Literal["within_step", "after_backward"]
"""When an engine's gradients are known."""


class NotExactError(Exception):
    """An engine cannot give this step's gradients; the message says why. Nothing of the graph has been used up."""


class GroupGradients:
    """Gradients of one micro-batch's group loss sums, and the scalar that finishes the step.

    Args:
        rows: [G, P], one row per group, in at least float32; [G, S] sketches of them from an engine that sketches.
            None where a subclass forms them when they are asked for.

    Attributes:
        reads_graph: whether `scalar` needs the graph of the loss, since it hands the loss on.
        others: parameters outside of the scope that get a gradient straight from `scalar`, besides what comes through
            the cut. They are in no row and in no inner product.
    """

    reads_graph: ClassVar[bool] = True
    others: Sequence[nn.Parameter] = ()

    def __init__(self, rows: Tensor | None = None) -> None:
        self._rows = rows

    @property
    def rows(self) -> Tensor:
        """The gradients [G, P] (or sketches [G, S])."""
        if self._rows is None:
            self._rows = self._form_rows()
        return self._rows

    def _form_rows(self) -> Tensor:
        raise NotImplementedError

    def gram(self, reads_values: bool = True) -> Tensor:
        """Inner products [G, G] of the rows: float64 on the CPU; where no value may be read, on their device."""
        return inner_products(self.rows, reads_values)

    def exact_gram(self) -> Tensor:
        """Inner products [G, G] of the gradients themselves, also where the rows are sketches; float64 on the CPU."""
        return self.gram()

    def scalar(self, loss: Tensor, coefficients: Tensor) -> Tensor:
        """What to call `backward()` on for the gradient of sum_n coefficients_n l_n, whose value is `loss`.

        Args:
            loss: that sum, with the graph of the forward pass if it `reads_graph`.
            coefficients: [B], the same for all examples of a group.
        """
        return loss


class GradientEngine(ABC):
    """Takes the gradients of the groups' loss sums over the gradient scope.

    Attributes:
        name: what log lines and errors call it.
        timing: when the gradients are known. "within_step": before the backward pass of the step, so that they can
            set the weights of that very step. "after_backward": the step's own backward pass gives them; `watch` comes
            before that pass and `group_gradients` after it.
        parameters: the gradient scope. P is their total number of elements.
    """

    name: ClassVar[str]
    timing: ClassVar[Timing] = "within_step"
    parameters: list[nn.Parameter]

    def recording(self) -> AbstractContextManager[object]:
        """Goes around the forward pass of a training step."""
        return nullcontext()

    def watch(self, losses: Tensor) -> None:
        """Announce the losses [B] that the coming backward pass weighs, to an "after_backward" engine.

        Raises:
            RuntimeError: this engine's gradients come within the step.
        """
        raise RuntimeError(f"The gradients of engine {self.name!r} come before the backward pass; nothing to watch.")

    @abstractmethod
    def group_gradients(self, losses: Tensor, group_ids: Tensor, groups: Sequence[int]) -> GroupGradients:
        """Gradient of the *sum* of each listed group's losses.

        Sums, so that micro-batches and processes can be added up. `.grad` is not touched. A parameter that the loss
        does not depend on gives zeros.

        Args:
            losses: [B] with graph.
            group_ids: [B] integers; on the host, wherever the losses are, so that no device is waited for.
            groups: those that are present, in ascending order.
        """
