"""Which row each entry of a batch came from, where a collator does not say."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_cgd.data.alike_rows import agreement, alike, array_of, in_turn, is_joined, same, single
from hf_cgd.data.rows import RandomState, has_value, value_of, with_values

CONFIRMATIONS = 3
"""Batches in which a collator is seen to keep the order of its rows, until equal labels are proof enough."""


class RowOrder:
    """Compares what came out of a collator with the rows that went in.

    Equal labels, lengths and input values tell which row is which. Where they leave a doubt that matters (rows of
    different groups), the collator is called again, with the places of the rows for labels, or with the rows in
    another order; random numbers are then drawn from where they were.

    Args:
        collator: the user's.
        labels: names of the labels, in rows and in batches.
        remedy: what to do where it cannot be known, a sentence.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], labels: Sequence[str], remedy: str) -> None:
        self.collator = collator
        self.labels = tuple(labels)
        self.remedy = remedy
        self._confirmed: float = 0

    def ids_of(
        self, rows: Sequence[Any], ids: np.ndarray, batch: Mapping[str, Any], before: RandomState
    ) -> np.ndarray:
        """The entry of `ids`, [B] or [B, K], that belongs to each row of the batch.

        Args:
            rows: what went in, B of them.
            ids: that of each of them.
            batch: what came out.
            before: the state of the generators when the collator was called.

        Raises:
            ValueError: it cannot be known.
        """
        size = self.size_of(batch)
        if size is None:
            raise ValueError(f"The batch holds no tensor with one entry per row, but {sorted(batch)}. {self.remedy}")
        present = np.asarray([row is not None for row in rows])
        known: np.ndarray = ids[present]
        labels = self._labels_in(batch)
        own = [next((value_of(r, n) for n in self.labels if r is not None and has_value(r, n)), None) for r in rows]
        if size == 1 < len(known) and (is_joined(labels, own) or self._joins_inputs(rows, batch)):
            raise ValueError(
                f"The collator {self._name} joins the {len(known)} rows of a batch into one, which would count as one "
                "example. Expected a row for each example: take a collator that pads."
            )
        if len(known) and (known == known[0]).all():
            return np.repeat(known[:1], size, axis=0)
        in_place = size == len(rows) and bool(present.all())
        if in_place and self._soft_targets_fit(labels, own):
            return ids
        if in_place and self._confirmed >= CONFIRMATIONS and same(labels, own):
            return ids
        by_inputs = np.tile(present, (size, 1))
        compared = {name for name in batch if name not in self.labels and self._narrow(by_inputs, rows, batch, name)}
        seen = agreement(own, labels)
        # Where inputs contradict them, the collator has made other labels of them.
        fits = seen is not None and (by_inputs & seen).any(axis=1).all()
        possible = by_inputs & seen if seen is not None and fits else by_inputs
        return self._decide(rows, ids, batch, before, possible, by_inputs, compared)

    @property
    def _name(self) -> str:
        return getattr(self.collator, "__qualname__", None) or type(self.collator).__name__

    def size_of(self, batch: Mapping[str, Any]) -> int | None:
        """Number of rows of a batch: of its labels, or else of the first value that has any."""
        for value in (self._labels_in(batch), *batch.values()):
            listed = hasattr(value, "__len__") and not isinstance(value, (str, Mapping))
            if listed and getattr(value, "ndim", 1) > 0:
                return len(value)
        return None

    def _joins_inputs(self, rows: Sequence[Any], batch: Mapping[str, Any]) -> bool:
        """Whether something in the batch is as long as what all rows have under its name."""
        there = [row for row in rows if row is not None]
        return any(
            is_joined(value, [value_of(row, name) for row in there])
            for name, value in batch.items()
            if all(has_value(row, name) for row in there)
        )

    def _decide(
        self,
        rows: Sequence[Any],
        ids: np.ndarray,
        batch: Mapping[str, Any],
        before: RandomState,
        possible: np.ndarray,
        by_inputs: np.ndarray,
        compared: set[str],
    ) -> np.ndarray:
        size = len(possible)
        found = np.asarray(possible.any(axis=1))
        if found.all():
            doubtful = [j for j in range(size) if len(np.unique(ids[possible[j]], axis=0)) > 1]
            is_complete = bool(compared) and self._inputs_of(batch, size) <= compared
            if is_complete:
                in_order = size == len(rows) and bool(possible.diagonal().all())
                self._confirmed = self._confirmed + (size > 2) if in_order else -np.inf
            # Labels alone are no proof: a collator may make 0 and 1 of five, and there are rows of such labels.
            if is_complete and not doubtful:
                return np.asarray(ids[possible.argmax(axis=1)])
            if is_complete:
                # Rows that are alike in all that the model sees: which of them is which makes no difference.
                return ids[in_turn(possible)]
        keeps_order = size == len(rows) and bool(possible.diagonal().all())
        if keeps_order and self._confirmed >= CONFIRMATIONS:
            return ids
        places = self._ask_again(rows, batch, before)
        known = np.asarray(by_inputs.any(axis=1))
        if places is None or not all(by_inputs[j, place] or not known[j] for j, place in enumerate(places.tolist())):
            raise ValueError(
                f"The collator {self._name} made a batch of {size} of {len(rows)} rows, and what came "
                f"back ({sorted(batch)}) does not show which row is which, so that groups are not known. {self.remedy}"
            )
        in_order = size == len(rows) and bool((places == np.arange(size)).all())
        self._confirmed = self._confirmed + (size > 2) if in_order else -np.inf
        return ids[places]

    def _narrow(self, possible: np.ndarray, rows: Sequence[Any], batch: Mapping[str, Any], name: str) -> bool:
        """Leave only rows possible whose value of that name is the batch's; False where the two are not comparable."""
        if not all(row is None or has_value(row, name) for row in rows):
            return False
        whole = array_of(batch[name])
        if whole is None or whole.ndim == 0 or len(whole) != len(possible):
            return False
        values = [None if row is None else array_of(value_of(row, name)) for row in rows]
        if any(value is None and row is not None for value, row in zip(values, rows, strict=True)):
            return False
        same = alike(whole.reshape(len(whole), -1), values)
        if not (same & possible).any(axis=1).all():
            return False
        possible &= same
        return True

    def _inputs_of(self, batch: Mapping[str, Any], size: int) -> set[str]:
        """Names of all that has more than one number per row, the labels aside."""
        arrays = {name: array_of(value) for name, value in batch.items() if name not in self.labels}
        return {name for name, a in arrays.items() if a is not None and a.ndim and len(a) == size and a.size > size}

    def _labels_in(self, batch: Mapping[str, Any]) -> Any:
        return next((batch[name] for name in self.labels if batch.get(name) is not None), None)

    def _soft_targets_fit(self, labels: Any, own: Sequence[Any]) -> bool:
        """Whether the labels are shares of classes, of the class of the row in the same place among others."""
        shares = array_of(labels)
        classes = array_of([single(value) for value in own])
        if shares is None or classes is None or shares.ndim != 2 or shares.shape[1] < 2 or classes.ndim != 1:
            return False
        if shares.dtype.kind != "f" or classes.dtype.kind == "f" or classes.min() < 0:
            return False
        if classes.max() >= shares.shape[1] or not ((shares > 0).sum(axis=1) > 1).any():
            return False
        return bool((shares[np.arange(len(shares)), classes] > 0).all())

    def _ask_again(self, rows: Sequence[Any], batch: Mapping[str, Any], before: RandomState) -> np.ndarray | None:
        """Places of the batch's rows, found by calling the collator again; None where that does not tell."""
        after = RandomState()
        try:
            for way in (self._by_numbered_labels, self._by_other_orders):
                try:
                    places = way(rows, batch, before)
                # Whatever a collator says to labels that are none, or to other rows: this way tells nothing.
                except Exception:
                    places = None
                if places is not None:
                    return places
            return None
        finally:
            after.restore()

    def _by_numbered_labels(
        self, rows: Sequence[Any], batch: Mapping[str, Any], before: RandomState
    ) -> np.ndarray | None:
        """Places that come back as labels where they were given for labels, and so again when counted further on."""
        name = next(n for n in self.labels if any(row is not None and has_value(row, n) for row in rows))
        found = []
        for start in (0, len(rows)):
            numbered = [
                None if row is None else with_values(row, {name: _like(value_of(row, name), number)})
                for number, row in enumerate(rows, start)
            ]
            before.restore()
            labels = array_of(self._labels_in(self.collator(numbered)))
            if labels is None or labels.size != len(labels) or len(labels) != self.size_of(batch):
                return None
            found.append(labels.reshape(-1))
        places: np.ndarray = found[0].astype(np.int64)
        fits = (places == found[0]).all() and places.min() >= 0 and places.max() < len(rows)
        # A collator that makes other labels of them gives numbers as well.
        fits = fits and (found[1] == places + len(rows)).all()
        return places if fits and not any(rows[place] is None for place in places.tolist()) else None

    def _by_other_orders(
        self, rows: Sequence[Any], batch: Mapping[str, Any], before: RandomState
    ) -> np.ndarray | None:
        """The order of the rows where each other order of them gives the batch in that other order."""
        size = len(rows)
        if self.size_of(batch) != size:
            return None
        compared = False
        # An order that goes with a turn and with the exchange of two is the given one. Two rows need a third.
        orders = [[0, 1, 1]] if size == 2 else [[*range(1, size), 0], [1, 0, *range(2, size)]]
        for order in orders:
            before.restore()
            again = self.collator([rows[place] for place in order])
            for name, value in batch.items():
                whole, other = array_of(value), array_of(again[name])
                if whole is None or not whole.ndim or len(whole) != size:
                    continue
                if other is None or not np.array_equal(whole[order], other, equal_nan=whole.dtype.kind == "f"):
                    return None
                compared = True
        return np.arange(size) if compared else None


def _like(value: Any, place: int) -> Any:
    """A place as a label of the same kind."""
    if isinstance(value, torch.Tensor):
        dtype = value.dtype if value.is_floating_point() else torch.int64
        return torch.full(value.shape, place, dtype=dtype)
    if isinstance(value, np.ndarray):
        return np.full(value.shape, place)
    if isinstance(value, (list, tuple)):
        return [place for _ in value]
    return float(place) if isinstance(value, float) else place
