"""The step for any loop: loss values, gradients, when the weights move, and the state."""

import json
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cgd import CGD, ERM, ERMUW, GroupDRO, GroupInfo, GroupRobustLoss, GroupRobustWarning, Objective
from hf_cgd.arithmetic import Arithmetic, DeviceArithmetic, HostArithmetic
from hf_cgd.distributed.communication import Communication
from hf_cgd.objectives import GroupBatch, GroupStatistics, ObjectiveOutput

TWO = GroupInfo(["a", "b"], [90, 10])


def losses_of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def test_weighted_mean_of_group_means_by_hand() -> None:
    losses = losses_of(1, 3, 5)
    loss = GroupRobustLoss(GroupDRO(step_size=0), TWO)(losses, torch.tensor([0, 0, 1]))
    assert loss.item() == pytest.approx(3.5, rel=1e-6)
    loss.backward()
    assert losses.grad is not None and losses.grad.tolist() == pytest.approx([0.25, 0.25, 0.5], rel=1e-6)


def test_erm_is_the_mean_over_examples() -> None:
    assert GroupRobustLoss(ERM(), TWO)(losses_of(1, 3, 5), torch.tensor([0, 0, 1])).item() == 3.0


def test_erm_uw_by_hand() -> None:
    robust_loss = GroupRobustLoss(ERMUW(adjustment=3.0), GroupInfo(["a", "b"], [9, 1]))
    weight = math.exp(1) / (math.exp(1) + math.exp(3))
    for _ in range(2):
        loss = robust_loss(losses_of(2, 7), torch.tensor([0, 1]))
        assert loss.item() == pytest.approx(weight * 2 + (1 - weight) * 7, rel=1e-6)


def test_the_released_erm_uw_undoes_the_balancing_of_batches() -> None:
    """A batch that holds the one example of `b` as often as the three of `a` has the loss of the data as they are."""
    released = GroupRobustLoss(ERMUW(variant="reference"), GroupInfo(["a", "b"], [3, 1]))
    balanced = released(losses_of(1, 2, 6, 8, 8, 8), torch.tensor([0, 0, 0, 1, 1, 1]))
    plain = GroupRobustLoss(ERM(), GroupInfo(["a", "b"], [3, 1]))(losses_of(1, 2, 6, 8), torch.tensor([0, 0, 0, 1]))
    assert balanced.item() == pytest.approx(plain.item(), rel=1e-6) == 4.25


def test_weights_move_before_the_loss_under_current_and_after_it_under_next() -> None:
    moved = math.exp(0.1) / (math.exp(0.1) + math.exp(0.2))
    group_ids = torch.tensor([0, 1])
    current = GroupRobustLoss(GroupDRO(step_size=0.1), TWO, weight_timing="current")
    assert current(losses_of(1, 2), group_ids).item() == pytest.approx(moved * 1 + (1 - moved) * 2)
    following = GroupRobustLoss(GroupDRO(step_size=0.1), TWO, weight_timing="next")
    assert following(losses_of(1, 2), group_ids).item() == pytest.approx(1.5, rel=1e-6)
    assert following.alpha is not None and following.alpha[0].item() == pytest.approx(moved)


def test_the_adjustment_never_enters_the_loss() -> None:
    plain = GroupRobustLoss(GroupDRO(step_size=0), TWO)
    adjusted = GroupRobustLoss(GroupDRO(step_size=0, adjustment=50.0), TWO)
    group_ids = torch.tensor([0, 1])
    for robust_loss in (plain, adjusted):
        assert robust_loss(losses_of(1, 2), group_ids).item() == pytest.approx(1.5, rel=1e-6)


def test_absent_groups() -> None:
    frozen = GroupRobustLoss(GroupDRO(step_size=0.1), GroupInfo("abc", [5, 5, 5]))
    assert frozen(losses_of(1, 3), torch.tensor([0, 1])).item() == pytest.approx(
        (math.exp(0.1) * 1 + math.exp(0.3) * 3) / (math.exp(0.1) + math.exp(0.3))
    )
    assert frozen.alpha is not None and frozen.alpha[2].item() == 1 / 3
    older = GroupRobustLoss(GroupDRO(step_size=0.0, absent_groups="zero_loss"), GroupInfo("abc", [5, 5, 5]))
    assert older(losses_of(1, 3), torch.tensor([0, 1])).item() == pytest.approx(4 / 3)
    older = GroupRobustLoss(GroupDRO(step_size=0.1, absent_groups="zero_loss"), GroupInfo("abc", [5, 5, 5]))
    older(losses_of(1, 3), torch.tensor([0, 1]))
    assert older.alpha is not None
    assert older.alpha[2].item() == pytest.approx(1 / (math.exp(0.1) + math.exp(0.3) + 1), rel=1e-6)


@pytest.mark.parametrize("variant", [CGD(step_size=0.7), CGD(step_size=0.7, variant="reference"),
                                     CGD(step_size=0.7, absent_groups="zero_loss")])  # fmt: skip
def test_cgd_with_an_absent_group_stays_finite(variant: CGD) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 1)
    robust_loss = GroupRobustLoss(variant, GroupInfo("abc", [5, 5, 5]), list(layer.parameters()))
    for present in ([0, 1], [2, 2], [1, 2]):
        robust_loss(layer(torch.randn(2, 4)).squeeze(1) ** 2, torch.tensor(present)).backward()
        assert robust_loss.alpha is not None and bool(robust_loss.alpha.isfinite().all())
        assert robust_loss.alpha.sum().item() == pytest.approx(1, abs=5e-5)


class Quadratic(nn.Module):
    """Per-example losses of a linear model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(1) ** 2


@pytest.mark.parametrize("objective", [ERM(), ERMUW(adjustment=1.0), GroupDRO(step_size=0.3), CGD(step_size=0.3),
                                       CGD(step_size=0.3, scaling="gradient", interaction="mean")])  # fmt: skip
def test_micro_batches_of_any_make_up_equal_one_batch(objective: Objective) -> None:
    """Under "next", four micro-batches of 8 and one batch of 32 give the same weights, losses and parameters."""
    generator = torch.Generator().manual_seed(0)
    groups = GroupInfo("abcd", [40, 30, 20, 10])
    runs = []
    for parts in (1, 4):
        generator.manual_seed(0)
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        robust_loss = GroupRobustLoss(objective, groups, list(model.parameters()), weight_timing="next")
        history = []
        for _ in range(5):
            x = torch.randn(32, 5, generator=generator, dtype=torch.float64)
            group_ids = torch.randint(0, 3, (32,), generator=generator).sort().values
            robust_loss.open_window(group_ids.chunk(parts))
            optimizer.zero_grad()
            total = 0.0
            for part, ids in zip(x.chunk(parts), group_ids.chunk(parts), strict=True):
                loss = robust_loss(model(part), ids) / parts
                loss.backward()
                total += loss.item()
            optimizer.step()
            history.append(total)
        runs.append(
            (history, robust_loss.alpha, robust_loss.updates, [p.detach().clone() for p in model.parameters()])
        )
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-10)
    assert runs[0][2] == runs[1][2] == (5 if objective.has_weights else 0)
    if objective.has_weights:
        assert torch.allclose(runs[0][1], runs[1][1], atol=1e-12)
    for one, many in zip(runs[0][3], runs[1][3], strict=True):
        assert torch.allclose(one, many, rtol=1e-10)


def test_order_of_groups_does_not_matter() -> None:
    order = torch.tensor([2, 0, 1])
    generator = torch.Generator().manual_seed(0)
    x, group_ids = (
        torch.randn(9, 5, generator=generator, dtype=torch.float64),
        torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2]),
    )
    weights = []
    for names, ids in (("abc", group_ids), ("cab", torch.argsort(order)[group_ids])):
        model = Quadratic()
        robust_loss = GroupRobustLoss(CGD(step_size=0.5), GroupInfo(names, [9, 9, 9]), list(model.parameters()))
        for _ in range(3):
            robust_loss(model(x), ids).backward()
        weights.append(dict(zip(names, robust_loss.alpha.tolist(), strict=True)))
    assert weights[0] == pytest.approx(weights[1], abs=1e-12)


def test_group_dro_without_steps_is_the_mean_of_group_means() -> None:
    losses, group_ids = torch.rand(30), torch.arange(30) % 3
    mean = sum(losses[group_ids == group].mean() for group in range(3)) / 3
    loss = GroupRobustLoss(GroupDRO(step_size=0), GroupInfo("abc", [10] * 3))(losses, group_ids)
    assert loss.item() == pytest.approx(mean.item(), rel=1e-6)


def test_the_scalar_makes_up_for_the_division_by_processes() -> None:
    one = GroupRobustLoss(GroupDRO(step_size=0), TWO)
    four = GroupRobustLoss(GroupDRO(step_size=0), TWO, communication=Communication(num_processes=4, rank=0))
    group_ids = torch.tensor([0, 1])
    expected = 4 * one(losses_of(1, 2), group_ids).item()
    assert four(losses_of(1, 2), group_ids).item() == pytest.approx(expected, rel=1e-6)


# ---- Trouble --------------------------------------------------------------------------------


def test_a_negative_loss_is_refused_by_name_under_cgd_and_allowed_elsewhere() -> None:
    layer = nn.Linear(1, 1)
    group_ids = torch.tensor([0, 1])

    def losses() -> Tensor:
        return layer(torch.ones(2, 1)).squeeze() * 0 + torch.tensor([1.0, -0.1])

    with pytest.raises(ValueError, match="group 'b' is -0.1"):
        GroupRobustLoss(CGD(), TWO, list(layer.parameters()))(losses(), group_ids)
    GroupRobustLoss(CGD(scaling="gradient"), TWO, list(layer.parameters()))(losses(), group_ids)
    GroupRobustLoss(GroupDRO(), TWO)(losses(), group_ids)


def test_a_loss_that_is_not_finite_moves_no_weights_and_warns_once() -> None:
    robust_loss = GroupRobustLoss(GroupDRO(step_size=0.1), TWO)
    group_ids = torch.tensor([0, 1])
    with pytest.warns(GroupRobustWarning, match=r"group\(s\) \['b'\] is not finite") as caught:
        robust_loss(losses_of(1, math.nan), group_ids)
        robust_loss(losses_of(1, math.inf), group_ids)
    assert len(caught) == 1
    assert robust_loss.alpha is not None and robust_loss.alpha.tolist() == [0.5, 0.5]
    assert (robust_loss.updates, robust_loss.skipped_updates) == (0, 2)
    robust_loss(losses_of(1, 2), group_ids)
    assert robust_loss.updates == 1


def test_what_an_objective_needs_is_asked_for_at_construction() -> None:
    with pytest.raises(ValueError, match=r"CGD compares gradients.*gradient_scope"):
        GroupRobustLoss(CGD(), TWO)
    spectrum = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(
        ValueError, match=r"expected real parameters in the gradient scope, got some of torch.complex64"
    ):
        GroupRobustLoss(CGD(), TWO, [nn.Parameter(torch.ones(2)), spectrum])
    GroupRobustLoss(GroupDRO(), TWO, [spectrum])
    with pytest.raises(
        ValueError, match=r"adjustment > 0 needs the number of training examples.*GroupInfo\(names, counts"
    ):
        GroupRobustLoss(GroupDRO(adjustment=1.0), GroupInfo(["a", "b"]))
    with pytest.raises(ValueError, match=r"min_weight must be below 1/K = 0.5"):
        GroupRobustLoss(GroupDRO(min_weight=0.5), TWO)
    with pytest.raises(ValueError, match="weight_timing must be one of"):
        GroupRobustLoss(GroupDRO(), TWO, weight_timing="later")
    with pytest.raises(ValueError, match=r"weight_timing='current' needs the whole optimizer step.*got 2"):
        GroupRobustLoss(GroupDRO(), TWO).open_window([torch.tensor([0])] * 2)


def test_the_scope_of_another_model_is_refused() -> None:
    """Of a copy, say, or of the model before it was wrapped anew."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    robust_loss = GroupRobustLoss(CGD(), TWO, other.parameters())
    with pytest.raises(ValueError, match=r"depend on none of the 2 parameters .*shapes \[2, 3\], \[2\].*very model"):
        robust_loss(model(torch.ones(2, 3)).square().sum(dim=1), torch.tensor([0, 1]))


def test_pooled_gradients_that_are_large_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_cgd.robust_loss.estimators.LARGE_ROWS", 2 * 6 * 8 - 1)
    model = Quadratic()
    robust_loss = GroupRobustLoss(CGD(), TWO, list(model.parameters()), weight_timing="next")
    ids = torch.tensor([0, 1])
    with pytest.warns(GroupRobustWarning, match="take 0.0 GiB on every process.*gradient_engine='sketch'") as caught:
        for _ in range(2):
            robust_loss.open_window([ids, ids])
            for _ in range(2):
                robust_loss(model(torch.ones(2, 5, dtype=torch.float64)), ids)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = GroupRobustLoss(CGD(), TWO, list(model.parameters()))
        alone(model(torch.ones(2, 5, dtype=torch.float64)), ids)


# ---- State --------------------------------------------------------------------------------


def stepped(names: str = "ab") -> GroupRobustLoss:
    robust_loss = GroupRobustLoss(GroupDRO(step_size=0.123), GroupInfo(names, [5] * len(names)))
    for step in range(7):
        robust_loss(losses_of(*[0.1 * (group + step) ** 2 for group in range(len(names))]), torch.arange(len(names)))
    return robust_loss


def test_state_survives_json_bit_for_bit() -> None:
    saved = stepped()
    restored = GroupRobustLoss(GroupDRO(step_size=0.123), GroupInfo("ab", [5, 5]))
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert torch.equal(restored.alpha, saved.alpha) and restored.updates == 7
    more = [loss(losses_of(0.3, 0.2), torch.tensor([0, 1])).item() for loss in (saved, restored)]
    assert more[0] == more[1] and torch.equal(restored.alpha, saved.alpha)


def test_groups_are_matched_by_name() -> None:
    saved = stepped("äbc")
    restored = GroupRobustLoss(GroupDRO(step_size=0.123), GroupInfo("cäb", [5, 5, 5]))
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert restored.alpha.tolist() == saved.alpha[[2, 0, 1]].tolist()


def test_other_groups_or_another_objective_are_refused() -> None:
    state = stepped().state_dict()
    with pytest.raises(ValueError, match=r"groups \['a', 'b'\].*has \['a', 'b', 'c'\]"):
        GroupRobustLoss(GroupDRO(), GroupInfo("abc", [5] * 3)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"objective='group_dro'.*'erm_uw'"):
        GroupRobustLoss(ERMUW(), GroupInfo("ab", [5, 5])).load_state_dict(state)
    with pytest.raises(ValueError, match=r"other options of objective='group_dro': step_size 0.123 -> 0.2"):
        GroupRobustLoss(GroupDRO(step_size=0.2), GroupInfo("ab", [5, 5])).load_state_dict(state)


def test_objectives_of_the_same_name_are_told_apart() -> None:
    class Mine(Objective):
        pass

    class Other(Objective):
        pass

    state = json.loads(json.dumps(GroupRobustLoss(Mine(), TWO).state_dict()))
    GroupRobustLoss(Mine(), TWO).load_state_dict(state)
    with pytest.raises(ValueError, match=r"objective='custom' \(.*Mine\), but this run has 'custom' \(.*Other\)"):
        GroupRobustLoss(Other(), TWO).load_state_dict(state)
    with pytest.raises(ValueError, match="only the name 'custom'"):
        GroupRobustLoss(Mine(), TWO).load_state_dict({**state, "objective": "custom"})


def test_former_declarations_are_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"declares 'needs', which is `reads` now"):

        class Old(Objective):
            needs = ("logits",)


def test_an_objective_with_a_loss_of_its_own_is_not_taken_for_linear() -> None:
    class Squared(Objective):
        def loss(self, batch: GroupBatch) -> ObjectiveOutput:
            return ObjectiveOutput(batch.losses.square().sum())

    class Declared(Squared):
        linear_in_losses = True

    class OtherMean(ERM):
        def loss(self, batch: GroupBatch) -> ObjectiveOutput:
            return ObjectiveOutput(batch.losses.square().mean())

    assert (Objective.linear_in_losses, Squared.linear_in_losses, Declared.linear_in_losses) == (True, False, True)
    assert (ERM.plain_mean, OtherMean.plain_mean) == (True, False)


def test_no_state_in_the_middle_of_a_step() -> None:
    robust_loss = GroupRobustLoss(GroupDRO(), TWO, weight_timing="next")
    robust_loss.open_window([torch.tensor([0]), torch.tensor([1])])
    robust_loss(losses_of(1), torch.tensor([0]))
    with pytest.raises(RuntimeError, match="between optimizer steps"):
        robust_loss.state_dict()


def test_training_losses_of_groups_since_the_last_look() -> None:
    robust_loss = GroupRobustLoss(GroupDRO(), GroupInfo("abc", [5] * 3))
    robust_loss(losses_of(1, 3, 5), torch.tensor([0, 0, 1]))
    robust_loss(losses_of(5), torch.tensor([0]))
    assert robust_loss.drain_group_losses() == {"a": 3, "b": 5}
    assert robust_loss.drain_group_losses() == {}


def test_a_snapshot_is_not_changed_by_the_step_that_follows() -> None:
    robust_loss, twin = stepped(), stepped()
    before = robust_loss.snapshot()
    robust_loss.open_window([torch.tensor([0, 1])])
    assert robust_loss.state_dict(before) == twin.state_dict(), "in the middle of a step"
    robust_loss(losses_of(0.3, 0.2), torch.tensor([0, 1]))
    assert robust_loss.state_dict(before) == twin.state_dict() != robust_loss.state_dict()


# ---- What is refused in words -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "group_ids", "message"),
    [
        (torch.tensor(1.0), torch.tensor([0, 1]), r"one loss for each example.*reduction='none'"),
        (torch.ones(2, 3), torch.tensor([0, 1]), r"one loss for each example.*\(2, 3\)"),
        ([1.0, 2.0], torch.tensor([0, 1]), r"one loss for each example.*got list"),
        (torch.ones(2), ["a", "b"], r"number of each example's group.*got list.*GroupInfo.encode"),
        (torch.ones(2), torch.tensor([0.0, 1.0]), r"number of each example's group.*float32"),
        (torch.ones(2), torch.tensor([0]), "one group for each of the 2 losses, got 1"),
        (torch.ones(2), torch.tensor([0, 2]), "numbered 0 to 1, got 0 to 2"),
        (torch.ones(2), torch.tensor([-1, 0]), "numbered 0 to 1, got -1 to 0"),
    ],
)
def test_what_is_no_batch_is_refused_in_words(losses: Any, group_ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupRobustLoss(GroupDRO(), TWO)(losses, group_ids)


@pytest.mark.parametrize("weights", [[0.5, 0.6], [-0.5, 1.5], [1.0], [[0.5, 0.5]]])
def test_weights_of_an_own_objective_must_be_weights(weights: Any) -> None:
    class Wrong(Objective):
        def next_weights(self, alpha: Tensor, statistics: GroupStatistics) -> Tensor:
            return torch.tensor(weights, dtype=torch.float64)

    with pytest.raises(ValueError, match=r"Wrong.next_weights must give 2 weights, none negative, that sum to 1; got"):
        GroupRobustLoss(Wrong(), TWO)(losses_of(1, 2), torch.tensor([0, 1]))


@pytest.mark.filterwarnings("ignore:The group weights are saturated")
@pytest.mark.parametrize("arithmetic", [HostArithmetic(), DeviceArithmetic(torch.device("cpu"))])
def test_a_group_whose_weight_has_vanished_may_come_alone(arithmetic: Arithmetic) -> None:
    robust_loss = GroupRobustLoss(GroupDRO(step_size=1.0, min_weight=0.0), TWO, arithmetic=arithmetic)
    for _ in range(400):
        robust_loss(losses_of(0.1, 6.0), torch.tensor([0, 1]))
    assert robust_loss.alpha is not None
    before = robust_loss.alpha.clone()
    assert robust_loss(losses_of(0.25), torch.tensor([0])).item() == pytest.approx(0.25)
    assert torch.allclose(robust_loss.alpha, before, rtol=1e-6, atol=1e-30)
    assert robust_loss.alpha.sum().item() == pytest.approx(1)
    assert robust_loss(losses_of(0.25, 6.0), torch.tensor([0, 1])).item() == pytest.approx(6.0)
    assert robust_loss.skipped_updates == 0
