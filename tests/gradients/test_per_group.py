"""The exact engine against plain autograd on each group alone."""

import pytest
import timm
import torch
from torch import nn

from hf_cgd.gradients import PerGroupEngine, gram_matrix


class Twice(nn.Module):
    """A layer used twice, a tied weight, an in-place activation, and a parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.relu(self.shared(self.shared(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x[:, None].repeat(1, 4, 1))[0][:, -1])


@pytest.mark.parametrize("build", [Twice, Recurrent, lambda: nn.Linear(8, 3)])
@pytest.mark.parametrize("num_groups", [1, 2, 7])
def test_gradient_sums_equal_those_of_each_group_alone(build: type[nn.Module], num_groups: int) -> None:
    torch.manual_seed(0)
    model = build()
    x, y = torch.randn(14, 8), torch.randint(0, 3, (14,))
    group_ids = torch.arange(14) % num_groups
    cross_entropy = nn.CrossEntropyLoss(reduction="none")
    losses = cross_entropy(model(x), y)
    rows = PerGroupEngine(list(model.parameters())).group_gradients(losses, group_ids, range(num_groups)).rows
    assert all(parameter.grad is None for parameter in model.parameters())
    for group, row in enumerate(rows):
        alone = cross_entropy(model(x[group_ids == group]), y[group_ids == group]).sum()
        gradients = torch.autograd.grad(alone, list(model.parameters()), allow_unused=True)
        flat = [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(model.parameters(), gradients, strict=True)
        ]
        assert torch.allclose(row, torch.cat(flat), atol=1e-6)
    losses.sum().backward()
    whole = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    assert torch.allclose(rows.sum(0), whole, atol=1e-5)


def test_batchnorm_in_training_mode_and_in_place_activations() -> None:
    """Examples interact through the batch statistics; the sums over groups still add up to the batch's gradient."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=2)
    inplace = [module.inplace for module in model.modules() if isinstance(module, nn.ReLU)]
    losses = nn.CrossEntropyLoss(reduction="none")(model(torch.randn(6, 3, 32, 32)), torch.tensor([0, 1] * 3))
    parameters = list(model.layer4.parameters()) + list(model.fc.parameters())
    rows = PerGroupEngine(parameters).group_gradients(losses, torch.tensor([0, 0, 1, 1, 1, 2]), [0, 1, 2]).rows
    losses.sum().backward()
    whole = torch.cat([p.grad.flatten() for p in parameters])
    assert torch.allclose(rows.sum(0), whole, atol=1e-4 * whole.abs().max().item())
    assert [module.inplace for module in model.modules() if isinstance(module, nn.ReLU)] == inplace


def test_half_precision_gradients_are_flattened_in_float32() -> None:
    layer = nn.Linear(4, 2, dtype=torch.bfloat16)
    losses = layer(torch.ones(3, 4, dtype=torch.bfloat16)).float().sum(1)
    assert (
        PerGroupEngine(list(layer.parameters())).group_gradients(losses, torch.zeros(3).long(), [0]).rows.dtype
        == torch.float32
    )


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_gram_of_tiny_and_huge_gradients(scale: float) -> None:
    rows = torch.tensor([[3.0, 4.0], [-4.0, 3.0], [0.0, 0.0], [6.0, 8.0]])
    expected = (rows.double() @ rows.double().T) * float(torch.tensor(scale)) ** 2
    assert torch.allclose(gram_matrix(rows * scale), expected, rtol=1e-6, atol=1e-7 * expected.max().item())


@pytest.mark.parametrize(
    ("groups", "size"), [(1, 1), (2, 1024), (3, 5000), (12, 2048), (13, 1500), (29, 3 * 1024 + 1)]
)
def test_gram_by_tiles_equals_the_whole_product(groups: int, size: int) -> None:
    rows = torch.randn(groups, size, dtype=torch.float64)
    assert torch.allclose(gram_matrix(rows), rows @ rows.T, rtol=1e-12, atol=1e-10)


def test_gram_of_millions_of_columns_is_as_exact_as_that_of_a_few() -> None:
    rows = torch.randn(2, 3_000_000)
    expected = rows.double() @ rows.double().T
    assert (gram_matrix(rows) - expected).abs().max() < 1e-7 * expected.max()
