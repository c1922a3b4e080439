"""Rules for layer types: which layer gets which, what a rule of a user's own gives, and the defaults of the base."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_cgd.gradients import (
    GradientEngine,
    LayerRule,
    PerGroupEngine,
    SinglePassEngine,
    SketchEngine,
    StaticShapesEngine,
    TensorHookEngine,
    register_layer_rule,
)
from hf_cgd.gradients.group_order import GroupOrder, products_of_groups
from hf_cgd.gradients.layers import registry
from hf_cgd.gradients.layers.base import LayerCall, OutputGradients, ReusedMemory
from hf_cgd.gradients.layers.convolution import Conv2dRule
from hf_cgd.gradients.layers.linear import LinearRule, TransposedLinearRule
from hf_cgd.gradients.layers.norm import LayerNormRule
from hf_cgd.gradients.layers.registry import layer_rules, rule_for
from hf_cgd.gradients.layers.rerun import RerunRule

GROUP_IDS = torch.tensor([2, 0, 2, 1, 0, 2, 2, 1])
GROUPS = [0, 1, 2]


class Mix(nn.Module):
    """inputs + (inputs * scale) mixed by a tensor of three dimensions; no layer of torch does this."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.mixing = nn.Parameter(torch.randn(2, 3, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.einsum("bi,aji->baj", inputs * self.scale, self.mixing).flatten(1)


class MixRule(LayerRule):
    """What a user has to write: when it is right, and the gradient of each group."""

    uses = 0

    def matches(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
        return isinstance(module, Mix)

    def add_gradients(
        self, call: LayerCall, gradients: OutputGradients, order: GroupOrder, targets: dict[str, Tensor]
    ) -> None:
        MixRule.uses += 1
        module, gradient = call.module, gradients[0]
        assert isinstance(module, Mix) and gradient is not None
        scale, mixing = module.scale.detach(), module.mixing.detach()
        for group, (inputs, part) in enumerate(zip(order.split(call.inputs), order.split(gradient), strict=True)):
            part = part.unflatten(1, (2, 3))
            if "scale" in targets:
                targets["scale"][group] += torch.einsum("baj,bi,aji->i", part, inputs, mixing)
            if "mixing" in targets:
                targets["mixing"][group] += torch.einsum("baj,bi,i->aji", part, inputs, scale).flatten()


class FromOutputs(nn.Module):
    """Its rule needs no weights: scale * inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


class FromOutputsRule(LayerRule):
    needs_weights = False

    def matches(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
        return isinstance(module, FromOutputs)

    def add_gradients(
        self, call: LayerCall, gradients: OutputGradients, order: GroupOrder, targets: dict[str, Tensor]
    ) -> None:
        # As tensor hooks promise: no memory for weights that no rule reads.
        assert call.module.scale.untyped_storage().nbytes() in (4, 24)  # type: ignore[union-attr]
        for group, rows in enumerate(order.split(call.inputs * gradients[0])):
            targets["scale"][group] += rows.flatten(0, -2).sum(dim=0)


@pytest.fixture(autouse=True)
def rules_of_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_rules", list(registry._rules))
    MixRule.uses = 0
    yield


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Mix(), FromOutputs(), nn.Tanh(), Mix(), nn.Linear(6, 2))


def losses_of(model: nn.Module) -> Tensor:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(inputs), torch.arange(8) % 2, reduction="none")


def close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-5 * other.abs().max())


ENGINES: dict[str, Callable[[nn.Module, list[nn.Parameter]], GradientEngine]] = {
    "single_pass": SinglePassEngine,
    "sketch": lambda model, scope: SketchEngine(model, scope, size=3),
    "static_shapes": StaticShapesEngine,
    "tensor_hooks": TensorHookEngine,
}


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_uses_a_rule_of_the_users_own(name: str) -> None:
    """All four agree with one backward pass per group: the rows, and the gradient of the whole step."""
    register_layer_rule(MixRule)
    register_layer_rule(FromOutputsRule)
    model = network()
    scope = list(model.parameters())
    exact = PerGroupEngine(scope).group_gradients(losses_of(model), GROUP_IDS, GROUPS).rows
    coefficients = torch.tensor([0.2, 0.7, 0.4])[GROUP_IDS]
    step = torch.autograd.grad((coefficients * losses_of(model)).sum(), scope)
    engine = ENGINES[name](model, scope)
    with engine.recording():
        losses = losses_of(model)
    weighted = (coefficients * losses).sum()
    if engine.timing == "after_backward":
        engine.watch(losses)
        weighted.backward()
        gradients = engine.group_gradients(losses.detach(), GROUP_IDS, GROUPS)
    else:
        gradients = engine.group_gradients(losses, GROUP_IDS, GROUPS)
    expected = (
        torch.stack([engine.group_rows.sketch(row) for row in exact]) if isinstance(engine, SketchEngine) else exact
    )
    assert expected.shape == gradients.rows.shape and (name != "sketch" or expected.shape[1] < exact.shape[1])
    assert close(gradients.rows, expected)
    if engine.timing == "within_step":
        gradients.scalar(weighted, coefficients).backward()
        for parameter, gradient in zip(scope, step, strict=True):
            assert parameter.grad is not None and close(parameter.grad, gradient)
    assert MixRule.uses > 0


def test_the_example_of_the_documentation_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (register_layer_rule.__doc__ or "").splitlines()
    start = next(place for place, line in enumerate(lines) if "@register_layer_rule" in line)
    example = "\n".join(line.removeprefix("        ") for line in lines[start : lines.index("", start)])
    namespace = {"register_layer_rule": register_layer_rule, "LayerRule": LayerRule, "Scale": FromOutputs}
    exec(example, namespace)
    model = nn.Sequential(nn.Linear(5, 6), FromOutputs(), nn.Linear(6, 2))
    scope = list(model.parameters())
    engine = SinglePassEngine(model, scope)
    with engine.recording():
        losses = losses_of(model)
    exact = PerGroupEngine(scope).group_gradients(losses, GROUP_IDS, GROUPS).rows
    assert close(engine.group_gradients(losses, GROUP_IDS, GROUPS).rows, exact)
    assert type(layer_rules()[0]) is namespace["ScaleRule"]


def test_the_latest_rule_is_asked_first() -> None:
    class Everything(MixRule):
        def matches(self, *_: Any) -> bool:
            return True

    before = layer_rules()
    assert register_layer_rule(MixRule) is MixRule
    rule = Everything()
    assert register_layer_rule(rule) is rule
    assert layer_rules()[0] is rule and type(layer_rules()[1]) is MixRule and layer_rules()[2:] == before
    assert rule_for(nn.LayerNorm(3), (torch.ones(2, 3),), {}, torch.ones(2, 3)) is rule


@pytest.mark.parametrize("thing", [nn.Linear, "LinearRule", lambda: None])
def test_what_is_no_rule_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="Expected a LayerRule or a subclass of it, got"):
        register_layer_rule(thing)


class OwnNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("make", "shape", "rule"),
    [
        (lambda: nn.Linear(4, 3), (2, 5, 4), LinearRule),
        (lambda: nn.Linear(4, 4, bias=False), (2, 4), LinearRule),
        (lambda: Conv1D(3, 4), (2, 5, 4), TransposedLinearRule),
        (lambda: Conv1D(4, 4), (2, 5, 4), TransposedLinearRule),
        (lambda: Doubled(4, 3), (2, 5, 4), RerunRule),
        (lambda: nn.LayerNorm(4), (2, 5, 4), LayerNormRule),
        (lambda: nn.LayerNorm((5, 4)), (2, 5, 4), LayerNormRule),
        (lambda: OwnNorm(4), (2, 5, 4), RerunRule),
        (lambda: nn.RMSNorm(4), (2, 5, 4), RerunRule),
        (lambda: nn.Conv2d(3, 2, 3), (2, 3, 5, 5), Conv2dRule),
        (lambda: nn.Conv2d(3, 2, 3, padding="same"), (2, 3, 5, 5), RerunRule),
        (lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"), (2, 3, 5, 5), RerunRule),
        (lambda: nn.Conv1d(3, 2, 3), (2, 3, 5), RerunRule),
    ],
)
def test_which_layer_gets_which_rule(make: Callable[[], nn.Module], shape: tuple[int, ...], rule: type) -> None:
    torch.manual_seed(0)
    layer, inputs = make(), torch.randn(shape)
    nn.init.normal_(layer.weight)  # type: ignore[arg-type]
    assert type(rule_for(layer, (inputs,), {}, layer(inputs))) is rule
    assert type(rule_for(layer, (), {"input": inputs}, layer(inputs))) is rule


def test_choosing_a_rule_leaves_a_parametrized_layer_alone() -> None:
    """Its weight is computed whenever it is read: spectral norms go one iteration further."""
    torch.manual_seed(0)
    layer, inputs = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), torch.randn(2, 4)
    output = layer(inputs)
    before = [buffer.clone() for buffer in layer.buffers()]
    assert type(rule_for(layer, (inputs,), {}, output)) is RerunRule
    assert before and all(torch.equal(one, other) for one, other in zip(before, layer.buffers(), strict=True))


def call_of(layer: nn.Module, inputs: Tensor) -> tuple[LayerCall, Tensor]:
    output = layer(inputs)
    return LayerCall(layer, (inputs,), {}, [], rule_for(layer, (inputs,), {}, output)), output


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(6, 5), (8, 3, 6)),
    "Linear, two dimensions": (lambda: nn.Linear(6, 5), (8, 6)),
    "Linear, narrow": (lambda: nn.Linear(6, 50), (8, 3, 6)),
    "Conv1D": (lambda: Conv1D(5, 6), (8, 3, 6)),
    "Conv1D, two dimensions": (lambda: Conv1D(5, 6), (8, 6)),
    "LayerNorm": (lambda: nn.LayerNorm(6), (8, 3, 6)),
    "LayerNorm over two dimensions": (lambda: nn.LayerNorm((6, 6)), (8, 2, 6, 6)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, dilation=2), (8, 3, 9, 9)),
    "Conv2d with groups": (lambda: nn.Conv2d(4, 4, 3, groups=2), (8, 4, 5, 5)),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3), (8, 3, 9)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_short_ways_of_a_rule_give_what_the_defaults_give(name: str) -> None:
    """The oracle is autograd on each group's examples, and the definitions of sum, sketch and weighted sum."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, inputs = make().double(), torch.randn(shape, dtype=torch.float64)
    call, output = call_of(layer, inputs)
    gradient, rule = torch.randn_like(output), call.rule
    names = [key for key, _ in layer.named_parameters()]

    def expected(rows: Tensor, factors: Tensor | None = None) -> dict[str, Tensor]:
        part = gradient[rows] if factors is None else gradient[rows] * factors.view(-1, *[1] * (gradient.ndim - 1))
        found = torch.autograd.grad(layer(inputs[rows]), list(layer.parameters()), part)
        return {key: one.flatten() for key, one in zip(names, found, strict=True)}

    order = GroupOrder.by_group(GROUP_IDS, GROUPS)
    by_group = [expected(GROUP_IDS.eq(group).nonzero().flatten()) for group in GROUPS]
    with torch.no_grad():
        small = rule.small_gradients(call, [gradient], order, names, torch.float64)
        assert (small is not None) == name.startswith(("Linear", "Conv1D"))
        for key, found in (small or {}).items():
            assert torch.allclose(found, torch.stack([one[key] for one in by_group])), key
        targets = {key: torch.full((3, p.numel()), torch.nan).double() for key, p in layer.named_parameters()}
        rule.form_gradients(call, [gradient], order, targets, fresh=names)
        rule.form_gradients(call, [gradient], order, targets)
        coefficients = torch.rand(8, dtype=torch.float64)
        weighted = rule.weighted_gradients(call, [gradient], coefficients, names, torch.float64, ReusedMemory())
        alone = GroupOrder.one_group_per_example(8, torch.device("cpu"))
        of_examples = rule.example_gradients(call, [gradient], alone, names, torch.float64)
    for key in names:
        assert torch.allclose(targets[key], 2 * torch.stack([one[key] for one in by_group]))
        assert torch.allclose(weighted[key], expected(torch.arange(8), coefficients)[key])
        each = torch.stack([expected(torch.tensor([place]))[key] for place in range(8)])
        assert torch.allclose(of_examples[key], each)
    weight = layer.get_parameter("weight")
    if weight.ndim >= 2:
        left, right = torch.randn(2, len(weight)).double(), torch.randn(weight[0].numel(), 2).double()
        sketch = torch.ones(3, 4, dtype=torch.float64)
        with torch.no_grad():
            rule.add_projected(call, [gradient], order, "weight", (left, right), sketch)
            factors = rule.projected(call, [gradient], "weight", (left, right))
        whole = torch.stack([one["weight"] for one in by_group]).view(3, len(weight), -1)
        assert torch.allclose(sketch, 1 + (left @ whole @ right).flatten(1))
        assert (factors is not None) == (name == "Conv2d" or name.startswith(("Linear", "Conv1D")))
        if factors is not None:
            ones, others = ([factor, 2 * factor] for factor in factors)
            products = products_of_groups(ones, others, order, torch.float64)
            assert torch.allclose(products[:, 0], sketch - 1) and torch.allclose(products[:, 1], 4 * (sketch - 1))


@pytest.mark.parametrize("name", LAYERS)
def test_an_output_that_the_loss_does_not_depend_on_gives_zeros(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make()
    call, _ = call_of(layer, torch.randn(shape))
    sizes = {key: p.numel() for key, p in layer.named_parameters()}
    order, alone = GroupOrder.by_group(GROUP_IDS, GROUPS), GroupOrder.one_group_per_example(8, torch.device("cpu"))
    with torch.no_grad():
        targets = {key: torch.full((3, size), torch.nan) for key, size in sizes.items()}
        call.rule.form_gradients(call, [None], order, targets, fresh=list(sizes))
        args = (torch.ones(8), list(sizes), torch.float32, ReusedMemory())
        weighted = call.rule.weighted_gradients(call, [None], *args)
        of_examples = call.rule.example_gradients(call, [None], alone, list(sizes), torch.float32)
    for key, size in sizes.items():
        assert torch.equal(targets[key], torch.zeros(3, size)) and torch.equal(weighted[key], torch.zeros(size))
        assert torch.equal(of_examples[key], torch.zeros(8, size))


@pytest.mark.parametrize("ids", [[2, 0, 2, 1, 0], [0, 0, 1, 2, 2], [3], [5, 4, 3]])
def test_an_order_holds_every_group_once(ids: list[int]) -> None:
    group_ids = torch.tensor(ids)
    groups = sorted(set(ids))
    order = GroupOrder.by_group(group_ids, groups)
    assert (order.permutation is None) == (ids == sorted(ids))
    for place, (group, part) in enumerate(zip(groups, order.split(group_ids), strict=True)):
        assert part.tolist() == [group] * ids.count(group)
        assert order.examples_of(place).tolist() == [i for i, one in enumerate(ids) if one == group]
        assert ids[int(order.first[place])] == group
