"""Groups by the errors of a plain model: the rule of JTT (Liu et al. 2021, "Just Train Twice")."""

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

from hf_cgd.data.collator import LABEL_COLUMNS
from hf_cgd.data.columns import column_names, read_columns
from hf_cgd.discovery.features import label_column_of
from hf_cgd.discovery.found import FOUND_COLUMN, FoundGroups, found_groups, require_room, with_true_groups
from hf_cgd.discovery.predictions import ORIGINS, Predictions
from hf_cgd.discovery.trust import stability
from hf_cgd.visible_numbers import per_cent

FEWEST_ERRORS = 0.01
"""Share of errors in a class below which they are called few."""


def groups_from_errors(
    dataset: datasets.Dataset,
    predictions: Predictions,
    *,
    cross_with_class: bool = True,
    repeats: Sequence[Predictions] = (),
    validation: Any = None,
    validation_predictions: Predictions | None = None,
    true_group_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    column: str = FOUND_COLUMN,
) -> FoundGroups:
    """Two groups, the rows that a plain model answers wrong and the others, in each class or over all.

        early = predict_classes(model, train, "early checkpoint", processing_class=tokenizer)
        found = groups_from_errors(train, early)
        print(found)
        GroupRobustTrainer(..., train_dataset=found.dataset, group_column=found.column)

    The rows behind wrong answers are rare groups, hard rows and wrong labels alike.

    Args:
        dataset: the rows to train on.
        predictions: answers to them.
        cross_with_class: whether each class has two groups of its own.
        repeats: answers to the same rows from other seeds or folds, for the stability.
        validation: rows whose true groups are known; None for none.
        validation_predictions: answers of the plain model to them.
        true_group_column: column(s) of the true groups there, which are crossed with the class.
        label_column: of the classes; None for the first of labels, label, label_ids.
        column: name of the new column.

    Raises:
        ValueError: parts that do not fit together, or a model without any error.
    """
    require_room(dataset, column)
    for number, other in enumerate((predictions, *repeats)):
        if len(other.labels) != len(dataset) or not np.array_equal(other.labels, predictions.labels):
            raise ValueError(
                f"Expected answers to the {len(dataset)} rows of the dataset, got {len(other.labels)} answers, or "
                f"answers to other labels{f', in repeats[{number - 1}]' if number else ''}."
            )
    if not predictions.wrong.any():
        raise ValueError(
            "The model answers every row right, so that its errors make no groups. Take an earlier checkpoint, "
            "out_of_fold_predictions, or groups_from_clusters."
        )
    own_label = next((name for name in (label_column, *LABEL_COLUMNS) if name in (column_names(dataset) or [])), None)
    if own_label is not None:
        _require_same_rows(dataset, own_label, predictions, "dataset")
    given = (validation is not None, validation_predictions is not None, true_group_column is not None)
    if any(given) and not all(given):
        raise ValueError("validation, validation_predictions and true_group_column go together: pass all or none.")
    classes, wrong = predictions.labels, predictions.wrong
    names = [f"{name} ({kind})" for name in predictions.class_names for kind in ("right", "wrong")]
    ids = 2 * classes + wrong
    if not cross_with_class:
        names, ids = ["right", "wrong"], wrong.astype(np.int64)
    cautions = []
    if predictions.origin == "training rows":
        cautions.append(
            "The model has learned the rows it answers, so that few of them are wrong, and wrong labels are among the "
            "last: an early checkpoint or out_of_fold_predictions shows more."
        )
    shares = {int(number): wrong[classes == number].mean() for number in np.unique(classes)}
    few = [
        f"{predictions.class_names[n]!r} ({per_cent(share)})" for n, share in shares.items() if share < FEWEST_ERRORS
    ]
    if few:
        cautions.append(f"Hardly any errors in: {', '.join(few)}. Groups of these classes are not found by errors.")
    half = [f"{predictions.class_names[n]!r} ({share:.0%})" for n, share in shares.items() if share > 0.5]
    if half:
        cautions.append(f"Most answers are wrong in: {', '.join(half)}. The model has learned too little to tell.")
    stable = None
    if repeats:
        again = [other.wrong.astype(np.int64) for other in repeats]
        stable = stability(wrong.astype(np.int64), again, classes, "other models")
    agrees = None
    if validation is not None and validation_predictions is not None and true_group_column is not None:
        name, own = label_column_of(validation, label_column)
        if len(own) != len(validation_predictions.labels):
            raise ValueError(
                f"Expected answers to the {len(own)} rows of validation, got {len(validation_predictions.labels)}."
            )
        _require_same_rows(validation, name, validation_predictions, "validation")
        if validation_predictions.origin in ("training rows", "early checkpoint"):
            cautions.append(
                f"The answers to validation are those of {ORIGINS[validation_predictions.origin]}: on rows that the "
                "model has not seen the agreement may be another."
            )
        found = validation_predictions.wrong.astype(np.int64)
        agrees = with_true_groups(validation, true_group_column, name, found, validation_predictions.labels)
    how = (
        f"Groups by the errors of {ORIGINS[predictions.origin]} ({wrong.sum():,} of {len(wrong):,} wrong)"
        f"{', in each class' if cross_with_class else ''}. Errors are rare groups, hard rows and wrong labels alike."
    )
    return found_groups(dataset, column, names, ids, how, stable, agrees, cautions)


def _require_same_rows(rows: Any, label: str, answers: Predictions, where: str) -> None:
    """Raise a ValueError where rows with one label were answered as rows of several: they are others, or in disorder.

    A transform may make the labels, so that several that are stored are one class.
    """
    codes = read_columns(rows, [label])[label].factors[1]
    pairs = np.unique(np.stack([codes, answers.labels]), axis=1)
    if pairs.shape[1] > len(np.unique(codes)):
        _, first_of, code = np.unique(codes, return_index=True, return_inverse=True)
        first = int(np.flatnonzero(answers.labels != answers.labels[first_of[code]])[0])
        raise ValueError(
            f"{where}: expected answers to its rows in their order, but row {first} has the {label!r} of an earlier "
            "row and was answered as one of another class. Were rows shuffled or filtered in between? Ask for the "
            "answers again."
        )
