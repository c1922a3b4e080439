"""Answers of plain (ERM) models, and what kind of answers they are: to rows that the model has learned, or not."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
from torch import nn
from transformers import Trainer

from hf_cgd.discovery.features import ExampleFeatures, example_features, label_column_of

Origin = Literal["early checkpoint", "out of fold", "training rows", "unseen rows"]
ORIGINS: dict[str, str] = {
    "early checkpoint": "a model that was stopped early, on rows it was trained on",
    "out of fold": "models that were each trained without the rows they answer",
    "training rows": "a model on rows it was trained on to the end",
    "unseen rows": "a model on rows it was not trained on",
}
"""What each origin means, in words."""


@dataclass(frozen=True)
class Predictions:
    """Answers to N rows.

    Args:
        classes: [N] the class that was answered.
        labels: [N] the class that is right.
        class_names: by number.
        origin: one of `ORIGINS`.
    """

    classes: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    origin: Origin

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise ValueError(f"origin: expected one of {list(ORIGINS)}, got {self.origin!r}.")
        for name in ("classes", "labels"):
            given = np.asarray(getattr(self, name))
            if given.ndim != 1 or given.dtype.kind not in "iu":
                raise ValueError(
                    f"{name}: expected one class per row as integers [N], got {given.dtype} {given.shape}. Of "
                    "scores take the argmax."
                )
            if len(given) and not 0 <= given.min() <= given.max() < len(self.class_names):
                raise ValueError(f"{name}: expected classes in 0..{len(self.class_names) - 1}, got {given.max()}.")
            object.__setattr__(self, name, given)
        if len(self.classes) != len(self.labels):
            raise ValueError(f"Expected as many classes as labels, got {len(self.classes)} and {len(self.labels)}.")

    @property
    def wrong(self) -> np.ndarray:
        """[N] whether the answer is wrong."""
        return np.asarray(self.classes != self.labels)


def predict_classes(model: nn.Module, dataset: Any, origin: Origin, **options: Any) -> Predictions:
    """Answers of a model.

    Args:
        model: any classifier.
        dataset: rows with labels.
        origin: what the rows are to the model (`ORIGINS`). JTT takes an early checkpoint and its training rows.
        **options: see `hf_cgd.discovery.example_features`.

    Raises:
        ValueError: see there.
    """
    found: ExampleFeatures = example_features(model, dataset, **options)
    return Predictions(found.predictions, found.labels, found.class_names, origin)


def out_of_fold_predictions(
    make_trainer: Callable[[datasets.Dataset], Trainer],
    dataset: datasets.Dataset,
    *,
    folds: int = 3,
    seed: int = 0,
    label_column: str | None = None,
    **options: Any,
) -> Predictions:
    """Answers to each row of a model that was trained without it; `folds` trainings.

    Args:
        make_trainer: given the rows to train on, returns a `Trainer` (or `GroupRobustTrainer`) of a *new* model.
        dataset: rows with labels.
        folds: parts, each class shared out evenly, >= 2.
        seed: of the parts.
        label_column: see `hf_cgd.discovery.example_features`.
        **options: as well; `processing_class` and `data_collator` are the trainer's unless given.

    Raises:
        ValueError: fewer than two folds, a class with fewer rows than folds, or a model that is handed out twice.
    """
    name, column = label_column_of(dataset, label_column)
    codes = column.factors[1]
    least = int(np.bincount(codes).min())
    if not 2 <= folds <= least:
        raise ValueError(
            f"folds: expected 2 to {least}, the number of rows of the rarest class in {name!r}, got {folds}."
        )
    part = _parts(codes, folds, seed)
    answers: ExampleFeatures | None = None
    classes = np.zeros(len(codes), dtype=np.int64)
    labels = np.zeros(len(codes), dtype=np.int64)
    trained: list[weakref.ref[nn.Module]] = []
    for fold in range(folds):
        trainer = make_trainer(dataset.select(np.flatnonzero(part != fold)))
        model = trainer.model
        assert isinstance(model, nn.Module)
        if any(other() is model for other in trained):
            raise ValueError(
                "make_trainer returned a model that another fold has trained already, so that it has seen the rows it "
                "would answer. Build a new model in every call."
            )
        trainer.train()
        rows = np.flatnonzero(part == fold)
        given = {"processing_class": trainer.processing_class, **options}
        answers = example_features(model, dataset.select(rows), label_column=name, **given)
        classes[rows], labels[rows] = answers.predictions, answers.labels
        trained.append(weakref.ref(model))
    assert answers is not None
    return Predictions(classes, labels, answers.class_names, "out of fold")


def _parts(codes: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """[N] the fold of each row; every class is shared out evenly."""
    random = np.random.default_rng(seed)
    part = np.zeros(len(codes), dtype=np.int64)
    for code in np.unique(codes):
        rows = random.permutation(np.flatnonzero(codes == code))
        part[rows] = np.arange(len(rows)) % folds
    return part
