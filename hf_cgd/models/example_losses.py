"""The loss of one example: what every group mean is made of."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cgd.arithmetic import is_on_host
from hf_cgd.data.training_groups import IGNORED

CLASSIFICATION = "single_label_classification"
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"
PROBLEM_TYPES = (CLASSIFICATION, MULTI_LABEL, REGRESSION)
NO_ANSWER = -1
"""What stands for the answer to an example whose scores are NaN: right for no label."""


def infer_problem_type(num_outputs: int | None, labels: Tensor) -> str:
    """The problem type that `transformers` would choose: one output is a regression, integer labels are classes."""
    if num_outputs == 1:
        return REGRESSION
    if labels.ndim <= 1 and not labels.is_floating_point():
        return CLASSIFICATION
    return MULTI_LABEL


def is_labelled(labels: Tensor) -> Tensor:
    """Which examples [B] have a label: all but those of class `IGNORED`, where labels [B] or [B, 1] are classes."""
    if labels.is_floating_point() or labels.numel() != len(labels):
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    return labels.view(-1) != IGNORED


def all_labelled(labels: Tensor) -> bool:
    """Whether labels on the host are known to have no class `IGNORED`; False where a device would be waited for."""
    return is_on_host(labels) and not (labels.numpy() == IGNORED).any()


def example_losses(logits: Tensor, labels: Tensor, problem_type: str, label_smoothing: float = 0.0) -> Tensor:
    """Loss of each example, [B], in at least float32.

    Args:
        logits: [B, C] class scores, [B, L] label scores, or [B] / [B, L] predicted values.
        labels: [B] class indices or [B, C] shares of the classes, [B, L] zeros and ones, or [B] / [B, L] targets.
        problem_type: cross-entropy for "single_label_classification", binary cross-entropy averaged over the labels
            of a row for "multi_label_classification", squared error (averaged over the outputs of a row) for
            "regression". The loss of an example of class `IGNORED` is 0.
        label_smoothing: in [0, 1), for cross-entropy only; 0 for none.

    Raises:
        ValueError: an unknown problem type, or one that knows no label smoothing.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if problem_type == CLASSIFICATION and labels.is_floating_point() and labels.shape == logits.shape:
        return F.cross_entropy(logits, labels.to(logits.dtype), reduction="none", label_smoothing=label_smoothing)
    if problem_type == CLASSIFICATION:
        return F.cross_entropy(logits, labels.long().view(-1), reduction="none", label_smoothing=label_smoothing)
    if problem_type not in PROBLEM_TYPES:
        raise ValueError(f"problem_type must be one of {', '.join(PROBLEM_TYPES)}, got {problem_type!r}.")
    require_classes_to_smooth(problem_type, label_smoothing)
    targets = labels.to(logits.dtype).view(len(labels), -1)
    logits = logits.view(len(labels), -1)
    if logits.shape != targets.shape:
        raise ValueError(
            f"Expected as many targets per row as the model has outputs, {logits.shape[1]}, for "
            f"problem_type={problem_type!r}, got {targets.shape[1]}. Build the model with that num_labels, "
            f"or set model.config.problem_type = {CLASSIFICATION!r} if the labels are classes."
        )
    if problem_type == MULTI_LABEL:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)
    return F.mse_loss(logits, targets, reduction="none").mean(dim=1)


def require_classes_to_smooth(problem_type: str | None, label_smoothing: float) -> None:
    """Raise a ValueError for label smoothing of what is not one class out of several; None: not known yet."""
    if label_smoothing and problem_type not in (None, CLASSIFICATION):
        raise ValueError(
            f"label_smoothing_factor={label_smoothing} smooths the one class of an example over the others; "
            f"problem_type={problem_type!r} has no such class. Set it to 0."
        )


def predictions_of(logits: Tensor, problem_type: str) -> Tensor:
    """What the model answers: class indices [B], zeros and ones [B, L], or values [B] / [B, L].

    `NO_ANSWER` stands where scores are NaN. (Their argmax would be class 0, and a dead model half right.)
    """
    if problem_type == CLASSIFICATION:
        return logits.argmax(dim=-1).masked_fill(logits.isnan().any(dim=-1), NO_ANSWER)
    if problem_type == MULTI_LABEL:
        return (logits > 0).long().masked_fill(logits.isnan(), NO_ANSWER)
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return values.squeeze(-1) if values.ndim == 2 and values.shape[-1] == 1 else values
