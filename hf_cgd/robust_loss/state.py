"""All that a run remembers from step to step, and its form in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cgd.arithmetic import Arithmetic
from hf_cgd.data.groups import GroupInfo
from hf_cgd.distributed.communication import Communication
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.averages import RunningAverages
from hf_cgd.robust_loss.interactions import MAX_GROUPS, GroupInteractions

AVERAGE_PREFIX = "average_gradient."
"""In the names of a checkpoint's tensors, before that of the group."""


@dataclass
class LossState:
    """What moves in a run.

    Attributes:
        alpha: group weights [K], None for an objective without weights.
        interactions: mean cosines between the groups' gradients so far; None without gradients, and for many groups.
        averages: running averages of the groups' gradients and losses; None where there are none.
        steps: optimizer steps so far.
        updates: weight updates so far.
        skipped_updates: weight updates that were left out, because a loss or gradient was not finite.
        mean_alpha: mean [K] of the weights after each step so far; None for an objective without weights.
        averaged_steps: number of steps in that mean, [1] where the weights are; None like it.
    """

    alpha: Tensor | None
    interactions: GroupInteractions | None = None
    averages: RunningAverages | None = None
    steps: int = 0
    updates: int = 0
    skipped_updates: int = 0
    mean_alpha: Tensor | None = None
    averaged_steps: Tensor | None = None

    @classmethod
    def at_start(
        cls, objective: Objective, groups: GroupInfo, arithmetic: Arithmetic, communication: Communication
    ) -> "LossState":
        """First weights, nothing counted."""
        alpha: Tensor | None = None
        if objective.has_weights:
            alpha = arithmetic.move(objective.initial_weights(groups.counts_tensor()))
        state = cls(alpha, mean_alpha=alpha)
        if alpha is not None:
            # A number that steps count up on the host would make another graph of every one that is compiled.
            state.averaged_steps = arithmetic.zeros(1)
        if objective.needs_gradients and len(groups) <= MAX_GROUPS:
            state.interactions = GroupInteractions(len(groups), arithmetic)
        if "averages" in objective.statistics:
            state.averages = RunningAverages(len(groups), objective.average_kept, communication, arithmetic)
        return state

    def copy(self) -> "LossState":
        """The state as it is now, whatever becomes of this one."""
        return LossState(
            self.alpha,
            None if self.interactions is None else self.interactions.copy(),
            None if self.averages is None else self.averages.copy(),
            self.steps,
            self.updates,
            self.skipped_updates,
            self.mean_alpha,
            self.averaged_steps,
        )

    def end_step(self) -> None:
        """A step is over: it is counted, and its weights join the mean."""
        self.steps += 1
        if self.alpha is not None and self.mean_alpha is not None and self.averaged_steps is not None:
            self.averaged_steps = self.averaged_steps + 1
            # Weights that never move are their own mean.
            if self.mean_alpha is not self.alpha:
                moved = self.alpha - self.mean_alpha
                self.mean_alpha = torch.addcdiv(self.mean_alpha, moved, self.averaged_steps)

    def take_back(self, before: "LossState") -> None:
        """Undo the update since `before`, a copy of then."""
        if self.alpha is not None and before.alpha is not None and self.averaged_steps is not None:
            assert self.mean_alpha is not None
            # The step has been counted already, with the weights that are taken back.
            self.mean_alpha = self.mean_alpha + (before.alpha - self.alpha) / self.averaged_steps.clamp_min(1)
        self.alpha, self.interactions = before.alpha, before.interactions
        if self.averages is not None and before.averages is not None:
            self.averages.take_back(before.averages)
        self.leave_out(1)

    def leave_out(self, updates: int) -> None:
        """Of the updates that were counted, this many left the weights as they were."""
        self.updates -= updates
        self.skipped_updates += updates

    def to_dict(self, objective: Objective, groups: GroupInfo) -> dict[str, Any]:
        """What a checkpoint needs, JSON-ready and exact; gradients come beside it, as tensors."""
        return {
            "objective": objective.identity(),
            "groups": groups.to_dict(),
            "alpha": None if self.alpha is None else self.alpha.tolist(),
            "mean_alpha": None if self.mean_alpha is None else self.mean_alpha.tolist(),
            "averaged_steps": 0 if self.averaged_steps is None else int(self.averaged_steps),
            "steps": self.steps,
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
            "average_losses": None if self.averages is None else self.averages.losses.tolist(),
            "interactions": None if self.interactions is None else self.interactions.state_dict(),
        }

    def tensors(self, groups: GroupInfo) -> dict[str, Tensor]:
        """The large part, by name: averaged gradients, whole on every process; a collective."""
        if self.averages is None:
            return {}
        return {f"{AVERAGE_PREFIX}{name}": row for name, row in self.averages.whole_rows(groups.names).items()}

    def load(
        self,
        saved: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        objective: Objective,
        groups: GroupInfo,
        gradients_on: torch.device,
    ) -> None:
        """Take over what `to_dict` and `tensors` gave; groups are matched by name, in any order.

        Args:
            saved, tensors: what was saved.
            objective, groups: those of this run; this state is that of its start.
            gradients_on: the device of the gradients.

        Raises:
            ValueError: other groups or another objective than those of the saved run.
        """
        _require_the_same(saved, objective, groups)
        names = list(saved["groups"]["names"])
        order = [names.index(name) for name in groups.names]
        if self.interactions is not None and saved["interactions"] is not None:
            self.interactions.load_state_dict(saved["interactions"], order)
        if self.alpha is not None:
            self.alpha = torch.tensor(saved["alpha"], dtype=torch.float64)[order].to(self.alpha)
            # A checkpoint of an older version holds no mean: it begins with the steps that follow.
            steps = saved.get("averaged_steps", 0)
            mean = saved["mean_alpha"] if steps else saved["alpha"]
            self.mean_alpha = torch.tensor(mean, dtype=torch.float64)[order].to(self.alpha)
            self.averaged_steps = torch.tensor([float(steps)]).to(self.alpha)
        if self.averages is not None and saved["average_losses"] is not None:
            losses = torch.tensor(saved["average_losses"], dtype=torch.float64)[order]
            self.averages.losses = losses.to(self.averages.losses)
            rows = {name.removeprefix(AVERAGE_PREFIX): row for name, row in tensors.items()}
            self.averages.load_rows(rows, groups.names, gradients_on)
        self.steps, self.updates = saved["steps"], saved["updates"]
        self.skipped_updates = saved["skipped_updates"]


def require_same_terms(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a ValueError where weights would move by something else than in the saved run.

    Args:
        saved: the state of a checkpoint.
        own: "excess_clip" and "weights_enter" of this run, and "rows_of" where it has running averages (see
            `GroupRobustLoss`).
    """
    for name, before in (("excess_clip", None), ("weights_enter", "loss")):
        if saved.get(name, before) != own[name]:
            raise ValueError(
                f"The checkpoint was trained with {name}={saved.get(name, before)!r}, but this run has {own[name]!r}. "
                "Resume with the same reference_losses and group_sampling, or start a new run from the saved model."
            )
    # Where one of the two does not say what its rows stand for, they are taken to be the same.
    theirs, ours = saved.get("rows_of"), own.get("rows_of")
    if theirs and ours and theirs != ours:
        raise ValueError(
            f"The checkpoint holds running averages of {theirs}, but this run compares {ours}. Resume with the same "
            "gradient_layers, gradient_engine and trainable layers, or start a new run from the saved model."
        )


def _require_the_same(saved: Mapping[str, Any], objective: Objective, groups: GroupInfo) -> None:
    names = list(saved["groups"]["names"])
    if set(names) != set(groups.names):
        raise ValueError(
            f"The checkpoint was trained with the groups {names}, but the training data has "
            f"{list(groups.names)}. Resume with the same groups, or start a new run from the saved model."
        )
    theirs, own = saved["objective"], objective.identity()
    way_out = "Resume with the same objective, or start a new run from the saved model."
    if not isinstance(theirs, Mapping):
        raise ValueError(
            f"The checkpoint tells of its objective only the name {theirs!r}, as versions before 0.2 wrote it, so it "
            f"cannot be known whether it is the present one. {way_out}"
        )
    if theirs["class"] != own["class"]:
        raise ValueError(
            f"The checkpoint was trained with objective={theirs['name']!r} ({theirs['class']}), but this run has "
            f"{own['name']!r} ({own['class']}). {way_out}"
        )
    # A knob that the saved run's version did not have yet was at what is its default now.
    before = objective.default_knobs() | theirs["knobs"]
    differing = [
        f"{name} {before.get(name)!r} -> {value!r}"
        for name, value in own["knobs"].items()
        if before.get(name) != value
    ]
    if differing or before.keys() != own["knobs"].keys():
        raise ValueError(
            f"The checkpoint was trained with other options of objective={own['name']!r}: {', '.join(differing)}. "
            f"{way_out}"
        )
