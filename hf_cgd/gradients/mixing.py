"""Whether examples of a batch influence one another, found from a single batch of whatever groups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cgd.gradients.autograd import Cut
from hf_cgd.gradients.base import NotExactError
from hf_cgd.gradients.layers.base import LayerCall
from hf_cgd.gradients.rearranging import Rows
from hf_cgd.gradients.structure import LossGraph

SEED = 2.0**-6
"""Size of the gradients that are sent through the scope; small, so that float16 does not overflow."""


class IndependenceCheck:
    """Looks whether examples are independent as often as the graph of the losses makes it necessary.

    Once for every form of the graph. A network that sorts its rows, or mixes each with another one, may leave all of
    them where they are in the first batch, and the form does not tell their order. So that is looked at in every step.
    Where only a device knows the order, this is at uses 1, 2, 4, 8, … of the form, and no step in between waits; in
    every step once examples were seen not to be independent.
    """

    def __init__(self) -> None:
        self._uses: dict[frozenset[tuple[str, int]], int] = {}
        self._failed: set[frozenset[tuple[str, int]]] = set()

    def require(
        self, graph: LossGraph, losses: Tensor, calls: Sequence[LayerCall], cut: Cut | None, anyway: bool = False
    ) -> None:
        """Look if there is need to, or `anyway`.

        Raises:
            NotExactError: examples influence one another, or their rows have changed places.
        """
        if Rows.MOVED in graph.rows:
            raise NotExactError(
                f"rows of the batch change places ({graph.rows[Rows.MOVED]}), so that a row is not its example's"
            )
        form = graph.form
        uses = self._uses[form] = self._uses.get(form, 0) + 1
        is_doubled = uses & (uses - 1) == 0
        is_due = Rows.UNCLEAR in graph.rows or (Rows.UNREAD in graph.rows and is_doubled)
        if anyway or is_due or uses == 1 or form in self._failed:
            self._failed.add(form)
            require_independent_examples(losses, calls, cut, thorough=bool(graph.rows))
            self._failed.discard(form)


def require_independent_examples(
    losses: Tensor, calls: Sequence[LayerCall], cut: Cut | None, thorough: bool = False
) -> None:
    """Check that some examples' losses have no gradient in the rows of the others. The graph is kept.

    Gradients start at the losses and also at the inputs of every module of the scope. So a layer whose weights are
    still zero hides nothing of what lies behind it.

    Args:
        losses: [B] with graph.
        calls: of the modules of the scope.
        cut: what flows into the scope; None for nothing.
        thorough: whether no two examples may be left out: 2 log2(B) passes in place of one.

    Raises:
        NotExactError: they have.
    """
    batch = len(losses)
    for examples in _probes(batch, thorough) if batch > 1 else ():
        probed = torch.zeros(batch, device=losses.device, dtype=losses.dtype)
        probed[examples] = 1
        starts, seeds = [losses], [probed]
        # Once for what several modules take in, as attention's do: each seed is as large as the activation.
        inputs = {
            (edge.node, edge.output_nr): (edge, tensor)
            for call in calls
            for edge, tensor in call.differentiable_inputs
        }
        for edge, tensor in inputs.values():
            if tensor.ndim and len(tensor) == batch and not hasattr(edge.node, "variable"):
                starts.append(edge)  # type: ignore[arg-type]
                # Not constant, since norms have no gradient in that direction.
                waves = torch.arange(tensor[0].numel(), device=tensor.device, dtype=torch.float32).sin().add(0.1)
                chosen = probed.to(tensor).view([-1] + [1] * (tensor.ndim - 1))
                seeds.append(chosen * (SEED * waves).to(tensor.dtype).view(tensor[0].shape))
        ends = [edge for call in calls for edge in call.outputs]
        ends += [] if cut is None else [cut.tensor]  # type: ignore[list-item]
        found = torch.autograd.grad(starts, ends, seeds, retain_graph=True, allow_unused=True)
        others = probed == 0
        rows = [part[others] for part in found if part is not None and part.ndim and len(part) == batch]
        # What is not finite tells nothing: zero times infinity is not a number in the rows of others either.
        touched = [(part.isfinite() & (part != 0)).any() for part in rows]
        if touched and bool(torch.stack(touched).any()):
            raise NotExactError("examples of a batch influence one another, so that a row is not one example's alone")


def _probes(batch: int, thorough: bool) -> list[list[int]]:
    """The examples whose losses are looked at, for each pass.

    A single pass leaves out the first and the last, which may lend something to all others, and one more, so that no
    common order (reversed, in pairs, half by half, moved on) keeps the rest among themselves. Several tell any two
    examples apart, each in turn.
    """
    if not thorough and batch != 3:
        return [list(range(1, max(batch - 2, 2)))]
    bits = range((batch - 1).bit_length())
    return [[one for one in range(batch) if (one >> bit) & 1 == side] for bit in bits for side in (0, 1)]
