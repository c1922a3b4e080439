"""The collator that carries group ids from the dataset's columns into the batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_cgd.data.groups import UNKNOWN_GROUP, GroupInfo

GROUP_IDS = "group_ids"
"""Batch key of the group ids where the column's own name cannot be used."""


class RenamingCollator:
    """Wraps a collator: renames batch keys, for networks whose argument is not named like the column.

    Args:
        collator: makes a batch (a mapping of tensors) of a list of examples.
        renamed: {old: new}.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], renamed: Mapping[str, str]) -> None:
        self.collator = collator
        self.renamed = dict(renamed)

    def __call__(self, features: list[Any]) -> Any:
        """The batch of the wrapped collator, with new names."""
        batch = self.collator(features)
        for old, new in self.renamed.items():
            if old in batch:
                batch[new] = batch.pop(old)
        return batch


class GroupCollator:
    """Wraps a collator: takes the group columns out of the examples and puts group ids into the batch.

    The wrapped collator sees numbers in place of the group columns' values (the group id), so that neither strings nor
    bools get in its way.

    Args:
        collator: makes a batch (a mapping of tensors) of a list of examples (mappings).
        groups: what the columns' values stand for.
        batch_key: key of the ids in the batch: int64 [B].
        group_columns: all columns that must not reach the model: those of `groups` and any other group columns.
        optional: whether examples without the columns of `groups` are let through, with `UNKNOWN_GROUP`.
        in_group_order: whether the examples of a batch are put in the order of their groups (and otherwise as they
            came), which spares the gradient engines a sorted copy of every activation.
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Any],
        groups: GroupInfo,
        *,
        batch_key: str,
        group_columns: Sequence[str],
        optional: bool = False,
        in_group_order: bool = False,
    ) -> None:
        self.collator = collator
        self.groups = groups
        self.batch_key = batch_key
        self.group_columns = list(group_columns)
        self.optional = optional
        self.in_group_order = in_group_order

    def __call__(self, features: list[Any]) -> Any:
        """A batch with the group ids under `batch_key`."""
        ids = self._ids(features)
        if self.in_group_order:
            order = np.argsort(ids, kind="stable")
            ids, features = ids[order], [features[place] for place in order]
        batch = self.collator([self._numbered(feature, row) for feature, row in zip(features, ids, strict=True)])
        for name in self.group_columns:
            batch.pop(name, None)
        batch[self.batch_key] = torch.as_tensor(ids)
        return batch

    def _ids(self, features: list[Any]) -> np.ndarray:
        columns = self.groups.columns
        if self.optional and not all(name in feature for feature in features for name in columns):
            return np.full(len(features), UNKNOWN_GROUP, dtype=np.int64)
        try:
            return self.groups.encode([feature[name] for name in columns] for feature in features)
        except KeyError as error:
            raise ValueError(
                f"Expected the group column(s) {list(columns)} in every example, but {error.args[0]!r} is missing; "
                f"the example has {list(features[0])}. Keep the column in the dataset, or name another group_column."
            ) from error

    def _numbered(self, feature: Any, group_id: Any) -> Any:
        own = [name for name in self.group_columns if name in feature]
        return {**feature, **dict.fromkeys(own, int(group_id))} if own else feature


class SubgroupCollator(GroupCollator):
    """The same for subgroups that may overlap, one per column of zeros and ones.

    The batch holds the membership, int64 [B, K], in place of ids; all zeros where an example lacks the columns.
    """

    def _ids(self, features: list[Any]) -> np.ndarray:
        return np.asarray([[int(feature.get(name, 0)) for name in self.groups.columns] for feature in features])

    def _numbered(self, feature: Any, group_id: Any) -> Any:
        return {name: value for name, value in feature.items() if name not in self.group_columns}
