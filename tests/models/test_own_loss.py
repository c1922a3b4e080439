"""A network's own loss beside the mean of the losses of its examples."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cgd.models.heads import LossOptions, head_of
from hf_cgd.models.own_loss import compare_losses


class Weighted(nn.Module):
    """A classifier whose loss has weights of the classes."""

    def __init__(self, weights: list[float]) -> None:
        super().__init__()
        self.classifier = nn.Linear(3, 3)
        self.weights = torch.tensor(weights)
        self.rows = 0

    def forward(self, x: Tensor, labels: Tensor, shift: Tensor | None = None) -> dict[str, Tensor]:
        self.rows = len(x)
        logits = self.classifier(x)
        return {"loss": F.cross_entropy(logits, labels, weight=self.weights), "logits": logits}


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 1.0, 1.5]])
@pytest.mark.parametrize(("beside", "rows"), [({}, 6), ({"shift": torch.zeros(2)}, 24)])
def test_two_rows_of_each_class_tell_what_the_batch_does(weights: list[float], beside: Any, rows: int) -> None:
    """Also of a class that the first rows lack; all rows are taken where a tensor's are not those of the batch."""
    torch.manual_seed(0)
    network, labels = Weighted(weights), torch.tensor([0] * 12 + [1] * 10 + [2] * 2)
    head = head_of(network)
    inputs = {"x": torch.randn(24, 3), "labels": labels, **beside}
    found = compare_losses(
        network, inputs, labels, head, lambda scores, own: head.losses(scores, own, network, LossOptions())
    )
    assert found is not None and found.same == (len(set(weights)) == 1) and network.rows == rows


class Balanced(Weighted):
    """A classifier whose loss has a term of its gate, which does not go through the scores."""

    def __init__(self, factor: float, frozen: bool = False) -> None:
        super().__init__([1.0, 1.0, 1.0])
        self.gate = nn.Linear(3, 4).requires_grad_(not frozen)
        self.factor = factor

    def forward(self, x: Tensor, labels: Tensor, shift: Tensor | None = None) -> dict[str, Tensor]:
        outputs = super().forward(x, labels)
        outputs["loss"] = outputs["loss"] + self.factor * self.gate(x).softmax(-1).square().sum(-1).mean()
        return outputs


@pytest.mark.parametrize(
    ("factor", "frozen", "same"), [(0.001, False, False), (0.0, False, True), (0.001, True, True), (1.0, True, False)]
)
def test_a_small_term_beside_the_scores_is_found(factor: float, frozen: bool, same: bool) -> None:
    """The term is 5e-4 of the loss, the balance of experts as their configs have it; frozen gates do not learn by it."""
    torch.manual_seed(0)
    network, labels = Balanced(factor, frozen), torch.tensor([0, 1, 2] * 4)
    head = head_of(network)
    inputs = {"x": torch.randn(12, 3), "labels": labels}
    found = compare_losses(
        network, inputs, labels, head, lambda scores, own: head.losses(scores, own, network, LossOptions())
    )
    assert found is not None and found.same == same
