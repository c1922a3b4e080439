"""The collator that carries group ids from the dataset's columns into the batch."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

from hf_cgd.data.alike_rows import array_of
from hf_cgd.data.groups import UNKNOWN_GROUP, GroupInfo
from hf_cgd.data.row_order import RowOrder
from hf_cgd.data.rows import RandomState, has_value, names_in, value_of, with_values

GROUP_IDS = "group_ids"
"""Batch key of the group ids where the column's own name cannot be used."""
ROW_GROUP = "__group_id__"
"""Name under which a row holds its group id where the dataset was read by index; see `RowsWithGroups`."""
MOST_SUBGROUPS = 31
"""From this many subgroups on a membership does not fit into one number, and rows are recognised by what they hold."""
LABEL_COLUMNS = ("labels", "label", "label_ids")
TAKE_ANY_NUMBER = (
    "default_data_collator",
    "torch_default_data_collator",
    "DefaultDataCollator",
    "DataCollatorWithPadding",
)
"""Collators that make a tensor of any column of numbers, also of one that the dataset did not have."""


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


class DroppingCollator:
    """Wraps a collator: takes columns out of the examples.

    Args:
        collator: makes a batch of a list of examples.
        columns: what it must not see.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], columns: Sequence[str]) -> None:
        self.collator = collator
        self.columns = tuple(columns)

    def __call__(self, features: list[Any]) -> Any:
        """The batch of the wrapped collator, made without these columns."""
        for name in self.columns:
            features = [without_value(row, name) for row in features]
        return self.collator(features)


class GroupCollator:
    """Wraps a collator: takes the group columns out of the examples and puts group ids into the batch.

    The wrapped collator sees numbers in place of the group columns' values (the group id), so that neither strings nor
    bools get in its way. Where it returns them, they are the ids of the batch's rows, in whatever order and number
    these are. Where it does not, the rows are recognised by what they hold (see `RowOrder`).

    Args:
        collator: makes a batch (a mapping of tensors) of a list of examples (mappings, or objects with attributes).
        groups: what the columns' values stand for.
        batch_key: key of the ids in the batch: int64 [B].
        group_columns: all columns that must not reach the model: those of `groups` and any other group columns.
        labels: names of the labels, by which rows are recognised.
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
        labels: Sequence[str] = LABEL_COLUMNS,
        optional: bool = False,
        in_group_order: bool = False,
    ) -> None:
        self.collator = collator
        self.groups = groups
        self.batch_key = batch_key
        self.group_columns = list(group_columns)
        self.optional = optional
        self.in_group_order = in_group_order
        remedy = (
            f"Have it keep the column {self.group_columns[0]!r}, which holds a number here: "
            f"batch[{self.group_columns[0]!r}] = torch.tensor([row[{self.group_columns[0]!r}] for row in rows])."
            if self.group_columns
            else "Have it keep the order of the rows, or name a group_column that is no input of the model."
        )
        self._order = RowOrder(collator, tuple(dict.fromkeys((*labels, *LABEL_COLUMNS))), remedy)
        self._returned = False
        self._taken_out = {*group_columns, batch_key, ROW_GROUP}
        self._takes_more = _name_of(collator) in TAKE_ANY_NUMBER
        self._keeps_order = keeps_order(collator)

    def __call__(self, features: list[Any]) -> Any:
        """A batch with the group ids under `batch_key`.

        Raises:
            ValueError: an example without its group, a batch without rows, or one whose rows cannot be recognised.
        """
        names = _names_of_all(features) if self._keeps_order else frozenset()
        if ROW_GROUP in names and self._taken_out.isdisjoint(names - {ROW_GROUP}) and not self.in_group_order:
            # Such a collator makes a tensor of the ids, too.
            batch = self.collator(features)
            batch[self.batch_key] = batch.pop(ROW_GROUP)
            return batch
        ids = self._ids(features)
        if self.in_group_order:
            order = np.argsort(ids, kind="stable")
            ids, features = ids[order], [features[place] for place in order]
        if names and ids.ndim == 1 and ids.min(initial=0) >= 0:
            kept = [name for name in names if name not in self._taken_out]
            if kept:
                rows = (
                    features if len(kept) == len(names) else [{name: row[name] for name in kept} for row in features]
                )
                batch = self.collator(rows)
                batch[self.batch_key] = torch.from_numpy(ids)
                return batch
        rows = self._all_numbered(features, ids)
        before = None if self._returned else RandomState()
        batch = self.collator(rows)
        if not isinstance(batch, MutableMapping):
            raise ValueError(
                f"Expected the collator to return a mapping of names to tensors (a dict), got {type(batch).__name__}."
            )
        returned = [batch.pop(name) for name in (*self.group_columns, self.batch_key) if name in batch]
        size = self._order.size_of(batch)
        if size == 0:
            raise ValueError(
                f"The collator made a batch without rows of {len(features)} examples: its mean loss is not a number. "
                "Leave out what it drops before training (dataset.filter), or have it return at least one row."
            )
        found = self._ids_in(returned, size)
        self._returned = found is not None
        if found is None:
            found = self._order.ids_of(rows, ids, batch, before or RandomState())
        if not self.optional and found.min(initial=0) < 0:
            raise ValueError("The collator returned a row of which the dataset gave None, which has no group.")
        batch[self.batch_key] = torch.as_tensor(found)
        return batch

    def _ids_in(self, returned: Sequence[Any], size: int | None) -> np.ndarray | None:
        """Group ids that came through the collator, [B]; None where none did."""
        for value in returned:
            array = array_of(value)
            if array is not None and array.ndim and array.size == len(array) and len(array) == (size or len(array)):
                ids = array.reshape(-1).astype(np.int64)
                if (ids == array.reshape(-1)).all() and ids.min() >= UNKNOWN_GROUP and ids.max() < len(self.groups):
                    return ids
        return None

    def _ids(self, features: list[Any]) -> np.ndarray:
        columns, ids = self.groups.columns, np.full(len(features), UNKNOWN_GROUP, dtype=np.int64)
        present = [place for place, feature in enumerate(features) if feature is not None]
        given = [features[place] for place in present]
        if given and all(has_value(feature, ROW_GROUP) for feature in given):
            ids[present] = [value_of(feature, ROW_GROUP) for feature in given]
            return ids
        if self.optional and not all(has_value(feature, name) for feature in given for name in columns):
            return ids
        try:
            values = [_plain([value_of(feature, name) for feature in given]) for name in columns]
            ids[present] = self.groups.encode(zip(*values, strict=True))
        except KeyError as error:
            raise ValueError(
                f"Expected the group column(s) {list(columns)} in every example, but {error.args[0]!r} is missing; "
                f"the example has {names_in(given[0])}. Keep the column in the dataset, or name another group_column."
            ) from error
        return ids

    def _all_numbered(self, features: list[Any], ids: np.ndarray) -> list[Any]:
        """The rows with numbers in place of the group columns' values."""
        names = _names_of_all(features)
        # The usual case, without a look at each row's names.
        if ids.ndim == 1 and names:
            own = self._own_names(features[0])
            if ROW_GROUP not in names:
                return [
                    {**row, **dict.fromkeys(own, number)} for row, number in zip(features, ids.tolist(), strict=True)
                ]
        return [self._numbered(feature, row) for feature, row in zip(features, ids, strict=True)]

    def _own_names(self, feature: Any) -> list[str]:
        """Names of a row under which the wrapped collator gets its group id."""
        own = [name for name in self.group_columns if has_value(feature, name)]
        return [self.batch_key] if not own and self._takes_more and isinstance(feature, Mapping) else own

    def _numbered(self, feature: Any, group_id: Any) -> Any:
        if feature is None:
            return None
        own = self._own_names(feature)
        if own:
            feature = with_values(feature, dict.fromkeys(own, int(group_id)))
        if has_value(feature, ROW_GROUP):
            feature = without_value(feature, ROW_GROUP)
        return feature


def keeps_order(collator: Any) -> bool:
    """Whether a collator is known to make its batch of the rows as they come, whatever their columns."""
    kind = collator if hasattr(collator, "__name__") else type(collator)
    return _name_of(collator) in TAKE_ANY_NUMBER and getattr(kind, "__module__", "").startswith("transformers.")


def _name_of(collator: Any) -> str:
    return getattr(collator, "__name__", None) or type(collator).__name__


def _names_of_all(features: list[Any]) -> AbstractSet[str]:
    """Names of the columns where all rows are dicts with the same ones; none elsewhere."""
    if not features or type(features[0]) is not dict:
        return frozenset()
    names = features[0].keys()
    return names if all(type(row) is dict and row.keys() == names for row in features) else frozenset()


class SubgroupCollator(GroupCollator):
    """The same for subgroups that may overlap, one per column of zeros and ones.

    The batch holds the membership, int64 [B, K], in place of ids; all zeros where an example lacks the columns.
    """

    def _ids(self, features: list[Any]) -> np.ndarray:
        rows = [
            value_of(feature, ROW_GROUP)
            if has_value(feature, ROW_GROUP)
            else [int(value_of(feature, name)) if has_value(feature, name) else 0 for name in self.groups.columns]
            for feature in features
        ]
        return np.asarray(rows, dtype=np.int64).reshape(len(rows), len(self.groups.columns))

    def _ids_in(self, returned: Sequence[Any], size: int | None) -> np.ndarray | None:
        # What came through is a row's membership written as one number.
        width = len(self.groups.columns)
        for value in returned if width < MOST_SUBGROUPS else ():
            array = array_of(value)
            if array is not None and array.ndim and array.size == len(array) and len(array) == (size or len(array)):
                numbers = array.reshape(-1).astype(np.int64)
                if (numbers == array.reshape(-1)).all() and numbers.min() >= 0 and numbers.max() < 2**width:
                    return (numbers[:, None] >> np.arange(width)) & 1
        return None

    def _numbered(self, feature: Any, group_id: Any) -> Any:
        bits = np.arange(len(group_id)) if len(group_id) < MOST_SUBGROUPS else 0
        return super()._numbered(feature, int((group_id << bits).sum()))


def _plain(values: list[Any]) -> list[Any]:
    """The values of a column; those of single-valued tensors as Python's own, read all at once."""
    kind = getattr(values[0], "dtype", None) if values else None
    if kind is not None and all(isinstance(v, torch.Tensor) and v.ndim == 0 and v.dtype == kind for v in values):
        return torch.stack(values).tolist()
    return values


def without_value(row: Any, name: str) -> Any:
    """A copy of a row without the value of that name."""
    if isinstance(row, Mapping):
        kept: Any = {key: value for key, value in row.items() if key != name}
        kind: Any = type(row)
        return kept if kind is dict else kind(kept)
    return row
