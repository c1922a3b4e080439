"""Trainable parameters behind the cut and outside of the scope: no part of the rows, and their gradients are right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import parameters_of
from tiny_tokens import COMMON, batch_of, tiny_model, token_dataset, token_rows
from torch import Tensor, nn

from hf_cgd import GroupRobustConfig, GroupRobustTrainer, gradient_scope
from hf_cgd.gradients import AutoEngine, GradientEngine, PerGroupEngine, SinglePassEngine, verification
from hf_cgd.gradients.compiled import engines_for, network_is_compiled
from hf_cgd.gradients.engines.per_group import PerGroupCutEngine
from hf_cgd.gradients.engines.sketch import SketchEngine
from hf_cgd.gradients.layers import registry
from hf_cgd.gradients.layers.linear import LinearRule
from hf_cgd.models.heads import LossOptions, head_of

GROUPS = torch.tensor([0, 1, 2, 1, 0, 2, 1, 1, 0, 2, 0, 1])
WIDTH = 6


class Scale(nn.Module):
    """A layer without a rule: its gradient is taken through the graph."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH)) if weight is None else weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.tanh()


class Small(nn.Module):
    """Body, scope (`middle`), then layers outside of the scope; `late` works at two places behind the cut."""

    def __init__(self, late: nn.Module | None = None, times: int = 2) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.late = late or nn.Linear(WIDTH, WIDTH)
        self.times = times
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.body(x))).relu()
        for _ in range(self.times):
            hidden = self.norm(hidden + self.late(hidden))
        return self.head(hidden)


class Tied(Small):
    """`late` has the weight of the body, and is run before the scope as well."""

    def __init__(self) -> None:
        super().__init__()
        self.late.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.late(x))


class Lent(Small):
    """The weight of the head is used by a function behind the cut too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.head.weight.T)


class TiedScale(Small):
    """A weight whose gradient is taken through the graph is used before the cut too."""

    def __init__(self) -> None:
        scale = Scale()
        super().__init__(scale, times=1)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale.weight)


def vectors(model: nn.Module) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(GROUPS), WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (len(GROUPS),), generator=generator)
    return lambda: F.cross_entropy(model(x), labels, reduction="none")


def tokens(name: str, model: nn.Module) -> Callable[[], Tensor]:
    batch, head = batch_of(token_rows(name)), head_of(model)
    given = {key: batch[key] for key in ("input_ids", "attention_mask")}
    return lambda: head.losses(head.scores_of(model(**given)), batch["labels"], model, LossOptions())


SMALL: dict[str, Callable[[], nn.Module]] = {
    "small": Small, "tied": Tied, "scale": lambda: Small(Scale(), times=1), "lent": Lent, "tied scale": TiedScale,
}  # fmt: skip


def case(name: str) -> tuple[Any, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = SMALL[name]().double() if name in SMALL else tiny_model(name).double()
    return model, vectors(model) if name in SMALL else tokens(name, model)


def trained(name: str, layers: Any, engine_name: str, steps: int = 4) -> tuple[list[Tensor], list[Tensor], str]:
    """Gradients of all parameters and inner products of the groups after each step with momentum, and the engine."""
    model, losses_of = case(name)
    scope = list(gradient_scope(model, layers).values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine: Any = PerGroupEngine(scope)
    if engine_name in ("auto", "single_pass", "sketch"):
        engine = AutoEngine(model, scope, engine_name)  # type: ignore[arg-type]
    all_gradients, grams = [], []
    for step in range(steps):
        optimizer.zero_grad()
        with engine.recording():
            losses = losses_of()
        coefficients = torch.tensor([0.1, 0.3, 0.05 * (step + 1)], dtype=losses.dtype)[GROUPS]
        weighted = (coefficients * losses).sum()
        if engine_name != "plain":
            gradients = engine.group_gradients(losses, GROUPS, [0, 1, 2])
            grams.append(gradients.gram())
            value = float(weighted.detach())
            # A scalar may be scaled, as a GradScaler does.
            weighted = gradients.scalar(weighted, coefficients)
            assert float(weighted.detach()) == value
            (weighted * 2.0).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= 2.0
        else:
            weighted.backward()
        every = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        all_gradients.append(torch.cat([one.flatten() for one in every]))
        optimizer.step()
    chosen = getattr(engine, "chosen", None)
    return all_gradients, grams, "" if chosen is None else chosen.name


CASES = [
    ("gpt2", 3), ("llama tied", 3), ("masked", 3), ("llama", r"layers\.[12]\."), ("llama", [r"layers\.2\.", "embed"]),
    ("gpt2 untied", r"h\.[12]\."), ("masked", [r"encoder\..*bias"]), ("small", "middle"), ("small", ["middle", "bias"]),
    ("small", ["middle", "late"]), ("tied", "middle"), ("scale", "middle"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layers"), CASES)
def test_training_is_that_of_plain_autograd_and_of_one_pass_per_group(name: str, layers: Any) -> None:
    """In float64, with every parameter's gradient compared at every step, momentum carrying errors on."""
    model, _ = case(name)
    scope = gradient_scope(model, layers).values()
    assert any(all(p is not one for one in scope) for p in model.parameters())
    found, grams, chosen = trained(name, layers, "single_pass")
    exact, exact_grams, _ = trained(name, layers, "per_group")
    plain, _, _ = trained(name, layers, "plain")
    assert chosen == "single_pass"
    # Llama's norms compute in float32 whatever the type of the network.
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6} if "llama" in name else {"rtol": 1e-8, "atol": 1e-11}
    torch.testing.assert_close(found, plain, **close)
    torch.testing.assert_close(exact, plain, **close)
    # A product of two groups may be zero but for what their lengths round off.
    longest = max(gram.max().item() for gram in exact_grams)
    torch.testing.assert_close(grams, exact_grams, **{**close, "atol": close["atol"] * longest})


@pytest.mark.parametrize(("name", "layers"), [("gpt2", 3), ("masked", 3), ("tied", "middle")])
def test_a_sketch_leaves_the_step_exact(name: str, layers: Any) -> None:
    found, _, chosen = trained(name, layers, "sketch")
    assert chosen == "sketch"
    torch.testing.assert_close(found, trained(name, layers, "plain")[0], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", ["lent", "tied scale"])
def test_where_it_is_not_proven_one_pass_per_group_is_taken(name: str) -> None:
    found, _, chosen = trained(name, "middle", "auto")
    assert chosen.startswith("per_group")
    torch.testing.assert_close(found, trained(name, "middle", "plain")[0], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", ["small", "tied"])
def test_a_hook_on_a_layer_outside_of_the_scope_in_mid_run_is_seen(name: str) -> None:
    """Where the layer is tied, its gradient through the graph would hold what it does before the scope too."""
    model, losses_of = case(name)
    engine = AutoEngine(model, list(model.middle.parameters()))
    coefficients = torch.tensor([0.1, 0.3, 0.2]).double()[GROUPS]
    for step in range(3):
        if step == 2:
            model.late.register_forward_hook(lambda module, inputs, output: 2 * output)
        with engine.recording():
            losses = losses_of()
        weighted = (coefficients * losses).sum()
        expected = torch.autograd.grad(weighted, list(model.parameters()), retain_graph=True)
        model.zero_grad()
        engine.group_gradients(losses, GROUPS, [0, 1, 2]).scalar(weighted, coefficients).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], list(expected), rtol=1e-9, atol=1e-12)
    assert engine.chosen is not None and engine.chosen.name == "single_pass"


def test_fixed_shapes_are_not_served() -> None:
    model, losses_of = case("small")
    engine = AutoEngine(model, list(model.middle.parameters()), static=True)
    with engine.recording():
        losses = losses_of()
    engine.group_gradients(losses, GROUPS, [0, 1, 2])
    assert engine.chosen is not None and engine.chosen.name == "per_group"
    assert "is not in the gradient scope but reaches the loss" in engine.reason


def test_only_what_the_losses_depend_on_behind_the_cut_is_given_a_gradient() -> None:
    model, losses_of = case("small")
    model.unused = nn.Linear(WIDTH, WIDTH).double()
    engine = SinglePassEngine(model, list(model.middle.parameters()))
    with engine.recording():
        losses = losses_of()
    gradients = engine.group_gradients(losses, GROUPS, [0, 1, 2])
    wanted = [*model.norm.parameters(), *model.late.parameters(), *model.head.parameters()]
    assert set(map(id, gradients.others)) == set(map(id, wanted))
    assert gradients.rows.shape == (3, WIDTH * WIDTH + WIDTH)
    gradients.scalar(losses.mean(), torch.full((len(GROUPS),), 1 / len(GROUPS)).double()).backward()
    assert all(parameter.grad is None for parameter in model.unused.parameters())


@pytest.mark.parametrize("make", [SinglePassEngine, PerGroupCutEngine, SketchEngine, AutoEngine])
def test_what_the_losses_do_not_depend_on_gets_no_gradient_in_the_scope_either(
    make: Callable[[nn.Module, list[nn.Parameter]], GradientEngine],
) -> None:
    """An optimizer would move it, by its momentum or weight decay; and DDP has counted it as unused."""
    model, losses_of = case("small")
    model.unused = nn.Linear(WIDTH, WIDTH).double()
    scope = list(model.parameters())
    engine = make(model, scope)
    for _ in range(2):
        model.zero_grad()
        with engine.recording():
            losses = losses_of()
        coefficients = torch.linspace(0.2, 0.9, len(GROUPS)).double()[GROUPS]
        expected = torch.autograd.grad((coefficients * losses).sum(), scope, retain_graph=True, allow_unused=True)
        gradients = engine.group_gradients(losses, GROUPS, [0, 1, 2])
        gradients.scalar((coefficients * losses).sum(), coefficients).backward()
        assert [p.grad is None for p in scope] == [gradient is None for gradient in expected]
        assert sum(gradient is None for gradient in expected) == 2


class Wrong(LinearRule):
    """Forms a weighted gradient that is off by a thousandth."""

    def weighted_gradients(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {name: 1.001 * one for name, one in super().weighted_gradients(*args, **kwargs).items()}


@pytest.mark.parametrize("size", [1.0, 1e5])
def test_the_first_step_finds_a_wrong_gradient_outside_of_the_scope(
    monkeypatch: pytest.MonkeyPatch, size: float
) -> None:
    """Also where what the same weight gets through the cut is far larger than the part that is wrong."""
    for rules, chosen in (([Wrong()], "per_group"), ([], "single_pass")):
        monkeypatch.setattr(registry, "_rules", [*rules, *registry._rules])
        model, losses_of = case("tied")
        with torch.no_grad():
            model.middle.weight.mul_(size)
        engine = AutoEngine(model, list(model.middle.parameters()))
        with engine.recording():
            losses = losses_of()
        engine.group_gradients(losses, GROUPS, [0, 1, 2])
        assert engine.chosen is not None and engine.chosen.name == chosen, engine.reason
        monkeypatch.undo()


def test_a_gradient_of_zero_outside_of_the_scope_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    original = verification.StepCheck.verdict_on

    def noted(check: verification.StepCheck, engine: Any) -> verification.Verdict:
        checked.append(engine)
        return original(check, engine)

    monkeypatch.setattr(verification.StepCheck, "verdict_on", noted)
    model, losses_of = case("small")
    with torch.no_grad():
        model.head.weight.zero_()
    engine = AutoEngine(model, list(model.middle.parameters()))
    for _ in range(3):
        with engine.recording():
            losses = losses_of()
        engine.group_gradients(losses, GROUPS, [0, 1, 2])
    assert len(checked) == 2


def run(folder: Path, name: str, engine: str, **options: Any) -> GroupRobustTrainer:
    options = {
        "max_steps": 3, "group_column": "group", "objective": "cgd", "step_size": 0.5, "gradient_engine": engine, **COMMON,
        **options,
    }  # fmt: skip
    args = GroupRobustConfig(str(folder), **options)
    trainer = GroupRobustTrainer(model=tiny_model(name), args=args, train_dataset=token_dataset(name))
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["gpt2", "masked"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.1},
        {"gradient_accumulation_steps": 3},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"weight_timing": "next", "gradient_accumulation_steps": 3, "group_unit": "token"},
    ],
    ids=["clipped", "accumulated", "checkpointed", "next"],
)
def test_a_trainers_run_is_that_of_one_pass_per_group(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    fast, exact = (run(tmp_path / engine, name, engine, **options) for engine in ("single_pass", "per_group"))
    torch.testing.assert_close(parameters_of(fast.model), parameters_of(exact.model), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fast.group_weights, exact.group_weights, rtol=1e-4, atol=1e-6)
    assert (parameters_of(fast.model) - parameters_of(tiny_model(name))).abs().max() > 1e-3


def test_an_engine_for_a_compiled_network_leaves_no_trace_in_later_ones() -> None:
    """There weights outside of the scope are not served, since their hooks would cut the compiled code to pieces."""
    model = Small()
    scope = list(model.middle.parameters())
    AutoEngine(model, scope, compiled=True)
    assert not network_is_compiled()
    with engines_for(True):
        assert not SinglePassEngine(model, scope).outside
    served = {id(p) for held in SinglePassEngine(model, scope).outside.values() for p in held.values()}
    assert served == {id(p) for p in model.parameters()} - {id(p) for p in scope}
