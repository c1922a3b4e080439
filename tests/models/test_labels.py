"""Which labels fit a model: kinds, values, shapes, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_cgd.data.columns import Column, read_columns
from hf_cgd.models.labels import LabelChecks, LabelCollator, require_same_classes
from hf_cgd.monitors import GroupRobustWarning

C, M, R = "single_label_classification", "multi_label_classification", "regression"


def kind(values: list[Any], outputs: int | None = 2, problem: str | None = None, own_loss: bool = False) -> str | None:
    """What the checks say, of a list and of a stored column alike."""
    checks = LabelChecks(outputs, problem, own_loss)
    found = checks.kind_of("y", Column(values), "set")
    if not any(isinstance(value, (torch.Tensor, np.generic)) for value in values):
        stored = read_columns(Dataset.from_dict({"y": values}), ["y"])["y"]
        assert checks.kind_of("y", stored, "set") == found
    return found


@pytest.mark.parametrize(
    ("values", "outputs", "problem", "expected"),
    [
        ([0, 1, 1], 2, None, C), ([True, False], 2, None, C), ([[0], [1]], 2, C, C), ([0, -100], 2, None, C),
        ([np.uint8(1), np.int8(0)], 2, None, C), ([torch.tensor([1]), torch.tensor(0)], 2, None, C),
        ([0.5, 1.0], 1, None, R), ([3, 70], 1, None, R), ([[0.5, 2.0]] * 2, 2, R, R), ([0.5, 2.0], None, R, R),
        ([[1.0, 1.0], [0.0, 1.0]], 2, None, M), ([[1, 1], [0, 1]], 2, M, M), ([0, 1], 1, M, M), ([0, 7], None, C, C),
        ([0, 1], None, None, None), ([0.5, 1.5], None, None, None), ([], 2, None, None),
    ],
)  # fmt: skip
def test_labels_that_fit(values: list[Any], outputs: int | None, problem: str | None, expected: str | None) -> None:
    if values:
        assert kind(values, outputs, problem) == expected
    assert LabelChecks(outputs, problem).kind_of("y", Column(values), "set") == expected


@pytest.mark.parametrize(
    ("values", "outputs", "problem", "message"),
    [
        ([0, None, 1, None], 2, None, r"'y', row 1 of the set: expected a label, got None \(2 of 4 rows: 1, 3\)"),
        ([0.0, 1.0, float("nan")], 2, None, r"row 2 of the set: expected a label, got nan \(1 of 3 rows: 2\)"),
        ([0.0, float("inf")], 1, None, r"row 1 .*a finite number, got inf"),
        ([0, -1, 1], 2, None, r"row 1 .*a class in 0\.\.1, got -1 .*-100 to leave"),
        ([0, 1, 4], 2, None, r"row 2 .*a class in 0\.\.1, got 4 .*num_labels=5"),
        ([0, -1], None, C, r"a class >= 0, got -1"),
        ([0.0, 1.0], 2, None, r"a class in 0\.\.1, got 0.0 .*cast_column"),
        (["a", "b"], 2, None, r"a number, got 'a' .*class_encode_column\('y'\)"),
        (["0", "1"], 1, None, r"a number, got '0'"),
        ([0, 1], 2, R, r"expected 2 values per row, .*left over from another task, set .*single_label"),
        ([0, 1], 2, M, r"expected 2 values per row"),
        ([[0, 1], [1, 0]], 2, None, r"one class in 0\.\.1 per row, got lists of 2 numbers"),
        ([[0.0, 1.0]], 2, C, r"one class in 0\.\.1 per row"),
        ([[0.0, 1.0, 1.0]], 2, None, r"expected 2 values per row, .*got 3"),
        ([[0.0, 1.0, 1.0]], 2, R, r"expected 2 values per row, .*got 3"),
        ([[0.0, 1.0], [0.0, float("nan")]], 2, M, r"row 1 .*2 finite numbers, got .*nan.*\(1 of 2 rows: 1\)"),
        ([[0.0, 1.0], [0.0, 1.5]], 2, M, r"row 1 .*zeros and ones.*\[0.0, 1.5\] \(1 of 2 rows: 1\)"),
        ([[0, 1], [0]], 2, M, r"expected 2 numbers as in other rows"),
    ],
)
def test_labels_that_do_not_fit(values: list[Any], outputs: int | None, problem: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(values, outputs, problem)


def test_one_hot_floats_are_yes_or_no_questions_with_a_warning() -> None:
    with pytest.warns(GroupRobustWarning, match="trained as 2 yes-or-no questions, as the Trainer does"):
        assert LabelChecks(2, None).kind_of("y", Column([[1.0, 0.0], [0.0, 1.0]]), "set") == M
    assert LabelChecks(2, M).kind_of("y", Column([[1.0, 0.0], [0.0, 1.0]]), "set") == M


def test_a_loss_of_ones_own_gives_labels_their_meaning() -> None:
    assert kind([-1, 1, 7], own_loss=True) is None
    with pytest.raises(ValueError, match="expected a label, got None"):
        kind([-1, None], own_loss=True)


def test_one_number_for_two_classes_is_refused() -> None:
    trained, swapped = Column([0], ["neg", "pos"]), Column([0], ["pos", "neg"])
    require_same_classes("y", trained, Column([0], ["neg", "pos", "new"]), "set")
    require_same_classes("y", trained, Column([0]), "set")
    with pytest.raises(ValueError, match=r"order of training, \['neg', 'pos'\], got \['pos', 'neg'\]"):
        require_same_classes("y", trained, swapped, "set")
    with pytest.raises(ValueError, match="parts of the set number the classes of 'y' differently"):
        require_same_classes("y", trained, Column([0], ["neg", "pos"], renumbered=True), "set")


@pytest.mark.parametrize(
    ("given", "problem", "expected"),
    [
        (torch.tensor([1, 0], dtype=torch.uint8), C, torch.tensor([1, 0])),
        (torch.tensor([[True], [False]]), C, torch.tensor([1, 0])),
        (torch.tensor([[1.0], [0.0]]), C, torch.tensor([1, 0])),
        (torch.tensor([[0.3, 0.7]]), C, torch.tensor([[0.3, 0.7]])),
        (torch.tensor([3, 4]), R, torch.tensor([3.0, 4.0])),
        (torch.tensor([[0, 1]]), M, torch.tensor([[0.0, 1.0]])),
        (torch.tensor([3, 4], dtype=torch.int32), None, torch.tensor([3, 4], dtype=torch.int32)),
    ],
)
def test_labels_of_a_batch(given: torch.Tensor, problem: str | None, expected: torch.Tensor) -> None:
    labels = LabelCollator(lambda rows: {"labels": given}, "labels", problem)([])["labels"]
    assert labels.dtype == expected.dtype and torch.equal(labels, expected)


def test_labels_of_a_batch_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match=r"finite numbers, got nan in its row 1 \(1 such rows\)"):
        LabelCollator(lambda rows: {"labels": torch.tensor([0.0, float("nan")])}, "labels", None)([])
