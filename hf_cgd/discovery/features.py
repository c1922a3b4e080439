"""What a trained classifier makes of each row of a dataset: the input of its head, its scores, its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import DataCollatorWithPadding, default_data_collator

from hf_cgd.data.collator import LABEL_COLUMNS
from hf_cgd.data.columns import Column, column_names, listed_rows, read_columns, require_columns, row_names
from hf_cgd.data.row_order import RowOrder
from hf_cgd.data.rows import RandomState, undisturbed, value_of
from hf_cgd.data.training_groups import IGNORED
from hf_cgd.models.example_losses import CLASSIFICATION
from hf_cgd.models.head import HeadInput
from hf_cgd.models.heads import require_whole_examples
from hf_cgd.models.labels import LabelChecks, other_order
from hf_cgd.models.modes import modes_kept
from hf_cgd.models.outputs import (
    class_names_of,
    declared_problem_type,
    forward_parameters,
    logits_of,
    num_outputs_of,
    renamed_input,
)


@dataclass(frozen=True)
class ExampleFeatures:
    """What a classifier makes of N rows.

    Args:
        features: [N, D] float32, what goes into the classification head.
        logits: [N, C] float32.
        labels: [N] classes in [0, C).
        class_names: C names.
    """

    features: np.ndarray
    logits: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]

    @property
    def predictions(self) -> np.ndarray:
        """[N] class with the highest score."""
        return np.asarray(self.logits.argmax(axis=1))


def example_features(
    model: nn.Module,
    dataset: Any,
    *,
    label_column: str | None = None,
    not_inputs: Sequence[str] = (),
    processing_class: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    batch_size: int = 32,
    num_workers: int = 0,
) -> ExampleFeatures:
    """Run a classifier once over a dataset, in evaluation mode, where it is (`model.to("cuda")` for a GPU).

    Args:
        model: any classifier with a head (`hf_cgd.models.head`), of transformers, of timm or of one's own.
        dataset: map-style, with labels and the model's inputs (or what `data_collator` makes these of).
        label_column: None for the first of labels, label, label_ids.
        not_inputs: columns that are no inputs (groups).
        processing_class: a tokenizer, which pads; None where rows have one length.
        data_collator: makes a batch of rows; None for padding with `processing_class`, or plain stacking.
        batch_size: rows in a forward pass.
        num_workers: processes that read rows.

    Raises:
        ValueError: labels that are not one class of the model's per row, no head, or a collator that loses rows.
    """
    require_whole_examples(model)
    name, column = label_column_of(dataset, label_column)
    head = HeadInput(model, num_outputs_of(model))
    outputs = num_outputs_of(model) or getattr(head.heads[-1], "out_features", None)
    labels = class_labels(name, column, LabelChecks(outputs, declared_problem_type(model)))
    columns = row_names(dataset) or []
    renamed = renamed_input(model, columns, [name, *not_inputs]) if data_collator is None else {}
    parameters = forward_parameters(model)
    inputs = [own for own in columns if renamed.get(own, own) in parameters and own not in (*LABEL_COLUMNS, name)]
    if data_collator is None:
        data_collator = default_data_collator
        if hasattr(processing_class, "pad"):
            data_collator = DataCollatorWithPadding(processing_class)
    collate = _NumberedRows(data_collator, [*inputs, name] if inputs else None, name)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    features: dict[int, Tensor] = {}
    logits: dict[int, Tensor] = {}
    loader: Any = DataLoader(dataset, batch_size=batch_size, collate_fn=collate, num_workers=num_workers)
    with modes_kept(model), undisturbed(dataset), torch.no_grad():
        model.eval()
        start = 0
        for batch, places, size in tqdm(loader, desc="Features of the last layer", disable=None):
            given = {renamed.get(key, key): value for key, value in batch.items() if key not in LABEL_COLUMNS}
            given = {key: _moved(value, device) for key, value in given.items() if key in parameters}
            with head.recording():
                scores = logits_of(model(**given))
            rows = (start + places).tolist()
            features.update(zip(rows, head.values(scores).float().cpu(), strict=True))
            logits.update(zip(rows, scores.float().cpu(), strict=True))
            start += size
    lost = [row for row in range(len(labels)) if row not in features]
    if lost:
        raise ValueError(
            f"The collator left out {listed_rows(lost, len(labels))}. Every row needs an answer: pass a data_collator "
            "that returns all rows, or leave these rows out of the dataset."
        )
    order = range(len(labels))
    if wrong := other_order(name, column, class_names_of(model)):
        raise ValueError(wrong)
    known = column.class_names or class_names_of(model)
    scores_of_all = torch.stack([logits[row] for row in order]).numpy()
    if scores_of_all.ndim != 2 or scores_of_all.shape[1] < 2:
        raise ValueError(
            f"Expected a classifier with one score per class, at least two, got scores of shape {scores_of_all.shape}."
        )
    return ExampleFeatures(
        torch.stack([features[row] for row in order]).numpy(),
        scores_of_all,
        labels,
        tuple(known) if len(known) == scores_of_all.shape[1] else tuple(map(str, range(scores_of_all.shape[1]))),
    )


def label_column_of(dataset: Any, given: str | None) -> tuple[str, Column]:
    """Name and values of the labels of a map-style dataset.

    Raises:
        ValueError: there are none, or no rows.
    """
    names = column_names(dataset) or []
    name = given or next((name for name in LABEL_COLUMNS if name in names), LABEL_COLUMNS[0])
    require_columns(dataset, [name], "label_column", "dataset", "Name the column of the classes in label_column.")
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        raise ValueError("Expected a dataset with rows that can be counted, got a stream or an empty dataset.")
    return name, read_columns(dataset, [name])[name]


def class_labels(name: str, column: Column, checks: LabelChecks) -> np.ndarray:
    """[N] classes.

    Raises:
        ValueError: other labels, or rows without one (-100).
    """
    kind = checks.kind_of(name, column, "dataset")
    different, codes = column.factors
    if kind not in (CLASSIFICATION, None) or any(np.size(value) != 1 for value in different):
        raise ValueError(
            f"Column {name!r}: expected one class per row, got {str(different[0])[:60]} under problem_type={kind!r}. "
            "Regression and multi-label problems have no single wrong answer and no classes to look into."
        )
    classes = np.asarray([int(np.ravel(np.asarray(value))[0]) for value in different], dtype=np.int64)[codes]
    if (classes == IGNORED).any():
        rows = listed_rows(np.flatnonzero(classes == IGNORED).tolist(), len(classes))
        raise ValueError(f"Column {name!r}: {rows} have no label ({IGNORED}). Leave them out with dataset.filter.")
    return classes


class _NumberedRows:
    """A collator that tells the place of each row of its batch among those that it was given.

    Args:
        collator: makes a batch.
        names: what it is given of a row; None for all.
        label: the name of the labels.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], names: Sequence[str] | None, label: str) -> None:
        self.collator, self.names = collator, names
        remedy = "Pass a data_collator that keeps the order of the rows."
        self._order = RowOrder(collator, tuple(dict.fromkeys((label, *LABEL_COLUMNS))), remedy)

    def __call__(self, rows: list[Any]) -> tuple[Mapping[str, Any], np.ndarray, int]:
        if self.names is not None:
            rows = [{name: value_of(row, name) for name in self.names} for row in rows]
        before = RandomState()
        batch = self.collator(rows)
        if not isinstance(batch, Mapping):
            raise ValueError(f"Expected the collator to return a mapping of names to tensors, got {type(batch)}.")
        return batch, self._order.ids_of(rows, np.arange(len(rows)), batch, before), len(rows)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
