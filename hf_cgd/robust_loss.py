"""The step of group-robust training for any loop: per-example losses in, one scalar out, weights moved on the way."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.functional import group_counts_of
from hf_cgd.gradients import AutoEngine, GroupGradients, PerGroupEngine, gram_matrix
from hf_cgd.groups import GroupInfo
from hf_cgd.guard_rails import GroupRobustWarning, PenaltyMonitor, WeightMonitor
from hf_cgd.objectives import GroupBatch, GroupStatistics, Objective
from hf_cgd.objectives.penalty import PenaltyObjective
from hf_cgd.processes import Processes

WEIGHT_TIMINGS = ("current", "next")
GradientEngine = PerGroupEngine | AutoEngine


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
        engine: takes the group gradients; None for `PerGroupEngine(parameters)`.
        reduce: sums a tensor over all processes; None for a single process.
        num_processes: by which DDP divides the gradient; the scalar is multiplied by it.
        process_index: rank of this process among them; needed by PGI and IRM where there are several.

    Raises:
        ValueError: an objective that needs gradients without parameters, or one that needs counts without them, or
            larger groups.
    """

    def __init__(
        self,
        objective: Objective,
        groups: GroupInfo,
        parameters: Sequence[nn.Parameter] = (),
        *,
        weight_timing: str = "current",
        engine: GradientEngine | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
        num_processes: int = 1,
        process_index: int | None = None,
    ) -> None:
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
        _require_groups_for(objective, groups)
        self.objective = objective
        self.groups = groups
        self._class_counts = None if groups.class_counts is None else torch.tensor(groups.class_counts)
        self.weight_timing = weight_timing
        self.num_processes = num_processes
        self._momentum: float = getattr(objective, "interaction_momentum", 0.0)
        self._reduce = reduce or (lambda tensor: tensor)
        self._processes = Processes(self._reduce, num_processes, process_index)
        self._engine: GradientEngine | None = None
        if objective.needs_gradients:
            self._engine = engine or PerGroupEngine(parameters)
        self.reset()

    def reset(self) -> None:
        """Start afresh: first weights, no updates."""
        counts = self.groups.counts_tensor()
        self.alpha: Tensor | None = self.objective.initial_weights(counts) if self.objective.has_weights else None
        """Group weights [K] in float64 on the CPU, None for an objective without weights."""
        self.steps = 0
        """Optimizer steps so far."""
        self.updates = 0
        """Weight updates so far."""
        self.skipped_updates = 0
        """Weight updates left out because a loss or gradient was not finite."""
        self._average_rows: dict[int, Tensor] = {}
        self._average_losses = torch.zeros(len(self.groups), dtype=torch.float64)
        self._monitor = WeightMonitor(self.groups.names)
        self._penalty_monitor = PenaltyMonitor(self.objective.name)
        self._logged_sums = torch.zeros(2, len(self.groups), dtype=torch.float64)
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
        counts = sum(group_counts_of(ids.cpu(), len(self.groups)) for ids in group_ids)
        self._counts: Tensor | None = self._reduce(torch.as_tensor(counts, dtype=torch.float64))
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
        missing = [name for name in self.objective.needs if name in given and given[name] is None]
        if missing:
            raise ValueError(
                f"{type(self.objective).__name__} needs {' and '.join(missing)} of the batch besides the losses: call "
                f"robust_loss(losses, group_ids, {', '.join(f'{name}=...' for name in missing)})."
            )
        if self._remaining == 0:
            self.open_window([group_ids])
        gradients = self._gather(losses, group_ids)
        last = self._remaining == 0
        if last and self.weight_timing == "current":
            self._move_weights()
        loss = self._scalar(losses, group_ids, gradients, given)
        if last and self.weight_timing == "next":
            self._move_weights()
        if last:
            self.steps += 1
            self._close_window()
        return loss

    def recording(self) -> AbstractContextManager[object]:
        """Goes around the forward pass of a training step; the faster gradient engines need it."""
        return nullcontext() if self._engine is None else self._engine.recording()

    def record(self, losses: Tensor, group_ids: Tensor) -> None:
        """Count losses [B] in the group losses that `drain_group_losses` tells, and do nothing else."""
        self._logged_sums += self._sums(losses, group_ids)

    def drain_group_losses(self) -> dict[str, float]:
        """Mean training loss of each group since the last call, by name; groups without examples are left out."""
        sums, counts = self._reduce(self._logged_sums)
        self._logged_sums = torch.zeros_like(self._logged_sums)
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
        return {
            "objective": self.objective.name,
            "groups": self.groups.to_dict(),
            "alpha": None if self.alpha is None else self.alpha.tolist(),
            "steps": self.steps,
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
            "average_losses": self._average_losses.tolist(),
        }

    def state_tensors(self) -> dict[str, Tensor]:
        """The large part of the state, by name: running averages of the groups' gradients; {} without momentum."""
        names = self.groups.names
        return {f"average_gradient.{names[group]}": row.cpu() for group, row in self._average_rows.items()}

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
        if self.alpha is not None:
            order = [names.index(name) for name in self.groups.names]
            self.alpha = torch.tensor(state["alpha"], dtype=torch.float64)[order]
            self._average_losses = torch.tensor(state["average_losses"], dtype=torch.float64)[order]
        for place, name in enumerate(self.groups.names):
            if f"average_gradient.{name}" in (tensors or {}):
                assert tensors is not None and self._engine is not None
                device = self._engine.parameters[0].device
                self._average_rows[place] = tensors[f"average_gradient.{name}"].to(device)
        self.steps = state["steps"]
        self.updates = state["updates"]
        self.skipped_updates = state["skipped_updates"]

    def _close_window(self) -> None:
        self._counts = None
        self._micro_batches = self._remaining = 0
        self._pooled_losses = torch.zeros(len(self.groups), dtype=torch.float64)
        self._pooled_gradients: dict[int, Tensor] = {}
        self._gram: Tensor | None = None

    def _scalar(
        self,
        losses: Tensor,
        group_ids: Tensor,
        gradients: GroupGradients | None,
        given: Mapping[str, Tensor | None],
    ) -> Tensor:
        assert self._counts is not None
        counts = self._counts.to(losses.device)
        alpha = None if self.alpha is None else self.alpha.to(losses.device)
        needed: dict[str, Any] = {name: given[name] for name in self.objective.needs if name in given}
        if needed:
            group_ids = group_ids.to(losses.device)
            needed |= {"processes": self._processes, "step": self.steps}
        if "class_counts" in self.objective.needs:
            assert self._class_counts is not None
            needed["class_counts"] = self._class_counts.to(losses.device)
        output = self.objective.loss(GroupBatch(losses, group_ids, counts, alpha, **needed))
        # Makes up for the division by the number of micro-batches (Trainer) and of processes (DDP).
        loss = output.loss * (self._micro_batches * self.num_processes)
        if isinstance(self.objective, PenaltyObjective) and self.objective.is_active(self.steps, len(self.groups)):
            self._penalty_monitor.observe(output.penalty is not None)
        if output.penalty is not None:
            # Its value is the same on all processes, its gradients are to be summed over them.
            others = self.num_processes - 1
            loss = loss + output.penalty + others * (output.penalty - output.penalty.detach())
        if gradients is None:
            return loss
        (coefficients,) = torch.autograd.grad(loss, losses, retain_graph=True)
        return gradients.scalar(loss, coefficients)

    def _gather(self, losses: Tensor, group_ids: Tensor) -> GroupGradients | None:
        """Pool this micro-batch's statistics; its group gradients, where the objective needs any."""
        sums = self._sums(losses, group_ids)
        self._logged_sums += sums
        self._pooled_losses += sums[0]
        self._remaining -= 1
        if self._engine is None:
            return None
        present_here = sums[1].nonzero().flatten().tolist()
        alone = self._micro_batches == 1 and self.num_processes == 1
        need_rows = not alone or self._momentum > 0
        gradients = self._engine.group_gradients(losses, group_ids, present_here, need_rows)
        if not need_rows:
            self._gram = gradients.gram()
        else:
            for group, row in zip(present_here, gradients.rows, strict=True):
                pooled = self._pooled_gradients.get(group)
                self._pooled_gradients[group] = row if pooled is None else pooled + row
        return gradients

    def _move_weights(self) -> None:
        if self.alpha is None:
            return
        assert self._counts is not None
        counts = self._counts
        present = counts.nonzero().flatten()
        losses = self._reduce(self._pooled_losses) / counts.clamp_min(1)
        rows: Tensor | None = None
        inner: Tensor | None = None
        if self._gram is not None:
            inner = self._gram / (counts[present, None] * counts[None, present])
        elif self._engine is not None:
            rows = self._pooled_rows(present)
            rows /= counts[present, None].to(rows)
            inner = gram_matrix(rows)
        finite = losses.isfinite()
        if inner is not None:
            finite[present] &= inner.diagonal().isfinite()
        if not bool(finite.all()):
            self._skip(finite)
            return
        if rows is not None and self._momentum > 0:
            losses, rows = self._averaged(losses, rows, present)
            inner = gram_matrix(rows)
        gram: Tensor | None = None
        if inner is not None:
            gram = torch.zeros(len(counts), len(counts), dtype=torch.float64)
            gram[present[:, None], present[None, :]] = inner
        statistics = GroupStatistics(losses, counts, self.groups.counts_tensor(), gram, self.groups.names)
        self.alpha = self.objective.next_weights(self.alpha, statistics)
        self.updates += 1
        self._monitor.observe(self.alpha, self.updates)

    def _pooled_rows(self, present: Tensor) -> Tensor:
        """Gradient sums of the present groups over all micro-batches and processes, [G, P]."""
        zero = torch.zeros_like(next(iter(self._pooled_gradients.values())))
        rows = torch.stack([self._pooled_gradients.get(group, zero) for group in present.tolist()])
        self._pooled_gradients = {}
        return self._reduce(rows)

    def _averaged(self, losses: Tensor, rows: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Running averages of the losses [K] and of the gradients [G, P] of the present groups."""
        losses, kept = losses.clone(), self._momentum
        for place, group in enumerate(present.tolist()):
            old = self._average_rows.get(group)
            if old is not None:
                rows[place] = kept * old + (1 - kept) * rows[place]
                losses[group] = kept * self._average_losses[group] + (1 - kept) * losses[group]
            self._average_rows[group] = rows[place].clone()
            self._average_losses[group] = losses[group]
        return losses, rows

    def _skip(self, finite: Tensor) -> None:
        self.skipped_updates += 1
        if self.skipped_updates == 1:
            bad = [name for name, ok in zip(self.groups.names, finite.tolist(), strict=True) if not ok]
            warnings.warn(
                f"After {self.updates} weight updates the loss or gradient of the group(s) {bad} is not finite "
                "(NaN or infinite). The group weights stay as they are for such steps. Look for a learning rate that "
                "is too high, or for bad input in these groups.",
                GroupRobustWarning,
                stacklevel=2,
            )

    def _sums(self, losses: Tensor, group_ids: Tensor) -> Tensor:
        """Sums of the losses and counts of each group on this process: float64 [2, K] on the CPU."""
        group_ids = group_ids.cpu()
        values = losses.detach().to("cpu", torch.float64)
        both = torch.stack([values, torch.ones_like(values)])
        return torch.zeros(2, len(self.groups), dtype=torch.float64).index_add(1, group_ids, both)


def _require_groups_for(objective: Objective, groups: GroupInfo) -> None:
    """Raise a ValueError unless the groups are large enough for the objective and have the counts it needs."""
    if "class_counts" in objective.needs and groups.class_counts is None:
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
