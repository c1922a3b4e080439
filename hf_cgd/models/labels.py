"""Which labels fit a model: every check that can be made of a whole column, and of a batch."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_cgd.data.columns import Column, is_missing, listed_rows
from hf_cgd.data.training_groups import IGNORED
from hf_cgd.models.example_losses import CLASSIFICATION, MULTI_LABEL, REGRESSION
from hf_cgd.monitors import GroupRobustWarning

SHOWN_CLASSES = 10


@dataclass(frozen=True)
class LabelChecks:
    """What a model says about its labels, and the checks that follow from it.

    Args:
        outputs: number of its classes or targets, None where it is not known.
        problem_type: what it declares, None for nothing.
        own_loss: whether the user's loss gives labels their meaning: then only missing ones are refused.
    """

    outputs: int | None
    problem_type: str | None
    own_loss: bool = False

    def kind_of(self, name: str, column: Column, where: str) -> str | None:
        """The kind of problem that a column of labels belongs to, None where it cannot be told yet.

        Raises:
            ValueError: labels that do not fit the model; tells the first row, how many there are, and what to do.
        """
        if len(column) == 0:
            return None
        labels = _Labels(name, column, where)
        labels.refuse(is_missing, "a label", "Drop such rows, or give them the label -100 to leave them out")
        if self.own_loss:
            return None
        width = labels.width()
        if width is not None:
            return self._kind_of_rows(labels, width)
        labels.refuse(
            lambda value: isinstance(value, (str, bytes)), "a number",
            f"Encode them: dataset.class_encode_column({name!r})",
        )  # fmt: skip
        numbers = labels.different
        if self.problem_type in (REGRESSION, MULTI_LABEL) and (self.outputs or 1) > 1:
            raise ValueError(
                f"{labels.column_name}: expected {self.outputs} values per row, since the model has "
                f"problem_type={self.problem_type!r} and num_labels={self.outputs}, got single ones such as "
                f"{numbers[0]!r}. If the problem type is left over from another task, set model.config.problem_type = "
                f"{CLASSIFICATION!r}."
            )
        if self.problem_type == REGRESSION or (self.problem_type is None and self.outputs == 1):
            labels.refuse(lambda value: not np.isfinite(value), "a finite number", "Correct or drop such rows")
            return REGRESSION
        if self.problem_type == MULTI_LABEL or (self.outputs is None and self.problem_type is None):
            return self.problem_type
        labels.refuse(
            lambda value: not _is_integer(value), f"a class{self._range()}",
            f"Cast the column: dataset.cast_column({name!r}, Value('int64')); for a regression use num_labels=1",
        )  # fmt: skip
        if self.outputs is None:
            labels.refuse(lambda value: value < 0 and value != IGNORED, "a class >= 0", _UNLABELLED)
            return CLASSIFICATION
        largest = max(int(value) for value in numbers)
        advice = _UNLABELLED if largest < self.outputs else (
            f"Build the model with num_labels={largest + 1}, or correct the labels"
        )  # fmt: skip
        labels.refuse(
            lambda value: value != IGNORED and not 0 <= value < self.outputs, f"a class{self._range()}", advice
        )
        return CLASSIFICATION

    def _kind_of_rows(self, labels: "_Labels", width: int) -> str | None:
        """The same for labels that are lists of `width` > 1 numbers."""
        values = labels.matrix(width)
        if self.problem_type is None and self.outputs is None:
            return None
        if self.problem_type == CLASSIFICATION or (values.dtype.kind not in "f" and self.problem_type is None):
            raise ValueError(
                f"{labels.column_name}: expected one class{self._range()} per row, got lists of {width} numbers "
                f"such as {values[0].tolist()}. For one-hot classes take the place of the 1 (argmax); several "
                f"labels per row are floats with problem_type={MULTI_LABEL!r}. Labels of tokens are not supported."
            )
        if self.outputs is not None and width != self.outputs:
            raise ValueError(
                f"{labels.column_name}: expected {self.outputs} values per row, as many as the model has outputs, got "
                f"{width}. Build the model with num_labels={width}, or correct the labels."
            )
        if self.problem_type == REGRESSION:
            return REGRESSION
        outside = np.flatnonzero(((values < 0) | (values > 1)).any(axis=1))
        if len(outside):
            rows = listed_rows([labels.row(place) for place in outside.tolist()], len(values))
            raise ValueError(
                f"{labels.at(int(outside[0]))}: expected zeros and ones, one per label, got "
                f"{values[outside[0]].tolist()} ({rows}). "
                f"Correct them, or set problem_type={REGRESSION!r}."
            )
        if self.problem_type is None and ((values == 1).sum(axis=1) == 1).all() and (values.sum(axis=1) == 1).all():
            warnings.warn(
                f"{labels.column_name} holds one 1 in each row: it is trained as {width} yes-or-no questions, as the "
                f"Trainer does. For one class per row take the place of the 1 (argmax); else set "
                f"model.config.problem_type = {MULTI_LABEL!r}.",
                GroupRobustWarning,
                stacklevel=2,
            )
        return MULTI_LABEL

    def _range(self) -> str:
        return "" if self.outputs is None else f" in 0..{self.outputs - 1}"


_UNLABELLED = "Drop such rows, or give them the label -100 to leave them out"


class _Labels:
    """A column of labels with its different values and the numbers of its rows."""

    def __init__(self, name: str, column: Column, where: str) -> None:
        self.column_name, self._where = f"Column {name!r} of the {where}", where
        self._name = name
        self.row = column.row
        different, codes = column.factors
        self.different = [_scalar(value) for value in different]
        self._codes, self._column = codes, column

    def at(self, place: int) -> str:
        """What messages call the row of a value."""
        return f"Column {self._name!r}, row {self.row(place)} of the {self._where}"

    def width(self) -> int | None:
        """Numbers per row where that is not one; None for single values, in lists of one or not."""
        sizes = [np.size(value) for value in self.different if not isinstance(value, (str, bytes))]
        longest = max(sizes, default=1)
        return longest if longest > 1 or 0 in sizes else None

    def matrix(self, width: int) -> np.ndarray:
        """The labels as an array [N, width].

        Raises:
            ValueError: rows of other lengths, missing numbers in them, or what are no numbers.
        """
        for code, value in enumerate(self.different):
            place = int(np.flatnonzero(self._codes == code)[0])
            array = np.asarray(value, dtype=object).ravel()
            if array.size != width or any(isinstance(entry, (str, bytes)) for entry in array):
                raise ValueError(
                    f"{self.at(place)}: expected {width} numbers as in other rows, got "
                    f"{str(value)[:80]}. Labels of tokens and texts are not supported."
                )
            if any(is_missing(entry) or not np.isfinite(entry) for entry in array):
                holes = [
                    self.row(p) for p, c in enumerate(self._codes) if not np.isfinite(_floats(self.different[c])).all()
                ]
                raise ValueError(
                    f"{self.at(place)}: expected {width} finite numbers, got "
                    f"{str(value)[:80]} ({listed_rows(holes, len(self._codes))}). Fill in or drop such rows."
                )
        return np.asarray([np.asarray(value).ravel() for value in self.different])[self._codes]

    def refuse(self, is_bad: Callable[[Any], bool], expected: str, advice: str) -> None:
        """Raise a ValueError that names the rows of the values that are bad."""
        bad = [code for code, value in enumerate(self.different) if np.size(value) <= 1 and is_bad(value)]
        if not bad:
            return
        rows = self._column.rows_of(bad)
        place = int(np.flatnonzero(np.isin(self._codes, bad))[0])
        value = self.different[self._codes[place]]
        raise ValueError(
            f"{self.at(place)}: expected {expected}, got {value!r} ({listed_rows(rows, len(self._codes))}). {advice}."
        )


class LabelCollator:
    """Wraps a collator: labels of classes become int64 [B], and others float, whatever integers the dataset holds.

    Args:
        collator: makes a batch.
        name: key of the labels.
        kind: the problem type, None where it is not known.

    A batch whose labels are not finite raises a ValueError.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], name: str, kind: str | None) -> None:
        self.collator, self.name, self.kind = collator, name, kind

    def __call__(self, features: list[Any]) -> Any:
        """The batch of the wrapped collator, with such labels."""
        batch = self.collator(features)
        labels = batch.get(self.name) if hasattr(batch, "get") else None
        if not isinstance(labels, torch.Tensor):
            return batch
        if labels.is_floating_point():
            if not bool(torch.isfinite(labels).all()):
                rows = (~torch.isfinite(labels)).reshape(len(labels), -1).any(dim=1).nonzero().flatten().tolist()
                raise ValueError(
                    f"Labels {self.name!r} of a batch: expected finite numbers, got {labels[rows[0]].tolist()} in its "
                    f"row {rows[0]} ({len(rows)} such rows). Fill in or drop such rows."
                )
            elif self.kind == CLASSIFICATION and labels.numel() == len(labels):
                # Lists of one, which the default collator takes for fractions.
                batch[self.name] = labels.reshape(-1).long()
        elif self.kind == CLASSIFICATION and (labels.dtype != torch.int64 or labels.ndim != 1):
            batch[self.name] = (labels.reshape(-1) if labels.numel() == len(labels) else labels).long()
        elif self.kind in (REGRESSION, MULTI_LABEL):
            batch[self.name] = labels.float()
        return batch


def require_same_classes(name: str, trained: Column, other: Column, where: str) -> None:
    """Raise a ValueError where two columns of labels give one number to different classes."""
    first, second = trained.class_names, other.class_names
    if other.renumbered:
        raise ValueError(
            f"The parts of the {where} number the classes of {name!r} differently, and a model sees only the numbers. "
            "Bring them to one order: dataset.align_labels_with_mapping."
        )
    if first and second and any(a != b for a, b in zip(first, second, strict=False)):
        raise ValueError(
            f"Column {name!r} of the {where}: expected the classes in the order of training, {list(first)}, got "
            f"{list(second)}. Use dataset.align_labels_with_mapping(label2id, {name!r})."
        )


def other_order(name: str, column: Column, outputs: Sequence[str]) -> str:
    """What is wrong where model and data have classes of one name at different numbers; "" where none has.

    Args:
        name, column: the labels.
        outputs: names of the model's classes.
    """
    classes = list(column.class_names or ())
    moved = [one for one in classes if one in outputs and list(outputs).index(one) != classes.index(one)]
    if not moved:
        return ""
    return (
        f"The model's classes are {list(outputs)[:SHOWN_CLASSES]}, those of column {name!r} {classes[:SHOWN_CLASSES]}"
        f": {moved[0]!r} is not the same number in both, so that its right answers count as wrong. Use "
        f"dataset.align_labels_with_mapping(model.config.label2id, {name!r}); or, for a model that is still to learn "
        "them, give it the names in the order of the data (id2label, label2id)."
    )


def _scalar(value: Any) -> Any:
    """The one value in a list or array of one; anything else as it is."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, (list, tuple, np.ndarray)) and np.size(np.asarray(value, dtype=object)) == 1:
        return np.asarray(value, dtype=object).ravel()[0]
    return value


def _floats(value: Any) -> np.ndarray:
    return np.asarray([np.nan if is_missing(entry) else entry for entry in np.asarray(value, dtype=object).ravel()],
                      dtype=float)  # fmt: skip


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer, np.bool_))
