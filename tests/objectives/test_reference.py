"""`variant="reference"` against trajectories of the authors' released code, and that code's quirks."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from paths import DATA

from hf_cgd import CGD, GroupInfo, GroupRobustLoss

CASES = json.loads((DATA / "cgd_reference_trajectories.json").read_text())["cases"]


def linear(initial: dict) -> torch.nn.Linear:
    weight = torch.tensor(initial["weight"])
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(torch.tensor(initial["bias"]))
    return layer


@pytest.mark.parametrize("case", CASES, ids=[f"K{c['num_groups']}-C{c['C']}" for c in CASES])
def test_trajectory(case: dict) -> None:
    model = linear(case["initial"])
    optimizer = torch.optim.SGD(model.parameters(), lr=case["learning_rate"])
    objective = CGD(step_size=case["step_size"], adjustment=case["C"], variant="reference")
    names = [str(group) for group in range(case["num_groups"])]
    robust_loss = GroupRobustLoss(objective, GroupInfo(names, case["group_counts"]), list(model.parameters()))
    for step in case["steps"]:
        losses = F.cross_entropy(model(torch.tensor(step["x"])), torch.tensor(step["y"]), reduction="none")
        loss = robust_loss(losses, torch.tensor(step["group"]))
        optimizer.zero_grad()
        loss.backward()
        close = dict(rtol=0, atol=1e-5)
        assert torch.allclose(robust_loss.alpha, torch.tensor(step["alpha"], dtype=torch.float64), **close)
        assert loss.item() == pytest.approx(step["objective"], abs=1e-5)
        assert torch.allclose(model.weight.grad, torch.tensor(step["grad_weight"]), **close)
        assert torch.allclose(model.bias.grad, torch.tensor(step["grad_bias"]), **close)
        optimizer.step()
        assert torch.allclose(model.weight, torch.tensor(step["weight_after"]), **close)


def weights_after_one_step(scale: float, variant: str) -> torch.Tensor:
    """Weights after a step on two groups whose gradients have the given scale."""
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    inputs = torch.tensor([[1.0, 0.2], [0.3, 1.0]]) * scale
    robust_loss = GroupRobustLoss(CGD(step_size=1.0, variant=variant), GroupInfo(["a", "b"], [5, 5]), [parameter])
    outputs = inputs @ parameter
    robust_loss(outputs - outputs.detach() + torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
    assert robust_loss.alpha is not None
    return robust_loss.alpha


def test_the_paper_variant_has_true_cosines_where_the_released_code_has_a_floor() -> None:
    assert torch.allclose(weights_after_one_step(1.0, "paper"), weights_after_one_step(1e-3, "paper"), atol=1e-6)
    assert torch.allclose(weights_after_one_step(1.0, "paper"), weights_after_one_step(1e-25, "paper"), atol=1e-6)
    assert torch.allclose(weights_after_one_step(1.0, "paper"), weights_after_one_step(1e25, "paper"), atol=1e-6)
    moved = weights_after_one_step(1.0, "reference") - weights_after_one_step(1e-3, "reference")
    assert moved.abs().max() > 0.05


def test_the_clamp_of_the_released_code_lets_weights_sum_to_more_than_one() -> None:
    objective = CGD(step_size=1.0, variant="reference")
    parameter = torch.nn.Parameter(torch.ones(3))
    robust_loss = GroupRobustLoss(objective, GroupInfo("abc", [5, 5, 5]), [parameter])
    for _ in range(50):
        losses = parameter * torch.tensor([9.0, 0.01, 0.01])
        robust_loss(losses, torch.tensor([0, 1, 2]))
    assert robust_loss.alpha is not None
    # Gradients are orthogonal; cos(b, b) is 1e-4 / 1e-3 by the floor. The sum is taken before the clamp and after it.
    shrinks = math.exp((0.01 * 0.1 - 9.0) / 3)
    assert robust_loss.alpha.sum().item() == pytest.approx(1 + 2e-5 * (1 - shrinks), abs=1e-9)
