"""A loss that a subclass forms itself: used as it is under ERM, refused where the objective would never be used."""

from typing import Any

from hf_cgd.robust_loss.loss import GroupRobustLoss


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
