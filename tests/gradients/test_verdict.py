"""The verdict on an engine must not hang on the first batch: every step of a changing network equals plain autograd."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import transformers as tf
from networks import losses_of
from plain_autograd import error, worst_error
from timm.layers import LayerScale
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torchvision.models.vision_transformer import VisionTransformer

from hf_cgd import gradient_scope
from hf_cgd.gradients import AutoEngine, PerGroupEngine
from hf_cgd.gradients.engines import auto
from hf_cgd.gradients.engines.group_rows import GroupRows
from hf_cgd.gradients.engines.single_pass import SinglePassEngine
from hf_cgd.gradients.engines.sketch import GroupSketches, SketchEngine

ONE, THREE = [1, 1, 1, 1, 1, 1], [2, 1, 2, 0, 2, 1]
WIDTH = 8


def engine_for(model: nn.Module, layers: Any = "all") -> AutoEngine:
    return AutoEngine(model, list(gradient_scope(model, layers).values()))


def chosen(engine: AutoEngine) -> str:
    assert engine.chosen is not None
    return engine.chosen.name


def vectors() -> Tensor:
    return torch.randn(6, WIDTH, dtype=torch.float64)


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), *middle, nn.Tanh(), nn.Linear(WIDTH, 2)]
    return nn.Sequential(*layers).double().train()


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Functional(nn.Module):
    """Uses its linear layer's weight without calling the layer, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias)


class UsedTwice(nn.Module):
    """Calls its layer, and uses its weight once more behind its back."""

    def __init__(self, gate: float = 0.0) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.gate * (x @ self.inner.weight)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class Lent(nn.Module):
    """The last example lends something to all others."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x[-1:].tanh()


class Instance(nn.Module):
    """Statistics of one example, taken by batch_norm all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return F.instance_norm(x.view(len(x), 2, WIDTH // 2)).flatten(1)


class Standardised(nn.Linear):
    """Statistics of the weight, taken by batch_norm, as timm's ScaledStdConv2d does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.batch_norm(self.weight[None], None, None, training=True)[0], self.bias)


# ---- Zero and tiny gradients hide nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.0, 1e-7])
@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (Functional, "per_group"),
        (UsedTwice, "per_group"),
        (Centred, "per_group"),
        (Lent, "per_group"),
        (lambda: nn.BatchNorm1d(WIDTH), "per_group"),
        (lambda: nn.BatchNorm1d(WIDTH, affine=False), "per_group"),
        (lambda: frozen(nn.BatchNorm1d(WIDTH)), "per_group"),
        (lambda: nn.BatchNorm1d(WIDTH).eval(), "single_pass"),
        (Instance, "single_pass"),
        (lambda: Standardised(WIDTH, WIDTH), "single_pass"),
    ],
)
@pytest.mark.parametrize("first", [ONE, THREE, [1]])
def test_a_head_that_starts_at_zero_hides_nothing(
    middle: Callable[[], nn.Module], expected: str, size: float, first: list[int]
) -> None:
    """Whatever the first batch holds: one group, three, or a single example."""
    model = net()
    model.insert(3, middle().double())
    evaluates = [module for module in model if not module.training]
    if len(first) == 1 and not evaluates and any(isinstance(m, nn.BatchNorm1d) for m in model):
        first = [1, 1]  # BatchNorm refuses one example.
    with torch.no_grad():
        model[-1].weight.mul_(size)
    engine = engine_for(model)
    for step, ids in enumerate((first, first, THREE, THREE)):
        x = vectors()[: len(ids)]
        model_of = (lambda x: model(torch.cat([x, x[:0]]))) if len(ids) == 6 else model
        assert worst_error(engine, _Padded(model_of), x, ids) < 1e-6, (step, chosen(engine))
        if step == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
    assert chosen(engine).startswith(expected), engine.reason


class _Padded(nn.Module):
    """Gives logits for six examples, of which only the first belong to the batch."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = [inner]

    def forward(self, x: Tensor) -> Tensor:
        logits = self._inner[0](x)
        return torch.cat([logits, logits.new_zeros(6 - len(logits), logits.shape[1])])

    def parameters(self, recurse: bool = True) -> Any:
        inner = self._inner[0]
        return (inner if isinstance(inner, nn.Module) else inner.__closure__[0].cell_contents).parameters(recurse)


def test_torchvisions_attention_behind_its_zero_head() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(16, 8, 3, 2, 16, 32, num_classes=2).double()
    engine = engine_for(model, 3)
    for _ in range(3):
        images = torch.randn(6, 3, 16, 16, dtype=torch.float64)
        assert worst_error(engine, model, images, THREE) < 1e-6
        with torch.no_grad():
            model.heads.head.weight.normal_()
    assert chosen(engine) == "per_group with the cut" and "out_proj.weight is used outside" in engine.reason


def test_a_gate_that_starts_at_zero_hides_no_way_round_the_cut() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_nfnet", num_classes=2).double().train()
    engine = engine_for(model, 3)
    for _ in range(2):
        assert worst_error(engine, model, torch.randn(6, 3, 32, 32, dtype=torch.float64), THREE) < 1e-6
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.5 if name.endswith("skipinit_gain") else 0.0)
    assert chosen(engine) == "per_group" and "reaches the loss by another way" in engine.reason


def test_gradients_of_exactly_zero_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """At steps 1, 2, 4, …, until there is something to see; numbers that were seen are not checked again."""
    checked: list[int] = []
    original = auto.StepCheck.verdict_on
    monkeypatch.setattr(auto.StepCheck, "verdict_on", lambda *args: (checked.append(step), original(*args))[1])
    model = net()
    with torch.no_grad():
        model[-1].weight.zero_()
    engine = engine_for(model)
    for step in range(1, 12):
        assert worst_error(engine, model, vectors(), THREE) < 1e-6
        if step == 3:
            with torch.no_grad():
                model[-1].weight.normal_()
    assert checked == [1, 2, 4] and chosen(engine) == "single_pass"


# ---- Changes in mid-run ---------------------------------------------------------------------------------------------


class Gated(nn.Linear):
    gate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate


def half(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return output * 0.5


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "gate": lambda model: setattr(model[3], "gate", 0.5),
    "pruned": lambda model: prune.l1_unstructured(model[2], "weight", 0.5),
    "pruned norm": lambda model: prune.l1_unstructured(model[4], "weight", 0.5),
    "parametrized": lambda model: nn.utils.parametrizations.weight_norm(model[2]),
    "hook": lambda model: model[2].register_forward_hook(half),
    "hook on a norm": lambda model: model[4].register_forward_hook(half),
    "forward": lambda model: setattr(model[2], "forward", lambda x: F.linear(x, model[2].weight)),
    "replaced": lambda model: model.__setitem__(2, nn.Linear(WIDTH, WIDTH).double()),
    "taken out": lambda model: model.__setitem__(4, nn.Identity()),
    "mixing": lambda model: model.insert(3, Centred()),
    "training mode": lambda model: model[5].train(),
    "frozen weight": lambda model: model[2].weight.requires_grad_(False),
    "frozen layer": lambda model: model[4].requires_grad_(False),
    "unfrozen body": lambda model: model[0].requires_grad_(True),
    "unfrozen gap": lambda model: model[2].bias.requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_that_changes_in_mid_run(change: str) -> None:
    middle = (Gated(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH).eval())
    model = net(*middle)
    model[5].eval()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(change != "unfrozen gap")
    engine = engine_for(model)
    for step in range(5):
        if step == 2:
            assert chosen(engine) == "single_pass", engine.reason
            CHANGES[change](model)
        assert worst_error(engine, model, vectors(), THREE) < 1e-6, (step, engine.reason)


@pytest.mark.parametrize("kind", ["weight", "layer", "everything"])
def test_one_pass_per_group_follows_what_is_frozen(kind: str) -> None:
    model = net()
    engine = PerGroupEngine(list(gradient_scope(model, "all").values())[2:])
    for step in range(2):
        assert worst_error(engine, model, vectors(), THREE) < 1e-6
        if step == 0 and kind != "everything":
            (model[2].weight if kind == "weight" else model[2]).requires_grad_(False)
        elif step == 0:
            for parameter in engine.parameters:
                parameter.requires_grad_(False)


# ---- Modules that cannot be run again, or whose rows cannot be told --------------------------------------------------


class Handing(nn.Module):
    """Gives its input on beside its output; nested."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.weight, self.nested = nn.Parameter(torch.ones(WIDTH)), nested

    def forward(self, x: Tensor) -> Any:
        scaled = x.tanh() * self.weight
        return {"given": x, "made": [(scaled,)]} if self.nested else (x, scaled)


class Taking(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), Handing(nested), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.first(x))
        x, scaled = (out["given"], out["made"][0][0]) if isinstance(out, dict) else out
        return self.head(scaled + x)


class Drawing(nn.Module):
    """Draws from one of the three random sources beside a weight of its own."""

    def __init__(self, source: Callable[[], float]) -> None:
        super().__init__()
        self.weight, self.source = nn.Parameter(torch.ones(WIDTH)), source

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.source()


class Table(nn.Module):
    """Takes a table with as many rows as the batch has, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.block = self.Block()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma, self.inner = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.gamma * self.inner(x + table)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x)[:, None] * torch.arange(1.0, 7.0).double()[None, :, None]
        table = torch.arange(6.0 * WIDTH).double().view(6, WIDTH).sin()
        return self.head(self.block(tokens, table).mean(dim=1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Taking(False),
        lambda: Taking(True),
        lambda: net(LayerScale(WIDTH, init_values=1.0, inplace=True)),
        lambda: net(Drawing(lambda: float(torch.rand(())))),
        lambda: net(Drawing(random.random)),
        lambda: net(Drawing(np.random.random)),
        lambda: net(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        Table,
    ],
    ids=["tuple", "nested", "in place", "torch", "random", "numpy", "spectral norm", "batch = tokens"],
)
def test_modules_without_a_rule(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double().train()
    engine = engine_for(model)
    for _ in range(3):
        assert worst_error(engine, model, vectors(), THREE) < 1e-6, engine.reason
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))


def test_random_depth_beside_a_weight() -> None:
    """BEiT's blocks hold lambda_1 beside a drop path; a second run would drop other examples."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=16)
    config = tf.BeitConfig(**sizes, patch_size=8, num_labels=2, drop_path_rate=0.3, layer_scale_init_value=0.1)
    network = tf.BeitForImageClassification(config).double().train()
    engine = engine_for(network, 3)
    model = _Logits(network)
    for _ in range(6):
        assert worst_error(engine, model, torch.randn(6, 3, 16, 16, dtype=torch.float64), THREE) < 1e-6


class _Logits(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).logits


# ---- Re-entrant checkpointing ---------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.middle, self.head = (nn.Linear(WIDTH, n).double() for n in (WIDTH, WIDTH, 2))
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        x = checkpoint(self.body, x, use_reentrant=True) if self.place == "body" else self.body(x)
        middle = checkpoint(self.middle, x, use_reentrant=True) if self.place == "middle" else self.middle(x)
        return self.head(middle)


@pytest.mark.parametrize("kind", ["auto", "per_group"])
@pytest.mark.parametrize("scope", [[r"middle", r"head"], [r"body", r"head"]])
def test_reentrant_checkpoints_in_the_scope_are_an_error(kind: str, scope: list[str]) -> None:
    model = Checkpointed("middle")
    parameters = list(gradient_scope(model, scope).values())
    engine = AutoEngine(model, parameters) if kind == "auto" else PerGroupEngine(parameters)
    with engine.recording():
        losses = losses_of(model, vectors())
    with pytest.raises(ValueError, match="'use_reentrant': False"):
        engine.group_gradients(losses, torch.tensor(THREE), [0, 1, 2])


@pytest.mark.parametrize("kind", ["auto", "per_group"])
def test_reentrant_checkpoints_in_the_body_are_none(kind: str) -> None:
    model, twin = Checkpointed("body"), Checkpointed("none")
    parameters = list(gradient_scope(model, [r"middle", r"head"]).values())
    engine = AutoEngine(model, parameters) if kind == "auto" else PerGroupEngine(parameters)
    group_ids = torch.tensor(THREE)
    for _ in range(2):
        x = vectors()
        with engine.recording():
            losses = losses_of(model, x)
        coefficients = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)[group_ids]
        found = engine.group_gradients(losses, group_ids, [0, 1, 2])
        model.zero_grad()
        found.scalar((coefficients * losses).sum(), coefficients).backward()
        expected = torch.autograd.grad((coefficients * losses_of(twin, copy.copy(x))).sum(), list(twin.parameters()))
        assert max(error(g, p.grad) for g, p in zip(expected, model.parameters(), strict=True)) < 1e-6


def with_tampered_rows(change: Callable[[Tensor], None]) -> Any:
    """A single pass whose rows of the groups are not what they should be."""

    class TamperedRows(GroupRows):
        def rows_of(self, step: Any) -> Tensor:
            rows = super().rows_of(step).clone()
            change(rows)
            return rows

    class Tampered(SinglePassEngine):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.group_rows = TamperedRows(self.parameters, self.owned)

    return Tampered


def swap(rows: Tensor) -> None:
    rows[[0, 1]] = rows[[1, 0]]


def move_between_groups(rows: Tensor) -> None:
    rows[0, :4] += 0.01 * rows.abs().max()
    rows[1, :4] -= 0.01 * rows.abs().max()


def spoil_the_smallest(rows: Tensor) -> None:
    rows[rows.abs().sum(dim=1).argmin()] *= 1.01


TAMPERING = [lambda rows: None, swap, move_between_groups, spoil_the_smallest]


@pytest.mark.parametrize("change", TAMPERING)
def test_one_sum_over_the_groups_shows_an_error_in_any_of_them(
    change: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the sum of all groups is right, and in a group whose gradient is 10,000 times as small as others'."""
    monkeypatch.setattr(auto, "SinglePassEngine", with_tampered_rows(change))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    engine = AutoEngine(model, list(model.parameters()))
    del engine._candidates[1:]
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    with engine.recording():
        losses = F.cross_entropy(model(torch.randn(8, 5)), ids, reduction="none")
    losses = losses * torch.tensor([1.0, 1.0, 1e-4])[ids]
    found = engine.group_gradients(losses, ids, [0, 1, 2]).rows
    is_right = change.__name__ == "<lambda>"
    assert engine.chosen.name == ("single_pass" if is_right else "per_group"), engine.reason
    for group, row in enumerate(found):
        expected = torch.autograd.grad(losses[ids == group].sum(), list(model.parameters()), retain_graph=True)
        assert torch.allclose(torch.cat([part.flatten() for part in expected]), row, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("change", TAMPERING)
def test_the_sum_of_the_sketches_shows_it_as_well(
    change: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a backward pass for each group."""

    class TamperedSketches(GroupSketches):
        def rows_of(self, step: Any) -> Tensor:
            sketches = super().rows_of(step)
            change(sketches)
            return sketches

    class Tampered(SketchEngine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.group_rows = TamperedSketches(self.parameters, self.owned, size=2)

    monkeypatch.setattr(auto, "SketchEngine", Tampered)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    engine = AutoEngine(model, list(model.parameters()), "sketch")
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    with engine.recording():
        losses = F.cross_entropy(model(torch.randn(8, 5)), ids, reduction="none")
    losses = losses * torch.tensor([1.0, 1.0, 1e-4])[ids]
    expected = PerGroupEngine(engine.parameters).group_gradients(losses, ids, [0, 1, 2]).rows
    monkeypatch.setattr(PerGroupEngine, "group_gradients", None)
    if change.__name__ != "<lambda>":
        with pytest.raises(ValueError, match="its gradients differ from per_group's"):
            engine.group_gradients(losses, ids, [0, 1, 2])
        return
    found = engine.group_gradients(losses, ids, [0, 1, 2]).rows
    sketcher = Tampered(model, engine.parameters)
    assert found.shape[1] < expected.shape[1]
    assert torch.allclose(
        torch.stack([sketcher.group_rows.sketch(row) for row in expected]), found, rtol=1e-4, atol=1e-9
    )
