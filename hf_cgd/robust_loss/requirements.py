"""What has to fit together before the first step: objective, groups, engine and options."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_cgd.arithmetic import Arithmetic
from hf_cgd.data.groups import GroupInfo
from hf_cgd.gradients import GradientEngine
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.excess import ExcessClip, require_excess_to_matter


def require_that_all_fit(
    objective: Objective,
    groups: GroupInfo,
    parameters: Sequence[nn.Parameter],
    engine: GradientEngine | None,
    weight_timing: str,
    arithmetic: Arithmetic,
    has_loss_scale: bool,
    excess_clip: ExcessClip | None = None,
) -> None:
    """Raise a ValueError that names what does not fit; see `GroupRobustLoss` for the arguments."""
    if objective.needs_gradients and engine is None and not parameters:
        raise ValueError(
            f"{type(objective).__name__} compares gradients of the groups and needs `parameters` to take them "
            "over; pass gradient_scope(model).values()."
        )
    if objective.needs_gradients:
        _require_real(engine.parameters if engine is not None else parameters, objective)
    if groups.counts is None and objective.needs_group_counts:
        raise ValueError(
            f"adjustment > 0 needs the number of training examples of each group, but only the names "
            f"{list(groups.names)} are known. Pass groups=GroupInfo(names, counts)."
        )
    require_excess_to_matter(objective, excess_clip)
    comes_late = engine is not None and engine.timing == "after_backward"
    if comes_late:
        _require_late_gradients_to_do(objective, weight_timing)
    if arithmetic.fixed_shapes:
        _require_fixed_shapes(objective, comes_late or has_loss_scale)
    _require_large_enough_groups(objective, groups)


def require_losses_and_ids(losses: Tensor, group_ids: Tensor) -> None:
    """Raise a ValueError unless there is one loss and one integer for each example of a batch."""
    if not isinstance(losses, Tensor) or losses.ndim != 1 or not losses.is_floating_point():
        raise ValueError(
            f"Expected one loss for each example, a tensor [B], got {_told(losses)}. Leave the mean out: "
            "reduction='none'."
        )
    whole = isinstance(group_ids, Tensor) and not (group_ids.is_floating_point() or group_ids.dtype == torch.bool)
    if not whole or group_ids.ndim != 1:
        raise ValueError(
            f"Expected the number of each example's group, a tensor [B] of integers, got {_told(group_ids)}. "
            "GroupInfo.encode turns names into numbers."
        )
    if len(losses) != len(group_ids):
        raise ValueError(f"Expected one group for each of the {len(losses)} losses, got {len(group_ids)} groups.")


def require_weights(weights: Tensor, num_groups: int, objective: Objective, method: str) -> bool:
    """Raise a ValueError unless finite weights of an objective are [K], at least 0 and sum to 1.

    Returns:
        whether they are finite.
    """
    finite, fits = True, isinstance(weights, Tensor) and weights.shape == (num_groups,)
    if fits:
        values = weights.numpy(force=True)
        total = float(values.sum())
        # Group weights of the released code may sum to slightly more than 1.
        tolerance = 1e-4 + 1e-5 * num_groups
        finite = math.isfinite(total)
        fits = not finite or (values.min() >= 0 and abs(total - 1) <= tolerance)
    if not fits:
        raise ValueError(
            f"{type(objective).__name__}.{method} must give {num_groups} weights, none negative, that sum to 1; got "
            f"{_told(weights)}. Normalise them: weights / weights.sum()."
        )
    return finite


def _told(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} ({str(value)[:60]})"
    values = f", {value.tolist()}" if value.numel() <= 8 else ""
    return f"a tensor of shape {tuple(value.shape)} ({value.dtype}{values})"


def _require_real(parameters: Sequence[nn.Parameter], objective: Objective) -> None:
    kinds = {str(parameter.dtype) for parameter in parameters if parameter.is_complex()}
    if kinds:
        raise ValueError(
            f"{type(objective).__name__} takes inner products of gradients, which are defined here for real numbers: "
            f"expected real parameters in the gradient scope, got some of {', '.join(sorted(kinds))}. Leave them out "
            "of gradient_layers, or keep them as real numbers and use torch.view_as_complex in forward."
        )


def _require_late_gradients_to_do(objective: Objective, weight_timing: str) -> None:
    if weight_timing != "next":
        raise ValueError(
            "Tensor hooks give the group gradients after the backward pass, when it is too late for the weights of "
            f"the same step: expected weight_timing='next', got {weight_timing!r}."
        )
    if "self_products" in objective.statistics:
        raise ValueError(
            "Tensor hooks see the gradients of whole groups only, but self_term='split_half' and "
            "cross_terms='consensus' want those of halves: expected neither. Leave both unset, or train without "
            "sharding (DDP)."
        )
    if not objective.linear_in_losses:
        raise ValueError(
            f"Tensor hooks tell a group's gradient by dividing by the group's weight, but {type(objective).__name__} "
            "has a loss() of its own. Train without sharding (DDP)."
        )
    if not objective.keeps_weights_positive:
        raise ValueError(
            "min_weight=0 lets a group's weight vanish, and with it the gradient that tensor hooks see. Expected "
            "min_weight > 0, or None for the default."
        )


def _require_fixed_shapes(objective: Objective, hooks_or_scaler: bool) -> None:
    reasons = {
        "tensor hooks or a GradScaler": hooks_or_scaler,
        "cross_terms='consensus' or self_term='split_half'": "self_products" in objective.statistics,
        "interaction_momentum > 0": "averages" in objective.statistics,
    }
    for name in [name for name, holds in reasons.items() if holds]:
        raise ValueError(
            f"{name} cannot be had on XLA devices: its shapes depend on which groups a batch holds, and each would be "
            "compiled anew. Leave the option unset, or train on another device."
        )


def _require_large_enough_groups(objective: Objective, groups: GroupInfo) -> None:
    if "class_counts" in objective.reads and groups.class_counts is None:
        raise ValueError(
            f"{type(objective).__name__} needs the number of training examples of each class in each group, which is "
            "not known. Pass groups=GroupInfo(names, counts, class_counts=...) with one row of K numbers per class."
        )
    small = [n for n, c in zip(groups.names, groups.counts or (), strict=False) if c < objective.min_group_size]
    if small and len(groups) > 1:
        raise ValueError(
            f"{type(objective).__name__} needs at least {objective.min_group_size} training examples in each group, "
            f"but these have fewer: {', '.join(map(repr, small[:20]))}. Merge or drop small groups."
        )
