"""The convergence theorem (section 3): its setting keeps the mean squared gradient norm under the bound."""

import math

import pytest
import torch

from hf_cgd import CGD, GroupInfo, GroupRobustLoss


@pytest.mark.parametrize("steps", [50, 500])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mean_squared_gradient_norm_stays_under_the_bound(steps: int, seed: int) -> None:
    """Group losses sin(a_i . x + b_i) with |a_i| = 1 are non-convex; G = 1, L = 1 and B = 1 hold for them."""
    lipschitz = smooth = bound = 1.0
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    directions = directions / directions.norm(dim=1, keepdim=True)
    phases = torch.rand(4, generator=generator, dtype=torch.float64) * 6
    theta = torch.nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))

    step = 2 * math.sqrt(bound / (smooth * lipschitz**2 * steps))
    weight_step = math.sqrt(bound * smooth / (lipschitz**6 * steps))
    # The proof's g is the mean of the group gradients, hence interaction="mean".
    objective = CGD(step_size=weight_step, scaling="gradient", interaction="mean", min_weight=0.0)
    robust_loss = GroupRobustLoss(objective, GroupInfo("abcd", [1, 1, 1, 1]), [theta])
    norms = []
    for _ in range(steps):
        losses = torch.sin(directions @ theta + phases)
        (mean_gradient,) = torch.autograd.grad(losses.mean(), theta, retain_graph=True)
        norms.append(mean_gradient.square().sum().item())
        (gradient,) = torch.autograd.grad(robust_loss(losses, torch.arange(4)), theta)
        with torch.no_grad():
            theta -= step * gradient
    assert sum(norms) / steps <= 3 * math.sqrt(bound * smooth * lipschitz**2 / steps)
    assert sum(norms[-10:]) < sum(norms[:10])


def test_with_independent_groups_a_run_is_that_of_group_dro() -> None:
    """Each group has parameters of its own, so all cosines between groups are 0 (section 2)."""
    from hf_cgd import GroupDRO

    runs = []
    for objective in (CGD(step_size=0.3), GroupDRO(step_size=0.3)):
        theta = torch.nn.Parameter(torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64))
        robust_loss = GroupRobustLoss(objective, GroupInfo("abc", [9, 9, 9]), [theta])
        for _ in range(30):
            (gradient,) = torch.autograd.grad(robust_loss(theta**2, torch.arange(3)), theta)
            with torch.no_grad():
                theta -= 0.05 * gradient
        runs.append((theta.detach().clone(), robust_loss.alpha))
    assert torch.allclose(runs[0][0], runs[1][0], atol=1e-12)
    assert torch.allclose(runs[0][1], runs[1][1], atol=1e-12)
