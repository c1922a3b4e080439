"""Parameters in a ParameterDict or ParameterList, which nobody calls: the module that they are a part of uses them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cgd.gradients import PerGroupEngine, SinglePassEngine, SketchEngine, StaticShapesEngine, gradient_scope
from hf_cgd.gradients.autograd import held_parameters, owned_parameters

GROUP_IDS = torch.tensor([2, 0, 2, 1, 0, 2, 2, 1])
GROUPS = [0, 1, 2]


class Scaled(nn.Module):
    """A frozen layer whose inputs are scaled, as adapters do; and outputs, by scales in a list within a dict."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.scales = nn.ParameterDict(
            {"in": torch.randn(6), "more": nn.ParameterList([torch.randn(6), torch.randn(6)])}
        )
        self.bias, self.dropout = nn.Parameter(torch.randn(6)), nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.scales["more"]
        return self.base(self.dropout(inputs) * self.scales["in"]) * first * second + self.bias


class ScaledLinear(nn.Linear):
    """A subclass of torch's layer, which is none of its type any more."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.scales = nn.ParameterList([torch.randn(6)])

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.scales[0]


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), nn.Tanh(), Scaled(dropout), nn.Tanh(), ScaledLinear(), Scaled(dropout), nn.Linear(6, 2)]
    return nn.Sequential(*layers).double()


def losses_of(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    inputs = torch.randn(8, 5, dtype=torch.float64)
    return F.cross_entropy(model(inputs), torch.arange(8) % 2, reduction="none")


def test_what_a_module_holds() -> None:
    module = Scaled()
    names = {"bias": module.bias, "scales.in": module.scales["in"]}
    names |= {f"scales.more.{place}": module.scales["more"][place] for place in (0, 1)}
    held = held_parameters(module)
    assert set(held) == set(names) and all(held[name] is names[name] for name in names)
    wanted = [names["scales.in"], names["scales.more.1"]]
    (found,) = owned_parameters(nn.Sequential(module), wanted).items()
    assert found == (module, {"scales.in": wanted[0], "scales.more.1": wanted[1]})
    direct = owned_parameters(module, wanted, in_containers=False)
    assert list(direct) == [module.scales, module.scales["more"]]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("layers", ["all", ["^[4-6]"], ["scales"], [r"^5.scales.more.1"]])
def test_one_pass_gives_what_a_pass_for_each_group_gives(layers: Any, dropout: float) -> None:
    """The rows of every group, and after the final pass the gradient of each parameter of the network."""
    model = network(dropout)
    scope = list(gradient_scope(model, layers).values())
    weights = torch.tensor([0.5, 2.0, 0.25], dtype=torch.float64)[GROUP_IDS]
    found = []
    for engine in (PerGroupEngine(scope), SinglePassEngine(model, scope)):
        model.zero_grad()
        with engine.recording():
            losses = losses_of(model)
        gradients = engine.group_gradients(losses, GROUP_IDS, GROUPS)
        gradients.scalar((weights * losses).sum(), weights).backward()
        ends = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((gradients.rows, ends))
    (expected, ends), (rows, own) = found
    torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-12)
    assert set(ends) == set(own) and {name for name in ends if "scales" in name}
    for name, gradient in ends.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [SketchEngine, StaticShapesEngine])
def test_engines_that_run_modules_again_agree(kind: Any) -> None:
    model = network()
    scope = list(gradient_scope(model, ["^[2-6]"]).values())
    grams = []
    for engine in (PerGroupEngine(scope), kind(model, scope)):
        with engine.recording():
            losses = losses_of(model)
        grams.append(engine.group_gradients(losses, GROUP_IDS, GROUPS).gram())
    # Rows of so few numbers are sketched as they are.
    torch.testing.assert_close(grams[1].double(), grams[0].double(), rtol=1e-6, atol=1e-9)
