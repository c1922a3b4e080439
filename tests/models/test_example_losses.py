"""The loss of one example against the losses of transformers and torch."""

import pytest
import torch
from tiny import tiny_distilbert
from transformers.trainer_pt_utils import LabelSmoother

from hf_cgd.models.example_losses import (
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    example_losses,
    infer_problem_type,
    predictions_of,
)


@pytest.mark.parametrize(
    "num_labels,labels,problem_type",
    [
        (3, torch.tensor([0, 2, 1, 1]), CLASSIFICATION),
        (3, torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]]), MULTI_LABEL),
        (1, torch.tensor([0.5, -1.0, 2.0, 0.0]), REGRESSION),
        (1, torch.tensor([1, 2, 3, 4]), REGRESSION),
    ],
)
def test_mean_is_the_loss_of_the_model(num_labels: int, labels: torch.Tensor, problem_type: str) -> None:
    model = tiny_distilbert(num_labels).eval()
    input_ids = torch.randint(1, 64, (4, 8))
    targets = labels.float() if problem_type == REGRESSION else labels
    outputs = model(input_ids=input_ids, labels=targets)
    assert model.config.problem_type == problem_type
    assert infer_problem_type(outputs.logits.shape[-1], labels) == problem_type
    losses = example_losses(outputs.logits, labels, problem_type)
    assert losses.shape == (4,)
    assert losses.mean().item() == pytest.approx(outputs.loss.item(), rel=1e-6)


def test_each_value_is_that_of_the_example_alone() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    together = example_losses(logits, labels, CLASSIFICATION, 0.2)
    alone = [example_losses(logits[i : i + 1], labels[i : i + 1], CLASSIFICATION, 0.2) for i in range(5)]
    assert torch.allclose(together, torch.cat(alone))


def test_label_smoothing_is_that_of_the_trainer() -> None:
    logits, labels = torch.randn(6, 4), torch.randint(0, 4, (6,))
    expected = LabelSmoother(epsilon=0.1)({"logits": logits}, labels)
    assert example_losses(logits, labels, CLASSIFICATION, 0.1).mean().item() == pytest.approx(
        expected.item(), rel=1e-6
    )


@pytest.mark.parametrize("problem_type", [MULTI_LABEL, REGRESSION])
def test_label_smoothing_without_classes_is_refused(problem_type: str) -> None:
    with pytest.raises(ValueError, match="has no such class"):
        example_losses(torch.randn(4, 2), torch.ones(4, 2), problem_type, 0.1)


def test_half_precision_logits_give_float32_losses() -> None:
    logits = torch.randn(4, 3, dtype=torch.bfloat16)
    losses = example_losses(logits, torch.tensor([0, 1, 2, 0]), CLASSIFICATION)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, example_losses(logits.float(), torch.tensor([0, 1, 2, 0]), CLASSIFICATION))


def test_predictions() -> None:
    assert predictions_of(torch.tensor([[1.0, 3, 2]]), CLASSIFICATION).tolist() == [1]
    assert predictions_of(torch.tensor([[-1.0, 3]]), MULTI_LABEL).tolist() == [[0, 1]]
    assert predictions_of(torch.tensor([[0.5], [2.0]]), REGRESSION).tolist() == [0.5, 2.0]
    assert predictions_of(torch.tensor([[0.5, 1], [2.0, 3]]), REGRESSION).shape == (2, 2)


def test_unknown_problem_type() -> None:
    with pytest.raises(ValueError, match=r"problem_type must be one of.*'ranking'"):
        example_losses(torch.zeros(1, 2), torch.tensor([0]), "ranking")
