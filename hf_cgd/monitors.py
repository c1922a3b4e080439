"""Watch a run for the ways in which group-robust training goes wrong without an error."""

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from torch import Tensor

NonFinite = Literal["skip", "raise"]
"""What to do about a loss or gradient that is not finite."""
NONFINITE: tuple[NonFinite, ...] = get_args(NonFinite)

WINDOW = 50
"""Weight updates that a judgement looks back on."""
SATURATED = 0.95
"""Weights count as saturated when one group holds more than this share in every update of the window."""
SWINGING = 0.1
"""Weights count as swinging when on average more than this mass moves from group to group in an update."""

GUESSING = 0.03
"""A mean cross-entropy within this share of log C is that of a model that guesses among C classes."""


class GroupRobustWarning(UserWarning):
    """The run goes on and its numbers are right, but it will hardly give what its user wants."""


class WeightMonitor:
    """Warns once when the weights swing and once when they saturate.

    Args:
        group_names: K names, for the message.
    """

    def __init__(self, group_names: Sequence[str]) -> None:
        self.group_names = list(group_names)
        self._last: np.ndarray | None = None
        self._moved: deque[float] = deque(maxlen=WINDOW - 1)
        """Mass that moved in each of the last updates."""
        self._holder, self._held = -1, 0
        """The group with a saturated weight, and for how many updates on end it has had that."""
        self._warned: set[str] = set()

    def observe(self, alpha: Tensor, step: int) -> None:
        """Take note of the weights [K] after weight update number `step`."""
        if len(alpha) < 2:
            return
        weights, last = alpha.numpy(force=True), self._last
        self._last = weights.copy()
        if last is not None:
            self._moved.append(float(np.abs(weights - last).sum()) / 2)
        holder = int(weights.argmax())
        if weights[holder] > SATURATED:
            self._held = self._held + 1 if holder == self._holder else 1
            self._holder = holder
        else:
            self._holder, self._held = -1, 0
        if len(self._moved) < WINDOW - 1:
            return
        moved = sum(self._moved) / len(self._moved)
        if moved > SWINGING:
            self._warn(
                "swing",
                f"The group weights swing: over the last {WINDOW} updates before step {step}, {moved:.0%} of the mass "
                "moved in every update. Training on one group after the other rarely converges. Use a smaller "
                "step_size, or a larger batch (or more gradient accumulation).",
            )
        if self._held >= WINDOW:
            name = self.group_names[holder]
            self._warn(
                "saturate",
                f"The group weights are saturated: group {name!r} has held more than {SATURATED:.0%} of the weight "
                f"for {WINDOW} updates (step {step}), so the model trains on almost nothing else. If this group is "
                "noisy or tiny, use a smaller step_size or a larger batch.",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, GroupRobustWarning, stacklevel=2)


class NonFiniteMonitor:
    """Tells of groups whose loss or gradient is NaN or infinite: warns once, or raises every time.

    Args:
        group_names: K names, for the message.
        nonfinite: "skip" to warn, "raise" to raise a FloatingPointError.
    """

    def __init__(self, group_names: Sequence[str], nonfinite: NonFinite) -> None:
        self.group_names = list(group_names)
        self.nonfinite = nonfinite
        self._warned = False

    def names(self, bad: Tensor) -> list[str]:
        """Names of the groups that are True among [K] booleans."""
        return [name for name, is_bad in zip(self.group_names, bad.tolist(), strict=True) if is_bad]

    def report(self, where: str, bad: Tensor) -> None:
        """Tell of the groups that are True among [K] booleans; `where` begins the sentence ("In step 3")."""
        problem = f"{where} the loss or gradient of the group(s) {self.names(bad)} is not finite (NaN or inf)."
        advice = "Look for a learning rate that is too high, or for bad input in these groups."
        if self.nonfinite == "raise":
            raise FloatingPointError(f"{problem} {advice}")
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{problem} The group weights stay as they are for such steps. {advice}",
                GroupRobustWarning,
                stacklevel=2,
            )


class PenaltyMonitor:
    """Warns once when the penalty of an objective has had nothing to compare for a whole window of micro-batches.

    Args:
        objective: its name, for the message.
    """

    def __init__(self, objective: str) -> None:
        self.objective = objective
        self._without = 0

    def observe(self, found: bool) -> None:
        """Take note of whether there was a penalty in one more micro-batch."""
        self._without = 0 if found else self._without + 1
        if self._without == WINDOW:
            warnings.warn(
                f"The penalty of objective={self.objective!r} had nothing to compare in {WINDOW} batches on end: too "
                "few of the groups had enough examples in them, so the loss was that without a penalty. Use a larger "
                "batch, or group_sampling='balanced'.",
                GroupRobustWarning,
                stacklevel=2,
            )


class PresenceMonitor:
    """Warns once when the steps of a whole window held too few groups for the objective to do what it is named for.

    Args:
        objective: what it is called in the message.
        num_groups: K.
        lone_weight_cancels: whether the weight of a group that is alone in a step has no effect.
        wanted: how many groups a step has to hold to be another one than Group-DRO's.
    """

    def __init__(self, objective: str, num_groups: int, lone_weight_cancels: bool, wanted: int) -> None:
        self.objective = objective
        self.num_groups = num_groups
        # With two groups in all nothing is to be had by other batches.
        self._needed = max(2 if lone_weight_cancels else 0, wanted if num_groups > 2 else 0)
        self._most = 0
        """The most groups that a step of the window held."""
        self._lacking = 0

    def observe(self, present: int) -> None:
        """Take note of how many groups have examples in one more optimizer step."""
        if not present:
            return
        self._lacking = 0 if present >= self._needed else self._lacking + 1
        self._most = max(self._most, present) if self._lacking else 0
        if self._lacking < WINDOW:
            return
        needed, self._needed = self._needed, 0
        if self._most == 1:
            story = (
                "examples of one group alone. Its weight cancels out then and does not move, so that this is training "
                f"without group weights, and not objective={self.objective!r}"
            )
        else:
            story = (
                f"at most {self._most} of the {self.num_groups} groups, and objective={self.objective!r} needs "
                f"{needed} in a step to do anything of its own: this is Group-DRO"
            )
        warnings.warn(
            f"{WINDOW} optimizer steps on end held {story}. Use a larger batch, gradient accumulation, or "
            "group_sampling='balanced'.",
            GroupRobustWarning,
            stacklevel=2,
        )


def warn_if_one_class(
    predictions: np.ndarray,
    labels: np.ndarray,
    step_size: float | None,
    learning_rate: float,
    *,
    losses: np.ndarray | None = None,
    class_names: Sequence[str] = (),
    has_learned: bool = False,
) -> bool:
    """Warn when all [N] predictions are one class although the [N] labels are not; True if it warned.

    Args:
        predictions, labels: class numbers.
        step_size: None stands for an objective without one.
        learning_rate: for the advice.
        losses: [N] cross-entropies, which tell a model that guesses; None where they are not known.
        class_names: of the C classes; () where they have none.
        has_learned: whether the model predicted several classes earlier in the run.
    """
    if len(predictions) < 2 or len(np.unique(predictions)) > 1 or len(np.unique(labels)) < 2:
        return False
    predicted = int(predictions[0])
    name = f" ({class_names[predicted]})" if predicted < len(class_names) else ""
    guessing = np.log(max(len(class_names), int(labels.max()) + 1, predicted + 1))
    guesses = losses is not None and abs(losses.mean() - guessing) < GUESSING * guessing
    advice = "" if step_size is None else f"step_size (now {step_size:g}), "
    smaller = f"use a smaller {advice}learning_rate (now {learning_rate:g}) or weight_decay, or a larger batch."
    if has_learned:
        story = f"The model has collapsed, for it predicted several classes earlier in this run: {smaller}"
    elif guesses and losses is not None:
        story = (
            f"The model has not begun to learn: its mean loss, {losses.mean():.3f}, is that of guessing. Train on, or "
            f"with another learning_rate (now {learning_rate:g})."
        )
    else:
        story = f"The model has collapsed, or has not started to learn: {smaller}"
    warnings.warn(
        f"A single class, {predicted}{name}, was predicted for all {len(predictions)} evaluated rows, so groups of "
        f"other classes have accuracy 0. {story}",
        GroupRobustWarning,
        stacklevel=2,
    )
    return True
