"""The statistics of a step that the weights are moved by: how they are estimated from its micro-batches."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic, moved
from hf_cgd.data.groups import UNCOUNTED
from hf_cgd.distributed.communication import Communication
from hf_cgd.functional import alternating_halves, merge_halves
from hf_cgd.gradients import GradientEngine, GroupGradients, inner_products
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.averages import RunningAverages
from hf_cgd.robust_loss.batch_groups import BatchGroups
from hf_cgd.robust_loss.pooling import PooledRows
from hf_cgd.robust_loss.uncounted import with_stand_ins
from hf_cgd.robust_loss.window import StepWindow

Scale = float | Tensor
"""A factor of the losses; on a device that is not waited for, a tensor there."""
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

    def is_finite(self) -> bool:
        """Whether all of it is, looked at on the host."""
        squares = [] if self.gram is None else self.gram.diagonal().tolist()
        return math.isfinite(sum([*self.losses.tolist(), *squares]))

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

    def add(self, losses: Tensor, groups: BatchGroups, window: StepWindow, scale: Scale) -> GroupGradients | None:
        """Take the group gradients of one micro-batch on this process into account, and return them.

        Args:
            losses: [B] with graph; 0 for an example that does not count.
            groups: of the examples.
            window: the step.
            scale: of the losses that the gradients are taken of; the caller's business is to divide it out.
        """
        return None

    def estimate(self, window: StepWindow, scale: Scale) -> Estimate:
        """The statistics of the whole step; a collective. `scale` is divided out of the gradients."""
        return Estimate(self._communication.sum(window.loss_sums) / window.divisors)

    def accept(self, estimate: Estimate, moves: Tensor | None = None) -> Tensor:
        """The losses [K] to move the weights by.

        `moves` tells whether the estimate is finite; None where it has been found to be.
        """
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

    def add(self, losses: Tensor, groups: BatchGroups, window: StepWindow, scale: Scale) -> GroupGradients | None:
        """See `LossEstimator.add`."""
        ids, here = self._labels(groups, window)
        scaled = losses if isinstance(scale, float) and scale == 1 else losses * scale
        gradients = self._engine.group_gradients(scaled, ids, here)
        alone = window.micro_batches == 1 and self._communication.num_processes == 1
        if alone and not self._needs_rows:
            self._gram = self._arithmetic.move(gradients.gram(self._arithmetic.reads_values))
        else:
            anywhere = self._present(window)
            self.pooled_rows.add(anywhere, here, gradients.rows)
            self._warn_of_large_rows(len(anywhere) * gradients.rows[0].nbytes)
        return gradients

    def estimate(self, window: StepWindow, scale: Scale) -> Estimate:
        """See `LossEstimator.estimate`."""
        counts, present = self._counts(window), self._present(window)
        places: Tensor | None = None
        if len(present) < len(counts):
            places = moved(torch.tensor(present), counts.device)
            divisors = counts.index_select(0, places) * scale
        else:
            divisors = counts if window.everyone else counts.clamp_min(1)
            divisors = divisors if isinstance(scale, float) and scale == 1 else divisors * scale
        rows: Tensor | None = None
        if self._gram is not None:
            inner, self._gram = self._gram / torch.outer(divisors, divisors), None
            sums = self._communication.sum(window.loss_sums)
        else:
            rows = self.pooled_rows.close()
            rows /= divisors[:, None].to(rows)
            self._mix(rows, window)
            products = self._arithmetic.move(inner_products(rows, self._arithmetic.reads_values))
            both = self._communication.sum(torch.cat([window.loss_sums, products.flatten()]))
            sums, inner = both.split([len(window.counts), len(divisors) ** 2])
            inner = inner.view(len(divisors), len(divisors))
        gram, self_products = self._merged(_spread(inner, places, len(counts)), window)
        losses = sums / window.divisors
        return Estimate(losses, gram, self_products, rows, window.present)

    def discard(self) -> None:
        """Forget the step."""
        self._gram = None
        self.pooled_rows.discard()

    def _labels(self, groups: BatchGroups, window: StepWindow) -> tuple[Tensor, Sequence[int]]:
        """What has a gradient of its own: the ids [B] of it, and which of them this micro-batch holds."""
        return groups.ids_in_groups, groups.present

    def _counts(self, window: StepWindow) -> Tensor:
        """Examples in the step, on all processes, of what has a gradient of its own."""
        return window.counts

    def _present(self, window: StepWindow) -> Sequence[int]:
        """Which of it has any, in ascending order."""
        return window.present

    def _mix(self, rows: Tensor, window: StepWindow) -> None:
        """Change the gradients [G, c] of the step before their inner products are formed."""

    def _merged(self, gram: Tensor, window: StepWindow) -> tuple[Tensor, Tensor | None]:
        """Inner products of the groups, and self-products, from those of what has a gradient of its own."""
        return gram, None

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

    def _labels(self, groups: BatchGroups, window: StepWindow) -> tuple[Tensor, Sequence[int]]:
        assert groups.numbers is not None
        rows = slice(None) if groups.rows is None else groups.rows
        ids = torch.from_numpy(groups.numbers[rows])
        halves = 2 * ids + alternating_halves(ids, window.earlier)
        of_all = np.full(len(groups.numbers), UNCOUNTED, dtype=np.int64)
        of_all[rows] = halves.numpy()
        return with_stand_ins(torch.from_numpy(of_all)), np.unique(halves.numpy()).tolist()

    def _counts(self, window: StepWindow) -> Tensor:
        return _half_sizes(window.counts).flatten()

    def _present(self, window: StepWindow) -> Sequence[int]:
        assert window.counts_on_host is not None
        return np.flatnonzero(_half_sizes(window.counts_on_host).flatten().numpy()).tolist()

    def _merged(self, gram: Tensor, window: StepWindow) -> tuple[Tensor, Tensor | None]:
        sizes = _half_sizes(window.counts)
        present = moved(torch.tensor(window.present), gram.device)
        by_half = gram.view(*sizes.shape, *sizes.shape).index_select(0, present).index_select(2, present)
        merged, products = merge_halves(by_half, sizes.index_select(0, present))
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

    def accept(self, estimate: Estimate, moves: Tensor | None = None) -> Tensor:
        """See `LossEstimator.accept`; the averages take the step in."""
        assert estimate.rows is not None
        size = self.pooled_rows.row_size
        return self.averages.update(estimate.losses, estimate.rows, estimate.present, size, moves)

    def _mix(self, rows: Tensor, window: StepWindow) -> None:
        self.averages.mix_into(rows, window.present)


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


def _half_sizes(counts: Tensor) -> Tensor:
    """Examples of each half [K, 2] of the groups' examples in the step, [K]: they take turns."""
    second = (counts / 2).floor()
    return torch.stack([counts - second, second], dim=1)


def _spread(inner: Tensor, places: Tensor | None, size: int) -> Tensor:
    """Inner products [G, G] at their places in a matrix [size, size] of zeros; None for all places."""
    if places is None:
        return inner
    whole = inner.new_zeros(size, size)
    whole[places[:, None], places[None, :]] = inner
    return whole
