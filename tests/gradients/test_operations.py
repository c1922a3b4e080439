"""What engines do in fewer operations on a device gives the same numbers, and how many operations a step then has."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paths import benchmark
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_cgd.gradients import PerGroupEngine, SinglePassEngine, SketchEngine, StaticShapesEngine
from hf_cgd.gradients.engines import group_rows
from hf_cgd.gradients.layers import linear

EVEN, UNEVEN, UNSORTED = [0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 2], [2, 0, 1, 1, 2, 0]


class Network(nn.Module):
    """Convolution, norm, a layer on positions that is used twice, one on examples, and one that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 6, 2)
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Linear(6, 6)
        self.unknown = nn.PReLU(6)
        self.head = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        positions = self.norm(self.convolution(images).flatten(2).transpose(1, 2))
        positions = self.twice(self.twice(positions).tanh())
        return self.head(self.unknown(positions.mean(dim=1)))


@pytest.mark.parametrize("kind", ["kept", "not kept", "rows", "sketch"])
@pytest.mark.parametrize("ids", [EVEN, UNEVEN, UNSORTED], ids=["even", "uneven", "unsorted"])
def test_the_way_on_a_device_gives_the_gradients_of_one_pass_per_group(
    ids: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(group_rows, "SMALL_ROWS", 0)
    monkeypatch.setattr(linear, "SMALL_WORK", 0)
    for module in (group_rows, linear):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    network, images = Network().double(), torch.randn(6, 2, 4, 4).double()
    labels, scope, groups = torch.tensor([0, 1, 2, 0, 1, 2]), list(network.parameters()), torch.tensor(ids)
    engine: SinglePassEngine
    if kind == "sketch":
        engine = SketchEngine(network, scope, size=2)
    else:
        engine = SinglePassEngine(network, scope, memory_budget=0 if kind == "not kept" else 2**20)

    def losses() -> Tensor:
        return F.cross_entropy(network(images), labels, reduction="none")

    expected = PerGroupEngine(scope).group_gradients(losses(), groups, [0, 1, 2]).rows
    with engine.recording():
        own = losses()
    found = engine.group_gradients(own, groups, [0, 1, 2])
    if isinstance(engine, SketchEngine):
        assert torch.allclose(found.rows, torch.stack([engine.group_rows.sketch(row) for row in expected]))
    elif kind == "rows":
        assert torch.allclose(found.rows, expected)
    else:
        assert torch.allclose(found.gram(reads_values=False), expected @ expected.T)
    weights = torch.tensor([0.2, 0.3, 0.5]).double()
    found.scalar((weights[groups] * own).sum().detach(), weights[groups]).mul(3).backward()
    given = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in scope])
    assert torch.allclose(given, 3 * weights @ expected)


@pytest.mark.slow
def test_the_operations_of_a_step_hardly_grow_with_the_groups() -> None:
    script: Any = benchmark("operations")

    def count(groups: int, method: str = "cgd", declared: int | None = None, layers: int = 3, batch: int = 24) -> int:
        build = lambda: script.text(layers)  # noqa: E731
        declared = groups if declared is None else declared
        setting = script.Setting(build, batch, declared, groups, tokens=8, vocabulary=500)
        return int(script.operations_of(script.steps_of(setting, {}), method).total)

    four, stock = count(4), count(4, "stock")
    # One sum for each of eight more groups. The Gram matrix is still one tile wide.
    assert count(12) - four <= 8 + 2
    # Two linear layers with six matrices each in blocks, and pre_classifier: a product for each group if not even.
    assert count(4, batch=23) - four <= 4 * 13
    # Groups that no batch holds cost what it takes to leave them out, whatever their number.
    assert count(4, declared=200) <= count(4, declared=40) <= four + 30
    # The body costs what it costs in the stock step.
    assert count(4, layers=4) - count(4, "stock", layers=4) == four - stock
    # Fewer than a third of the stock step's own, which has 422 at six layers (docs/performance.md).
    assert four - stock <= 140


class Shapes(TorchDispatchMode):
    """Notes every operation with the shapes that go in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((str(func), [tuple(part.shape) for part in args if isinstance(part, Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("engine", "is_fixed"), [(StaticShapesEngine, True), (SinglePassEngine, False)])
def test_which_engines_operations_are_the_same_whoever_is_in_a_batch(
    engine: Any, is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a captured CUDA graph would need: it repeats the operations of one step on memory of fixed shapes."""
    monkeypatch.setattr(group_rows, "SMALL_ROWS", 0)
    monkeypatch.setattr(linear, "SMALL_WORK", 0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    of_network = engine(network, list(network.parameters()))
    seen = []
    # The first step looks more closely at the graph.
    for ids in (EVEN, EVEN, UNEVEN):
        with Shapes() as shapes:
            with of_network.recording():
                losses = F.cross_entropy(network(torch.ones(6, 4)), torch.zeros(6).long(), reduction="none")
            assert len(of_network.group_gradients(losses, torch.tensor(ids), [0, 1, 2]).rows) == 3
        seen.append(shapes.found)
    assert len(seen[1]) > 10 and (seen[1] == seen[2]) == is_fixed
