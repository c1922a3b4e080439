"""Groups by the errors of a plain model: the rule of JTT (Liu et al. 2021, "Just Train Twice")."""

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

from hf_cgd.discovery.features import label_column_of
from hf_cgd.discovery.found import FOUND_COLUMN, FoundGroups, found_groups, require_room, with_true_groups
from hf_cgd.discovery.predictions import ORIGINS, Predictions
from hf_cgd.discovery.trust import stability

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
        label_column: of the classes of `validation`; None for the first of labels, label, label_ids.
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
    given = (validation is not None, validation_predictions is not None, true_group_column is not None)
    if any(given) and not all(given):
        raise ValueError("validation, validation_predictions and true_group_column go together: pass all or none.")
    classes, wrong = predictions.labels, predictions.wrong
    if not wrong.any():
        raise ValueError(
            "The model answers every row right, so that its errors make no groups. Take an earlier checkpoint, "
            "out_of_fold_predictions, or groups_from_clusters."
        )
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
    few = [f"{predictions.class_names[n]!r} ({share:.1%})" for n, share in shares.items() if share < FEWEST_ERRORS]
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
        found = validation_predictions.wrong.astype(np.int64)
        agrees = with_true_groups(validation, true_group_column, name, found, validation_predictions.labels)
    how = (
        f"Groups by the errors of {ORIGINS[predictions.origin]} ({wrong.sum():,} of {len(wrong):,} wrong)"
        f"{', in each class' if cross_with_class else ''}. Errors are rare groups, hard rows and wrong labels alike."
    )
    return found_groups(dataset, column, names, ids, how, stable, agrees, cautions)
