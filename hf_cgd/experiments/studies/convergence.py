"""The convergence theorem of the CGD paper (section 3) and its remark on groups that do not interact, as measurements.

For group losses that are G-Lipschitz with an L-smooth mean between -B and B, T steps of eta = 2 sqrt(B / (L G^2 T))
and eta_alpha = sqrt(B L / (G^6 T)) keep the mean over the steps of the squared gradient norm of the mean group loss
under 3 sqrt(B L G^2 / T).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from hf_cgd.data.groups import GroupInfo
from hf_cgd.experiments.studies import simple_settings
from hf_cgd.objectives import CGD, GroupDRO
from hf_cgd.robust_loss.loss import GroupRobustLoss


@dataclass(frozen=True)
class Problem:
    """K group losses of a parameter vector, with constants for which the theorem's assumptions hold.

    Attributes:
        losses: parameters [P] to group losses [K].
        start: [P] in float64.
        lipschitz, smooth, bound: G, L and B.
    """

    losses: Callable[[Tensor], Tensor]
    start: Tensor
    lipschitz: float
    smooth: float
    bound: float

    def limit(self, steps: int) -> float:
        """What the theorem promises after T steps."""
        return 3 * math.sqrt(self.bound * self.smooth * self.lipschitz**2 / steps)


def waves(seed: int) -> Problem:
    """Four groups with l_i = sin(a_i . x + b_i), |a_i| = 1: far from convex, with G = L = B = 1."""
    draw = torch.Generator().manual_seed(seed)
    directions = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    directions = directions / directions.norm(dim=1, keepdim=True)
    phases = torch.rand(4, generator=draw, dtype=torch.float64) * 6
    start = torch.randn(6, generator=draw, dtype=torch.float64)
    return Problem(lambda x: torch.sin(directions @ x + phases), start, 1.0, 1.0, 1.0)


def noisy_classes(seed: int) -> Problem:
    """Noise-Simple under the loss sigmoid(-margin) of a linear classifier: bounded, and not convex.

    With |x| the norm of an example, bias included: |sigmoid'| <= 1/4 gives G = max_i mean |x| / 4, and
    |sigmoid''| <= 1 / (6 sqrt 3) gives L = mean_i mean |x|^2 / (6 sqrt 3). B = 1.
    """
    points = simple_settings.draw("noise", "train", seed)
    features = torch.tensor(np.column_stack([points.features, np.ones(len(points.labels))]))
    signed = features * torch.tensor(2 * points.labels - 1)[:, None]
    groups = [signed[torch.tensor(points.group_ids == group)] for group in range(3)]
    lipschitz = max(rows.norm(dim=1).mean().item() for rows in groups) / 4
    smooth = sum(rows.square().sum(dim=1).mean().item() for rows in groups) / 3 / (6 * math.sqrt(3))
    start = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Problem(
        lambda x: torch.stack([torch.sigmoid(-rows @ x).mean() for rows in groups]), start, lipschitz, smooth, 1.0
    )


PROBLEMS: Mapping[str, Callable[[int], Problem]] = MappingProxyType({"waves": waves, "noisy classes": noisy_classes})
"""Problems by name, each drawn from a seed."""


def mean_squared_gradient_norm(problem: Problem, steps: int) -> float:
    """Mean over T steps of |gradient of the mean group loss|^2, in the theorem's setting."""
    theta = torch.nn.Parameter(problem.start.clone())
    lipschitz, smooth, bound = problem.lipschitz, problem.smooth, problem.bound
    step = 2 * math.sqrt(bound / (smooth * lipschitz**2 * steps))
    weight_step = math.sqrt(bound * smooth / (lipschitz**6 * steps))
    count = len(problem.losses(problem.start))
    # The proof's g is the mean of the group gradients, hence interaction="mean".
    objective = CGD(step_size=weight_step, scaling="gradient", interaction="mean", min_weight=0.0)
    groups = GroupInfo(tuple(str(group) for group in range(count)), (1,) * count)
    robust_loss = GroupRobustLoss(objective, groups, [theta])
    total = 0.0
    for _ in range(steps):
        losses = problem.losses(theta)
        (mean_gradient,) = torch.autograd.grad(losses.mean(), theta, retain_graph=True)
        total += mean_gradient.square().sum().item()
        (gradient,) = torch.autograd.grad(robust_loss(losses, torch.arange(count)), theta)
        with torch.no_grad():
            theta.sub_(step * gradient)
    return total / steps


def slope(steps: Sequence[int], values: Sequence[float]) -> float:
    """Of log value against log T, by least squares."""
    return float(np.polyfit(np.log(steps), np.log(values), 1)[0])


def difference_from_group_dro(overlap: float, steps: int = 200, step_size: float = 0.3) -> float:
    """Largest difference between the group weights of CGD and of Group-DRO over a run of three groups.

    Group i fits its own target with a linear predictor of inputs that lie along unit vectors v_i, and
    <v_i, v_j> = `overlap` in [0, 1) for i != j: at 0 the gradients of different groups are orthogonal.
    """
    gram = torch.full((3, 3), overlap, dtype=torch.float64).fill_diagonal_(1.0)
    inputs = torch.linalg.cholesky(gram)
    targets = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64)
    runs = []
    for objective in (CGD(step_size=step_size), GroupDRO(step_size=step_size)):
        theta = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        robust_loss = GroupRobustLoss(objective, GroupInfo(("a", "b", "c"), (1, 1, 1)), [theta])
        weights = []
        for _ in range(steps):
            losses = (inputs @ theta - targets).square()
            (gradient,) = torch.autograd.grad(robust_loss(losses, torch.arange(3)), theta)
            assert robust_loss.alpha is not None
            weights.append(robust_loss.alpha)
            with torch.no_grad():
                theta.sub_(0.05 * gradient)
        runs.append(torch.stack(weights))
    return float((runs[0] - runs[1]).abs().max())
