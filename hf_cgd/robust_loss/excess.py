"""Losses in excess of a reference: what group weights move by where groups differ in how hard they are."""

from typing import Literal, get_args

from torch import Tensor

from hf_cgd.arithmetic import moved
from hf_cgd.objectives import Objective
from hf_cgd.objectives.base import require_one_of

ExcessClip = Literal["example", "group"]
"""What of max(loss - reference, 0) is compared with 0: each example's difference, or the mean one of each group."""
EXCESS_CLIPS: tuple[ExcessClip, ...] = get_args(ExcessClip)


def excess_losses(losses: Tensor, reference: Tensor, clip: ExcessClip) -> Tensor:
    """What the weights move by for each example, [B] without graph: loss minus reference.

    The scalar that is minimised keeps the losses themselves; since a reference is constant, it has no gradient either.

    Args:
        losses: [B].
        reference: [B], wherever it is.
        clip: "example": negative differences count as 0. DoReMi (Xie et al., NeurIPS 2023, algorithm 1) does so with
            each token, so that in a group of mixed examples a success does not make up for a failure; noise alone
            then gives a positive mean. "group": nothing is clipped here, and the group's mean is later, which noise
            shifts less; the way for a reference that does not tell examples apart.
    """
    excess = losses.detach() - moved(reference.detach(), losses.device).to(losses)
    return excess.clamp_min(0) if clip == "example" else excess


def require_excess_to_matter(objective: Objective, clip: ExcessClip | None) -> None:
    """Raise a ValueError for an objective whose weights a reference would leave as they are."""
    if clip is None:
        return
    require_one_of("excess_clip", clip, EXCESS_CLIPS)
    if not objective.moves_by_losses:
        raise ValueError(
            f"Reference losses have no effect on {type(objective).__name__}({_knobs_of(objective)}), whose weights do "
            "not move by the losses of the groups. Leave them out, or use Group-DRO, or CGD with scaling='loss', an "
            "exponent > 0 and variant='paper'."
        )


def require_reference(reference: Tensor | None, losses: Tensor, clip: ExcessClip | None) -> None:
    """Raise a ValueError unless there is one reference loss for each example where they are wanted, and else none."""
    if clip is None:
        if reference is not None:
            raise ValueError(
                "reference_losses are given, but the loss was built without excess_clip and would ignore them. Build "
                "GroupRobustLoss(..., excess_clip='example'), or leave them out."
            )
        return
    if reference is None or reference.shape != losses.shape or not reference.is_floating_point():
        told = "none" if reference is None else f"a tensor of shape {tuple(reference.shape)} ({reference.dtype})"
        raise ValueError(
            f"excess_clip={clip!r} needs a reference loss for each of the {len(losses)} examples, reference_losses "
            f"[B]; got {told}."
        )


def _knobs_of(objective: Objective) -> str:
    told = [name for name in ("scaling", "exponent", "variant") if name in objective.knobs()]
    return ", ".join(f"{name}={objective.knobs()[name]!r}" for name in told)


def require_finite(name: str, values: Tensor) -> None:
    """Raise a ValueError that names the first row of [N] that is not a finite number."""
    bad = ~values.isfinite()
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"{name}: expected finite reference losses, got {float(values[row])} (row {row}).")
