"""The statistics of a step that the weights are moved by: how they are estimated from its micro-batches."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic
from hf_cgd.data.groups import UNCOUNTED
from hf_cgd.distributed.communication import Communication
from hf_cgd.functional import alternating_halves, group_counts_of, merge_halves
from hf_cgd.gradients import GradientEngine, GroupGradients, gram_matrix, gram_on_device
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.averages import RunningAverages
from hf_cgd.robust_loss.pooling import PooledRows
from hf_cgd.robust_loss.uncounted import counted, with_stand_ins
from hf_cgd.robust_loss.window import StepWindow

LARGE_ROWS = 4 * 2**30
"""Bytes of pooled group gradients beyond which a warning tells of sketches."""


@dataclass(frozen=True)
class Estimate:
    """Statistics of a step over all its micro-batches and processes.

    Attributes:
        losses: [K] mean loss of each group, 0 for an absent one.
        gram: [K, K] inner products of the groups' gradients, 0 for absent ones; None where none were taken.
        self_products: [K] of `hf_cgd.functional.merge_halves`; None where groups were not split.
        rows: [G, c] what the inner products were formed of: this process's columns; None where they came without.
        present: the groups of these rows.
    """

    losses: Tensor
    gram: Tensor | None = None
    self_products: Tensor | None = None
    rows: Tensor | None = None
    present: Sequence[int] = ()

    def not_finite(self) -> Tensor:
        """[K] booleans: groups whose loss is not finite or, where all losses are, whose gradient is not."""
        bad = ~self.losses.isfinite()
        if self.gram is None:
            return bad
        # A loss that is not finite spoils the gradients of all groups.
        return torch.where(bad.any(), bad, ~self.gram.diagonal().isfinite())


class LossEstimator:
    """Group mean losses alone, for objectives without gradients.

    Args:
        arithmetic: where the statistics are formed.
        communication: sums over the processes.
    """

    def __init__(self, arithmetic: Arithmetic, communication: Communication) -> None:
        self._arithmetic = arithmetic
        self._communication = communication

    def add(
        self, losses: Tensor, group_ids: Tensor, counts: Tensor, window: StepWindow, scale: float
    ) -> GroupGradients | None:
        """Take the group gradients of one micro-batch on this process into account, and return them.

        Args:
            losses: [B] with graph.
            group_ids: [B]; -100 for an example that does not count, whose loss is 0.
            counts: [K] of them in this micro-batch.
            window: the step.
            scale: of the losses that the gradients are taken of; the caller's business is to divide it out.
        """
        return None

    def estimate(self, window: StepWindow, scale: float) -> Estimate:
        """The statistics of the whole step; a collective. `scale` is divided out of the gradients."""
        return Estimate(self._communication.sum(window.loss_sums) / window.counts.clamp_min(1))

    def accept(self, estimate: Estimate) -> Tensor:
        """The losses [K] to move the weights by, after the estimate has been found to be finite."""
        return estimate.losses

    def discard(self) -> None:
        """Forget the step."""


class GramEstimator(LossEstimator):
    """Inner products of the groups' mean gradients over the step, as equation 5 has them.

    A single micro-batch on a single process needs no sums, and its inner products come straight from the engine.
    Elsewhere the gradients are summed first, each process keeping its share of the columns.

    Args:
        arithmetic, communication: see `LossEstimator`.
        engine: takes the gradients.
    """

    _needs_rows = False

    def __init__(self, arithmetic: Arithmetic, communication: Communication, engine: GradientEngine) -> None:
        super().__init__(arithmetic, communication)
        self._engine = engine
        self.pooled_rows = PooledRows(communication)
        self._gram: Tensor | None = None
        self._warned_large = False

    def add(
        self, losses: Tensor, group_ids: Tensor, counts: Tensor, window: StepWindow, scale: float
    ) -> GroupGradients | None:
        """See `LossEstimator.add`."""
        ids, counts_here = self._labels(group_ids, counts, window)
        here = self._arithmetic.present(counts_here)
        scaled = losses if scale == 1 else losses * scale
        gradients = self._engine.group_gradients(scaled, ids, here)
        alone = window.micro_batches == 1 and self._communication.num_processes == 1
        if alone and not self._needs_rows:
            self._gram = gradients.gram() if self._arithmetic.reads_values else self._inner_products(gradients.rows)
        else:
            anywhere = self._arithmetic.present(self._counts(window))
            self.pooled_rows.add(anywhere, here, gradients.rows)
            self._warn_of_large_rows(len(anywhere) * gradients.rows[0].nbytes)
        return gradients

    def estimate(self, window: StepWindow, scale: float) -> Estimate:
        """See `LossEstimator.estimate`."""
        counts = self._counts(window)
        divisors = self._arithmetic.rows(counts, counts > 0).clamp_min(1) * scale
        rows: Tensor | None = None
        if self._gram is not None:
            inner, self._gram = self._gram / (divisors[:, None] * divisors[None, :]), None
            sums = self._communication.sum(window.loss_sums)
        else:
            rows = self.pooled_rows.close()
            rows /= divisors[:, None].to(rows)
            self._mix(rows, window)
            both = self._communication.sum(torch.cat([window.loss_sums, self._inner_products(rows).flatten()]))
            sums, inner = both.split([len(window.counts), len(divisors) ** 2])
            inner = inner.view(len(divisors), len(divisors))
        places = self._arithmetic.places(counts > 0)
        gram, self_products = self._merged(_spread(inner, places, len(counts)), window)
        losses = sums / window.counts.clamp_min(1)
        return Estimate(losses, gram, self_products, rows, self._arithmetic.present(window.counts))

    def discard(self) -> None:
        """Forget the step."""
        self._gram = None
        self.pooled_rows.discard()

    def _labels(self, group_ids: Tensor, counts: Tensor, window: StepWindow) -> tuple[Tensor, Tensor]:
        """What has a gradient of its own: the ids [B] of it, and how many examples it has in this micro-batch."""
        return with_stand_ins(group_ids), counts

    def _counts(self, window: StepWindow) -> Tensor:
        """Examples in the step, on all processes, of what has a gradient of its own."""
        return window.counts

    def _mix(self, rows: Tensor, window: StepWindow) -> None:
        """Change the gradients [G, c] of the step before their inner products are formed."""

    def _merged(self, gram: Tensor, window: StepWindow) -> tuple[Tensor, Tensor | None]:
        """Inner products of the groups, and self-products, from those of what has a gradient of its own."""
        return gram, None

    def _inner_products(self, rows: Tensor) -> Tensor:
        if self._arithmetic.reads_values:
            return gram_matrix(rows)
        return gram_on_device(rows).to(self._arithmetic.dtype)

    def _warn_of_large_rows(self, size: int) -> None:
        if size > LARGE_ROWS and not self._warned_large:
            self._warned_large = True
            warnings.warn(
                f"The gradients of all groups of a step take {size / 2**30:.1f} GiB on every process, since they are "
                "pooled over micro-batches or processes. gradient_engine='sketch' pools small sketches in their "
                "place; fewer gradient_layers take less as well.",
                GroupRobustWarning,
                stacklevel=2,
            )


class SplitHalfEstimator(GramEstimator):
    """The same with two halves of each group's examples, whose product has no noise in common (`merge_halves`).

    Half 2 i and half 2 i + 1 are group i's; its examples take turns, over micro-batches and processes as well.
    """

    def _labels(self, group_ids: Tensor, counts: Tensor, window: StepWindow) -> tuple[Tensor, Tensor]:
        rows = counted(group_ids).cpu()
        ids = group_ids.cpu()[rows]
        halves = 2 * ids + alternating_halves(ids, window.earlier)
        window.earlier = window.earlier + group_counts_of(ids, len(window.counts))
        of_all = torch.full(rows.shape, UNCOUNTED).masked_scatter(rows, halves)
        return with_stand_ins(of_all).to(group_ids.device), group_counts_of(halves, 2 * len(window.counts))

    def _counts(self, window: StepWindow) -> Tensor:
        return _half_sizes(window).flatten()

    def _merged(self, gram: Tensor, window: StepWindow) -> tuple[Tensor, Tensor | None]:
        sizes = _half_sizes(window)
        present = (window.counts > 0).nonzero().flatten()
        by_half = gram.view(*sizes.shape, *sizes.shape)[present][:, :, present]
        merged, products = merge_halves(by_half, sizes[present])
        whole = _spread(merged, present, len(sizes))
        return whole, torch.zeros_like(window.counts).index_copy(0, present, products)


class AveragedEstimator(GramEstimator):
    """The same between running averages of the groups' gradients; the losses are averaged likewise.

    Args:
        arithmetic, communication, engine: see `GramEstimator`.
        averages: the averages so far.
    """

    _needs_rows = True

    def __init__(
        self,
        arithmetic: Arithmetic,
        communication: Communication,
        engine: GradientEngine,
        averages: RunningAverages,
    ) -> None:
        super().__init__(arithmetic, communication, engine)
        self.averages = averages

    def accept(self, estimate: Estimate) -> Tensor:
        """See `LossEstimator.accept`; the averages take the step in."""
        assert estimate.rows is not None
        return self.averages.update(estimate.losses, estimate.rows, estimate.present, self.pooled_rows.row_size)

    def _mix(self, rows: Tensor, window: StepWindow) -> None:
        self.averages.mix_into(rows, self._arithmetic.present(window.counts))


def build_estimator(
    objective: Objective,
    arithmetic: Arithmetic,
    communication: Communication,
    engine: GradientEngine | None,
    averages: RunningAverages | None,
) -> LossEstimator:
    """The estimator of what the objective's `statistics` name."""
    if engine is None:
        return LossEstimator(arithmetic, communication)
    if averages is not None:
        return AveragedEstimator(arithmetic, communication, engine, averages)
    kind = SplitHalfEstimator if "self_products" in objective.statistics else GramEstimator
    return kind(arithmetic, communication, engine)


def _half_sizes(window: StepWindow) -> Tensor:
    """Examples of each half [K, 2] in the step, on all processes: they take turns."""
    second = (window.counts / 2).floor()
    return torch.stack([window.counts - second, second], dim=1)


def _spread(inner: Tensor, places: Tensor, size: int) -> Tensor:
    """Inner products [G, G] at their places in a matrix [size, size] of zeros."""
    if len(places) == size:
        return inner
    whole = inner.new_zeros(size, size)
    whole[places[:, None], places[None, :]] = inner
    return whole
