"""The step of group-robust training for any loop: per-example losses in, one scalar out, weights moved on the way."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from hf_cgd.arithmetic import HOST, Arithmetic
from hf_cgd.data.groups import GroupInfo
from hf_cgd.distributed.communication import Communication
from hf_cgd.gradients import GradientEngine, GroupGradients, PerGroupEngine
from hf_cgd.monitors import NONFINITE, NonFinite
from hf_cgd.objectives import Objective
from hf_cgd.objectives.base import require_one_of
from hf_cgd.robust_loss.batch_groups import BatchGroups
from hf_cgd.robust_loss.estimators import Scale, build_estimator
from hf_cgd.robust_loss.excess import ExcessClip, excess_losses, require_reference
from hf_cgd.robust_loss.group_losses import GroupLossLog
from hf_cgd.robust_loss.interactions import GroupInteractions
from hf_cgd.robust_loss.requirements import require_losses_and_ids, require_that_all_fit
from hf_cgd.robust_loss.scalar import WEIGHTS_ENTER, StepScalar, WeightsEnter
from hf_cgd.robust_loss.state import LossState, require_same_terms
from hf_cgd.robust_loss.uncounted import chosen_rows, drop_uncounted, silence_uncounted
from hf_cgd.robust_loss.weight_update import WeightUpdate
from hf_cgd.robust_loss.window import StepWindow

WeightTiming = Literal["current", "next"]
WEIGHT_TIMINGS: tuple[WeightTiming, ...] = get_args(WeightTiming)


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
        parameters: the gradient scope, for objectives that need gradients and without an `engine`.
        weight_timing: "current": the statistics of a step set the weights of that very step. "next": those of the
            following one, which is what accumulation over several micro-batches needs.
        engine: takes the group gradients; None for `PerGroupEngine(parameters)`. With one whose `timing` is
            "after_backward", `after_backward()` has to follow the scalar's backward pass.
        communication: sums over the processes; None for a single one. The scalar makes up for DDP's division.
        loss_scale: tells the factor that a `GradScaler` will give the scalar (`scaler.get_scale`), so that group
            gradients are taken under it as well, and small ones survive float16; None for none. Under a
            `DeviceArithmetic` a tensor on the device (what `scaler.scale` makes of 1) waits for nothing.
        nonfinite: where the loss or gradient of a group is not finite: "skip" leaves the weights as they are, warns
            once and counts in `skipped_updates`; "raise" raises a FloatingPointError.
        arithmetic: where weights and statistics are kept; None for float64 on the CPU, for which a step waits for the
            device. Under a `DeviceArithmetic` it does not if group ids come on the host; warnings, errors about
            losses and the counters come with `drain_group_losses` or `state_dict`.
        excess_clip: not None: every call brings `reference_losses`, and the weights move by max(loss - reference, 0)
            in the place of the losses; "example" or "group" says what is clipped (`excess_losses`). The scalar stays
            that of the losses.
        weights_enter: "loss": the group weights are coefficients of the scalar. "sampling": whoever draws the batches
            draws the groups in proportion to the weights, and the scalar is the plain mean over the examples (the
            group means times their shares of the step), so that no weight counts twice.
        rows_of: what the rows of the gradients stand for, in words that differ where the rows do not go together; a
            checkpoint with running averages of them is refused by a run with another. "" where nobody says.

    Raises:
        ValueError: what the objective needs is missing, or options do not go together.
    """

    def __init__(
        self,
        objective: Objective,
        groups: GroupInfo,
        parameters: Sequence[nn.Parameter] = (),
        *,
        weight_timing: WeightTiming = "current",
        engine: GradientEngine | None = None,
        communication: Communication | None = None,
        loss_scale: Callable[[], Scale] | None = None,
        nonfinite: NonFinite = "skip",
        arithmetic: Arithmetic | None = None,
        excess_clip: ExcessClip | None = None,
        weights_enter: WeightsEnter = "loss",
        rows_of: str = "",
    ) -> None:
        require_one_of("nonfinite", nonfinite, NONFINITE)
        require_one_of("weights_enter", weights_enter, WEIGHTS_ENTER)
        require_one_of("weight_timing", weight_timing, WEIGHT_TIMINGS)
        parameters = list(parameters)
        self._arithmetic = arithmetic or HOST
        require_that_all_fit(
            objective, groups, parameters, engine, weight_timing, self._arithmetic, loss_scale is not None, excess_clip
        )
        self.objective = objective
        self.groups = groups
        self.weight_timing = weight_timing
        self.nonfinite = nonfinite
        self.excess_clip = excess_clip
        self.weights_enter = weights_enter
        self.rows_of = rows_of
        self._communication = communication or Communication()
        self._loss_scale = loss_scale
        self._engine: GradientEngine | None = None
        if objective.needs_gradients:
            self._engine = engine or PerGroupEngine(parameters)
        self._announced: _Batch | None = None
        """A batch whose gradients come in its backward pass."""
        self._window = StepWindow(
            len(groups), self._arithmetic, self._communication, "self_products" in objective.statistics
        )
        self.reset()

    def reset(self) -> None:
        """Start afresh: first weights, no updates."""
        self._state = LossState.at_start(self.objective, self.groups, self._arithmetic, self._communication)
        self._estimator = build_estimator(
            self.objective, self._arithmetic, self._communication, self._engine, self._state.averages
        )
        self._update = WeightUpdate(
            self.objective,
            self.groups,
            self._state,
            self._estimator,
            self._arithmetic,
            self.nonfinite,
            of_excess=self.excess_clip is not None,
            may_be_undone=self._loss_scale is not None,
        )
        self._scalar = StepScalar(
            self.objective, self.groups, self._window, self._arithmetic, self._communication, self.weights_enter
        )
        self._group_losses = GroupLossLog(self.groups.names, self._arithmetic, self._communication)
        self._group_excess = GroupLossLog(self.groups.names, self._arithmetic, self._communication)
        self.passed_over = 0
        """Steps since then that were taken by another loss."""
        self._close_window()

    # ---- What a loop reads ------------------------------------------------------------------------------------------

    @property
    def engine(self) -> GradientEngine | None:
        """What takes the group gradients; None for an objective without."""
        return self._engine

    @property
    def knows_groups(self) -> bool:
        """Whether a step knows on the host who is in which group: anywhere but under fixed shapes."""
        return not self._arithmetic.fixed_shapes

    @property
    def alpha(self) -> Tensor | None:
        """Group weights [K] in float64 on the CPU (see `arithmetic`); None for an objective without weights."""
        return self._state.alpha

    @property
    def mean_alpha(self) -> Tensor | None:
        """Mean [K] of the weights after each step so far; those of the start before any, None without weights."""
        return self._state.mean_alpha

    @property
    def interactions(self) -> GroupInteractions | None:
        """Mean cosines between the groups' gradients so far; None without gradients, and for many groups."""
        return self._state.interactions

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._state.steps

    @property
    def updates(self) -> int:
        """Weight updates so far."""
        return self._state.updates

    @property
    def skipped_updates(self) -> int:
        """Weight updates left out because a loss or gradient was not finite."""
        return self._state.skipped_updates

    # ---- A step -----------------------------------------------------------------------------------------------------

    def open_window(self, group_ids: Sequence[Tensor]) -> None:
        """Announce the group ids [B] of all micro-batches of the coming optimizer step (on this process).

        Ids on the host are best, wherever the losses are: those on a device are waited for, unless shapes are fixed.

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
        self._close_window()
        self._window.open([self._groups_of(ids) for ids in group_ids])

    def _groups_of(self, group_ids: Tensor) -> BatchGroups:
        """Those of ids [B], once for a micro-batch that was announced."""
        known = next((groups for groups in self._window.groups if groups.ids is group_ids), None)
        return known or BatchGroups(group_ids, len(self.groups), self._arithmetic)

    def recording(self) -> AbstractContextManager[object]:
        """Goes around the forward pass of a training step; the faster gradient engines need it."""
        return nullcontext() if self._engine is None else self._engine.recording()

    def __call__(
        self,
        losses: Tensor,
        group_ids: Tensor,
        *,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        features: Tensor | None = None,
        reference_losses: Tensor | None = None,
        logged_losses: Tensor | None = None,
    ) -> Tensor:
        """The scalar to call `backward()` on, for one micro-batch.

        Args:
            losses: [B] with graph.
            group_ids: [B] integers in [0, K), see `open_window`; -100 for an example that does not count, because it
                has no label.
            logits: [B, ...] what `losses` were computed from, with graph; for PGI and IRM.
            labels: [B] classes; for PGI.
            features: [B, D] input of the classification head, with graph; for CORAL.
            reference_losses: [B], under `excess_clip`.
            logged_losses: [B], what `drain_group_losses` has the means of; None for the losses themselves.

        Returns:
            the scalar; averaged over the micro-batches and processes of a step it is the loss of the step. The
            multiplication that makes up for that averaging is done here.

        Raises:
            ValueError: no loss or group for each example, or something that the objective reads is missing.
        """
        require_losses_and_ids(losses, group_ids)
        if logged_losses is not None:
            self._group_losses.add_later(logged_losses, group_ids)
        logs = logged_losses is None
        require_reference(reference_losses, losses, self.excess_clip)
        given = self._read_by_objective({"logits": logits, "labels": labels, "features": features})
        if self._announced is not None:
            raise RuntimeError("The engine gives the group gradients in backward(): call after_backward() behind it.")
        groups = self._groups_of(group_ids)
        if not self._window.is_open:
            self._close_window()
            self._window.open([groups])
        # Statistics are no place for autocast: it would form the inner products in half precision.
        with _without_autocast(losses.device.type):
            losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
            group_ids = groups.ids
            if groups.rows is not None and self._engine is None:
                losses, given = drop_uncounted(losses, given, groups.rows)
                reference_losses = None if reference_losses is None else chosen_rows(reference_losses, groups.rows)
                groups = self._groups_of(group_ids[torch.from_numpy(groups.rows)])
                group_ids = groups.ids
            elif groups.rows is not None or self._arithmetic.fixed_shapes:
                # Under fixed shapes nobody knows who counts, so every batch goes this way.
                losses = silence_uncounted(losses, group_ids, may_look=groups.rows is not None)
                group_ids = groups.ids_in_groups
            if self._engine is not None and self._engine.timing == "after_backward":
                loss = self._scalar(losses, group_ids, given, self._state)
                self._engine.watch(losses)
                self._announced = _Batch(losses.detach(), groups, reference_losses, logs)
                return loss
            scale: Scale = 1.0 if self._loss_scale is None else self._loss_scale()
            gradients = self._gather(_Batch(losses, groups, reference_losses, logs), scale)
            is_last = not self._window.is_open
            if is_last and self.weight_timing == "current":
                self._update(self._window, scale)
            if gradients is None:
                loss = self._scalar(losses, group_ids, given, self._state)
            else:
                loss = self._scalar.of_gradients(gradients, losses, group_ids, given, self._state, scale)
            if is_last and self.weight_timing == "next":
                self._update(self._window, scale)
        if is_last:
            self._state.end_step()
            self._close_window()
        return loss

    def after_backward(self) -> None:
        """To be called after each `backward()` where the engine's gradients come in it; does nothing elsewhere.

        Pools the micro-batch's statistics and, after the last one of a step, moves the weights.
        """
        if self._announced is None:
            return
        batch, self._announced = self._announced, None
        self._gather(batch, 1.0)
        if not self._window.is_open:
            self._update(self._window, 1.0)
            self._state.end_step()
            self._close_window()

    def undo_update(self) -> None:
        """Take the last weight update back, for an optimizer step that a `GradScaler` left out after an overflow."""
        self._update.undo()

    def pass_over_step(self) -> None:
        """The step was taken by another loss: what is open of it is dropped, and it counts."""
        self._close_window()
        self._state.steps += 1
        self.passed_over += 1

    def _close_window(self) -> None:
        self._window.close()
        self._estimator.discard()
        self._announced = None

    def _read_by_objective(self, given: dict[str, Tensor | None]) -> dict[str, Any]:
        """Of what the caller gave, all that the objective reads."""
        wanted: dict[str, Any] = {name: given[name] for name in self.objective.reads if name in given}
        missing = [name for name, part in wanted.items() if part is None]
        if missing:
            raise ValueError(
                f"{type(self.objective).__name__} needs {' and '.join(missing)} of the batch besides the losses: call "
                f"robust_loss(losses, group_ids, {', '.join(f'{name}=...' for name in missing)})."
            )
        return wanted

    def _gather(self, batch: "_Batch", scale: Scale) -> GroupGradients | None:
        """Take this micro-batch into the step's statistics; its group gradients times `scale`, if there are any."""
        losses, groups, reference, is_logged = batch
        sums = self._group_losses.add(losses, groups) if is_logged else groups.sums_of(losses, self._arithmetic)
        if reference is not None:
            assert self.excess_clip is not None
            sums = self._group_excess.add(excess_losses(losses, reference, self.excess_clip), groups)
        self._window.add(sums)
        return self._estimator.add(losses, groups, self._window, scale)

    # ---- Logs and checkpoints ---------------------------------------------------------------------------------------

    def record(self, losses: Tensor, group_ids: Tensor, is_last: bool = True) -> None:
        """Count a batch whose loss was formed elsewhere, with its losses [B] for `drain_group_losses`.

        `is_last` says that it is the last one of an optimizer step.
        """
        self._group_losses.add_later(losses, group_ids)
        self._state.steps += is_last

    def read_checks(self) -> None:
        """Report what no step may look at, such as losses that are not finite; a wait for a device."""
        self._update.read_checks()

    def drain_group_losses(self) -> dict[str, float]:
        """Mean training loss of each group since the last call, by name; groups without examples are left out."""
        self.read_checks()
        return self._group_losses.drain()

    def drain_group_excess(self) -> dict[str, float]:
        """The same of the losses in excess of the reference, clipped; {} without one.

        Under "example" the weights see these means. Under "group" they see the mean of each step clipped, and this is
        the mean of all steps since the last call, clipped once: lower, where a group changes its sign in between.
        """
        if self.excess_clip is None:
            return {}
        return {name: max(mean, 0.0) for name, mean in self._group_excess.drain().items()}

    def snapshot(self) -> LossState:
        """The state as it is now, for `state_dict`: a checkpoint in mid-step holds what was before the step."""
        return self._state.copy()

    def state_dict(self, snapshot: LossState | None = None) -> dict[str, Any]:
        """What a checkpoint needs, JSON-ready and exact: see `LossState`.

        Statistics are pooled from the first micro-batch of a step to its last and used up then, so between steps there
        are none to save.

        Args:
            snapshot: an earlier state, None for the present one.

        Raises:
            RuntimeError: called in the middle of an optimizer step without a snapshot.
        """
        if snapshot is None and self._window.is_open:
            raise RuntimeError("The state can only be saved between optimizer steps, not in the middle of one.")
        self.read_checks()
        return {**(snapshot or self._state).to_dict(self.objective, self.groups), **self._terms}

    def state_tensors(self, snapshot: LossState | None = None) -> dict[str, Tensor]:
        """The large part of the state, by name: running averages of the groups' gradients; {} without momentum.

        Whole on every process, whatever their number; all of them have to call.
        """
        return (snapshot or self._state).tensors(self.groups)

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Inverse of `state_dict` (and of `state_tensors`); groups are matched by name, in any order.

        Raises:
            ValueError: other groups, another objective, other reference losses or averages of gradients over other
                parameters than those of the saved run.
        """
        require_same_terms(state, self._terms)
        self.reset()
        device = self._arithmetic.device if self._engine is None else self._engine.parameters[0].device
        self._state.load(state, tensors or {}, self.objective, self.groups, device)

    @property
    def _terms(self) -> dict[str, Any]:
        """What else a run must have in common with the checkpoint that it goes on from."""
        terms = {"excess_clip": self.excess_clip, "weights_enter": self.weights_enter}
        return terms if self._state.averages is None else {**terms, "rows_of": self.rows_of}


class _Batch(NamedTuple):
    """A micro-batch as the statistics of a step take it."""

    losses: Tensor
    groups: BatchGroups
    reference: Tensor | None
    is_logged: bool
    """Whether the means of its losses stand in the log; else others do."""


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """Full precision within; nothing at all where it is in force anyway."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
