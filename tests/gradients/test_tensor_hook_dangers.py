"""What tensor hooks cannot do is refused in words, whatever the numbers of the first batch are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cgd import CGD, GroupInfo
from hf_cgd.gradients import TensorHookEngine
from hf_cgd.robust_loss import GroupRobustLoss

GROUP_IDS = torch.tensor([0, 0, 0, 1, 1, 1])


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class Spread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.std(-2, keepdim=True)


class Normalised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class Functional(nn.Module):
    """Its first layer is called, its second is used without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x), self.second.weight)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.5)


class Gated(nn.Linear):
    gate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate


class ReadsState(nn.Module):
    """The last state of a network over time, [1, B, D]: layers come first."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x[:, None])[1][0][-1]


def network(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), middle, nn.Tanh(), nn.Linear(8, 2))
    nn.init.zeros_(model[-1].weight)
    return model


def step(model: nn.Module, loss_of: GroupRobustLoss) -> None:
    with loss_of.recording():
        losses = F.cross_entropy(model(torch.randn(6, 4)), torch.tensor([0, 1] * 3), reduction="none")
    loss_of(losses, GROUP_IDS).backward()
    loss_of.after_backward()


def loss_with(model: nn.Sequential) -> GroupRobustLoss:
    engine = TensorHookEngine(model, list(model[1:].parameters()))
    groups = GroupInfo(["a", "b"], [5, 5])
    return GroupRobustLoss(CGD(step_size=0.1), groups, engine.parameters, engine=engine, weight_timing="next")


@pytest.mark.parametrize(
    ("middle", "words"),
    [
        (Centred, r"examples are summed up \(MeanBackward1\)"),
        (Spread, r"examples are summed up \(StdBackward0\)"),
        (Normalised, "batch statistics .* mix the examples"),
        (Functional, "Linear is in the gradient scope but was not called"),
        (Noisy, "Noisy would have to be run again, but draws random numbers"),
    ],
)
def test_what_a_zero_head_would_hide(middle: Callable[[], nn.Module], words: str) -> None:
    model = network(middle())
    loss_of = loss_with(model)
    with pytest.raises(ValueError, match=f"by tensor hooks cannot be had: {words}"):
        step(model, loss_of)


def test_a_weight_that_is_used_without_a_call_before_the_first_module_of_the_scope() -> None:
    class Before(Functional):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(F.linear(x, self.second.weight))

    model = network(Before())
    engine = TensorHookEngine(model, list(model[2:].parameters()))
    groups = GroupInfo(["a", "b"], [5, 5])
    loss_of = GroupRobustLoss(CGD(step_size=0.1), groups, engine.parameters, engine=engine, weight_timing="next")
    with pytest.raises(ValueError, match="Linear is in the gradient scope but was not called"):
        step(model, loss_of)


@pytest.mark.parametrize("freeze", ["weight", "layer"])
def test_freezing_in_mid_run_is_refused(freeze: str) -> None:
    model = network(nn.Identity())
    loss_of = loss_with(model)
    step(model, loss_of)
    (model[1] if freeze == "layer" else model[1].weight).requires_grad_(False)
    with pytest.raises(ValueError, match="of Linear was trainable when the run began and is frozen now"):
        step(model, loss_of)


def test_a_factor_that_is_one_at_first_is_no_plain_layer() -> None:
    model = network(Gated(8, 8))
    with pytest.raises(ValueError, match="Gated scales what it computes"):
        step(model, loss_with(model))


def test_outputs_without_a_row_for_each_example_are_refused() -> None:
    model = network(ReadsState())
    with pytest.raises(ValueError, match="cannot be had: an output of LSTM has no entry for each example"):
        step(model, loss_with(model))
