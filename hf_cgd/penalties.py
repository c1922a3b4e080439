"""The penalties of PGI, IRM and CORAL: pure functions on tensors, as `hf_cgd.functional` has them for group weights.

Shapes: B examples, K groups.
"""

import torch
from torch import Tensor


def log_sums_by_group(values: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """log of the sum of exp(values) over the rows of each group: [K, D] from [B, D], -inf for a group without rows.

    Never leaves the log scale, so that exp(-100) has a value and a gradient in every floating type.
    """
    rows = group_ids[:, None].expand_as(values)
    top = values.new_full((num_groups, values.shape[1]), float("-inf"))
    top = top.scatter_reduce(0, rows, values.detach(), "amax")
    top = top.masked_fill(top == float("-inf"), 0.0)
    sums = torch.zeros_like(top).index_add(0, group_ids, (values - top[group_ids]).exp())
    return sums.log() + top


def pgi_divergence(log_means: Tensor, classes: Tensor, largest: Tensor) -> Tensor:
    """Predictive group invariance: sum over classes c of the mean over smaller groups of KL(Q^c || P^c).

    P^c is the mean vector of predicted *probabilities* of class c's examples in that class's largest group, Q^c the
    same in a smaller group (appendix "More Technical Details", after Ahmed et al., ICLR 2021).

    Args:
        log_means: [M, C] log of the mean probabilities, one row for each pair of a class and a group with examples. A
            row of -inf stands for a pair without, and takes no part.
        classes: [M] class of each row, in [0, C).
        largest: [M] booleans: whether the row's group is its class's largest; true for at most one row of a class, one
            with examples.

    Returns:
        a scalar >= 0. A class whose largest group, or all of whose smaller groups, have no row adds nothing.
    """
    num_classes = log_means.shape[1]
    rows = torch.where(largest, torch.arange(len(classes), device=classes.device), -1)
    places = torch.full((num_classes,), -1, device=classes.device).scatter_reduce(0, classes, rows, "amax")
    reference = places[classes]
    compared = ~largest & (reference >= 0) & ~(log_means == float("-inf")).all(dim=1)
    log_q = torch.where(compared[:, None], log_means, 0.0)
    log_p = torch.where(compared[:, None], log_means[reference.clamp_min(0)], 0.0)
    divergences = (log_q.exp() * (log_q - log_p)).sum(dim=1)
    # Rounding may leave -1e-9; the correction keeps the gradient, which a clamp would cut.
    divergences = divergences + (divergences.clamp_min(0) - divergences).detach()
    none = divergences.new_zeros(num_classes)
    counts = none.index_add(0, classes, compared.to(none))
    return (none.index_add(0, classes, divergences) / counts.clamp_min(1)).sum()


def scale_gradients(losses: Tensor, logits: Tensor) -> Tensor:
    """Derivative at w = 1 of each example's loss with w times its logits in their place: [B], differentiable.

    By the chain rule it is <dl_n / dz_n, z_n>, so that the loss itself need not be known.

    Args:
        losses: [B], computed from the logits.
        logits: [B, ...] with graph.

    Raises:
        ValueError: the losses do not depend on the logits.
    """
    if not logits.requires_grad:
        raise ValueError("Expected logits that carry a gradient, got a detached tensor. Pass the model's own output.")
    (gradients,) = torch.autograd.grad(losses.sum(), logits, create_graph=True, allow_unused=True)
    if gradients is None:
        raise ValueError(
            "Expected losses that were computed from these logits, but they do not depend on them. Compute the losses "
            "from the very tensor that is passed as logits."
        )
    product = gradients.to(torch.promote_types(gradients.dtype, torch.float32)) * logits
    # Nobody infers a width where a process holds no labelled example.
    return product if product.ndim == 1 else product.flatten(1).sum(dim=1)


def irm_penalty(half_sums: Tensor, half_counts: Tensor) -> Tensor:
    """IRM's gradient penalty: mean over groups of (d l_i / d w)^2 at w = 1 (Arjovsky et al. 2019, IRMv1, appendix D).

    The square is estimated without bias by the product of the mean derivatives on two disjoint halves of the group's
    examples; the estimate may be negative.

    Args:
        half_sums: [2, K] sums of `scale_gradients` over each half of each group.
        half_counts: [2, K] examples in each half.

    Returns:
        a scalar. Groups with fewer than two examples, and so with an empty half, are left out of the mean.
    """
    both = (half_counts > 0).all(dim=0)
    first, second = half_sums / half_counts.clamp_min(1).to(half_sums)
    return torch.where(both, first * second, 0.0).sum() / both.sum().clamp_min(1)


def coral_distance(means: Tensor, covariances: Tensor, compared: Tensor | None = None) -> Tensor:
    """CORAL: mean over pairs of groups of the squared distances of feature means and of feature covariances.

    A squared distance is taken per entry, |m_i - m_j|^2 / D + |C_i - C_j|_F^2 / D^2, so that a weight means the same
    for features of any width (Sun & Saenko 2016 divide by 4 D^2).

    Args:
        means: [G, D] of each group, G >= 1.
        covariances: [G, D, D] of each group, unbiased.
        compared: [G] booleans, which groups are in pairs; None for all.

    Returns:
        a scalar >= 0; 0 for a single group.
    """
    if compared is None:
        compared = torch.ones(len(means), dtype=torch.bool, device=means.device)
    number = compared.sum()

    def over_pairs(statistics: Tensor) -> Tensor:
        # The mean over the pairs of |x_i - x_j|^2 is 2 / (G - 1) times the sum of |x_i - mean|^2.
        chosen = compared.view([-1] + [1] * (statistics.ndim - 1))
        mean = torch.where(chosen, statistics, 0.0).sum(dim=0) / number.clamp_min(1)
        squares = torch.where(chosen, statistics - mean, 0.0).square().flatten(1).mean(dim=1).sum()
        return 2 * squares / (number - 1).clamp_min(1)

    return over_pairs(means) + over_pairs(covariances)
