"""CGD, Common Gradient Descent: weight goes to the groups whose gradient lowers the loss of all."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from hf_cgd.functional import cgd_reference_step, cgd_step, require_nonnegative, upweights
from hf_cgd.objectives.adaptive import AdaptiveObjective
from hf_cgd.objectives.base import (
    VARIANTS,
    GroupStatistics,
    Statistic,
    Variant,
    require_at_least_zero,
    require_one_of,
)

Scaling = Literal["loss", "gradient"]
Interaction = Literal["sum", "mean"]
SelfTerm = Literal["one", "split_half"]
CrossTerms = Literal["all", "consensus"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
INTERACTIONS: tuple[Interaction, ...] = get_args(Interaction)
SELF_TERMS: tuple[SelfTerm, ...] = get_args(SelfTerm)
CROSS_TERMS: tuple[CrossTerms, ...] = get_args(CrossTerms)


@dataclass(frozen=True)
class CGD(AdaptiveObjective):
    """Common Gradient Descent (equation 5): alpha_i <- alpha_i exp(eta_a sum_j (l_i l_j)^p cos(g_i, g_j)).

    With two groups, p = 1/2 and a self term of one this is Group-DRO: the one cross term is the same for both groups.

    Args:
        step_size, adjustment, absent_groups, min_weight: see `AdaptiveObjective`. With `adjustment` C > 0 every l of
            the exponent is l + C / sqrt(n). An absent group takes part neither as i nor as j.
        exponent: p >= 0; 1/2 in the paper.
        scaling: "loss" for equation 5, or "gradient" for equation 3, whose exponent is eta_a <g_i, sum_j g_j>.
        interaction: "sum" over j as in the paper, or "mean" over the present groups, which makes one `step_size` serve
            any number of groups.
        variant: "paper", or "reference" for the authors' released code step by step: start weights and weights of the
            sum over j proportional to exp(C / sqrt(n)), cosines with a floor of 1e-3 under the product of the norms,
            weights clamped at 1e-5 after normalising (so they may sum to slightly more than 1), absent groups with
            loss 0. It has the knobs `step_size` and `adjustment` only.
        interaction_momentum: beta in [0, 1): cosines and losses of the exponent are taken from running averages of
            each group's gradient and loss over optimizer steps, with this much of the old average kept; 0 is exactly
            the paper. A group's average moves only when the group is present. It averages noise away, and with it the
            pull towards a rare hard group.
        self_term: "one": cos(g_i, g_i) = 1 as in the paper. "split_half": <a_i, b_i> / <g_i, g_i>, kept within
            [0, 1], where a_i and b_i are the gradients of two halves of the group's examples in the step. Noise in a
            small batch shrinks the cosines of different groups and leaves the 1 as it is, so that CGD slides towards
            Group-DRO; this shrinks both alike (docs/reproduction.md). A group of one example in the step has 1.

        cross_terms: "all": the terms of other groups count in full, as in the paper. "consensus": they count as far as
            the other groups agree with one another, group by group (`hf_cgd.functional.consensus_cosines`). A group
            that stands against others which agree, as a noisy one does, is held down as under "split_half"; where the
            others do not agree either, as where each label has groups of its own, its loss alone counts, as under
            Group-DRO (docs/reproduction.md). A step that lacks a group is one of Group-DRO, so that it wants batches
            that hold all groups (`group_sampling="balanced"`). It halves groups and has a self term of its own.

    Raises:
        ValueError: a value outside its range, or a knob that the chosen form of the update does not use.
    """

    exponent: float = 0.5
    scaling: Scaling = "loss"
    interaction: Interaction = "sum"
    variant: Variant = "paper"
    interaction_momentum: float = 0.0
    self_term: SelfTerm = "one"
    cross_terms: CrossTerms = "all"

    name: ClassVar[str] = "cgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least_zero(exponent=self.exponent)
        require_one_of("scaling", self.scaling, SCALINGS)
        require_one_of("interaction", self.interaction, INTERACTIONS)
        require_one_of("variant", self.variant, VARIANTS)
        require_one_of("self_term", self.self_term, SELF_TERMS)
        require_one_of("cross_terms", self.cross_terms, CROSS_TERMS)
        if not 0 <= self.interaction_momentum < 1:
            raise ValueError(f"interaction_momentum must lie in [0, 1), got {self.interaction_momentum!r}.")
        if self.scaling == "gradient":
            self._refuse_knobs("scaling='gradient' (equation 3), which uses no losses", "adjustment", "exponent")
        if self.variant == "reference":
            fixed = ("absent_groups", "min_weight", "exponent", "scaling", "interaction", "interaction_momentum")
            self._refuse_knobs(
                "variant='reference', which has them fixed as in the released code", *fixed, "self_term", "cross_terms"
            )
        if self.cross_terms == "consensus":
            own = "cross_terms='consensus', which has a self term of its own and compares one step's losses and halves"
            self._refuse_knobs(own, "self_term", "interaction_momentum", "scaling")
        if self.self_term == "split_half":
            self._refuse_knobs("self_term='split_half', which compares one step's own halves", "interaction_momentum")

    @property
    def statistics(self) -> frozenset[Statistic]:
        """Losses and inner products, and what `self_term`, `cross_terms` and `interaction_momentum` need besides."""
        found: set[Statistic] = {"losses", "gram"}
        if self.self_term == "split_half" or self.cross_terms == "consensus":
            found.add("self_products")
        if self.interaction_momentum > 0:
            found.add("averages")
        return frozenset(found)

    @property
    def average_kept(self) -> float:
        """`interaction_momentum`."""
        return self.interaction_momentum

    def groups_wanted(self, num_groups: int) -> int:
        """See `Objective`: all under "consensus"; three where the cross term of two cancels and leaves the losses."""
        if self.variant == "reference" or self.absent_groups == "zero_loss" or self.scaling == "gradient":
            return 0
        if self.interaction_momentum > 0:
            return 0
        if self.cross_terms == "consensus":
            return num_groups
        return 3 if self.self_term == "one" and self.exponent == 0.5 else 0

    @property
    def moves_by_losses(self) -> bool:
        """As the factors (l_i l_j)^p of equation 5. Not in equation 3, nor for p = 0.

        The factor stands for the norm of a gradient: a smooth loss has |g|^2 <= 2 L (l - l*), with l* the lowest value
        it can take. With a reference in the place of l*, l - l* is the excess loss, which this makes of l in every
        factor, those of the self term too. The cosines stay: a reference is constant and has no gradient. The authors'
        released code knows no reference.
        """
        return self.scaling == "loss" and self.exponent > 0 and self.variant == "paper"

    @property
    def refuses_negative_losses(self) -> bool:
        """See `Objective`: loss scaling takes powers of them."""
        return self.scaling == "loss"

    def _refuse_knobs(self, reason: str, *names: str) -> None:
        changed = [name for name in names if getattr(self, name) != type(self).__dataclass_fields__[name].default]
        if changed:
            raise ValueError(f"{', '.join(changed)} cannot be set with {reason}. Leave {', '.join(names)} unset.")

    def initial_weights(self, group_counts: Tensor) -> Tensor:
        """Equal weights [K]; those of ERM-UW under `variant="reference"`."""
        if self.variant == "reference":
            return upweights(group_counts, self.adjustment)
        return super().initial_weights(group_counts)

    def coefficients(self, alpha: Tensor, present: Tensor) -> Tensor:
        """See `AdaptiveObjective`; never renormalised under `variant="reference"`."""
        if self.variant == "reference":
            return alpha.masked_fill(~present, 0.0)
        return super().coefficients(alpha, present)

    def next_weights(self, alpha: Tensor, statistics: GroupStatistics) -> Tensor:
        """Weights [K] after one step on losses and gradient inner products."""
        assert statistics.gram is not None
        if self.variant == "reference":
            require_nonnegative(statistics.losses, statistics.group_names, statistics.arithmetic)
            start = upweights(statistics.group_counts, self.adjustment).to(alpha)
            return cgd_reference_step(alpha, statistics.losses, statistics.gram, start, step_size=self.step_size)
        return cgd_step(
            alpha,
            statistics.losses,
            statistics.gram,
            step_size=self.step_size,
            adjustments=self._adjustments(statistics),
            present=self._takes_part(statistics),
            exponent=self.exponent,
            scaling=self.scaling,
            interaction=self.interaction,
            min_weight=self._floor(len(alpha)),
            self_products=statistics.self_products,
            consensus=self.cross_terms == "consensus",
            arithmetic=statistics.arithmetic,
            group_names=statistics.group_names or None,
        )
