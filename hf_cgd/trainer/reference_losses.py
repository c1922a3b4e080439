"""Reference losses of a run's training examples: of a column, of a model, or one number for each group.

Group weights then move by how far the model is behind the reference, and no longer by how hard a group is. As in
DoReMi (Xie et al., NeurIPS 2023), the excess loss max(l - l_ref, 0) is only for the weights: what is minimised stays
the weighted loss. There each token's excess is clipped; here each example's, or each group's mean (`excess_losses`).
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.arithmetic import is_on_host, moved
from hf_cgd.data.columns import numbers_in
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.training_groups import is_stream
from hf_cgd.models.heads import head_of
from hf_cgd.models.outputs import without_wrappers
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.robust_loss.excess import ExcessClip, require_finite
from hf_cgd.trainer.config import GroupOptions

Given = str | Mapping[str, float] | nn.Module
"""A column, a number for each group by name, or a model."""
MAX_PADDING = 0.01
"""Vocabularies of one tokenizer may differ by this share: they are padded for speed (those of Pythia: 0.8 %)."""


class ReferenceLosses:
    """Tells the reference loss of each example of a training batch.

    Args:
        given: column of the training set that holds them; or a number for each group; or a model, which runs on every
            batch too (in evaluation mode, without gradients), at the price of a forward pass.
        options: tell `excess_clip`.
        groups: the training groups.
        train_dataset: has the column.
        model: what is trained.

    Raises:
        ValueError: numbers for other groups, a column without finite numbers, a model that is the trained one or
            answers something else (other classes, another vocabulary, another kind of head), or options that make
            other losses than the reference has.
    """

    def __init__(
        self, given: Given, options: GroupOptions, groups: GroupInfo, train_dataset: Any, model: nn.Module
    ) -> None:
        self._given = given
        self._by_group: Tensor | None = None
        self.clip: ExcessClip = options.excess_clip or ("group" if isinstance(given, Mapping) else "example")
        """What is clipped at 0. A number for a group does not tell its examples apart: the mean is clipped there."""
        if options.focal_gamma is not None:
            raise ValueError(
                "focal_gamma changes the training losses into others than reference_losses are. Set one of them."
            )
        if isinstance(given, Mapping):
            self._by_group = _numbers_of_groups(given, groups)
        elif isinstance(given, nn.Module):
            _require_another_model(given, model)
        else:
            _require_column(given, train_dataset)

    def of(
        self,
        inputs: Mapping[str, Any],
        labels: Tensor,
        beside: Mapping[str, Any],
        key: str,
        losses_of: Callable[[Any, Tensor, nn.Module], Tensor],
    ) -> Tensor:
        """Reference losses [B] of a batch, where its labels are.

        Args:
            inputs: what the model takes of it.
            labels: [B, ...].
            beside: what travels beside it.
            key: of the group ids in that.
            losses_of: loss of each example, from what a network returned, the labels and the network.
        """
        if isinstance(self._given, nn.Module):
            self._given.to(labels.device).eval()
            with torch.no_grad():
                return losses_of(self._given(**inputs), labels, self._given).float()
        if self._by_group is not None:
            # -100 stands for an example without a label, which counts in no mean.
            return moved(self._by_group, labels.device)[moved(beside[key], labels.device).clamp_min(0)]
        return moved(self._column(beside), labels.device, torch.float64)

    def require_usable(self, beside: Mapping[str, Any]) -> None:
        """Raise a ValueError for what travels beside a batch where `of` will."""
        if isinstance(self._given, str):
            self._column(beside)

    def _column(self, beside: Mapping[str, Any]) -> Tensor:
        """Those of a batch that come in a column [B]."""
        own = beside.get(str(self._given))
        if own is None:
            raise ValueError(
                f"reference_losses={self._given!r}: the batch does not hold that column. The collator drops it: have "
                "it keep columns it does not know."
            )
        own = torch.as_tensor(own).view(-1)
        if is_on_host(own):
            require_finite(f"reference_losses={self._given!r}", own)
        return own


def column_of(given: Given | None, options: GroupOptions) -> str | None:
    """The column that has to travel with the batches; None for none."""
    wanted = options.reference_losses if given is None else given
    return wanted if isinstance(wanted, str) else None


def reference_of(
    given: Given | None, options: GroupOptions, groups: GroupInfo | None, train_dataset: Any, model: nn.Module
) -> ReferenceLosses | None:
    """The reference losses of a run, None for none; see `ReferenceLosses`."""
    wanted = options.reference_losses if given is None else given
    if options.excess_clip is not None and wanted is None:
        raise ValueError(
            "excess_clip says what of the excess over reference_losses is clipped: set these, or neither."
        )
    if wanted is None or train_dataset is None:
        return None
    if groups is None:
        raise ValueError("reference_losses are for the weights of groups: set group_column.")
    return ReferenceLosses(wanted, options, groups, train_dataset, model)


def _numbers_of_groups(given: Mapping[str, float], groups: GroupInfo) -> Tensor:
    if set(given) != set(groups.names):
        missing = [name for name in groups.names if name not in given]
        foreign = [name for name in given if name not in groups.names]
        raise ValueError(
            f"reference_losses must have a number for each training group {list(groups.names)}: "
            f"missing {missing}, not a group {foreign}."
        )
    numbers = torch.tensor([float(given[name]) for name in groups.names], dtype=torch.float64)
    require_finite("reference_losses", numbers)
    return numbers


def _require_another_model(reference: nn.Module, model: nn.Module) -> None:
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if any(id(parameter) in trained for parameter in reference.parameters()):
        raise ValueError(
            "reference_losses is a model that shares trained parameters with the model: its losses would follow, and "
            "the excess stay at 0. Pass a copy from before (copy.deepcopy), or another model."
        )
    head, other = head_of(model), head_of(reference)
    if other.of_tokens and type(other) is not type(head):
        raise ValueError(
            f"reference_losses is a model for {other.name or 'whole examples'} "
            f"({type(without_wrappers(reference)).__name__}), but the trained one is "
            f"{type(without_wrappers(model)).__name__}: its scores answer another question. Expected a model with the "
            "same kind of head."
        )
    own, theirs = head.num_outputs(without_wrappers(model)), head.num_outputs(without_wrappers(reference))
    if own is None or theirs is None or own == theirs:
        return
    if not head.predicts_vocabulary or abs(own - theirs) > MAX_PADDING * max(own, theirs):
        raise ValueError(
            f"reference_losses is a model with {theirs:,} outputs, but the trained one has {own:,}: their losses "
            "cannot be compared. Expected the same classes, or the same vocabulary."
        )
    warnings.warn(
        f"The vocabulary of the reference model has {theirs:,} words, that of the trained one {own:,}. Their losses "
        "can be compared only if both have the same tokenizer, and one is merely padded further.",
        GroupRobustWarning,
        stacklevel=2,
    )


def _require_column(column: str, train_dataset: Any) -> None:
    if is_stream(train_dataset):
        return
    advice = "Name the column that holds each example's reference loss."
    numbers = numbers_in(train_dataset, column, "reference_losses", advice)
    require_finite(f"reference_losses={column!r}", torch.from_numpy(numbers))
