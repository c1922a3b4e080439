"""What an objective is: how the loss is formed from the group losses, and how the group weights move."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from hf_cgd.arithmetic import HOST, Arithmetic, is_on_host, moved
from hf_cgd.distributed.communication import Communication

Statistic = Literal["losses", "gram", "self_products", "averages"]
"""What weights can be moved by: see `Objective.statistics`."""
Variant = Literal["paper", "reference"]
"""As the paper says, or as the authors' released code does."""
VARIANTS: tuple[Variant, ...] = get_args(Variant)
BatchPart = Literal["logits", "labels", "features", "class_counts"]
"""What a scalar can be formed of besides losses and groups: see `Objective.reads`."""


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
            `reads` them.
        labels: [B] classes.
        features: [B, D] input of the classification head.
        class_counts: [C, K] training examples of each class in each group.
        communication: turns statistics of this process into those of all.
        arithmetic: whether values may be looked at, and how to compute where they may not.
        present: numbers of the groups that the whole optimizer step holds, known on the host; None where they are not.
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
    arithmetic: Arithmetic = HOST
    present: Sequence[int] | None = None

    def groups(self, wanted: Tensor) -> Tensor:
        """Numbers of the groups to go through for a [K] mask: the wanted ones, or more where it may not be read."""
        if self.arithmetic.reads_values or self.present is None:
            return self.arithmetic.places(wanted)
        return moved(torch.tensor(list(self.present)), wanted.device)


@dataclass(frozen=True)
class GroupStatistics:
    """What the weights are moved by: statistics of one optimizer step, pooled over micro-batches and processes.

    Attributes:
        losses: [K] mean loss of each group, 0 for an absent one (float64).
        counts: [K] examples of each group (float64).
        group_counts: [K] training examples of each group (float64).
        gram: [K, K] inner products of the gradients of the group mean losses; None unless the objective's
            `statistics` name it.
        group_names: K names, for messages.
        self_products: [K] of `hf_cgd.functional.merge_halves`; None unless named.
        arithmetic: see `GroupBatch`; it tells the type and the place of all this.
        everyone: whether all groups are known to have examples in this step, so that no mask is needed.
    """

    losses: Tensor
    counts: Tensor
    group_counts: Tensor
    gram: Tensor | None = None
    group_names: Sequence[str] = ()
    self_products: Tensor | None = None
    arithmetic: Arithmetic = HOST
    everyone: bool = False

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
    weights come in and go out. What an objective needs it declares by the attributes below; nobody asks its type.
    """

    name: ClassVar[str] = "custom"
    has_weights: ClassVar[bool] = True
    """Whether it has group weights, fixed or moving."""
    reads: ClassVar[tuple[BatchPart, ...]] = ()
    """Which of a `GroupBatch`'s logits, labels, features and class_counts its `loss` reads."""
    min_group_size: ClassVar[int] = 1
    """Smallest training group that it can do anything with."""
    linear_in_losses: ClassVar[bool] = True
    """Whether its scalar is a sum of example losses with one coefficient for each group. The fast gradient engines
    need that. A class that overrides `loss` and does not say counts as not linear."""
    mean_over_examples: ClassVar[bool] = False
    """Whether its scalar (without a penalty) is a mean over the examples, and not one of means over groups; weights of
    examples are divided by their sum over the same."""
    plain_mean: ClassVar[bool] = False
    """Whether its scalar is the mean over the examples, for which no groups are needed."""
    weighs_group_means: ClassVar[bool] = True
    """Whether its scalar is the sum of the group mean losses times `coefficients`, so that these are its gradient and
    no graph is needed to find that. A class that overrides `loss` and does not say counts as another one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old, new in _FORMER_DECLARATIONS.items():
            if old in cls.__dict__:
                raise TypeError(f"{cls.__qualname__} declares {old!r}, which is {new} now. Rename it.")
        if "loss" in cls.__dict__:
            # What a parent class says of its own scalar does not hold for another one.
            cls.linear_in_losses = cls.__dict__.get("linear_in_losses", False)
            cls.plain_mean = cls.__dict__.get("plain_mean", False)
            cls.weighs_group_means = cls.__dict__.get("weighs_group_means", False)

    @property
    def statistics(self) -> frozenset[Statistic]:
        """What `next_weights` reads.

        "losses": group mean losses. "gram": inner products of the groups' gradients. "self_products": those between
        two halves of a group's examples (with "gram"). "averages": losses and inner products are taken from running
        averages of the groups' losses and gradients (with "gram"; see `average_kept`).
        """
        return frozenset({"losses"})

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients of the groups have to be taken."""
        return "gram" in self.statistics

    @property
    def moves_by_losses(self) -> bool:
        """Whether the groups' mean losses move its weights, so that losses in excess of a reference can do so."""
        return self.has_weights and "losses" in self.statistics

    @property
    def moves_weights(self) -> bool:
        """Whether its weights depend on what happens in training."""
        return self.has_weights and bool(self.statistics)

    @property
    def average_kept(self) -> float:
        """How much of a running average is kept in a step, in [0, 1); 0 where there are no averages."""
        return 0.0

    @property
    def needs_group_counts(self) -> bool:
        """Whether the number of training examples of each group has to be known."""
        return False

    @property
    def keeps_weights_positive(self) -> bool:
        """Whether no weight can become 0."""
        return True

    @property
    def refuses_negative_losses(self) -> bool:
        """Whether `next_weights` raises a ValueError for a negative group loss."""
        return False

    def groups_wanted(self, num_groups: int) -> int:
        """How many of the groups a step has to hold: with fewer its weights move as those of Group-DRO do."""
        return 0

    def knobs(self) -> dict[str, Any]:
        """Its options by name."""
        return {knob.name: getattr(self, knob.name) for knob in fields(self)}

    @classmethod
    def default_knobs(cls) -> dict[str, Any]:
        """The defaults of those options that have one, JSON-ready, by name."""
        return {knob.name: _json_ready(knob.default) for knob in fields(cls) if knob.default is not MISSING}

    def identity(self) -> dict[str, Any]:
        """What tells it from other objectives, JSON-ready: name, the class's qualified name, and its knobs."""
        knobs = {name: _json_ready(value) for name, value in self.knobs().items()}
        return {"name": self.name, "class": f"{type(self).__module__}.{type(self).__qualname__}", "knobs": knobs}

    def initial_weights(self, group_counts: Tensor) -> Tensor:
        """Weights [K] at the start of a run, from the training counts [K]: equal by default."""
        return torch.full_like(group_counts, 1 / len(group_counts), dtype=torch.float64)

    def next_weights(self, alpha: Tensor, statistics: GroupStatistics) -> Tensor:
        """Weights [K] after one optimizer step's statistics: unchanged by default."""
        return alpha

    def coefficients(self, alpha: Tensor, present: Tensor) -> Tensor:
        """Factor [K] of each group's mean loss in the loss: alpha, renormalised over the `present` [K] groups.

        Equal ones where all of these have weight 0.
        """
        masked = torch.where(present, alpha, 0.0)
        total = masked.sum()
        if is_on_host(total) and total.item() > 0:
            return masked / total
        masked = torch.where(total > 0, masked, present.to(masked))
        return masked / masked.sum()

    def loss(self, batch: GroupBatch) -> ObjectiveOutput:
        """This batch's part of sum_i alpha_i l_i, where l_i is a mean over the whole optimizer step.

        The parts of all micro-batches and processes add up to the loss of the step.
        """
        return ObjectiveOutput(torch.dot(self.example_factors(batch), batch.losses))

    def example_factors(self, batch: GroupBatch) -> Tensor:
        """Factor [B] of each example's loss in that sum, where `weighs_group_means`."""
        assert batch.alpha is not None
        return factors_of_examples(batch, self.coefficients(batch.alpha, batch.counts > 0))

    def expects_penalty(self, step: int, num_groups: int) -> bool:
        """Whether `loss` gives a penalty after `step` optimizer steps, unless a batch has nothing to compare."""
        return False


_FORMER_DECLARATIONS = {
    "needs": "`reads`",
    "needs_gradients": "`statistics` with 'gram' in it",
    "splits_groups": "`statistics` with 'self_products' in it",
}


def _json_ready(value: Any) -> Any:
    """A knob's value as it comes back from JSON; of what JSON has no form for, its `repr`."""
    if isinstance(value, (tuple, list)):
        return [_json_ready(part) for part in value]
    if isinstance(value, dict):
        return {str(name): _json_ready(part) for name, part in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def weighted_group_losses(batch: GroupBatch, coefficients: Tensor) -> Tensor:
    """This batch's part of the sum of the group mean losses, times their coefficients [K]."""
    return torch.dot(factors_of_examples(batch, coefficients), batch.losses)


def factors_of_examples(batch: GroupBatch, coefficients: Tensor) -> Tensor:
    """Factor [B] of each example's loss in the sum of the group mean losses times their coefficients [K]."""
    of_groups = (coefficients / batch.counts.clamp_min(1)).to(batch.losses)
    return of_groups.index_select(0, batch.group_ids)


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
