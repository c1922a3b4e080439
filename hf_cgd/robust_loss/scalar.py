"""The scalar of a micro-batch, on which `backward()` is called."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic, moved
from hf_cgd.data.groups import GroupInfo
from hf_cgd.distributed.communication import Communication
from hf_cgd.gradients import GroupGradients
from hf_cgd.monitors import PenaltyMonitor
from hf_cgd.objectives import GroupBatch, Objective
from hf_cgd.robust_loss.estimators import Scale
from hf_cgd.robust_loss.state import LossState
from hf_cgd.robust_loss.window import StepWindow

WeightsEnter = Literal["loss", "sampling"]
WEIGHTS_ENTER: tuple[WeightsEnter, ...] = get_args(WeightsEnter)


class StepScalar:
    """What an objective makes of a micro-batch, times what makes up for the means that are taken of it later.

    Args:
        objective: how losses are weighed.
        groups: the K groups.
        window: the step in progress.
        arithmetic, communication, weights_enter: see `GroupRobustLoss`.
    """

    def __init__(
        self,
        objective: Objective,
        groups: GroupInfo,
        window: StepWindow,
        arithmetic: Arithmetic,
        communication: Communication,
        weights_enter: WeightsEnter,
    ) -> None:
        self._objective = objective
        self._num_groups = len(groups)
        self._window = window
        self._arithmetic = arithmetic
        self._communication = communication
        self._weights_enter = weights_enter
        self._class_counts: Tensor | None = None
        if groups.class_counts is not None:
            self._class_counts = torch.tensor(groups.class_counts).to(arithmetic.device)
        self._penalty_monitor = PenaltyMonitor(objective.name)

    def __call__(self, losses: Tensor, group_ids: Tensor, given: dict[str, Any], state: LossState) -> Tensor:
        """The scalar with the ordinary graph.

        Args:
            losses: [B] with graph.
            group_ids: [B] in [0, K).
            given: what the objective reads of the batch besides, by name.
            state: weights and steps so far.
        """
        output = self._objective.loss(self._batch(losses, group_ids, given, state))
        processes = self._communication.num_processes
        loss = output.loss if self._parts == 1 else output.loss * self._parts
        if self._objective.expects_penalty(state.steps, self._num_groups):
            self._penalty_monitor.observe(output.penalty is not None)
        if output.penalty is not None:
            # Its value is the same on all processes, its gradients are to be summed over them.
            loss = loss + output.penalty + (processes - 1) * (output.penalty - output.penalty.detach())
        return loss

    def of_gradients(
        self,
        gradients: GroupGradients,
        losses: Tensor,
        group_ids: Tensor,
        given: dict[str, Any],
        state: LossState,
        scale: Scale,
    ) -> Tensor:
        """A scalar of the same value and gradient, for whose gradient the groups' are put to use.

        Args:
            gradients: of the losses times `scale`.
            scale: of a `GradScaler`.
            losses, group_ids, given, state: see `__call__`. The scalar is linear in the losses, with one coefficient
                for each group.
        """
        if self._objective.weighs_group_means and not gradients.reads_graph:
            batch = self._batch(losses.detach(), group_ids, given, state)
            factors, parts = self._objective.example_factors(batch), self._parts
            coefficients = factors if parts == 1 else factors * parts
            loss = torch.dot(coefficients, batch.losses)
        else:
            loss = self(losses, group_ids, given, state)
            (coefficients,) = torch.autograd.grad(loss, losses, retain_graph=True)
        if isinstance(scale, float) and scale == 1:
            return gradients.scalar(loss, coefficients)
        # A power of two changes no digit of the value.
        return gradients.scalar(loss * scale, coefficients) / scale

    def _batch(self, losses: Tensor, group_ids: Tensor, given: dict[str, Any], state: LossState) -> GroupBatch:
        """What the objective sees of this micro-batch."""
        counts = moved(self._window.counts, losses.device)
        alpha = None if state.alpha is None else moved(state.alpha, losses.device)
        if alpha is not None and self._weights_enter == "sampling":
            alpha = counts / counts.sum().clamp_min(1)
        group_ids = moved(group_ids, losses.device)
        if self._objective.reads:
            present = None if self._arithmetic.fixed_shapes else self._window.present
            given |= {"communication": self._communication, "step": state.steps, "present": present}
        if "class_counts" in self._objective.reads:
            assert self._class_counts is not None
            given["class_counts"] = moved(self._class_counts, losses.device)
        return GroupBatch(losses, group_ids, counts, alpha, **given, arithmetic=self._arithmetic)

    @property
    def _parts(self) -> int:
        """Makes up for the division by the number of micro-batches (Trainer) and of processes (DDP)."""
        return self._window.micro_batches * self._communication.num_processes
