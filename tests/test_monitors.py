"""Weights that swing or saturate give one warning each, healthy ones none."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_cgd import CGD, ERM, ERMUW, GroupDRO, GroupInfo, GroupRobustLoss, GroupRobustWarning, Objective
from hf_cgd.monitors import WINDOW, WeightMonitor, warn_if_one_class


def watch(weights: list[list[float]]) -> list[str]:
    monitor = WeightMonitor(["land", "sea"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, alpha in enumerate(weights):
            monitor.observe(torch.tensor(alpha), step)
    return [str(warning.message) for warning in caught if warning.category is GroupRobustWarning]


def test_swinging() -> None:
    messages = watch([[0.9, 0.1], [0.1, 0.9]] * WINDOW)
    assert len(messages) == 1
    assert "swing" in messages[0] and "80% of the mass" in messages[0] and "smaller step_size" in messages[0]


def test_saturated() -> None:
    messages = watch([[0.97, 0.03]] * 3 * WINDOW)
    assert len(messages) == 1
    assert "group 'land' has held more than 95%" in messages[0] and "larger batch" in messages[0]


def test_healthy() -> None:
    assert watch([[0.5 + 0.3 * np.sin(step / 20), 0.5 - 0.3 * np.sin(step / 20)] for step in range(500)]) == []
    assert watch([[0.97, 0.03]] * (WINDOW - 1)) == []


def test_a_step_that_is_too_large_is_noticed_in_a_run() -> None:
    robust_loss = GroupRobustLoss(GroupDRO(step_size=1.0), GroupInfo(["land", "sea"], [5, 5]))
    with pytest.warns(GroupRobustWarning, match="swing"):
        for step in range(2 * WINDOW):
            high, low = (9.0, 0.0) if step % 2 else (0.0, 9.0)
            robust_loss(torch.tensor([high, low], requires_grad=True), torch.tensor([0, 1]))


def test_one_class() -> None:
    with pytest.warns(GroupRobustWarning, match=r"single class, 1, .* all 3 .*learning_rate \(now 0.1\)") as caught:
        assert warn_if_one_class(np.array([1, 1, 1]), np.array([0, 1, 1]), None, 0.1)
    assert "step_size" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_if_one_class(np.array([1, 0, 1]), np.array([0, 1, 1]), 1.0, 0.1)
        assert not warn_if_one_class(np.array([1, 1]), np.array([1, 1]), 1.0, 0.1)
        assert not warn_if_one_class(np.array([1]), np.array([0]), 1.0, 0.1)


@pytest.mark.parametrize(
    ("loss", "has_learned", "story"),
    [(0.6931, False, "has not begun to learn: its mean loss, 0.693, is that of guessing"),
     (0.6931, True, "has collapsed, for it predicted several classes earlier"),
     (2.5, False, "has collapsed, or has not started to learn")],
)  # fmt: skip
def test_the_one_class_warning_names_the_class_and_knows_a_model_that_guesses(
    loss: float, has_learned: bool, story: str
) -> None:
    predictions, labels, losses = np.zeros(4, dtype=int), np.array([0, 1, 0, 1]), np.full(4, loss)
    with pytest.warns(GroupRobustWarning, match=rf"single class, 0 \(hateful\), was predicted.*{story}"):
        warn_if_one_class(
            predictions, labels, 0.1, 0.2, losses=losses, class_names=["hateful", "fine"], has_learned=has_learned
        )


@pytest.mark.parametrize(
    ("objective", "held", "story"),
    [
        (GroupDRO(step_size=0.1), 1, "one group alone.*without group weights, and not objective='group_dro'"),
        (ERMUW(), 1, "one group alone.*without group weights, and not objective='erm_uw'"),
        (CGD(step_size=0.1), 2, "at most 2 of the 3 groups, and objective='cgd' needs 3.*this is Group-DRO"),
        (CGD(step_size=0.1, cross_terms="consensus"), 2, "objective='cgd' needs 3.*this is Group-DRO"),
        (GroupDRO(step_size=0.1, absent_groups="zero_loss"), 1, None),
        (CGD(step_size=0.1, scaling="gradient"), 2, None),
        (CGD(step_size=0.1, self_term="split_half"), 2, None),
        (CGD(step_size=0.1, exponent=1.0), 2, None),
        (CGD(step_size=0.1), 3, None),
        (CGD(step_size=0.1, cross_terms="consensus"), 3, None),
    ],
)
def test_steps_that_lack_groups_make_another_run_of_it(objective: Objective, held: int, story: str | None) -> None:
    """Against a twin: a run that is warned of is that of plain training or of Group-DRO, any other one is not."""

    def run(objective: Objective) -> tuple[Tensor, list[str]]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.ones(3))
        robust_loss = GroupRobustLoss(objective, GroupInfo(["a", "b", "c"], [5, 5, 5]), [weight])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2 * WINDOW):
                ids = (torch.arange(6) % held + step) % 3
                inputs = torch.randn(6, 3)
                weight.grad = None
                robust_loss((inputs @ weight - ids).square(), ids).backward()
                with torch.no_grad():
                    weight -= 0.01 * weight.grad
        return weight.detach(), [str(warning.message) for warning in caught if "steps on end" in str(warning.message)]

    weight, messages = run(objective)
    twin, _ = run(ERM() if held == 1 else GroupDRO(step_size=0.1))
    assert torch.allclose(weight, twin, atol=1e-5) == (story is not None)
    assert len(messages) == (story is not None)
    if story is not None:
        assert re.search(story, messages[0]) and "group_sampling='balanced'" in messages[0]
