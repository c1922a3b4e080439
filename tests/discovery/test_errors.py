"""Groups by errors that are made by hand, and by models."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset
from tiny import predicts_one_class, text_dataset, tiny_distilbert

from hf_cgd import GroupRobustTrainer, GroupRobustWarning, groups_from_errors
from hf_cgd.discovery import Predictions, out_of_fold_predictions, predict_classes
from hf_cgd.discovery.trust import rand_within_classes

LABELS = np.array([0, 0, 0, 0, 1, 1, 1, 1] * 20)
WRONG = np.array([0, 0, 0, 1, 0, 0, 1, 0] * 20, dtype=bool)
"""A quarter of each class, so that both have groups of 20 and 60 rows."""


def answers(wrong: np.ndarray, origin: Any = "early checkpoint", labels: np.ndarray = LABELS) -> Predictions:
    return Predictions(np.where(wrong, 1 - labels, labels), labels, ("land", "water"), origin)


def rows(**columns: Any) -> Dataset:
    return Dataset.from_dict({"labels": LABELS, "x": np.arange(160)} | columns)


def test_right_and_wrong_in_each_class() -> None:
    found = groups_from_errors(rows(), answers(WRONG))
    names = [
        f"{('land', 'water')[label]} ({'wrong' if bad else 'right'})" for label, bad in zip(LABELS, WRONG, strict=True)
    ]
    assert found.dataset["found_group"][:] == names and found.column == "found_group"
    assert found.counts == {"land (right)": 60, "land (wrong)": 20, "water (right)": 60, "water (wrong)": 20}
    assert [found.names[number] for number in found.ids] == names
    assert found.cautions == ()
    text = str(found)
    assert "40 of 160 wrong" in text and "stopped early" in text
    assert "Stability: not measured" in text and "They may be anything" in text


def test_right_and_wrong_over_all_and_a_name_of_ones_own() -> None:
    found = groups_from_errors(rows(), answers(WRONG), cross_with_class=False, column="jtt")
    assert found.dataset["jtt"][:] == ["wrong" if bad else "right" for bad in WRONG]
    assert found.counts == {"right": 120, "wrong": 40}


def test_stability_over_other_models() -> None:
    other = np.roll(WRONG, 8) ^ (np.arange(160) < 8)
    found = groups_from_errors(rows(), answers(WRONG), repeats=[answers(WRONG), answers(other)])
    value = rand_within_classes(WRONG, other, LABELS)
    assert found.stability is not None and found.stability.least == value < 1
    assert found.stability.mean == pytest.approx((1 + value) / 2)
    with pytest.warns(GroupRobustWarning, match="do not come out again over other models"):
        found = groups_from_errors(rows(), answers(WRONG), repeats=[answers(np.roll(WRONG, 1))])
    assert len(found.cautions) == 1 and f"Caution: {found.cautions[0]}" in str(found)


def test_agreement_with_true_groups() -> None:
    """The true groups are the errors but for 5 rows of land's 20, which were answered right."""
    missed = np.flatnonzero(WRONG & (LABELS == 0))[:5]
    seen = WRONG.copy()
    seen[missed] = False
    validation = rows(place=["rare" if bad else "common" for bad in WRONG])
    found = groups_from_errors(
        rows(), answers(WRONG), validation=validation, validation_predictions=answers(seen, "unseen rows"),
        true_group_column="place",
    )  # fmt: skip
    by_name = {group.name: group for group in found.agreement.groups}
    rare = by_name["labels:0 place:rare"]
    assert (rare.count, rare.recall, rare.precision) == (20, 0.75, 1.0)
    assert found.agreement.worst == rare and found.cautions == ()
    assert f"labels:0 place:rare (n = 20): recall 0.75 ({rare.by_chance:.2f} by chance), precision 1.00" in str(found)


def test_true_groups_that_are_missed_are_warned_of() -> None:
    validation = rows(place=["a", "b"] * 80)
    with pytest.warns(GroupRobustWarning, match=r"found to \d+% only \(4\d% would be chance\)"):
        groups_from_errors(
            rows(), answers(WRONG), validation=validation, validation_predictions=answers(WRONG, "unseen rows"),
            true_group_column="place",
        )  # fmt: skip


@pytest.mark.parametrize(
    "wrong,origin,message",
    [
        (WRONG, "training rows", "has learned the rows it answers"),
        (WRONG & (LABELS == 0), "out of fold", r"Hardly any errors in: 'water' \(0.0%\)"),
        (~WRONG, "early checkpoint", r"Most answers are wrong in: 'land' \(75%\), 'water' \(75%\)"),
        (WRONG & (np.arange(160) < 80), "out of fold", r"fewer than 20 rows.*'land \(wrong\)' \(10\)"),
    ],
)
def test_what_speaks_against_them_is_said(wrong: np.ndarray, origin: Any, message: str) -> None:
    with pytest.warns(GroupRobustWarning, match=message):
        groups_from_errors(rows(), answers(wrong, origin))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="answers every row right"):
        groups_from_errors(rows(), answers(np.zeros(160, dtype=bool)))
    with pytest.raises(ValueError, match="to the 160 rows of the dataset, got 80"):
        groups_from_errors(rows(), answers(WRONG[:80], labels=LABELS[:80]))
    with pytest.raises(ValueError, match=r"in repeats\[0\]"):
        groups_from_errors(rows(), answers(WRONG), repeats=[answers(WRONG, labels=1 - LABELS)])
    # The same rows in another order: each would be given the answer to another one.
    shuffled = rows().shuffle(seed=0)
    with pytest.raises(ValueError, match=r"dataset: expected answers to its rows in their order, but row \d+ has"):
        groups_from_errors(shuffled, answers(WRONG))
    with pytest.raises(ValueError, match="validation: expected answers to its rows in their order"):
        groups_from_errors(
            rows(), answers(WRONG), validation=shuffled, validation_predictions=answers(WRONG, "unseen rows"),
            true_group_column="x",
        )  # fmt: skip
    # Labels that a transform makes: several that are stored are one class.
    graded = rows().remove_columns("labels").add_column("labels", (2 * LABELS + np.arange(160) % 2).tolist())
    assert groups_from_errors(graded, answers(WRONG)).counts["land (wrong)"] == 20
    with pytest.raises(ValueError, match="go together"):
        groups_from_errors(rows(), answers(WRONG), validation=rows())
    with pytest.raises(ValueError, match="has a column 'found_group' already"):
        groups_from_errors(rows(found_group=["a"] * 160), answers(WRONG))
    with pytest.raises(ValueError, match="expected a datasets.Dataset|Expected a datasets.Dataset"):
        groups_from_errors(list(rows()), answers(WRONG))
    with pytest.raises(ValueError, match="origin: expected one of"):
        answers(WRONG, "guessed")
    with pytest.raises(ValueError, match="take the argmax"):
        Predictions(np.zeros((4, 2)), np.zeros(4, dtype=int), ("a", "b"), "unseen rows")
    with pytest.raises(ValueError, match="classes in 0..1, got 2"):
        Predictions(np.array([2]), np.array([0]), ("a", "b"), "unseen rows")


def test_formats_and_transforms_are_kept() -> None:
    data = rows(hidden=["h"] * 160).with_format("torch", columns=["x", "labels"])
    found = groups_from_errors(data, answers(WRONG))
    assert set(found.dataset[0]) == {"x", "labels", "found_group"} and isinstance(found.dataset[0]["x"], torch.Tensor)
    doubled = rows().with_transform(lambda batch: {**batch, "x": [2 * x for x in batch["x"]]})
    assert groups_from_errors(doubled, answers(WRONG)).dataset[3]["x"] == 6


def test_answers_of_a_model_and_the_names_of_its_classes() -> None:
    data = text_dataset().cast_column("labels", ClassLabel(names=["no", "yes"]))
    model = tiny_distilbert()
    found = predict_classes(model, data, "early checkpoint")
    tensors = data.with_format("torch")[:]
    with torch.no_grad():
        scores = model.eval()(input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"]).logits
    assert np.array_equal(found.classes, scores.argmax(dim=1).numpy())
    assert found.class_names == ("no", "yes") and found.labels.tolist() == data["labels"][:]


@predicts_one_class
def test_out_of_fold_answers_are_those_of_models_without_the_row(config: Callable[..., Any]) -> None:
    """The oracle: each model asked by hand about the rows it was not given."""
    data = text_dataset(18).remove_columns("labels").add_column("labels", [0, 1] * 9)
    trained: list[tuple[torch.nn.Module, list[int]]] = []

    def make_trainer(part: Dataset) -> GroupRobustTrainer:
        model = tiny_distilbert(seed=len(trained))
        trained.append((model, [str(row["input_ids"]) for row in part]))
        return GroupRobustTrainer(model, config(objective="erm", group_column=None, max_steps=1), train_dataset=part)

    found = out_of_fold_predictions(make_trainer, data, folds=3)
    assert found.origin == "out of fold" and len(trained) == 3
    tensors = data.with_format("torch")[:]
    answered = 0
    for model, seen in trained:
        rows = [row for row in range(18) if str(data[row]["input_ids"]) not in seen]
        assert len(rows) == 6 and [data[row]["labels"] for row in rows].count(0) == 3
        with torch.no_grad():
            scores = model.eval()(
                input_ids=tensors["input_ids"][rows], attention_mask=tensors["attention_mask"][rows]
            ).logits
        assert np.array_equal(found.classes[rows], scores.argmax(dim=1).numpy())
        answered += len(rows)
    assert answered == 18


@predicts_one_class
def test_folds_that_share_a_model_are_refused(config: Callable[..., Any]) -> None:
    model = tiny_distilbert()

    def make_trainer(part: Dataset) -> GroupRobustTrainer:
        return GroupRobustTrainer(model, config(objective="erm", group_column=None, max_steps=1), train_dataset=part)

    with pytest.raises(ValueError, match="Build a new model in every call"):
        out_of_fold_predictions(make_trainer, text_dataset(), folds=2)
    with pytest.raises(ValueError, match="folds: expected 2 to"):
        out_of_fold_predictions(make_trainer, text_dataset(), folds=1)
