"""Classifiers and regressors of whole examples."""

import torch
from torch import Tensor, nn

from hf_cgd.models.example_losses import (
    CLASSIFICATION,
    all_labelled,
    example_losses,
    infer_problem_type,
    is_labelled,
    predictions_of,
)
from hf_cgd.models.heads.base import Head, LossOptions
from hf_cgd.models.outputs import declared_problem_type, num_outputs_of


class ExampleHead(Head):
    """One answer for each example: a class, several labels, or values.

    Args:
        has_classes: whether integer labels are classes, so that -100 among them stands for none.

    Attributes:
        may_be_shares: whether floats [B, C] for labels are shares of the classes that the data set holds.
    """

    def __init__(self, has_classes: bool) -> None:
        self.has_classes = has_classes
        self.may_be_shares = False

    @classmethod
    def of(cls, network: nn.Module) -> "ExampleHead":
        """That of a network."""
        declared = declared_problem_type(network)
        return cls(num_outputs_of(network) != 1 and declared in (None, CLASSIFICATION))

    def losses(self, scores: Tensor, labels: Tensor, network: nn.Module, options: LossOptions) -> Tensor:
        """See `Head.losses`, and `example_losses`."""
        return example_losses(scores, labels, self._problem_type(scores, labels, network), options.label_smoothing)

    def predictions(self, scores: Tensor, labels: Tensor, network: nn.Module) -> Tensor:
        """See `Head.predictions`; the labels tell of what kind they are."""
        return predictions_of(scores, self._problem_type(scores, labels, network))

    def labelled(self, labels: Tensor) -> Tensor:
        """See `Head.labelled`."""
        if self.has_classes:
            return is_labelled(labels)
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)

    def all_labelled(self, labels: Tensor) -> bool:
        """See `Head.all_labelled`."""
        return not self.has_classes or all_labelled(labels)

    def num_outputs(self, network: nn.Module) -> int | None:
        """See `Head.num_outputs`."""
        return num_outputs_of(network)

    def _problem_type(self, scores: Tensor, labels: Tensor, network: nn.Module) -> str:
        """The problem type that the model declares, or else what its outputs and labels look like."""
        if self.may_be_shares and labels.ndim == 2 and labels.is_floating_point() and labels.shape == scores.shape:
            # The collator has made shares of the classes of what are classes in the data set.
            return CLASSIFICATION
        num_outputs = scores.shape[-1] if scores.ndim > 1 else 1
        return declared_problem_type(network) or infer_problem_type(num_outputs, labels)
