"""Whether examples of a batch influence one another, found from a single batch of whatever groups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cgd.gradients.autograd import Cut
from hf_cgd.gradients.base import NotExactError
from hf_cgd.gradients.layers.base import LayerCall

SEED = 2.0**-6
"""Size of the gradients that are sent through the scope; small, so that float16 does not overflow."""


def require_independent_examples(losses: Tensor, calls: Sequence[LayerCall], cut: Cut | None) -> None:
    """Check that some examples' losses have no gradient in the rows of the others. The graph is kept.

    Gradients start at the losses and also at the inputs of every module of the scope. So a layer whose weights are
    still zero hides nothing of what lies behind it.

    Raises:
        NotExactError: they have.
    """
    batch = len(losses)
    if batch < 2:
        return
    probed = torch.zeros(batch, device=losses.device, dtype=losses.dtype)
    probed[1 : max(batch - 1, 2)] = 1
    starts, seeds = [losses], [probed]
    # Once for what several modules take in, as attention's do: each seed is as large as the activation.
    inputs = {
        (edge.node, edge.output_nr): (edge, tensor) for call in calls for edge, tensor in call.differentiable_inputs
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
