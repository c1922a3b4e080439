"""What the statistics of some steps at one and the same model say of its groups: noise, agreement, pulls."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cgd.functional import cgd_exponents
from hf_cgd.metrics.tables import plain
from hf_cgd.objectives import GroupStatistics
from hf_cgd.visible_text import visible_name

MAX_COLUMNS = 8
"""Of more groups the agreement is not printed."""
AGREE = 0.3
"""Mean agreement from which on groups count as agreeing."""


@dataclass(frozen=True)
class GroupDiagnosis:
    """Numbers of K groups, means over the steps of a probe in which the model stayed as it was.

    Attributes:
        names: of the groups.
        steps: how many steps.
        examples: [K] mean number of examples of a group in a step that holds it.
        losses: [K] mean training loss, NaN for a group that no step held.
        signal: [K] how much of the squared norm of a group's gradient in a step is no noise, in [0, 1]:
            mean <a_i, b_i> / mean <g_i, g_i>, where a_i and b_i are the gradients of two halves of its examples. 1
            where a group has a single example in every step, since nothing can be told there: see `known`.
        known: [K] booleans: whether `signal` is measured.
        agreement: [K, K] cosines between the groups' gradients with that noise taken out,
            mean <g_i, g_j> / (mean <a_i, b_i> mean <a_j, b_j>)^1/2, in [-1, 1]; NaN for groups without signal.
        cosines: [K, K] mean cosines as CGD sees them in a step of this size, noise included.
        pull_dro, pull_cgd, pull_halves, pull_consensus: [K] mean exponents of Group-DRO (the losses), of CGD, and of
            CGD with `self_term="split_half"` and with `cross_terms="consensus"`, less their mean over the groups:
            where the weights would go.
    """

    names: Sequence[str]
    steps: int
    examples: Tensor
    losses: Tensor
    signal: Tensor
    known: Tensor
    agreement: Tensor
    cosines: Tensor
    pull_dro: Tensor
    pull_cgd: Tensor
    pull_halves: Tensor
    pull_consensus: Tensor

    def __str__(self) -> str:
        """A table: a row for each group, its agreement with the others behind it."""
        few = len(self.names) <= MAX_COLUMNS
        pulls = ["pull: group_dro", "cgd", "cgd, halves", "cgd, consensus"]
        head = ["group", "in a step", "loss", "signal", *pulls, *(map(visible_name, self.names) if few else ())]
        rows = [head]
        for place, name in enumerate(self.names):
            numbers = [
                values[place] for values in (self.pull_dro, self.pull_cgd, self.pull_halves, self.pull_consensus)
            ]
            signal = f"{self.signal[place]:.2f}" if self.known[place] else "not measured"
            row = [visible_name(name), _said(self.examples[place], ".1f"), _said(self.losses[place], ".3f"), signal]
            row += [_said(number, "+.3f") for number in numbers]
            rows.append(row + ([_said(cosine, "+.2f") for cosine in self.agreement[place]] if few else []))
        above = f"{self.steps} steps. Pulls: where the weights would go."
        if few:
            above += " Columns of groups: agreement of the gradients, noise taken out."
        return f"{above}\n{plain(rows)}\n{self.advice}"

    @property
    def stands_apart(self) -> int | None:
        """The group of the highest loss, where its gradient opposes the others' and these agree; None elsewhere.

        So its mean agreement with them is negative, and theirs with one another above `AGREE`; two groups have no
        others that could agree. docs/results.md says where Group-DRO was worse than equal weights: on all
        problems that had such a group, and on none of the rest.
        """
        rated = [place for place in range(len(self.names)) if not self.losses[place].isnan()]
        if len(rated) < 3:
            return None
        highest = max(rated, key=lambda place: float(self.losses[place]))
        others = [place for place in rated if place != highest]
        between = self.agreement[others][:, others]
        pairs = between[~torch.eye(len(others), dtype=torch.bool)]
        opposes = self.agreement[highest][others].nanmean() < 0
        return highest if bool(opposes & (pairs.nanmean() > AGREE)) else None

    @property
    def advice(self) -> str:
        """What follows for the choice of an objective, as far as measurements bear it."""
        if len(self.names) == 2:
            return "Two groups: CGD moves the weights as Group-DRO does, unless self_term='split_half'."
        if self.stands_apart is None:
            return (
                "No group stands apart: these numbers do not tell the objectives apart. Try equal weights in balanced "
                "batches first (objective='erm_uw'), and objective='cgd', cross_terms='consensus' beside it on "
                "validation."
            )
        return (
            f"{self.names[self.stands_apart]!r} has the highest loss, and its gradient opposes the others', which "
            "agree: it may be noisy. Not Group-DRO, which would follow it, but objective='cgd', "
            "cross_terms='consensus', or equal weights (objective='erm_uw')."
        )


def diagnosis_of(steps: Sequence[GroupStatistics]) -> GroupDiagnosis:
    """The numbers of some steps, each with its `gram` and `self_products`.

    Raises:
        ValueError: no steps.
    """
    if not steps:
        raise ValueError("Expected the statistics of one step or more, got none. Give the probe some batches.")
    present = torch.stack([step.present for step in steps]).double()
    counts = torch.stack([step.counts for step in steps]).double()
    grams = torch.stack([_part(step.gram) for step in steps]).double()
    products = torch.stack([_part(step.self_products) for step in steps]).double()
    together = present[:, :, None] * present[:, None, :]

    def mean(values: Tensor, weights: Tensor) -> Tensor:
        """Over the steps that count; NaN where none does."""
        return (values * weights).sum(dim=0) / weights.sum(dim=0)

    gram = mean(grams, together)
    norms = gram.diagonal()
    halved = (counts > 1).double()
    known = halved.sum(dim=0) > 0
    # A half alone has <g, g> for its product: of such steps nothing can be told.
    own = torch.where(known, mean(products, halved), norms)
    whole = torch.where(known, mean(grams.diagonal(dim1=1, dim2=2), halved), norms)
    signal = torch.where(whole > 0, own / whole, 0.0).clamp(0, 1)
    lengths = torch.where(own > 0, own, torch.nan).sqrt()
    agreement = (gram / (lengths[:, None] * lengths[None, :])).clamp(-1, 1)
    agreement.fill_diagonal_(1.0)
    lengths_seen = grams.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    seen = grams / (lengths_seen[:, :, None] * lengths_seen[:, None, :]).clamp_min(torch.finfo(grams.dtype).tiny)
    forms = ((False, False), (True, False), (True, True))
    exponents = [torch.stack([_exponents(step, *form) for step in steps]) for form in forms]
    losses = mean(torch.stack([step.losses for step in steps]).double(), present)
    return GroupDiagnosis(
        steps[0].group_names,
        len(steps),
        mean(counts, present),
        losses,
        signal,
        known,
        agreement,
        mean(seen, together),
        losses - losses.nanmean(),
        *(pull - pull.nanmean() for pull in (mean(values, present) for values in exponents)),
    )


def _said(number: Tensor, form: str) -> str:
    """A number, "n/a" for one that no step told."""
    return "n/a" if number.isnan() else format(float(number), form)


def _part(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _exponents(step: GroupStatistics, halves: bool, consensus: bool) -> Tensor:
    return cgd_exponents(
        step.losses.double(),
        _part(step.gram).double(),
        present=step.present,
        self_products=_part(step.self_products).double() if halves else None,
        consensus=consensus,
    )
