"""The step of group-robust training for any loop: per-example losses in, one scalar out, weights moved on the way."""

import copy
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.arithmetic import HOST, DeviceArithmetic
from hf_cgd.data.groups import GroupInfo
from hf_cgd.distributed.communication import Communication
from hf_cgd.functional import group_counts_of, merge_halves, require_nonnegative
from hf_cgd.gradients import (
    GradientEngine,
    GroupGradients,
    PerGroupEngine,
    TensorHookEngine,
    gram_matrix,
    gram_on_device,
)
from hf_cgd.monitors import GroupRobustWarning, PenaltyMonitor, WeightMonitor
from hf_cgd.objectives import GroupBatch, GroupStatistics, Objective
from hf_cgd.objectives.base import require_one_of
from hf_cgd.robust_loss.interactions import MAX_GROUPS, GroupInteractions
from hf_cgd.robust_loss.late_checks import LateChecks
from hf_cgd.robust_loss.pooling import PooledRows

logger = logging.getLogger(__name__)

WEIGHT_TIMINGS = ("current", "next")
NONFINITE = ("skip", "raise")
LARGE_ROWS = 4 * 2**30
"""Bytes of pooled group gradients beyond which a warning tells of sketches."""


class GroupRobustLoss:
    """Turns the per-example losses of a batch into the scalar of an objective, and owns the group weights.

    The weights move once per optimizer step and, under `weight_timing="current"`, before the scalar is formed
    (Algorithm 1 of the paper uses alpha^{t+1} for theta^{t+1}).

        robust_loss = GroupRobustLoss(CGD(step_size=0.1), GroupInfo(["land", "water"], [900, 100]),
                                      gradient_scope(model).values())
        loss = robust_loss(F.cross_entropy(model(x), y, reduction="none"), group_ids)
        loss.backward()

    Args:
        objective: how losses are weighed.
        groups: the K groups, with training counts where the objective needs them.
        parameters: the gradient scope; needed by objectives with `needs_gradients`, ignored by others.
        weight_timing: "current": the statistics of a step set the weights of that very step. "next": those of the
            following one, which is what accumulation over several micro-batches needs.
        engine: takes the group gradients; None for `PerGroupEngine(parameters)`. A `TensorHookEngine` takes them in
            the scalar's backward pass, so that `after_backward()` has to follow it and `weight_timing` is "next".
        communication: sums over the processes; None for a single one. The scalar makes up for DDP's division by their
            number.
        loss_scale: tells the factor that a `GradScaler` will give the scalar (`scaler.get_scale`), so that group
            gradients are taken under it as well, and small ones survive float16; None for none.
        nonfinite: what to do where the loss or gradient of a group is not finite: "skip" leaves the weights as they
            are, warns once and counts in `skipped_updates`; "raise" raises a FloatingPointError.
        keep_on: a device on which weights and statistics stay, in float32, in steps whose shapes depend on no value:
            for XLA, which compiles a step once and runs it without a wait (an `AutoEngine` needs `static`). Warnings,
            errors about losses and the counters then come with `drain_group_losses` or `state_dict`, which do wait.
            None: statistics go to the CPU, where the weights are formed in float64.

    Raises:
        ValueError: an objective that needs gradients without parameters, or one that needs counts without them, or
            larger groups; with `keep_on`, options whose shapes depend on values.
    """

    def __init__(
        self,
        objective: Objective,
        groups: GroupInfo,
        parameters: Sequence[nn.Parameter] = (),
        *,
        weight_timing: str = "current",
        engine: GradientEngine | None = None,
        communication: Communication | None = None,
        loss_scale: Callable[[], float] | None = None,
        nonfinite: str = "skip",
        keep_on: torch.device | None = None,
    ) -> None:
        require_one_of("nonfinite", nonfinite, NONFINITE)
        if weight_timing not in WEIGHT_TIMINGS:
            raise ValueError(f"weight_timing must be one of {WEIGHT_TIMINGS}, got {weight_timing!r}.")
        parameters = list(parameters)
        if objective.needs_gradients and not parameters:
            raise ValueError(
                f"{type(objective).__name__} compares gradients of the groups and needs `parameters` to take them "
                "over; pass gradient_scope(model).values()."
            )
        if groups.counts is None and getattr(objective, "adjustment", 0) > 0:
            raise ValueError(
                f"adjustment > 0 needs the number of training examples of each group, but only the names "
                f"{list(groups.names)} are known. Pass groups=GroupInfo(names, counts)."
            )
        if isinstance(engine, TensorHookEngine):
            _refuse_for_tensor_hooks(objective, weight_timing)
        if keep_on is not None:
            _refuse_for_static_shapes(objective, isinstance(engine, TensorHookEngine) or loss_scale is not None)
        _require_groups_for(objective, groups)
        self._static = keep_on is not None
        self._arithmetic = HOST if keep_on is None else DeviceArithmetic(keep_on)
        self._device = keep_on or torch.device("cpu")
        self._dtype = torch.float32 if self._static else torch.float64
        self.objective = objective
        self.groups = groups
        self._group_counts = groups.counts_tensor().to(self._device, self._dtype)
        self._class_counts: Tensor | None = None
        if groups.class_counts is not None:
            self._class_counts = torch.tensor(groups.class_counts).to(self._device)
        self.weight_timing = weight_timing
        self.nonfinite = nonfinite
        self._splits = "self_products" in objective.statistics
        self._momentum: float = getattr(objective, "interaction_momentum", 0.0)
        self._communication = communication or Communication()
        self._loss_scale = loss_scale
        self._pooled_rows = PooledRows(self._communication)
        self._row_size = 0
        self._engine: GradientEngine | None = None
        if objective.needs_gradients:
            self._engine = engine or PerGroupEngine(parameters)
        self.reset()

    def reset(self) -> None:
        """Start afresh: first weights, no updates."""
        self.alpha: Tensor | None = None
        """Group weights [K] in float64 on the CPU (see `keep_on`), None for an objective without weights."""
        if self.objective.has_weights:
            self.alpha = self.objective.initial_weights(self.groups.counts_tensor()).to(self._device, self._dtype)
        self.steps = 0
        """Optimizer steps so far."""
        self.updates = 0
        """Weight updates so far."""
        self.skipped_updates = 0
        """Weight updates left out because a loss or gradient was not finite."""
        keeps_interactions = self.objective.needs_gradients and len(self.groups) <= MAX_GROUPS
        self.interactions: GroupInteractions | None = None
        """Mean cosines between the groups' gradients so far; None without gradients, and for many groups."""
        if keeps_interactions:
            self.interactions = GroupInteractions(len(self.groups), self._device, self._dtype)
        self._average_rows: dict[int, Tensor] = {}
        """Running averages of the groups present so far: of each, this process's columns."""
        self._average_losses = torch.zeros(len(self.groups), dtype=torch.float64)
        self._warned_nonfinite = self._warned_large = False
        self._watching: tuple[Tensor, Tensor] | None = None
        self._monitor = WeightMonitor(self.groups.names)
        self._penalty_monitor = PenaltyMonitor(self.objective.name)
        self._late_checks = LateChecks(len(self.groups), self._device) if self._static else None
        self._logged_sums = self._no_sums()
        self._before: tuple[Tensor, dict[int, Tensor], Tensor, GroupInteractions | None] | None = None
        self._close_window()

    def open_window(self, group_ids: Sequence[Tensor]) -> None:
        """Announce the group ids [B] of all micro-batches of the coming optimizer step (on this process).

        Group means are means over the whole step, so each micro-batch has to know the counts of all. Without a call a
        step is the one batch that `__call__` is given.

        Raises:
            ValueError: several micro-batches under `weight_timing="current"`, where the weights would have to be
                known before the statistics are.
        """
        if len(group_ids) > 1 and self.weight_timing == "current" and self.objective.has_weights:
            raise ValueError(
                f"weight_timing='current' needs the whole optimizer step in one batch, got {len(group_ids)} "
                "micro-batches. Use weight_timing='next', or no gradient accumulation."
            )
        counts = torch.as_tensor(sum(group_counts_of(ids.to(self._device), len(self.groups)) for ids in group_ids)).to(
            self._dtype
        )
        if self._splits:
            by_process = counts.new_zeros(self._communication.num_processes, len(counts))
            by_process[self._communication.rank] = counts
            by_process = self._communication.sum(by_process)
            counts = by_process.sum(dim=0)
            self._turns = by_process[: self._communication.rank].sum(dim=0).long()
        else:
            counts = self._communication.sum(counts)
        self._counts: Tensor | None = counts
        self._micro_batches = self._remaining = len(group_ids)

    def __call__(
        self,
        losses: Tensor,
        group_ids: Tensor,
        *,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """The scalar to call `backward()` on, for one micro-batch.

        Args:
            losses: [B] with graph.
            group_ids: [B] integers in [0, K).
            logits: [B, ...] what `losses` were computed from, with graph; for PGI and IRM.
            labels: [B] classes; for PGI.
            features: [B, D] input of the classification head, with graph; for CORAL.

        Returns:
            the scalar; averaged over the micro-batches and processes of a step it is the loss of the step. The
            multiplication that makes up for that averaging is done here.

        Raises:
            ValueError: something that the objective needs is missing.
        """
        given = {"logits": logits, "labels": labels, "features": features}
        missing = [name for name in self.objective.reads if name in given and given[name] is None]
        if missing:
            raise ValueError(
                f"{type(self.objective).__name__} needs {' and '.join(missing)} of the batch besides the losses: call "
                f"robust_loss(losses, group_ids, {', '.join(f'{name}=...' for name in missing)})."
            )
        if self._remaining == 0:
            self.open_window([group_ids])
        # Statistics are no place for autocast: it would form the inner products in half precision.
        with torch.autocast(losses.device.type, enabled=False):
            losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
            if isinstance(self._engine, TensorHookEngine):
                return self._watched(self._engine, losses, group_ids)
            scale = 1.0 if self._loss_scale is None else self._loss_scale()
            gradients = self._gather(losses, group_ids, scale)
            last = self._remaining == 0
            if last and self.weight_timing == "current":
                self._move_weights(scale)
            loss = self._scalar(losses, group_ids, gradients, scale, given)
            if last and self.weight_timing == "next":
                self._move_weights(scale)
        if last:
            self.steps += 1
            self._close_window()
        return loss

    def after_backward(self) -> None:
        """To be called after each `backward()` where the engine is a `TensorHookEngine`; does nothing elsewhere.

        Pools the micro-batch's statistics and, after the last one of a step, moves the weights.
        """
        if self._watching is None:
            return
        (losses, group_ids), self._watching = self._watching, None
        self._gather(losses, group_ids, 1.0)
        if self._remaining == 0:
            self._move_weights(1.0)
            self._close_window()

    def undo_update(self) -> None:
        """Take the last weight update back, for an optimizer step that a `GradScaler` left out after an overflow."""
        if self._before is not None:
            self.alpha, self._average_rows, self._average_losses, self.interactions = self._before
            self._before = None
            self.updates -= 1
            self.skipped_updates += 1

    def recording(self) -> AbstractContextManager[object]:
        """Goes around the forward pass of a training step; the faster gradient engines need it."""
        return nullcontext() if self._engine is None else self._engine.recording()

    def record(self, losses: Tensor, group_ids: Tensor) -> None:
        """Count losses [B] in the group losses that `drain_group_losses` tells, and do nothing else."""
        self._logged_sums += self._sums(losses, group_ids)

    def drain_group_losses(self) -> dict[str, float]:
        """Mean training loss of each group since the last call, by name; groups without examples are left out."""
        self._settle()
        sums, counts = self._communication.sum(self._logged_sums).to("cpu", torch.float64)
        self._logged_sums = self._no_sums()
        return {
            name: (total / count).item()
            for name, total, count in zip(self.groups.names, sums, counts, strict=True)
            if count > 0
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, JSON-ready and exact: names, weights, counters.

        Statistics are pooled from the first micro-batch of a step to its last and used up then, so between steps there
        are none to save.

        Raises:
            RuntimeError: called in the middle of an optimizer step.
        """
        if self._remaining:
            raise RuntimeError("The state can only be saved between optimizer steps, not in the middle of one.")
        self._settle()
        return {
            "objective": self.objective.name,
            "groups": self.groups.to_dict(),
            "alpha": None if self.alpha is None else self.alpha.tolist(),
            "steps": self.steps,
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
            "average_losses": self._average_losses.tolist(),
            "interactions": None if self.interactions is None else self.interactions.state_dict(),
        }

    def state_tensors(self) -> dict[str, Tensor]:
        """The large part of the state, by name: running averages of the groups' gradients; {} without momentum.

        Whole on every process, whatever their number; all of them have to call.
        """
        return {
            f"average_gradient.{self.groups.names[group]}": self._pooled_rows.whole_row(row, self._row_size).cpu()
            for group, row in self._average_rows.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Inverse of `state_dict` (and of `state_tensors`); groups are matched by name, in any order.

        Raises:
            ValueError: other groups or another objective than those of the saved run.
        """
        names = list(state["groups"]["names"])
        if set(names) != set(self.groups.names):
            raise ValueError(
                f"The checkpoint was trained with the groups {names}, but the training data has "
                f"{list(self.groups.names)}. Resume with the same groups, or start a new run from the saved model."
            )
        if state["objective"] != self.objective.name:
            raise ValueError(
                f"The checkpoint was trained with objective={state['objective']!r}, but this run has "
                f"{self.objective.name!r}. Resume with the same objective, or start a new run from the saved model."
            )
        self.reset()
        order = [names.index(name) for name in self.groups.names]
        if self.interactions is not None and state["interactions"] is not None:
            self.interactions.load_state_dict(state["interactions"], order)
        if self.alpha is not None:
            self.alpha = torch.tensor(state["alpha"], dtype=torch.float64)[order].to(self._device, self._dtype)
            self._average_losses = torch.tensor(state["average_losses"], dtype=torch.float64)[order]
        for place, name in enumerate(self.groups.names):
            if f"average_gradient.{name}" in (tensors or {}):
                assert tensors is not None and self._engine is not None
                row = tensors[f"average_gradient.{name}"]
                self._row_size = len(row)
                self._average_rows[place] = self._pooled_rows.own_columns(row).to(self._engine.parameters[0].device)
        self.steps = state["steps"]
        self.updates = state["updates"]
        self.skipped_updates = state["skipped_updates"]

    def _close_window(self) -> None:
        self._counts = None
        self._micro_batches = self._remaining = 0
        self._pooled_losses = torch.zeros(len(self.groups), dtype=self._dtype, device=self._device)
        self._pooled_rows.discard()
        self._gram: Tensor | None = None
        self._watching = None

    def _watched(self, engine: TensorHookEngine, losses: Tensor, group_ids: Tensor) -> Tensor:
        if self._watching is not None:
            raise RuntimeError("Tensor hooks give the group gradients in backward(): call after_backward() behind it.")
        loss = self._scalar(losses, group_ids, None, 1.0, {})
        engine.watch(losses)
        self._watching = (losses.detach(), group_ids)
        return loss

    def _scalar(
        self,
        losses: Tensor,
        group_ids: Tensor,
        gradients: GroupGradients | None,
        scale: float,
        given: Mapping[str, Tensor | None],
    ) -> Tensor:
        assert self._counts is not None
        counts = self._counts.to(losses.device)
        alpha = None if self.alpha is None else self.alpha.to(losses.device)
        needed: dict[str, Any] = {name: given[name] for name in self.objective.reads if name in given}
        if needed:
            group_ids = group_ids.to(losses.device)
            needed |= {"communication": self._communication, "step": self.steps}
        if "class_counts" in self.objective.reads:
            assert self._class_counts is not None
            needed["class_counts"] = self._class_counts.to(losses.device)
        output = self.objective.loss(
            GroupBatch(losses, group_ids, counts, alpha, **needed, arithmetic=self._arithmetic)
        )
        # Makes up for the division by the number of micro-batches (Trainer) and of processes (DDP).
        processes = self._communication.num_processes
        loss = output.loss * (self._micro_batches * processes)
        if self.objective.expects_penalty(self.steps, len(self.groups)):
            self._penalty_monitor.observe(output.penalty is not None)
        if output.penalty is not None:
            # Its value is the same on all processes, its gradients are to be summed over them.
            loss = loss + output.penalty + (processes - 1) * (output.penalty - output.penalty.detach())
        if gradients is None:
            return loss
        (coefficients,) = torch.autograd.grad(loss, losses, retain_graph=True)
        if scale == 1:
            return gradients.scalar(loss, coefficients)
        # The gradients at hand are those of the scaled losses; a power of two changes no digit of the value.
        return gradients.scalar(loss * scale, coefficients) / scale

    def _gather(self, losses: Tensor, group_ids: Tensor, scale: float) -> GroupGradients | None:
        """Pool this micro-batch's statistics; its group gradients times `scale`, where the objective needs any."""
        assert self._counts is not None
        sums = self._sums(losses, group_ids)
        self._logged_sums += sums
        self._pooled_losses += sums[0]
        self._remaining -= 1
        if self._engine is None:
            return None
        if self._static:
            present_here = list(range(len(self.groups)))
        elif self._splits:
            group_ids = self._halves_of(group_ids)
            present_here = group_ids.unique().tolist()
        else:
            present_here = sums[1].nonzero().flatten().tolist()
        scaled = losses if scale == 1 else losses * scale
        gradients = self._engine.group_gradients(scaled, group_ids, present_here)
        alone = self._micro_batches == 1 and self._communication.num_processes == 1
        if alone and self._momentum == 0:
            self._gram = gram_on_device(gradients.rows).to(self._dtype) if self._static else gradients.gram()
        else:
            present = present_here if self._static else self._parts().nonzero().flatten().tolist()
            self._row_size = gradients.rows.shape[1]
            self._pooled_rows.add(present, present_here, gradients.rows)
            self._warn_of_large_rows(len(present) * gradients.rows[0].nbytes)
        return gradients

    def _halves_of(self, group_ids: Tensor) -> Tensor:
        """Twice the group [B], and 1 more for every second example of a group in the step."""
        ids = group_ids.cpu()
        members = torch.nn.functional.one_hot(ids.unique(return_inverse=True)[1])
        turns = (members.cumsum(dim=0) * members).sum(dim=1) - 1 + self._turns[ids]
        self._turns = self._turns + group_counts_of(ids, len(self.groups))
        return (2 * ids + turns % 2).to(group_ids.device)

    def _parts(self) -> Tensor:
        """Examples in the step, on all processes, of what has a gradient of its own: groups [K], or halves [2 K]."""
        assert self._counts is not None
        return self._half_counts().flatten() if self._splits else self._counts

    def _half_counts(self) -> Tensor:
        """Examples of each half [K, 2] in the step, on all processes: they take turns."""
        assert self._counts is not None
        second = (self._counts / 2).floor()
        return torch.stack([self._counts - second, second], dim=1)

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

    def _move_weights(self, scale: float) -> None:
        if self.alpha is None:
            return
        assert self._counts is not None
        if self._late_checks is not None:
            self._move_on_device(self.alpha, self._counts, self._late_checks)
            return
        counts, parts = self._counts, self._parts()
        present = counts.nonzero().flatten()
        totals, rows, inner = self._pooled(present.tolist(), parts[parts > 0], scale)
        within: Tensor | None = None
        if inner is not None and self._splits:
            inner, within = _merged(inner, self._half_counts()[present])
        losses = totals / counts.clamp_min(1)
        losses_finite = losses.isfinite()
        finite = losses_finite.clone()
        if inner is not None:
            finite[present] &= inner.diagonal().isfinite()
        if not bool(finite.all()):
            self._skip(finite, expected=scale != 1 and bool(losses_finite.all()))
            return
        if self._loss_scale is not None:
            interactions = copy.deepcopy(self.interactions)
            self._before = (self.alpha, dict(self._average_rows), self._average_losses, interactions)
        if rows is not None and self._momentum > 0:
            losses = self._averaged(losses, rows, present)
        gram: Tensor | None = None
        if inner is not None:
            gram = torch.zeros(len(counts), len(counts), dtype=torch.float64)
            gram[present[:, None], present[None, :]] = inner
            if self.interactions is not None:
                self.interactions.observe(gram, counts > 0)
        products: Tensor | None = None
        if within is not None:
            products = torch.zeros_like(counts).index_copy(0, present, within)
        statistics = GroupStatistics(losses, counts, self._group_counts, gram, self.groups.names, products)
        self.alpha = self.objective.next_weights(self.alpha, statistics)
        self.updates += 1
        self._monitor.observe(self.alpha, self.updates)

    def _move_on_device(self, alpha: Tensor, counts: Tensor, late_checks: LateChecks) -> None:
        """`_move_weights` without a look at any value: all groups take part, numbers tell which have examples."""
        totals, _, gram = self._pooled(range(len(counts)), counts.clamp_min(1), 1.0)
        losses = totals / counts.clamp_min(1)
        bad = ~losses.isfinite()
        if gram is not None:
            # A loss that is not finite spoils the gradients of all groups.
            bad = torch.where(bad.any(), bad, ~gram.diagonal().isfinite())
        statistics = GroupStatistics(
            losses, counts, self._group_counts, gram, self.groups.names, arithmetic=self._arithmetic
        )
        weights = self.objective.next_weights(alpha, statistics)
        moves = weights.isfinite().all() & ~bad.any()
        if gram is not None and self.interactions is not None:
            self.interactions.observe(gram, (counts > 0) & moves)
        self.alpha = torch.where(moves, weights, alpha)
        self.updates += 1
        late_checks.note(moves, bad, losses, self.alpha)

    def _settle(self) -> None:
        """Read what `_move_on_device` has left to be looked at, and do what is to be done about it."""
        if self._late_checks is None or self.alpha is None:
            return
        found = self._late_checks.read()
        self.updates -= found.skipped
        self.skipped_updates += found.skipped
        if self.objective.refuses_negative_losses:
            require_nonnegative(found.lowest, self.groups.names)
        if found.skipped:
            step = self.updates + self.skipped_updates
            self._report_nonfinite(f"In {found.skipped} optimizer step(s) up to number {step}", found.bad)
        first = self.updates - len(found.weights) + 1
        for place, weights in enumerate(found.weights):
            self._monitor.observe(weights, first + place)

    def _pooled(
        self, groups: Sequence[int], counts: Tensor, scale: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Statistics over all micro-batches and processes.

        Args:
            groups: those that have examples.
            counts: [G] how many, or those of each half of a group where groups are split.
            scale: that of the gradients.

        Returns:
            sums of the losses [K]; gradients of the group mean losses (this process's columns, [G, c]), averaged with
            the running ones under momentum, None where the inner products came without; inner products [G, G], None
            for an objective without gradients.
        """
        divisors = counts * scale
        rows: Tensor | None = None
        inner: Tensor | None = None
        if self._gram is not None:
            inner = self._gram / (divisors[:, None] * divisors[None, :])
        elif self._engine is not None:
            rows = self._pooled_rows.close()
            rows /= divisors[:, None].to(rows)
            for place, group in enumerate(groups):
                if group in self._average_rows:
                    rows[place].mul_(1 - self._momentum).add_(self._average_rows[group], alpha=self._momentum)
            inner = gram_on_device(rows).to(self._dtype) if self._static else gram_matrix(rows)
        if self._gram is not None or inner is None:
            return self._communication.sum(self._pooled_losses), rows, inner
        both = self._communication.sum(torch.cat([self._pooled_losses, inner.flatten()]))
        losses, inner = both.split([len(self.groups), inner.numel()])
        return losses, rows, inner.view(len(divisors), len(divisors))

    def _averaged(self, losses: Tensor, rows: Tensor, present: Tensor) -> Tensor:
        """Keeps the averages: rows [G, c] that are averaged already, and those of the losses [K], which it returns."""
        losses, kept = losses.clone(), self._momentum
        self._average_losses = self._average_losses.clone()
        for place, group in enumerate(present.tolist()):
            if group in self._average_rows:
                losses[group] = kept * self._average_losses[group] + (1 - kept) * losses[group]
            self._average_rows[group] = rows[place].clone()
            self._average_losses[group] = losses[group]
        return losses

    def _skip(self, finite: Tensor, expected: bool) -> None:
        """Leave the weights as they are; `expected` for an overflow by which a `GradScaler` finds its scale."""
        self.skipped_updates += 1
        self._before = None
        step = self.updates + self.skipped_updates
        if expected:
            bad = self._names_of(~finite)
            logger.info("Optimizer step %d: gradients of the group(s) %s overflow under the loss scale", step, bad)
            return
        self._report_nonfinite(f"In optimizer step {step}", ~finite)

    def _names_of(self, chosen: Tensor) -> list[str]:
        return [name for name, yes in zip(self.groups.names, chosen.tolist(), strict=True) if yes]

    def _report_nonfinite(self, where: str, bad: Tensor) -> None:
        problem = f"{where} the loss or gradient of the group(s) {self._names_of(bad)} is not finite (NaN or inf)."
        advice = "Look for a learning rate that is too high, or for bad input in these groups."
        if self.nonfinite == "raise":
            raise FloatingPointError(f"{problem} {advice}")
        if not self._warned_nonfinite:
            self._warned_nonfinite = True
            warnings.warn(
                f"{problem} The group weights stay as they are for such steps. {advice}",
                GroupRobustWarning,
                stacklevel=2,
            )

    def _sums(self, losses: Tensor, group_ids: Tensor) -> Tensor:
        """Sums of the losses and counts of each group on this process: [2, K], float64 on the CPU (see `keep_on`)."""
        values = losses.detach().to(self._device, self._dtype)
        both = torch.stack([values, torch.ones_like(values)])
        return both.new_zeros(2, len(self.groups)).index_add(1, group_ids.to(self._device), both)

    def _no_sums(self) -> Tensor:
        # Made elsewhere and moved: constants would make another graph of the step after a reading.
        return torch.zeros(2, len(self.groups), dtype=self._dtype).to(self._device)


def _merged(inner: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_halves` of inner products [H, H] of the halves that are not empty, [G, 2] `sizes`."""
    filled = (sizes.flatten() > 0).nonzero().flatten()
    whole = inner.new_zeros(sizes.numel(), sizes.numel())
    whole[filled[:, None], filled[None, :]] = inner
    return merge_halves(whole.view(*sizes.shape, *sizes.shape), sizes)


def _refuse_for_tensor_hooks(objective: Objective, weight_timing: str) -> None:
    if weight_timing != "next":
        raise ValueError(
            "Tensor hooks give the group gradients after the backward pass, when it is too late for the weights of "
            f"the same step: expected weight_timing='next', got {weight_timing!r}."
        )
    if "self_products" in objective.statistics:
        raise ValueError(
            "Tensor hooks see the gradients of whole groups only: expected self_term='one', got 'split_half'. Leave "
            "self_term unset, or train without sharding (DDP)."
        )
    if not objective.linear_in_losses:
        raise ValueError(
            f"Tensor hooks tell a group's gradient by dividing by the group's weight, but {type(objective).__name__} "
            "has a loss() of its own. Train without sharding (DDP)."
        )
    if getattr(objective, "min_weight", None) == 0:
        raise ValueError(
            "min_weight=0 lets a group's weight vanish, and with it the gradient that tensor hooks see. Expected "
            "min_weight > 0, or None for the default."
        )


def _refuse_for_static_shapes(objective: Objective, hooks_or_scaler: bool) -> None:
    reasons = {
        "tensor hooks or a GradScaler": hooks_or_scaler,
        "self_term='split_half'": "self_products" in objective.statistics,
        "interaction_momentum > 0": getattr(objective, "interaction_momentum", 0.0) > 0,
    }
    for name in [name for name, holds in reasons.items() if holds]:
        raise ValueError(
            f"{name} cannot be had on XLA devices: its shapes depend on which groups a batch holds, and each would be "
            "compiled anew. Leave the option unset, or train on another device."
        )


def _require_groups_for(objective: Objective, groups: GroupInfo) -> None:
    """Raise a ValueError unless the groups are large enough for the objective and have the counts it needs."""
    if "class_counts" in objective.reads and groups.class_counts is None:
        raise ValueError(
            f"{type(objective).__name__} needs the number of training examples of each class in each group, which is "
            "not known. Pass groups=GroupInfo(names, counts, class_counts=...) with one row of K numbers per class."
        )
    small = [n for n, c in zip(groups.names, groups.counts or (), strict=False) if c < objective.min_group_size]
    if small and len(groups) > 1:
        raise ValueError(
            f"{type(objective).__name__} needs at least {objective.min_group_size} training examples in each group, "
            f"but these have fewer: {', '.join(small[:20])}. Merge or drop small groups."
        )
