"""Group ids on the host, beside those of a batch that has gone to a device: a step then waits for nothing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_cgd.arithmetic import moved
from hf_cgd.data.groups import UNCOUNTED
from hf_cgd.distributed.communication import Communication
from hf_cgd.gradients import needs_static_shapes
from hf_cgd.models.example_losses import is_labelled
from hf_cgd.models.heads import Head
from hf_cgd.trainer.same_batches import raise_everywhere

HOST_IDS = "__group_ids_on_host__"
"""Batch key of the ids as an array, which no loader moves to a device."""


class HostIdsCollator:
    """Wraps a collator: adds the group ids of the batch as an array, `UNCOUNTED` for examples without a label.

    Args:
        collator: makes a batch with group ids.
        key: of the ids.
        label_names: of the labels.
        head: tells which examples have one.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], key: str, label_names: Sequence[str], head: Head) -> None:
        self.collator, self.key, self.label_names, self.head = collator, key, label_names, head

    def __call__(self, features: list[Any]) -> Any:
        """The batch of the wrapped collator with the array."""
        batch = self.collator(features)
        ids = batch.get(self.key) if hasattr(batch, "get") else None
        if isinstance(ids, Tensor):
            batch[HOST_IDS] = ids_that_count(ids, self.head.labels_in(batch, self.label_names), self.head).numpy()
        return batch


class AllLabelledCollator:
    """Wraps a collator: refuses examples without a class, where nothing tells later which they are.

    Args:
        collator: makes a batch with labels.
        label_name: of these.
        objective: its name, for the message.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], label_name: str, objective: str) -> None:
        self.collator, self.label_name, self.objective = collator, label_name, objective

    def __call__(self, features: list[Any]) -> Any:
        """The batch of the wrapped collator.

        Raises:
            ValueError: a label of -100.
        """
        batch = self.collator(features)
        labels = batch.get(self.label_name) if hasattr(batch, "get") else None
        if isinstance(labels, Tensor) and not bool(is_labelled(labels).all()):
            raise ValueError(
                f"objective={self.objective!r} on an XLA device: expected a label for each example, got "
                f"{int((~is_labelled(labels)).sum())} of -100 in a batch. A batch has fixed shapes there, so that "
                "none can be left out: leave such rows out of the training set."
            )
        return batch


class HostIds:
    """Finds the ids of a batch on the host, and sees to it that they are those of the batch.

    Args:
        communication: of the processes.
        device: of the run.

    Attributes:
        keeps_copies: whether collators keep a copy of the ids on the host. On the CPU they are there anyhow, and where
            shapes are fixed nobody asks for them.
    """

    def __init__(self, communication: Communication, device: torch.device) -> None:
        self.keeps_copies = device.type != "cpu" and not needs_static_shapes(device)
        self._communication = communication
        self._differ: Tensor | None = None

    def of(self, taken: Mapping[str, Any], key: str, labels: Any, head: Head) -> Tensor | None:
        """Group ids [B], `UNCOUNTED` for examples without a label; None where the batch has none.

        They are on the host where the collator kept a copy there.

        Args:
            taken: what travels beside the batch.
            key: of the ids.
            labels, head: see `ids_that_count`.
        """
        ids = taken.get(key)
        if ids is None:
            return None
        own, kept = ids_that_count(ids, labels, head), taken.get(HOST_IDS)
        # Loaders that cut batches up for several processes hand the array on as it was.
        if not isinstance(kept, np.ndarray) or kept.shape != tuple(own.shape):
            return own
        on_host = torch.from_numpy(kept)
        differ = (moved(on_host, own.device) != own).any()
        self._differ = differ if self._differ is None else self._differ | differ
        return on_host

    def require_same(self) -> None:
        """Raise an error if a batch since the last call had other ids than its copy on the host; a wait, a collective.

        Raises:
            ValueError: one of this process had.
            RuntimeError: one of another process had.
        """
        differ, self._differ = self._differ, None
        failure = None
        if differ is not None and bool(differ):
            failure = ValueError(
                "The group ids or the labels of a batch were changed after the collator made it, so that the copy on "
                f"the host is another's. Change them in the collator, or take {HOST_IDS!r} out of the batch."
            )
        if not self.keeps_copies or self._communication.num_processes == 1:
            if failure is not None:
                raise failure
        elif not self._communication.all_agree(failure is None):
            # The others would wait for this process in their next step.
            raise_everywhere(failure, self._communication)


def ids_that_count(group_ids: Tensor, labels: Any, head: Head) -> Tensor:
    """Group ids [B] of a batch, `UNCOUNTED` for an example without a label, which counts in no mean.

    Args:
        group_ids: [B].
        labels: of the batch.
        head: tells which examples have one.

    Raises:
        ValueError: targets on the host that are NaN or infinite, which would spoil all parameters.
    """
    if not isinstance(labels, Tensor) or len(labels) != len(group_ids):
        return group_ids
    if labels.is_floating_point():
        bad = (~labels.isfinite()).flatten(1).any(dim=1) if labels.ndim > 1 else ~labels.isfinite()
        if labels.device.type == "cpu" and bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise ValueError(
                f"Expected finite targets, got {labels[row].tolist()} in row {row} of a batch. Leave such rows out of "
                "the training set."
            )
        return group_ids
    if head.all_labelled(labels):
        return group_ids
    return group_ids.masked_fill(~head.labelled(labels).to(group_ids.device), UNCOUNTED)
