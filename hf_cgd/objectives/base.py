"""What an objective is: how the loss is formed from the group losses, and how the group weights move."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_cgd.distributed.communication import Communication

ABSENT_GROUPS = ("frozen", "zero_loss")


@dataclass(frozen=True)
class GroupBatch:
    """What an objective sees of one (micro-)batch on one process.

    Attributes:
        losses: [B] loss of each example, with its graph.
        group_ids: [B] integers in [0, K).
        counts: [K] examples of each group in the whole optimizer step: all micro-batches, all processes (float64).
        alpha: [K] group weights to use (float64), None for an objective without weights.
        step: optimizer steps done before this one.
        logits: [B, ...] what the losses were computed from. This and the next three are there if the objective
            `needs` them.
        labels: [B] classes.
        features: [B, D] input of the classification head.
        class_counts: [C, K] training examples of each class in each group.
        communication: turns statistics of this process into those of all.
        validate: False where no value may be looked at and no shape may depend on one, so that a graph that XLA has
            compiled serves every batch.
    """

    losses: Tensor
    group_ids: Tensor
    counts: Tensor
    alpha: Tensor | None
    step: int = 0
    logits: Tensor | None = None
    labels: Tensor | None = None
    features: Tensor | None = None
    class_counts: Tensor | None = None
    communication: Communication = field(default_factory=Communication)
    validate: bool = True


@dataclass(frozen=True)
class GroupStatistics:
    """What the weights are moved by: statistics of one optimizer step, pooled over micro-batches and processes.

    Attributes:
        losses: [K] mean loss of each group, 0 for an absent one (float64).
        counts: [K] examples of each group (float64).
        group_counts: [K] training examples of each group (float64).
        gram: [K, K] inner products of the gradients of the group mean losses, None unless `needs_gradients`.
        group_names: K names, for messages.
        self_products: [K] of `hf_cgd.functional.merge_halves`, None unless `splits_groups`.
        validate: see `GroupBatch`. Where it is False all is in float32 on the device.
    """

    losses: Tensor
    counts: Tensor
    group_counts: Tensor
    gram: Tensor | None = None
    group_names: Sequence[str] = ()
    self_products: Tensor | None = None
    validate: bool = True

    @property
    def present(self) -> Tensor:
        """[K] booleans: the groups that have examples in this step."""
        return self.counts > 0


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective makes of a batch: the scalar to differentiate.

    Attributes:
        loss: this process's and micro-batch's part; all parts add up to the loss of the step.
        penalty: what is added to it for this micro-batch, None for nothing. Its value is that over all processes, its
            gradient that of this process's examples (`Communication.total`); it is averaged over the micro-batches.
    """

    loss: Tensor
    penalty: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """Base of all objectives: the mean of the group mean losses of the present groups, with weights that stay equal.

    To write your own, subclass this (a frozen dataclass whose fields are its knobs) and override `next_weights`, or
    `loss` for another scalar; pass an instance as `GroupRobustTrainer(objective=...)`. Objectives hold no state: the
    weights come in and go out.
    """

    name: ClassVar[str] = "custom"
    has_weights: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()
    """Which of a `GroupBatch`'s logits, labels, features and class_counts the objective reads."""
    min_group_size: ClassVar[int] = 1
    """Smallest training group that it can do anything with."""

    @property
    def splits_groups(self) -> bool:
        """Whether it wants the gradients of two halves of each group's examples (`GroupStatistics.self_products`)."""
        return False

    @property
    def refuses_negative_losses(self) -> bool:
        """Whether `next_weights` raises a ValueError for a negative group loss."""
        return False

    def initial_weights(self, group_counts: Tensor) -> Tensor:
        """Weights [K] at the start of a run, from the training counts [K]: equal by default."""
        return torch.full_like(group_counts, 1 / len(group_counts), dtype=torch.float64)

    def next_weights(self, alpha: Tensor, statistics: GroupStatistics) -> Tensor:
        """Weights [K] after one optimizer step's statistics: unchanged by default."""
        return alpha

    def coefficients(self, alpha: Tensor, present: Tensor) -> Tensor:
        """Factor [K] of each group's mean loss in the loss: alpha, renormalised over the `present` [K] groups."""
        masked = alpha.masked_fill(~present, 0.0)
        return masked / masked.sum()

    def loss(self, batch: GroupBatch) -> ObjectiveOutput:
        """This batch's part of sum_i alpha_i l_i, where l_i is a mean over the whole optimizer step.

        The parts of all micro-batches and processes add up to the loss of the step.
        """
        assert batch.alpha is not None
        present = batch.counts > 0
        coefficients = self.coefficients(batch.alpha, present) / batch.counts.clamp_min(1)
        per_example = coefficients.to(batch.losses)[batch.group_ids]
        return ObjectiveOutput((per_example * batch.losses).sum())


def mean_loss(batch: GroupBatch) -> Tensor:
    """This batch's part of the mean loss over all examples of the step."""
    return batch.losses.sum() / batch.counts.sum().to(batch.losses)


def require_at_least_zero(**values: float) -> None:
    """Raise a ValueError that names the first value that is not a finite number >= 0."""
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a finite number >= 0, got {value!r}.")


def require_one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ValueError that lists the choices unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
