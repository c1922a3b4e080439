"""Estimators of equation 5's losses and cosines: functions on the statistics of a step, and the methods they make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cgd.functional import consensus_cosines, cosine_gram

BETAS = (0.5, 0.9, 0.97, 0.99)
LOWEST_SHARE = 0.1
"""Corrected norms: the square of a norm is never taken to be less than this share of the uncorrected one."""


@dataclass(frozen=True)
class Statistics:
    """What a step tells of the groups.

    Attributes:
        losses: [..., K] mean losses.
        halves: [..., K, 2, P] gradients of the mean losses of two halves of each group's examples.
        sizes: [..., K, 2] examples in each half.
        squares: [..., K] sum over the group's examples of the squared norms of their gradients.
    """

    losses: Tensor
    halves: Tensor
    sizes: Tensor
    squares: Tensor

    @property
    def present(self) -> Tensor:
        """[..., K] booleans: groups with examples in the step."""
        return (self.sizes > 0).any(dim=-1)

    @property
    def gradients(self) -> Tensor:
        """[..., K, P], of the mean losses of the groups."""
        shares = self.sizes / self.sizes.sum(dim=-1, keepdim=True).clamp_min(1)
        return (self.halves * shares[..., None]).sum(dim=-2)


Memory = dict[str, Tensor]
"""What an estimator keeps from step to step."""
Estimate = Callable[[Statistics, Memory], tuple[Tensor, Tensor]]
"""Losses [..., K] and cosines [..., K, K] for the exponent of equation 5."""


def running(memory: Memory, name: str, value: Tensor, beta: float) -> Tensor:
    """The running average of a statistic, its first value included as it is (as `interaction_momentum` does)."""
    memory[name] = beta * memory[name] + (1 - beta) * value if name in memory else value
    return memory[name]


def running_of_present(memory: Memory, name: str, value: Tensor, beta: float, present: Tensor) -> Tensor:
    """The same of [..., K, ...] for each group by itself: it moves where `present` [..., K] says so."""
    here = present.reshape(*present.shape, *(1 for _ in range(value.ndim - present.ndim)))
    before, seen = memory.get(name, value), memory.get(f"{name} seen", torch.zeros_like(here))
    memory[name] = torch.where(here, torch.where(seen, beta * before + (1 - beta) * value, value), before)
    memory[f"{name} seen"] = seen | here
    return memory[name]


def gram_of(rows: Tensor) -> Tensor:
    """Inner products [..., K, K] of rows [..., K, P]."""
    return rows @ rows.transpose(-1, -2)


def cosines_of(gram: Tensor) -> Tensor:
    """`cosine_gram` of a stack of matrices [..., K, K]."""
    return torch.vmap(cosine_gram)(gram.flatten(0, -3)).view_as(gram)


def with_diagonal(matrices: Tensor, diagonal: Tensor) -> Tensor:
    """Matrices [..., K, K] with this diagonal [..., K] in place of theirs."""
    return torch.where(torch.eye(matrices.shape[-1], dtype=torch.bool), diagonal[..., None], matrices)


def split_self_products(statistics: Statistics) -> Tensor:
    """<a, b> of the gradients of a group's two halves [..., K]: unbiased for the squared norm of the expected one."""
    return statistics.halves.prod(dim=-2).sum(dim=-1)


def half_products(statistics: Statistics, gram: Tensor) -> Tensor:
    """The same, and <g_i, g_i> of a group with a single example, as `hf_cgd.functional.merge_halves` has it."""
    halved = (statistics.sizes > 0).all(dim=-1)
    return torch.where(halved, split_self_products(statistics), gram.diagonal(dim1=-2, dim2=-1))


def pair_self_products(statistics: Statistics) -> Tensor:
    """Mean of <g_m, g_n> over all pairs of a group's examples [..., K], which is that of `<a, b>` over all splits."""
    counts = statistics.sizes.sum(dim=-1)
    norms = statistics.gradients.square().sum(dim=-1)
    return (counts**2 * norms - statistics.squares) / (counts * (counts - 1))


def shrunk_self(cosines: Tensor, gram: Tensor, self_products: Tensor) -> Tensor:
    """Cosines whose self term is self_products_i / <g_i, g_i>, at least 0: it shrinks with noise as the others do."""
    norms = gram.diagonal(dim1=-2, dim2=-1)
    return with_diagonal(cosines, (self_products / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp(0, 1))


def paper(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Equation 5 as it stands."""
    return statistics.losses, cosines_of(gram_of(statistics.gradients))


def split_half(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Self term from two independent halves."""
    gram = gram_of(statistics.gradients)
    return statistics.losses, shrunk_self(cosines_of(gram), gram, half_products(statistics, gram))


def consensus(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Cross terms as far as the other groups agree: `CGD(cross_terms="consensus")`."""
    gram = gram_of(statistics.gradients)
    return statistics.losses, consensus_cosines(gram, half_products(statistics, gram), statistics.present)


def all_pairs(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Self term from all pairs of examples."""
    gram = gram_of(statistics.gradients)
    return statistics.losses, shrunk_self(cosines_of(gram), gram, pair_self_products(statistics))


def last_step(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Self term from two steps: the cosine of a group's gradient with its gradient of the step before, at least 0."""
    gradients = statistics.gradients
    previous = memory.get("gradients", gradients)
    memory["gradients"] = gradients
    similar = torch.nn.functional.cosine_similarity(gradients, previous, dim=-1).clamp(0, 1)
    return statistics.losses, with_diagonal(cosines_of(gram_of(gradients)), similar)


def no_self_term(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Self term shrunk to 0: the sum over j leaves i out."""
    cosines = cosines_of(gram_of(statistics.gradients))
    return statistics.losses, with_diagonal(cosines, torch.zeros_like(statistics.losses))


def gradient_average(beta: float) -> Estimate:
    """Cosines and losses from running averages of gradients and losses: `interaction_momentum`."""

    def estimate(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
        present = statistics.present
        losses = running_of_present(memory, "losses", statistics.losses, beta, present)
        gradients = running_of_present(memory, "gradients", statistics.gradients, beta, present)
        return losses, cosines_of(gram_of(gradients * present[..., None]))

    return estimate


def gram_average(beta: float) -> Estimate:
    """Cosines and losses from running averages of the inner products and losses."""

    def estimate(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
        losses = running(memory, "losses", statistics.losses, beta)
        return losses, cosines_of(running(memory, "gram", gram_of(statistics.gradients), beta))

    return estimate


def corrected_norms(beta: float) -> Estimate:
    """The running Gram with self-products of all pairs for norms: cosines between groups do not shrink."""

    def estimate(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
        losses = running(memory, "losses", statistics.losses, beta)
        gram = running(memory, "gram", gram_of(statistics.gradients), beta)
        products = running(memory, "products", pair_self_products(statistics), beta)
        norms = torch.maximum(products, LOWEST_SHARE * gram.diagonal(dim1=-2, dim2=-1))
        return losses, cosines_of(with_diagonal(gram, norms))

    return estimate


@dataclass(frozen=True)
class Method:
    """A way to move the weights.

    Attributes:
        name: what tables call it.
        estimate: of equation 5; None for a baseline without cosines.
        beta: what it keeps of old averages, None where there are none.
        full: it sees the statistics of the whole training set, which a user does not have: what perfect cosines give.
        head: the gradient scope is the last layer alone.
        late: the weights of a step come from the step before (`weight_timing="next"`).
        by_loss: Group-DRO's exponent, for `estimate` None; False for weights that stay as they are.
        by_size: weights start at the groups' shares of the training set, and not equal: the released code's ERM-UW.
    """

    name: str
    estimate: Estimate | None
    beta: float | None = None
    full: bool = False
    head: bool = False
    late: bool = False
    by_loss: bool = False
    by_size: bool = False


def methods_of(hidden: bool, betas: Sequence[float] = BETAS) -> list[Method]:
    """All methods of the study; `hidden` for a network with more than one layer."""
    return [
        Method("equal weights", None),
        Method("group_dro", None, by_loss=True),
        Method("cgd", paper),
        Method("cgd, weight_timing next", paper, late=True),
        *([Method("cgd, head only", paper, head=True)] if hidden else []),
        Method("split-half self term", split_half),
        Method("consensus", consensus),
        Method("all-pairs self term", all_pairs),
        Method("last-step self term", last_step),
        Method("no self term", no_self_term),
        *(Method("gradient average", gradient_average(beta), beta) for beta in betas),
        *(Method("Gram average", gram_average(beta), beta) for beta in betas),
        *(Method("corrected norms", corrected_norms(beta), beta) for beta in betas),
        Method("full-data cosines", paper, full=True),
    ]
