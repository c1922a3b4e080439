"""From a batch to its loss: the forward pass, the loss of each example, and what an objective reads besides."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_cgd.gradients.structure import LossGraph
from hf_cgd.models.head import HeadInput
from hf_cgd.models.heads import Head, LossOptions, TokenHead, head_of
from hf_cgd.models.outputs import (
    forward_parameters,
    logits_of,
    num_outputs_of,
    order_of_split,
    split_forward,
    takes_any_argument,
    with_logits,
    with_loss,
    without_wrappers,
)
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.robust_loss.uncounted import chosen_rows, rows_that_count
from hf_cgd.trainer.config import GroupOptions, options_of
from hf_cgd.trainer.own_loss import OwnLoss


class GroupForward:
    """Runs the model on a batch and forms the loss: the objective's in training, else the mean over the examples.

    Args:
        network: the model without wrappers.
        objective: tells by `reads` what it needs of a batch besides the losses.
        args: those of the Trainer.
        trains: whether there are groups to train on; without them it only evaluates.
        own_loss: what is known of the model's own loss.

    Raises:
        ValueError: the objective reads features, and the network has no classification head; or an option or the
            objective has no meaning for a head of tokens.
    """

    def __init__(
        self,
        network: nn.Module,
        objective: Objective,
        args: TrainingArguments,
        trains: bool,
        own_loss: OwnLoss,
    ) -> None:
        options = options_of(args)
        self.head = head_of(network)
        """How losses of examples are made of what the network returns."""
        self.by_tokens = self.head.of_tokens and options.unit_of(objective) == "token"
        """Whether means are over tokens, so that an example counts as often as it has some."""
        self._loss_options = LossOptions(args.label_smoothing_factor, options.token_reduction)
        self._objective = objective
        self._args = args
        self._own_loss = own_loss
        self._has_seen_own = False
        """Whether a user's function was seen to give losses that do not depend on the number of items."""
        self._by_group = options.forward_mode == "split"
        self._parameters = forward_parameters(network)
        self._takes_any = takes_any_argument(self._parameters)
        self._returns_loss = self.head.label_names(["labels"])[0] in self._parameters
        if isinstance(self.head, TokenHead):
            _require_for_tokens(self.head, objective, options)
            _require_scores_of_tokens_alone(network)
        reads_features = trains and "features" in objective.reads
        self._head = HeadInput(network, num_outputs_of(network)) if reads_features else None

    def requires(self, name: str) -> bool:
        """Whether the network cannot be called without that argument."""
        parameter = self._parameters.get(name)
        return parameter is not None and parameter.default is parameter.empty

    def left_to_the_trainer(self, num_processes: int, user_loss: Callable[..., Any] | None) -> bool:
        """Whether the `Trainer` forms the loss: ERM on a model with a loss of its own, to be bit for bit the same.

        Not with accumulation or several processes: it multiplies the loss of classifiers by their number.
        """
        alone = self._args.gradient_accumulation_steps == 1 and num_processes == 1
        plain = self._objective.plain_mean and not self._by_group and user_loss is None
        plain &= self.by_tokens or not self.head.of_tokens
        own_loss_alone = self.trains_own_loss and num_processes == 1
        return (alone or own_loss_alone) and plain and self._returns_loss

    @property
    def trains_own_loss(self) -> bool:
        """Whether the model's own loss is another than ours, and ERM trains it."""
        as_the_trainer = self.by_tokens or not self.head.of_tokens
        return self._objective.plain_mean and as_the_trainer and not self._by_group and self._own_loss.differs

    def may_have_own_loss(self, user_loss: Callable[..., Any] | None) -> bool:
        """Whether the model may have a loss of its own that is not ours; nobody asks where a `user_loss` is given."""
        return self._returns_loss and user_loss is None and not self._own_loss.is_settled

    def replaces_own_loss(self, num_processes: int) -> bool:
        """Whether the losses of the examples are trained in the place of a model's own."""
        return not self._objective.plain_mean or self._by_group or num_processes > 1

    def __call__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        labels: Tensor,
        group_ids: Tensor | None,
        robust_loss: GroupRobustLoss | None,
        losses_of: Callable[[Any, Tensor], Tensor],
        weigh: Callable[[Tensor, Tensor], Tensor] | None = None,
        reference_losses: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Loss of a batch, and what the model returned.

        Args:
            model: the network as it is wrapped for training.
            inputs: its arguments.
            labels: [B, ...].
            group_ids: [B], needed in training.
            robust_loss: forms the loss in training; None in evaluation.
            losses_of: loss of each example [B], from what the model returned and the labels.
            weigh: losses [B] by their weights, from losses and labels, so that the plain mean of them over the step
                is the weighed one; None for no weights.
            reference_losses: [B], what the weights see the losses in excess of; None for none.
        """
        if robust_loss is None:
            outputs = model(**inputs)
            losses = losses_of(outputs, labels)
            if weigh is not None:
                loss = self.head.mean(weigh(losses, labels), labels, by_tokens=False)
            else:
                loss = self.head.mean(losses, labels, self.by_tokens)
            return loss, with_loss(outputs, loss)
        assert group_ids is not None
        of_engine = nullcontext() if self._by_group else robust_loss.recording()
        with of_engine, nullcontext() if self._head is None else self._head.recording():
            outputs = split_forward(model, inputs, group_ids) if self._by_group else model(**inputs)
        read: dict[str, Tensor] = {}
        if self._objective.reads:
            outputs, read = self._what_is_read(outputs, labels, group_ids)
            rows = rows_that_count(group_ids.cpu()) if robust_loss.knows_groups else None
            if rows is not None:
                # What is left out has to be so before the losses are formed of it.
                read = {name: chosen_rows(part, rows) for name, part in read.items()}
                outputs, labels = with_logits(outputs, read["logits"]), read["labels"]
                group_ids = chosen_rows(group_ids, rows)
                reference_losses = None if reference_losses is None else chosen_rows(reference_losses, rows)
        losses = losses_of(outputs, labels)
        # Weights by tokens over all groups would make a group of long rows look worse in the log than it is.
        logged = losses if weigh is not None and self.by_tokens and self._objective.plain_mean else None
        loss = robust_loss(
            losses if weigh is None else weigh(losses, labels),
            group_ids,
            **read,
            reference_losses=reference_losses,
            logged_losses=logged,
        )
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
            ValueError: `user_loss` returns something else than one loss per example, or divides by that number.
        """
        if user_loss is None:
            return self.head.losses(self.head.scores_of(outputs), labels, network, self._loss_options)
        number = num_items_in_batch
        if number is not None and not self._has_seen_own:
            # With a gradient, so that the graph of the losses tells whether they were divided by it.
            number = torch.as_tensor(number, dtype=torch.float32).detach().requires_grad_()
        losses = user_loss(outputs, labels, num_items_in_batch=number)
        if not isinstance(losses, Tensor) or losses.shape != labels.shape[:1]:
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"compute_loss_func must return one loss per example, shape ({len(labels)},), so that group means can "
                f"be formed; got {shape}. Leave the mean out (reduction='none'), or set class_weights."
            )
        if (
            number is not num_items_in_batch
            and losses.requires_grad
            and id(number) in LossGraph(losses, [], None).reached
        ):
            raise ValueError(
                "compute_loss_func divides the losses of the examples by num_items_in_batch, but they are averaged "
                "over the step afterwards. Expected losses that do not depend on it: leave the division out."
            )
        self._has_seen_own |= number is not None
        return losses

    def predictions(self, outputs: Any, labels: Tensor, network: nn.Module) -> Tensor:
        """What the model answers (see `Head.predictions`); the labels tell of what kind it is."""
        return self.head.predictions(self.head.scores_of(outputs), labels, network)

    def without_idle_labels(self, inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """A batch without columns that stand in `label_names` for metrics alone, where the network takes none such."""
        idle = set() if self._takes_any else set(names) - {*self.head.label_names(names), *self._parameters}
        return {name: value for name, value in inputs.items() if name not in idle}

    def inputs_of(self, inputs: dict[str, Any], labels: Tensor, network: nn.Module, names: Sequence[str]) -> Any:
        """What the model is called with: without labels, unless it cannot be, so that it forms no loss itself."""
        wanted = self.head.label_names(names)
        rest = {name: value for name, value in inputs.items() if name not in wanted or self.requires(name)}
        return self.head.completed(rest, labels, without_wrappers(network))

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


def labels_in(inputs: Mapping[str, Any], names: Sequence[str], head: Head) -> Tensor:
    """The labels of a batch, as its head has them.

    Raises:
        ValueError: there are none under these names.
    """
    labels = head.labels_in(inputs, names)
    if labels is None:
        wanted, there = head.label_names(names), sorted(inputs)
        if isinstance(head, TokenHead):
            raise ValueError(f"Expected the batch to hold {' and '.join(wanted)}, got {there}. {head.missing_labels}")
        raise ValueError(
            f"Expected the batch to hold {wanted[0]!r}, got {there}. Name the column of the targets 'labels' (or "
            "'label'), or set label_names."
        )
    return labels


VIRTUAL = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT")
"""Adapters that put virtual tokens before those of a row."""


def _require_scores_of_tokens_alone(network: nn.Module) -> None:
    """Raise a ValueError where virtual tokens get scores, to which no label belongs; those of an encoder do not."""
    config: Any = getattr(network, "active_peft_config", None)
    kind = getattr(config, "peft_type", None)
    if kind in VIRTUAL and getattr(config, "task_type", None) != "SEQ_2_SEQ_LM":
        raise ValueError(
            f"{type(config).__name__}: the network gives its {config.num_virtual_tokens} virtual tokens scores beside "
            "those of a row's own tokens, and losses of tokens are formed of as many scores as labels. Expected "
            "adapters without such scores: PrefixTuningConfig, whose virtual tokens lie in the attention, LoRA or IA3."
        )


def _require_for_tokens(head: TokenHead, objective: Objective, options: GroupOptions) -> None:
    """Raise a ValueError for an objective or an option that has no meaning where labels belong to tokens."""
    if objective.reads:
        raise ValueError(
            f"objective={objective.name!r} compares classes or features of whole examples; a model for {head.name} "
            "gives each token an answer of its own. Expected an objective that is made of losses: 'cgd', 'group_dro', "
            "'erm_uw' or 'erm'."
        )
    idle = [name for name in ("class_weights", "focal_gamma") if getattr(options, name) is not None]
    if options.forward_mode == "split":
        idle.append("forward_mode='split'")
    if idle:
        raise ValueError(
            f"{', '.join(idle)}: for models of whole examples only, not for {head.name}. Leave it unset; "
            "example_weight_column weighs examples, and compute_loss_func may form any loss of an example."
        )
