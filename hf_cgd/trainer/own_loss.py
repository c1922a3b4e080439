"""A loss that the model or a subclass forms itself: ERM trains it; else it is replaced or refused, with words."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_cgd.models.heads import Head, LossOptions
from hf_cgd.models.outputs import is_of_transformers
from hf_cgd.models.own_loss import compare_losses
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.robust_loss.loss import GroupRobustLoss

EXAMINED = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Kinds of `accelerate` runs in which a network may run a batch more without its wrappers."""


class OwnLoss:
    """What has been found out about the loss that a model computes itself."""

    def __init__(self) -> None:
        self.is_settled = False
        self.differs = False
        """Whether it is another than the mean of the losses of the examples."""

    def examine(
        self,
        network: nn.Module,
        inputs: Mapping[str, Any],
        labels: Tensor,
        head: Head,
        objective: str,
        replaced: bool,
        is_last: bool,
    ) -> None:
        """Compare it with ours on a first batch, and say once where it is another, with what is trained.

        Args:
            network: without wrappers.
            inputs: the batch, labels included.
            labels: those, as the head has them.
            head: of the network.
            objective: its name, for the warning.
            replaced: whether the objective trains on the losses of the examples in its place.
            is_last: whether this is the last batch to be looked at.
        """

        def losses_of(scores: Tensor, labels: Tensor) -> Tensor:
            return head.losses(scores, labels, network, LossOptions())

        found = compare_losses(network, inputs, labels, head, losses_of)
        self.is_settled = found is not None or is_last
        if found is None or found.same:
            return
        self.differs = True
        what = f"The model's own loss ({found.own:.6g}) is not the mean loss of its examples ({found.ours:.6g})."
        if replaced:
            consequence = (
                f"objective={objective!r} weighs the losses of single examples, so it trains and reports the latter: "
                "weights of classes, a margin or an auxiliary loss (of experts) inside the model have no effect. To "
                "train your loss, pass compute_loss_func(outputs, labels, num_items_in_batch=None), which returns one "
                "loss per example; a term of the whole batch is added in a subclass, to super().compute_loss(...)."
            )
        else:
            consequence = (
                f"objective={objective!r} trains the model's own, as the Trainer does, and *_loss reports it; "
                "group_loss/* and worst_group_loss are means of the losses of the examples."
            )
        warnings.warn(f"{what} {consequence}", GroupRobustWarning, stacklevel=2)

    def leave_unexamined(self, network: nn.Module) -> None:
        """Say once, where wrappers leave no look at it, that it is replaced whatever it is."""
        self.is_settled = True
        if not is_of_transformers(network):
            warnings.warn(
                f"If {type(network).__name__} has a loss of its own (weights of classes, a margin), it has no effect: "
                "with sharded parameters and on XLA devices the mean loss of the examples is trained and reported, "
                "without a comparison. To train your loss, pass compute_loss_func(outputs, labels, "
                "num_items_in_batch=None), which returns one loss per example.",
                GroupRobustWarning,
                stacklevel=2,
            )


def source_of_loss(trainer: Any) -> str | None:
    """Whose code forms the loss of a `GroupRobustTrainer`, for readers of reports; None for this package's alone."""
    if trainer._has_own_loss:
        return f"{type(trainer).__name__}.compute_loss"
    if trainer.robust_loss is not None and trainer.robust_loss.passed_over > 0:
        return f"{type(trainer).__name__}.training_step"
    if trainer._forward.trains_own_loss:
        return f"{type(trainer._unwrapped()).__name__}.forward"
    given = trainer.compute_loss_func
    return None if given is None else f"compute_loss_func={getattr(given, '__name__', type(given).__name__)}"


def require_objective_used(trainer: object, robust_loss: GroupRobustLoss | None, batches_left: int) -> None:
    """Raise a ValueError before an optimizer step by another loss than the objective's; ERM may have any.

    Args:
        trainer: names the class whose `compute_loss` it is.
        robust_loss: that of the run, None without groups.
        batches_left: micro-batches of the step minus those whose loss the objective has formed.
    """
    if robust_loss is None or batches_left == 0:
        return
    if robust_loss.objective.plain_mean:
        robust_loss.pass_over_step()
        return
    owner, name = type(trainer).__name__, robust_loss.objective.name
    if batches_left > 0:
        raise ValueError(
            f"{owner}.compute_loss forms a loss of its own, so objective={name!r} would never be used. For weights of "
            "classes or a focal loss set class_weights or focal_gamma; for another loss of the examples pass "
            "compute_loss_func, which returns one loss per example; to add a term, call super().compute_loss(...) and "
            "add to what it returns; to train by a loss of your own and see how groups fare, set objective='erm'."
        )
    raise ValueError(
        f"{owner}.compute_loss calls super().compute_loss {1 - batches_left} times or more for one batch, and every "
        f"call moves the group weights of objective={name!r}. Call it once, and add other terms to what it returns."
    )
