"""Weights of examples in the training loss: of their class, of a column, of their tokens, and the focal loss.

Of examples with losses l and weights w a mean becomes sum(w l) / sum(w). The sums run over what the objective has
means of, in the whole optimizer step (all micro-batches, all processes): over each group, or over all examples for
the objectives with a mean over the examples (`Objective.mean_over_examples`). Each loss is multiplied by w n / sum(w),
with n the number of examples in that mean, so that everything behind it forms plain means.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_cgd.arithmetic import is_on_host, moved, statistics_type
from hf_cgd.data.columns import column_names, numbers_in, read_columns
from hf_cgd.data.training_groups import is_stream
from hf_cgd.distributed.communication import Communication
from hf_cgd.models.heads import ExampleHead, Head
from hf_cgd.objectives import Objective
from hf_cgd.trainer.config import GroupOptions

SMALLEST_ERROR = 1e-12
"""1 - p of the focal loss is no smaller than this, where its gradient may be infinite."""


class ExampleWeights:
    """Weighs the losses of a run's training examples.

    Args:
        objective: tells whether it takes means over groups or over all examples.
        num_groups: K, None without groups.
        classes: [C] weight of each class; None for none.
        options: tell `example_weight_column` and `focal_gamma`.
        head: tells who has a label, and how many tokens have.
        by_tokens: whether each example weighs as much as it has tokens with a label.
        communication: sums over the processes.
    """

    def __init__(
        self,
        objective: Objective,
        num_groups: int | None,
        classes: Tensor | None,
        options: GroupOptions,
        communication: Communication,
        head: Head | None = None,
        by_tokens: bool = False,
    ) -> None:
        self._head, self._by_tokens = head or ExampleHead(has_classes=True), by_tokens
        self._by_group = num_groups is not None and not objective.mean_over_examples
        self._has_groups = num_groups is not None
        self._size = num_groups if num_groups is not None and self._by_group else 1
        self._classes, self._column, self._gamma = classes, options.example_weight_column, options.focal_gamma
        self._communication = communication
        self._scales: Tensor | None = None
        self._micro_batches = 1

    @property
    def are_set(self) -> bool:
        """Whether losses are weighed at all."""
        return self._weighs or self._gamma is not None

    @property
    def leave_the_mean(self) -> bool:
        """Whether the mean is the `Trainer`'s own: over all tokens where labels belong to these, else plain."""
        return self._classes is None and self._column is None and self._gamma is None

    @property
    def _weighs(self) -> bool:
        return self._by_tokens or self._classes is not None or self._column is not None

    def require_usable(self, labels: Tensor, taken: Mapping[str, Any]) -> None:
        """Raise a ValueError for a micro-batch that cannot be weighed, as `weighed` will."""
        if self._weighs:
            self._of(labels, taken)

    def open_step(self, labels: Sequence[Tensor], beside: Sequence[Mapping[str, Any]], key: str) -> None:
        """Begin a step with the labels of its micro-batches and what travels beside them; a collective.

        `key` is that of the group ids.
        """
        if not self._weighs:
            return
        device = labels[0].device
        sums = torch.zeros(2, self._size, dtype=statistics_type(device), device=device)
        for part, taken in zip(labels, beside, strict=True):
            weights = self._of(part, taken)
            both = torch.stack([(weights > 0).to(weights), weights])
            sums.index_add_(1, self._places(taken, key, weights), both)
        counts, totals = self._communication.sum(sums)
        self._scales = torch.where(counts > 0, counts / totals, 0.0)
        self._counts, self._micro_batches = counts, len(labels)

    def weighed(self, losses: Tensor, labels: Tensor, taken: Mapping[str, Any], key: str) -> Tensor:
        """The losses [B] of a micro-batch as the objective takes plain means of them."""
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
        if self._gamma is not None:
            _require_classes(labels, "focal_gamma")
            losses = (-torch.expm1(-losses)).clamp_min(SMALLEST_ERROR) ** self._gamma * losses
        if not self._weighs:
            return losses
        if self._scales is None:
            self.open_step([labels], [taken], key)
        assert self._scales is not None
        weights = self._of(labels, taken)
        factors = weights * self._scales[self._places(taken, key, weights)]
        if not self._has_groups:
            # The mean over this micro-batch follows, and those over micro-batches and processes.
            parts = self._micro_batches * self._communication.num_processes
            factors = factors * ((weights > 0).sum() * parts / self._counts[0])
        return losses * factors.to(losses)

    def _of(self, labels: Tensor, taken: Mapping[str, Any]) -> Tensor:
        """Weights [B] where the labels are, 0 for an example without a class (-100)."""
        dtype = statistics_type(labels.device)
        weights = torch.ones(len(labels), dtype=dtype, device=labels.device)
        if self._by_tokens:
            weights = self._head.num_tokens(labels).to(dtype)
        if self._classes is not None:
            _require_classes(labels, "class_weights")
            weights = moved(self._classes, labels.device, dtype)[labels.long().view(-1).clamp_min(0)]
        if self._column is not None:
            own = taken.get(self._column)
            if own is None:
                raise ValueError(
                    f"example_weight_column={self._column!r}: the batch does not hold it. The collator drops it: have "
                    "it keep columns it does not know."
                )
            own = moved(torch.as_tensor(own), labels.device, dtype).view(-1)
            # On a device nobody looks: the column of a data set that can be read was looked through before.
            if is_on_host(own):
                _require_positive(self._column, own)
            weights = weights * own
        return weights.masked_fill(~self._head.labelled(labels), 0.0)

    def _places(self, taken: Mapping[str, Any], key: str, weights: Tensor) -> Tensor:
        """Of each example the place of its mean, where the weights are."""
        if self._by_group:
            return moved(taken[key], weights.device)
        return torch.zeros(len(weights), dtype=torch.long, device=weights.device)


def class_weights_of(
    wanted: list[float] | str | None, train_dataset: Any, label_columns: Sequence[str], num_classes: int | None
) -> Tensor | None:
    """Weight of each class [C], float64; None for none.

    Args:
        wanted: a number for each class, or "balanced" for N / (C n_c) of the training set.
        train_dataset: its classes are counted for "balanced"; None where nothing is trained.
        label_columns: where its classes may be.
        num_classes: C, None where the model does not tell.

    Raises:
        ValueError: another number of weights than classes, or classes that cannot be counted.
    """
    if wanted is None:
        return None
    if not isinstance(wanted, str):
        if num_classes is not None and len(wanted) != num_classes:
            raise ValueError(
                f"class_weights must have one number for each of the model's {num_classes} classes, in the order of "
                f"their numbers; got {len(wanted)}."
            )
        return torch.tensor(wanted, dtype=torch.float64)
    if train_dataset is None:
        return None
    column = None if is_stream(train_dataset) else _first_there(train_dataset, label_columns)
    if column is None:
        raise ValueError(
            "class_weights='balanced' counts the classes of the training set, which needs access by index and a "
            f"column of labels ({', '.join(label_columns)}). Give a number for each class instead."
        )
    labels = torch.as_tensor([int(value) for value in read_columns(train_dataset, [column])[column].values])
    counts = torch.bincount(labels[labels >= 0], minlength=num_classes or 0).double()
    if bool((counts == 0).any()):
        missing = (counts == 0).nonzero().flatten().tolist()
        raise ValueError(
            f"class_weights='balanced': the training set has no example of the class(es) {missing}. Give a number for "
            "each class instead."
        )
    return counts.sum() / (len(counts) * counts)


def require_weight_column(column: str | None, train_dataset: Any) -> None:
    """Raise a ValueError unless the training set, where it can be read, has the column and it holds weights."""
    if column is None or train_dataset is None or is_stream(train_dataset):
        return
    advice = "Name the column that holds each example's weight."
    _require_positive(column, torch.from_numpy(numbers_in(train_dataset, column, "example_weight_column", advice)))


def _first_there(dataset: Any, columns: Sequence[str]) -> str | None:
    there = column_names(dataset) or []
    return next((name for name in columns if name in there), None)


def _require_positive(column: str, weights: Tensor) -> None:
    bad = ~(weights.isfinite() & (weights > 0))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"example_weight_column={column!r}: expected finite numbers > 0, got {float(weights[row])} (row {row}). "
            "Leave examples that shall not count out of the training set."
        )


def _require_classes(labels: Tensor, option: str) -> None:
    if labels.is_floating_point() or labels.dim() > 2 or labels.numel() != len(labels):
        raise ValueError(
            f"{option} is for problems with one class for each example: expected integer labels [B], got "
            f"{tuple(labels.shape)} ({labels.dtype}). Weigh examples by example_weight_column, or pass "
            "compute_loss_func."
        )
