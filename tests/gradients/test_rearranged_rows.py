"""What the first batch cannot show: orders of rows, noise and hooks that come later, and gradients of other kinds."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import MODELS, losses_of
from plain_autograd import worst_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_cgd import CGD, GroupInfo, gradient_scope
from hf_cgd.gradients import AutoEngine, PerGroupEngine, TensorHookEngine, mixing, rearranging
from hf_cgd.gradients.rearranging import Rows
from hf_cgd.gradients.structure import LossGraph, edge_of
from hf_cgd.robust_loss import GroupRobustLoss

WIDTH = 8


class Network(nn.Module):
    """Three layers; `mixed` is called between the first two, and what it gives back puts rows in order again."""

    def __init__(self, mixed: Callable[[Tensor], tuple[Tensor, Any]], layer: Callable[..., nn.Module] = nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), layer(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.mixed = mixed
        self.double().train()

    def forward(self, x: Tensor) -> Tensor:
        hidden, back = self.mixed(self.first(x).tanh())
        return self.head(back(self.second(hidden).tanh()))


def alternating(model: nn.Module, x: Tensor) -> Tensor:
    """Losses of labels 0, 1, 0, …"""
    return F.cross_entropy(model(x), torch.arange(len(x)) % 2, reduction="none")


def as_it_is(h: Tensor) -> Tensor:
    return h


def shuffled_mixup(h: Tensor) -> tuple[Tensor, Any]:
    return 0.7 * h + 0.3 * h[torch.randperm(len(h))], as_it_is


def reversed_mixup(h: Tensor) -> tuple[Tensor, Any]:
    return 0.7 * h + 0.3 * h.flip(0), as_it_is


def rolled_mixup(h: Tensor) -> tuple[Tensor, Any]:
    return 0.7 * h + 0.3 * h.roll(1, 0), as_it_is


def mixup_in_halves(h: Tensor) -> tuple[Tensor, Any]:
    return 0.7 * h + 0.3 * torch.cat(h.chunk(2)[::-1]), as_it_is


def sorted_by_value(h: Tensor) -> tuple[Tensor, Any]:
    order = h[:, 0].argsort()
    return h[order], lambda h: h[order.argsort()]


def sorted_by_index_select(h: Tensor) -> tuple[Tensor, Any]:
    order = h[:, 0].argsort()
    return h.index_select(0, order), lambda h: h.index_select(0, order.argsort())


def sorted_by_gather(h: Tensor) -> tuple[Tensor, Any]:
    order = h[:, 0].argsort()
    return h.take_along_dim(order[:, None], 0), lambda h: h.take_along_dim(order.argsort()[:, None], 0)


def sorted_by_scatter(h: Tensor) -> tuple[Tensor, Any]:
    places = h[:, 0].argsort().argsort()
    return torch.zeros_like(h).index_add(0, places, h), lambda h: torch.zeros_like(h).index_put((places,), h[places])


def sorted_in_python(h: Tensor) -> tuple[Tensor, Any]:
    order = h[:, 0].argsort()
    return torch.stack([h[i] for i in order.tolist()]), lambda h: torch.stack([h[i] for i in order.argsort().tolist()])


def for_two_experts(h: Tensor) -> tuple[Tensor, Any]:
    order = (h[:, 0] > 0).long().argsort(stable=True)
    return h[order], lambda h: h[order.argsort()]


MIXED = [
    shuffled_mixup, reversed_mixup, rolled_mixup, mixup_in_halves, sorted_by_value, sorted_by_index_select,
    sorted_by_gather, sorted_by_scatter, sorted_in_python, for_two_experts,
]  # fmt: skip


def rows_that_stay(model: Network, batch: int) -> Tensor:
    """Inputs that sorting leaves in their places."""
    x = torch.randn(batch, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        return x[model.first(x)[:, 0].argsort()]


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("ids", [[0, 1], [0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0, 0, 1]], ids=len)
def test_an_order_that_the_first_batch_hides(mixed: Callable[[Tensor], Any], ids: list[int]) -> None:
    """Nothing moves in it, or only between examples of one group; later steps are those of plain autograd as well."""
    model = Network(mixed)
    engine = AutoEngine(model, list(gradient_scope(model, "all").values()))
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        x = rows_that_stay(model, len(ids)) if step < 2 else torch.randn(len(ids), WIDTH, dtype=torch.float64)
        present = ids if step < 2 else torch.randint(0, 3, (len(ids),), generator=generator).tolist()
        assert worst_error(engine, model, x, present, alternating) < 1e-9, (step, engine.reason)


def looks_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list with an entry for each time that examples are looked at."""
    looks: list[Any] = []
    original = mixing.require_independent_examples

    def note(*args: Any, **options: Any) -> None:
        looks.append(None)
        original(*args, **options)

    monkeypatch.setattr(mixing, "require_independent_examples", note)
    return looks


@pytest.mark.parametrize("name", ["GPT-2", "ViT", "timm convnext", "ModernBERT", "LSTM"])
def test_networks_that_leave_rows_in_place_pay_one_look(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 picks a token of each row, by a tensor of places."""
    build, inputs, _ = MODELS[name]
    model = build().train()
    engine = AutoEngine(model, list(gradient_scope(model, 3).values()))
    looks = looks_of(monkeypatch)
    for _ in range(4):
        with engine.recording():
            losses = losses_of(model, inputs())
        engine.group_gradients(losses, torch.tensor([0, 1, 0, 1, 2, 2]), [0, 1, 2])
    assert len(looks) == 1 and engine.chosen is not None and engine.chosen.name == "single_pass"


def test_an_order_on_a_device_is_looked_at_in_ever_longer_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in every step once rows were seen to move."""
    monkeypatch.setattr(rearranging, "is_on_host", lambda tensor: False)
    model = Network(for_two_experts)
    engine = AutoEngine(model, list(gradient_scope(model, "all").values()))
    looks, looked_at, moves_at = looks_of(monkeypatch), [], 14
    for step in range(1, 20):
        looks.clear()
        x = torch.randn(6, WIDTH, dtype=torch.float64)
        x = x if step >= moves_at else rows_that_stay(model, 6)
        error = worst_error(engine, model, x, [0, 1, 0, 2, 2, 1])
        assert error < 1e-9 or moves_at <= step < 16, step
        looked_at += [step] * len(looks)
    assert looked_at == [1, 2, 4, 8, 16, 17, 18, 19]


@pytest.mark.parametrize("moves", [False, True])
def test_an_order_within_a_checkpoint(moves: bool) -> None:
    """To read its places, a part of the network is computed once more, with the same dropout."""

    class Kept(Network):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.inner, self.first(x).tanh(), use_reentrant=False))

        def inner(self, h: Tensor) -> Tensor:
            order = h[:, 0].argsort() if moves else torch.arange(len(h))
            return self.second(F.dropout(h[order], 0.3)).tanh()[order.argsort()]

    model = Kept(shuffled_mixup)
    engine = AutoEngine(model, list(gradient_scope(model, "all").values()))
    for step in range(5):
        x = rows_that_stay(model, 6) if step < 2 else torch.randn(6, WIDTH, dtype=torch.float64)
        assert worst_error(engine, model, x, [0, 1, 0, 2, 2, 1]) < 1e-9, step
    assert engine.chosen is not None and engine.chosen.name == "single_pass"


def test_tensor_hooks_refuse_rows_that_move() -> None:
    model = Network(sorted_by_value)
    engine = TensorHookEngine(model, list(model.parameters()))
    loss_of = GroupRobustLoss(
        CGD(step_size=0.1), GroupInfo(["a", "b"], [9, 9]), engine.parameters, engine=engine, weight_timing="next"
    )
    ids = torch.tensor([0, 1, 0, 0, 1, 1])
    for moves in (False, True):
        x = rows_that_stay(model, 6)
        x = x.flip(0) if moves else x
        with loss_of.recording():
            losses = losses_of(model, x)
        refused = pytest.raises(ValueError, match="rows of the batch change places") if moves else nullcontext()
        with refused:
            loss_of(losses, ids).backward()
            loss_of.after_backward()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


H = torch.zeros(4, 3, 5)
PLACES = torch.tensor([1, 0, 3, 2])
NODES: list[tuple[Callable[[Tensor], Tensor], Rows]] = [
    (lambda h: h[torch.arange(4), PLACES % 3], Rows.KEPT),
    (lambda h: h[torch.arange(-4, 0), 0], Rows.KEPT),
    (lambda h: h[PLACES], Rows.MOVED),
    (lambda h: h[torch.tensor([0, 0, 1, 1])], Rows.MOVED),
    (lambda h: h[:, PLACES % 3], Rows.KEPT),
    (lambda h: h[torch.ones(4, dtype=torch.bool)], Rows.KEPT),
    (lambda h: h[torch.tensor([True, False, True, True])], Rows.UNCLEAR),
    (lambda h: h.view(12, 5)[torch.arange(4) * 3 + 2], Rows.KEPT),
    (lambda h: h.view(12, 5)[torch.arange(12)], Rows.KEPT),
    (lambda h: h.view(12, 5)[torch.arange(12).view(4, 3)], Rows.KEPT),
    (lambda h: h.view(12, 5)[torch.arange(12).view(3, 4).T], Rows.MOVED),
    (lambda h: h.view(12, 5)[torch.arange(11, -1, -1)], Rows.MOVED),
    (lambda h: h.index_select(1, PLACES[:1]), Rows.KEPT),
    (lambda h: h.index_select(0, torch.arange(4)), Rows.KEPT),
    (lambda h: h.gather(1, PLACES[:, None, None] % 3), Rows.KEPT),
    (lambda h: h.gather(0, PLACES[:, None, None]), Rows.MOVED),
    (lambda h: h[:, 0], Rows.KEPT),
    (lambda h: h[0:4], Rows.KEPT),
    (lambda h: h[1:3], Rows.UNCLEAR),
    (lambda h: h[2], Rows.UNCLEAR),
    (lambda h: h.transpose(0, 1)[2], Rows.KEPT),
    (lambda h: h.view(2, 2, 3, 5)[1], Rows.KEPT),
    (lambda h: h.unbind(1)[0], Rows.KEPT),
    (lambda h: h.unbind(0)[0], Rows.UNCLEAR),
    (lambda h: h.flip(1), Rows.KEPT),
    (lambda h: h.flip(-3), Rows.UNCLEAR),
    (lambda h: h.roll(1, 1), Rows.KEPT),
    (lambda h: h.roll(1), Rows.UNCLEAR),
    (lambda h: h.sort(2)[0], Rows.KEPT),
    (lambda h: h.sort(0)[0], Rows.UNCLEAR),
    (lambda h: h.topk(2, dim=1)[0], Rows.KEPT),
    (lambda h: h.masked_select(h == 0), Rows.UNCLEAR),
    (lambda h: F.embedding(PLACES, h.view(4, 15)), Rows.UNCLEAR),
    (lambda h: h.cumsum(0), Rows.KEPT),
    (lambda h: Own.apply(h), Rows.UNREAD),
    (lambda h: h.masked_fill(h == 0, 1.0), Rows.KEPT),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(NODES)))
def test_which_operations_may_move_rows(place: int) -> None:
    """Of four examples, by hand."""
    operation, expected = NODES[place]
    h = H.clone().requires_grad_() * 1
    node, _ = edge_of(operation(h))
    name = type(node).__name__
    assert rearranging.rows_behind(node, name, 4) is expected, name


def test_a_table_of_weights_is_no_batch() -> None:
    table = nn.Embedding(6, 5)
    losses = table(torch.tensor([5, 0, 3, 3, 2, 1])).sum(dim=1) + table.weight[torch.arange(5, -1, -1)].sum(dim=1)
    graph = LossGraph(losses, [], None)
    assert not graph.rows


# ---- Noise, hooks, other kinds of gradients --------------------------------------------------------------------------


class WithNoise(nn.Linear):
    """A linear layer of one's own, whose noise is raised in the course of training. The inputs have no gradient."""

    noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x + self.noise * torch.randn_like(x), self.weight, self.bias)


class WithDropout(WithNoise):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.dropout(x, self.noise, self.training), self.weight, self.bias)


@pytest.mark.parametrize("layer", [WithNoise, WithDropout])
@pytest.mark.parametrize("place", [0, 1])
def test_noise_that_begins_in_mid_run(layer: type[WithNoise], place: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)]
    layers[2 * place] = layer(WIDTH, 2 if place else WIDTH)
    model = nn.Sequential(*layers).double().train()
    engine = AutoEngine(model, list(model.parameters()))
    for step in range(4):
        model[2 * place].noise = 0.0 if step < 2 else 0.5
        assert worst_error(engine, model, torch.randn(6, WIDTH, dtype=torch.float64), [0, 1, 0, 2, 2, 1]) < 1e-9, step
    assert engine.chosen is not None and engine.chosen.name == "single_pass"


def scaled(gradient: Tensor) -> Tensor:
    return gradient * 0.1


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-4, 1e-4)


@pytest.mark.parametrize("hook", [scaled, clamped])
@pytest.mark.parametrize("begins", [0, 2])
def test_hooks_on_gradients_of_parameters(hook: Callable[[Tensor], Tensor], begins: int) -> None:
    """The step's gradient goes through a hook once, as in plain autograd, not once per group and then once more."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, 2)).double().train()
    engine = AutoEngine(model, list(gradient_scope(model, 2).values()))
    for step in range(4):
        if step == begins:
            model[3].weight.register_hook(hook)
        # BatchNorm takes the biases in front of it out again.
        model[0].bias.requires_grad_(False)
        x = torch.randn(6, WIDTH, dtype=torch.float64)
        assert worst_error(engine, model, x, [0, 1, 0, 2, 2, 1]) < 1e-6, (step, engine.reason)
    assert isinstance(engine.chosen, PerGroupEngine)


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_stay_sparse(table: type[nn.Module]) -> None:
    """Their optimizers take no others; rows are dense and those of the dense layer."""
    rows = {}
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(table(20, 4, sparse=sparse), nn.Flatten(), nn.LazyLinear(2))
        ids, group_ids = torch.arange(18).view(6, 3), torch.tensor([0, 1, 0, 2, 2, 1])
        model(ids)
        engine = AutoEngine(model, list(model.parameters()))
        for _ in range(2):
            model.zero_grad()
            with engine.recording():
                losses = F.cross_entropy(model(ids), torch.tensor([0, 1] * 3), reduction="none")
            found = engine.group_gradients(losses, group_ids, [0, 1, 2])
            rows[sparse] = found.rows.clone()
            found.scalar(losses.sum(), torch.ones(6)).backward()
        assert model[0].weight.grad.is_sparse == sparse
    assert torch.allclose(rows[True], rows[False], rtol=1e-5, atol=1e-7)
