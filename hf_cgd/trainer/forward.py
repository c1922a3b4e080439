"""From a batch to its loss: the forward pass, the loss of each example, and what an objective reads besides."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_cgd.models.example_losses import CLASSIFICATION, example_losses, infer_problem_type, predictions_of
from hf_cgd.models.head import HeadInput
from hf_cgd.models.outputs import (
    declared_problem_type,
    forward_parameters,
    logits_of,
    num_outputs_of,
    order_of_split,
    split_forward,
    with_logits,
    with_loss,
)
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.config import options_of


class GroupForward:
    """Runs the model on a batch and forms the loss: the objective's in training, else the mean over the examples.

    Args:
        network: the model without wrappers.
        objective: tells by `reads` what it needs of a batch besides the losses.
        args: those of the Trainer.
        trains: whether there are groups to train on; without them it only evaluates.

    Raises:
        ValueError: the objective reads features, and the network has no classification head.
    """

    def __init__(self, network: nn.Module, objective: Objective, args: TrainingArguments, trains: bool) -> None:
        self.label_kind: str | None = None
        """The problem type by the labels of the data set, None where they do not tell."""
        self._objective = objective
        self._args = args
        self._by_group = options_of(args).forward_mode == "split"
        self._returns_loss = "labels" in forward_parameters(network)
        reads_features = trains and "features" in objective.reads
        self._head = HeadInput(network, num_outputs_of(network)) if reads_features else None

    def left_to_the_trainer(self, num_processes: int, user_loss: Callable[..., Any] | None) -> bool:
        """Whether the `Trainer` forms the loss: ERM on a model with a loss of its own, to be bit for bit the same.

        Not with accumulation or several processes: it multiplies the loss of classifiers by their number.
        """
        alone = self._args.gradient_accumulation_steps == 1 and num_processes == 1
        plain = self._objective.plain_mean and not self._by_group and user_loss is None
        return alone and plain and self._returns_loss

    def __call__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        labels: Tensor,
        group_ids: Tensor | None,
        robust_loss: GroupRobustLoss | None,
        losses_of: Callable[[Any, Tensor], Tensor],
    ) -> tuple[Tensor, Any]:
        """Loss of a batch, and what the model returned.

        Args:
            model: the network as it is wrapped for training.
            inputs: its arguments.
            labels: [B, ...].
            group_ids: [B], needed in training.
            robust_loss: forms the loss in training; None in evaluation.
            losses_of: loss of each example [B], from what the model returned and the labels.
        """
        if robust_loss is None:
            outputs = model(**inputs)
            loss = losses_of(outputs, labels).mean()
            return loss, with_loss(outputs, loss)
        assert group_ids is not None
        with ExitStack() as recording:
            if not self._by_group:
                recording.enter_context(robust_loss.recording())
            if self._head is not None:
                recording.enter_context(self._head.recording())
            outputs = split_forward(model, inputs, group_ids) if self._by_group else model(**inputs)
        read: dict[str, Tensor] = {}
        if self._objective.reads:
            outputs, read = self._what_is_read(outputs, labels, group_ids)
        loss = robust_loss(losses_of(outputs, labels), group_ids, **read)
        return loss, with_loss(outputs, loss)

    def losses(
        self,
        outputs: Any,
        labels: Tensor,
        network: nn.Module,
        user_loss: Callable[..., Any] | None = None,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Loss of each example, [B], with graph.

        Args:
            outputs: what the model returned.
            labels: [B, ...].
            network: tells the kind of problem.
            user_loss: the Trainer's `compute_loss_func`, which replaces all this; None for none.
            num_items_in_batch: handed on to it.

        Raises:
            ValueError: `user_loss` returns something else than one loss per example.
        """
        if user_loss is None:
            logits = logits_of(outputs)
            problem_type = self._problem_type(network, logits, labels)
            return example_losses(logits, labels, problem_type, self._args.label_smoothing_factor)
        losses = user_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        if not isinstance(losses, Tensor) or losses.shape != labels.shape[:1]:
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"compute_loss_func must return one loss per example, shape ({len(labels)},), so that group means can "
                f"be formed; got {shape}. Leave the mean out (reduction='none')."
            )
        return losses

    def predictions(self, outputs: Any, labels: Tensor, network: nn.Module) -> Tensor:
        """What the model answers (see `predictions_of`); the labels tell of what kind it is."""
        logits = logits_of(outputs)
        return predictions_of(logits, self._problem_type(network, logits, labels))

    def _problem_type(self, network: nn.Module, logits: Tensor, labels: Tensor) -> str:
        """The problem type that the model declares, or else what its outputs and labels look like."""
        if self.label_kind == CLASSIFICATION and labels.ndim == 2 and labels.is_floating_point():
            # The collator has made shares of the classes of what are classes in the data set.
            return CLASSIFICATION
        num_outputs = logits.shape[-1] if logits.ndim > 1 else 1
        return declared_problem_type(network) or infer_problem_type(num_outputs, labels)

    def _what_is_read(self, outputs: Any, labels: Tensor, group_ids: Tensor) -> tuple[Any, dict[str, Tensor]]:
        """Outputs with logits that can be differentiated by, and what the objective reads of the batch, by name."""
        logits = logits_of(outputs)
        read = {"labels": labels}
        if self._head is not None:
            read["features"] = self._head.features(logits, order_of_split(group_ids) if self._by_group else None)
        # Gradients that the objective takes stop at a view: hooks on what the network itself returned (of FSDP) must
        # not run for them.
        read["logits"] = logits.to(torch.promote_types(logits.dtype, torch.float32)).view_as(logits)
        return with_logits(outputs, read["logits"]), read


def labels_in(inputs: Mapping[str, Any], name: str) -> Tensor:
    """The labels of a batch.

    Raises:
        ValueError: there are none under that name.
    """
    if inputs.get(name) is None:
        raise ValueError(
            f"Expected the batch to hold {name!r}, got {sorted(inputs)}. Name the column of the targets 'labels' (or "
            "'label'), or set label_names."
        )
    return inputs[name]
