"""The mathematics of group-robust training: pure functions on tensors, without state, ranks or a Trainer.

Shapes: B examples, K groups. Equation numbers are those of "Focus on the Common Good: Group Distributional
Robustness Follows" (Piratla, Netrapalli, Sarawagi; ICLR 2022) unless another source is named.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hf_cgd.arithmetic import HOST, Arithmetic
from hf_cgd.penalties import coral_distance as coral_distance
from hf_cgd.penalties import irm_penalty as irm_penalty
from hf_cgd.penalties import log_sums_by_group as log_sums_by_group
from hf_cgd.penalties import pgi_divergence as pgi_divergence
from hf_cgd.penalties import scale_gradients as scale_gradients


def group_means(losses: Tensor, group_ids: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Mean loss and number of examples of each group; differentiable in `losses`.

    Args:
        losses: [B], one value per example.
        group_ids: [B] integers in [0, num_groups).
        num_groups: K.

    Returns:
        means [K], 0 for a group without examples, and counts [K] in the dtype of `losses`.
    """
    sums = losses.new_zeros(num_groups).index_add(0, group_ids, losses)
    counts = group_counts_of(group_ids, num_groups).to(losses.dtype)
    return sums / counts.clamp_min(1), counts


def group_counts_of(group_ids: Tensor, num_groups: int) -> Tensor:
    """Number of examples of each group among `group_ids` [B]: integers [K]."""
    ones = torch.ones_like(group_ids, dtype=torch.long)
    return torch.zeros(num_groups, dtype=torch.long, device=group_ids.device).index_add(0, group_ids, ones)


def adjustment_terms(group_counts: Tensor, adjustment: float) -> Tensor:
    """Group adjustment C / sqrt(n_i) (section 2, after Sagawa et al. 2020): [K], from the training counts [K]."""
    return adjustment / group_counts.to(torch.float64).sqrt()


def upweights(group_counts: Tensor, adjustment: float = 0.0) -> Tensor:
    """Fixed weights of ERM-UW (section 5.2): alpha_i proportional to exp(C / sqrt(n_i)).

    Args:
        group_counts: [K] training examples of each group, all positive.
        adjustment: C >= 0; 0 gives equal weights.

    Returns:
        float64 [K], summing to 1.
    """
    return torch.softmax(adjustment_terms(group_counts, adjustment), dim=0)


def cosine_gram(gram: Tensor, norm_floor: float = 0.0) -> Tensor:
    """Cosines [..., K, K] between group gradients, from their inner products <g_i, g_j> [..., K, K].

    A zero gradient has cosine 0 with everything, itself included. `norm_floor` > 0 bounds the product of norms in the
    denominator from below, as the authors' released code does (1e-3); the default 0 gives true cosines at any scale.
    """
    norms = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    denominators = norms.unsqueeze(-1) * norms.unsqueeze(-2)
    if norm_floor > 0:
        denominators = denominators.clamp_min(norm_floor)
    return torch.where(denominators > 0, gram / denominators, 0.0).clamp(-1, 1)


def merge_halves(gram: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradients of two halves of each group's examples: inner products of the groups, and within each group.

    Args:
        gram: [G, 2, G, 2] inner products of the halves' mean gradients; those of empty halves do not count.
        sizes: [G, 2] examples in each half, the first at least as large as the second.

    Returns:
        gram [G, G] of the gradients of the groups' mean losses, and self-products <a_i, b_i> [G] of each group's two
        halves: their noise is independent, so that they are unbiased for the squared norm of the expected gradient. A
        group of a single example has <g_i, g_i> there.
    """
    shares = sizes / sizes.sum(dim=1, keepdim=True)
    filled = sizes > 0
    known = gram.masked_fill(~(filled[:, :, None, None] & filled), 0.0)
    merged = torch.einsum("iajb,ia,jb->ij", known, shares, shares)
    between = known[:, 0, :, 1].diagonal()
    return merged, torch.where(filled[:, 1], between, merged.diagonal())


def exponentiated_step(alpha: Tensor, exponents: Tensor, present: Tensor | None, min_weight: float) -> Tensor:
    """alpha_i <- alpha_i exp(exponent_i), normalised over the present groups (equation 4, the mirror-ascent step).

    Args:
        alpha: [K], non-negative, summing to 1.
        exponents: [K]; those of absent groups are ignored.
        present: [K] booleans. An absent group keeps its weight exactly; the present ones share the mass they had. None
            for all, who share a mass of 1.
        min_weight: floor of a present weight before the last normalisation, in [0, 1/K).

    Returns:
        the new weights [K]: never negative, and 0 only where `min_weight` is 0.
    """
    smallest = torch.finfo(alpha.dtype).tiny
    logits = alpha.clamp_min(smallest).log() + exponents
    if present is None:
        floored = torch.softmax(logits, dim=0).clamp_min(min_weight)
        return floored / floored.sum()
    shares = torch.softmax(logits.masked_fill(~present, float("-inf")), dim=0)
    own = alpha.masked_fill(~present, 0.0).sum()
    # A large mass is what the others leave of 1, so that rounding never accumulates; of a small one nothing would be
    # left but the rounding of that difference.
    mass = torch.where(own < 0.5, own, 1 - alpha.masked_fill(present, 0.0).sum())
    floored = (mass * shares).clamp_min(min_weight).masked_fill(~present, 0.0)
    return torch.where(present, mass * floored / floored.sum().clamp_min(smallest), alpha)


def group_dro_step(
    alpha: Tensor,
    losses: Tensor,
    *,
    step_size: float,
    adjustments: Tensor | float = 0.0,
    present: Tensor | None = None,
    min_weight: float = 0.0,
) -> Tensor:
    """Group-DRO: alpha_i <- alpha_i exp(eta_a (l_i + C / sqrt(n_i))), normalised (Sagawa et al. 2020, algorithm 1).

    Args:
        alpha: [K] current weights.
        losses: [K] group mean losses.
        step_size: eta_a >= 0.
        adjustments: [K], the terms C / sqrt(n_i) of `adjustment_terms`; 0 for none.
        present: [K] booleans, None for all; see `exponentiated_step`.
        min_weight: see `exponentiated_step`.
    """
    return exponentiated_step(alpha, step_size * (losses + adjustments), present, min_weight)


def cgd_exponents(
    losses: Tensor,
    gram: Tensor,
    *,
    exponent: float = 0.5,
    present: Tensor | None = None,
    self_products: Tensor | None = None,
    consensus: bool = False,
) -> Tensor:
    """Equation 5: sum_j (l_i l_j)^p cos(g_i, g_j), how much a step along group i's gradient lowers all losses.

    Args:
        losses: [K] group mean losses, >= 0.
        gram: [K, K] inner products <g_i, g_j> of the group gradients.
        exponent: p >= 0.
        present: [K] booleans, None for all; an absent group does not count as j.
        self_products: see `self_shares`; None for cos(g_i, g_i) = 1, as in the paper.
        consensus: take `consensus_cosines` for the cosines; needs `self_products`.

    Returns:
        [K].

    Raises:
        ValueError: `consensus` without `self_products`.
    """
    if not consensus:
        cosines = _with_self_shares(cosine_gram(gram), gram, self_products)
    elif self_products is None:
        raise ValueError("consensus=True needs self_products: inner products of two halves of each group's examples.")
    else:
        cosines = consensus_cosines(gram, self_products, present)
    scaled = losses**exponent
    interactions = torch.outer(scaled, scaled) * cosines
    return _sum_over_present(interactions, present)


def gradient_exponents(gram: Tensor, *, present: Tensor | None = None, self_products: Tensor | None = None) -> Tensor:
    """Equation 3: <g_i, sum_j g_j>, the same without scaling by losses or norms: [K]. See `cgd_exponents`."""
    return _sum_over_present(_with_self_shares(gram, gram, self_products), present)


SMALLEST_SIGNAL = 0.1
"""`consensus_cosines`: the share of a squared norm that is never taken for noise."""


def self_shares(gram: Tensor, self_products: Tensor) -> Tensor:
    """Share of each squared norm <g_i, g_i> that is not noise: [..., K], within [0, 1].

    Args:
        gram: [..., K, K] inner products.
        self_products: [..., K] estimates of <g_i, g_i> without the noise in it (`merge_halves`).
    """
    squares = gram.diagonal(dim1=-2, dim2=-1)
    return (self_products / squares.where(squares > 0, 1.0)).clamp(0, 1)


def consensus_cosines(gram: Tensor, self_products: Tensor, present: Tensor | None = None) -> Tensor:
    """What takes the place of the cosines in equation 5 under `CGD(cross_terms="consensus")`: [..., K, K].

    With s_i = `self_shares`, at least `SMALLEST_SIGNAL`, and the noise taken out of the norms,

        c_ij = cos(g_i, g_j) / sqrt(s_i s_j)
        A_i = mean of c_jk over the pairs of groups j, k other than i, each within [-1, 1]; at least 0
        row i: A_i c_ij at j, and 1 - A_i (1 - s_i) at i itself.

    A_i says how far the other groups agree with one another. Where they do not (A_i = 0; always with fewer than three
    groups) the exponent of group i is that of Group-DRO, its loss; where they wholly agree (A_i = 1) it is that of CGD
    with split halves, whose cross terms noise does not shrink. A step that lacks a group cannot tell: there A_i = 0.

    Args:
        gram: [..., K, K] inner products of the group gradients.
        self_products: [..., K], see `self_shares`.
        present: [..., K] booleans, None for all.
    """
    shares = self_shares(gram, self_products).clamp_min(SMALLEST_SIGNAL)
    seen, lengths, groups = cosine_gram(gram), shares.sqrt(), gram.shape[-1]
    cosines = seen / (lengths[..., :, None] * lengths[..., None, :])
    agreements = cosines.clamp(-1, 1)
    agreements = agreements - torch.diag_embed(agreements.diagonal(dim1=-2, dim2=-1))
    # All pairs less those that i is in, on both sides of the diagonal.
    sums = agreements.sum(dim=(-2, -1))[..., None] - 2 * agreements.sum(dim=-1)
    consensus = (sums / max(1, (groups - 1) * (groups - 2))).clamp_min(0)
    if present is not None:
        consensus = consensus * present.all(dim=-1, keepdim=True)
    own = seen.diagonal(dim1=-2, dim2=-1) * (1 - consensus * (1 - shares))
    crossed = consensus[..., None] * cosines
    return crossed + torch.diag_embed(own - crossed.diagonal(dim1=-2, dim2=-1))


def _with_self_shares(similarities: Tensor, gram: Tensor, self_products: Tensor | None) -> Tensor:
    if self_products is None:
        return similarities
    return similarities.diagonal_scatter(similarities.diagonal() * self_shares(gram, self_products))


def _sum_over_present(interactions: Tensor, present: Tensor | None) -> Tensor:
    counted = interactions if present is None else interactions.masked_fill(~present[None, :], 0.0)
    return counted.sum(dim=1)


def cgd_step(
    alpha: Tensor,
    losses: Tensor,
    gram: Tensor,
    *,
    step_size: float,
    adjustments: Tensor | float = 0.0,
    present: Tensor | None = None,
    exponent: float = 0.5,
    scaling: Literal["loss", "gradient"] = "loss",
    interaction: Literal["sum", "mean"] = "sum",
    min_weight: float = 0.0,
    self_products: Tensor | None = None,
    consensus: bool = False,
    arithmetic: Arithmetic = HOST,
    group_names: Sequence[str] | None = None,
) -> Tensor:
    """CGD: alpha_i <- alpha_i exp(eta_a exponent_i), normalised (equation 5, or 3).

    Args:
        alpha: [K] current weights.
        losses, gram, exponent, self_products, consensus: see `cgd_exponents`; `consensus` under `scaling="loss"` only.
        step_size: eta_a >= 0.
        adjustments: [K], terms C / sqrt(n_i) added to every loss of the exponent; 0 for none.
        present: [K] booleans, None for all. An absent group takes part neither as i nor as j.
        scaling: "loss" for `cgd_exponents`, "gradient" for `gradient_exponents`.
        interaction: "sum" over j as in the paper, or "mean", which divides by the number of present groups.
        min_weight: see `exponentiated_step`.
        arithmetic: whether the losses may be looked at.
        group_names: for the message.

    Raises:
        ValueError: a negative loss under `scaling="loss"`, where (l_i l_j)^p is not defined.
    """
    if scaling == "loss":
        of_present = losses if present is None else losses.masked_fill(~present, 0.0)
        require_nonnegative(of_present, group_names, arithmetic)
        exponents = cgd_exponents(
            losses if isinstance(adjustments, float) and adjustments == 0 else losses + adjustments,
            gram,
            exponent=exponent,
            present=present,
            self_products=self_products,
            consensus=consensus,
        )
    else:
        exponents = gradient_exponents(gram, present=present, self_products=self_products)
    if interaction == "mean":
        exponents = exponents / (len(losses) if present is None else present.sum())
    return exponentiated_step(alpha, step_size * exponents, present, min_weight)


def cgd_reference_step(alpha: Tensor, losses: Tensor, gram: Tensor, start: Tensor, *, step_size: float) -> Tensor:
    """One weight update of the authors' released code, quirks included; see `CGD(variant="reference")`.

    It differs from equation 5 in that the sum over j is weighted by `start` [K] = `upweights(...)`, the product of
    norms is floored at 1e-3 and the weights are clamped at 1e-5 after normalising, so that they may sum to slightly
    more than 1. An absent group counts with loss 0 and gradient 0.
    """
    scaled = losses.sqrt()
    totals = (scaled[:, None] * scaled[None, :] * cosine_gram(gram, norm_floor=1e-3)) @ start
    return torch.softmax(alpha.log() + step_size * totals, dim=0).clamp_min(1e-5)


def alternating_halves(group_ids: Tensor, earlier: Tensor) -> Tensor:
    """Half (0 or 1) of each example [B]: by turns within its group, after the `earlier` [K] examples of each group."""
    order = group_ids.argsort(stable=True)
    sorted_ids = group_ids[order]
    counts = group_counts_of(group_ids, len(earlier))
    starts = counts.cumsum(0) - counts
    places = torch.empty_like(group_ids)
    places[order] = torch.arange(len(group_ids), device=group_ids.device) - starts[sorted_ids] + earlier[sorted_ids]
    return places % 2


def require_nonnegative(
    losses: Tensor, group_names: Sequence[str] | None = None, arithmetic: Arithmetic = HOST
) -> None:
    """Raise a ValueError that names the first group whose mean loss [K] is negative, if it may be looked at."""
    if not arithmetic.reads_values:
        return
    negative = losses.numpy(force=True) < 0
    if negative.any():
        first = int(negative.argmax())
        name = repr(group_names[first]) if group_names is not None else f"number {first}"
        raise ValueError(
            f"CGD scales the weights by powers of the group losses and needs losses >= 0, but the mean loss of group "
            f"{name} is {losses[first].item():.4g}. Use a non-negative loss, or scaling='gradient' "
            f"(equation 3 of the paper), which does not use the losses."
        )
