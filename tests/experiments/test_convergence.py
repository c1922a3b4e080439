"""The convergence theorem (section 3) and groups that do not interact: the bound, its constants and the slope."""

import math
import runpy

import pytest
import torch
from paths import RECIPES

from hf_cgd import CGD, GroupDRO, GroupInfo, GroupRobustLoss
from hf_cgd.experiments.studies.convergence import (
    PROBLEMS,
    Problem,
    difference_from_group_dro,
    mean_squared_gradient_norm,
    slope,
    waves,
)

RECIPE = RECIPES / "convergence.py"


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_constants_hold_at_random_points(name: str, seed: int) -> None:
    """Gradient norms under G, curvature of the mean under L, its values within B."""
    problem = PROBLEMS[name](seed)
    generator = torch.Generator().manual_seed(seed)
    for scale in (0.1, 1.0, 5.0):
        point = scale * torch.randn(problem.start.shape, generator=generator, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(problem.losses, point)
        hessian = torch.autograd.functional.hessian(lambda x: problem.losses(x).mean(), point)
        assert jacobian.norm(dim=1).max() <= problem.lipschitz + 1e-12
        assert torch.linalg.eigvalsh(hessian).abs().max() <= problem.smooth + 1e-12
        assert problem.losses(point).mean().abs() <= problem.bound


@pytest.mark.parametrize("name", PROBLEMS)
def test_mean_squared_gradient_norm_stays_under_the_bound_and_falls_with_its_slope(name: str) -> None:
    problem = PROBLEMS[name](0)
    steps = [50, 200, 800]
    values = [mean_squared_gradient_norm(problem, count) for count in steps]
    assert all(value <= problem.limit(count) for value, count in zip(values, steps, strict=True))
    assert values == sorted(values, reverse=True)
    assert -0.75 < slope(steps, values) < -0.25


def test_limit_by_hand() -> None:
    problem = Problem(torch.sin, torch.zeros(1), lipschitz=2.0, smooth=3.0, bound=12.0)
    assert problem.limit(400) == pytest.approx(3 * math.sqrt(12 * 3 * 4 / 400))
    assert slope([1, 10, 100], [3.0, 0.3, 0.03]) == pytest.approx(-1)


def test_one_group_is_plain_gradient_descent() -> None:
    """K = 1: the weights cannot matter, so the mean is that of descent on sin with the theorem's step."""
    problem = Problem(lambda x: torch.sin(x), torch.ones(1, dtype=torch.float64), 1.0, 1.0, 1.0)
    x, total = 1.0, 0.0
    for _ in range(64):
        total += math.cos(x) ** 2
        x -= 2 / 8 * math.cos(x)
    assert mean_squared_gradient_norm(problem, 64) == pytest.approx(total / 64)


@pytest.mark.parametrize("steps", [5, 200])
@pytest.mark.parametrize("seed", [1, 2])
def test_bound_holds_for_waves_of_other_seeds(steps: int, seed: int) -> None:
    problem = waves(seed)
    assert mean_squared_gradient_norm(problem, steps) <= problem.limit(steps)


def test_orthogonal_gradients_give_group_dro_and_others_do_not() -> None:
    assert difference_from_group_dro(0.0, steps=60) < 1e-12
    assert difference_from_group_dro(0.5, steps=60) > 0.05


def test_recipe_prints_slopes_and_differences(capsys: pytest.CaptureFixture[str]) -> None:
    slopes = runpy.run_path(str(RECIPE))["main"](["--steps", "20", "80", "--seeds", "2"])
    means = [sum(mean_squared_gradient_norm(waves(seed), steps) for seed in (0, 1)) / 2 for steps in (20, 80)]
    assert slopes["waves"] == pytest.approx(math.log(means[1] / means[0]) / math.log(4))
    printed = capsys.readouterr().out
    assert f"T =     80  {means[1]:.3e}" in printed and f"slope {slopes['waves']:.3f}" in printed
    assert "cosine between groups 0.0" in printed


def test_with_independent_groups_a_run_is_that_of_group_dro() -> None:
    """Each group has parameters of its own, so all cosines between groups are 0 (section 2)."""
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
