"""Networks put together by chance, of layers that are used in ways nobody thought of: engines beside plain autograd."""

import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_autograd import worst_error
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hf_cgd import CGD, GroupInfo, gradient_scope
from hf_cgd.gradients import AutoEngine, GradientEngine, PerGroupEngine, TensorHookEngine
from hf_cgd.robust_loss import GroupRobustLoss

WIDTH, TOKENS = 6, 4
Use = Callable[[Any, Tensor], Tensor]


class Part(nn.Module):
    """A layer, and what is made of it: [B, T, D] in and out."""

    def __init__(self, layer: nn.Module, use: Use) -> None:
        super().__init__()
        self.layer, self.use = layer, use

    def forward(self, h: Tensor) -> Tensor:
        return self.use(self.layer, h)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def experts() -> nn.Module:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)])


def as_it_is(f: Any, h: Tensor) -> Tensor:
    return f(h)


def channels_first(f: Any, h: Tensor) -> Tensor:
    return f(h.transpose(1, 2)).transpose(1, 2)


def time_first(f: Any, h: Tensor) -> Tensor:
    return f(h.transpose(0, 1)).transpose(0, 1)


def flat_time_first(f: Any, h: Tensor) -> Tensor:
    return f(h.transpose(0, 1).reshape(-1, WIDTH)).view(h.shape[1], -1, WIDTH).transpose(0, 1)


def siamese(f: Any, h: Tensor) -> Tensor:
    one, other = f(torch.cat([h, h.flip(1)])).chunk(2)
    return one * other.sigmoid()


def sorted_rows(f: Any, h: Tensor) -> Tensor:
    order = h[:, 0, 0].argsort()
    return f(h[order])[order.argsort()]


def sorted_tokens(f: Any, h: Tensor) -> Tensor:
    return f(h.gather(1, h[..., 0].argsort(1)[..., None].expand_as(h)))


def chosen_tokens(f: Any, h: Tensor) -> Tensor:
    chosen, out = h[..., 0] > -1, torch.zeros_like(h)
    out[chosen] = f(h[chosen])
    return out


def drawn_rows(f: Any, h: Tensor) -> Tensor:
    rows = torch.randperm(len(h))[: len(h) // 2]
    return h.index_add(0, rows, f(h[rows]), alpha=2.0)


def in_place(f: Any, h: Tensor) -> Tensor:
    out = f(h)
    out += h
    return out.mul_(0.5)


def of_experts(f: Any, h: Tensor) -> Tensor:
    chances, out = f[2](h).softmax(-1), torch.zeros_like(h)
    for number in range(2):
        chosen = chances.argmax(-1) == number
        out[chosen] = f[number](h[chosen]) * chances[chosen][:, number : number + 1]
    return out


def state_of_lstm(f: Any, h: Tensor) -> Tensor:
    outputs, (state, _) = f(h)
    return outputs + state[-1][:, None]


def drawn_layers(f: Any, h: Tensor) -> Tensor:
    return h + f(h) if torch.rand(()) > 0.5 else h


KINDS: list[tuple[Callable[[], nn.Module], Use]] = [
    (linear, as_it_is),
    (linear, time_first),
    (linear, flat_time_first),
    (linear, siamese),
    (linear, sorted_rows),
    (linear, sorted_tokens),
    (linear, chosen_tokens),
    (linear, drawn_rows),
    (linear, drawn_layers),
    (linear, in_place),
    (linear, lambda f, h: f(f(h).tanh())),
    (linear, lambda f, h: F.linear(f(h).relu(), f.weight)),
    (linear, lambda f, h: torch.vmap(lambda x: F.linear(x, f.weight, f.bias))(h)),
    (linear, lambda f, h: f(h.repeat_interleave(2, 0)).view(len(h), 2, -1, WIDTH).mean(1)),
    (linear, lambda f, h: torch.stack([f(x) for x in h])),
    (linear, lambda f, h: torch.cat([f(x) for x in h.chunk(2)])),
    (linear, lambda f, h: torch.cat([f(h[:2]), h[2:]])),
    (linear, lambda f, h: h * 0.5 + f(h.detach())),
    (linear, lambda f, h: f(h - h.mean(0, keepdim=True))),
    (linear, lambda f, h: checkpoint(lambda h: F.gelu(f(h)), h, use_reentrant=False)),
    (experts, of_experts),
    (lambda: parametrizations.weight_norm(linear()), as_it_is),
    (lambda: parametrizations.spectral_norm(linear()), as_it_is),
    (lambda: nn.LayerNorm(WIDTH), as_it_is),
    (lambda: nn.RMSNorm(WIDTH), as_it_is),
    (lambda: nn.GroupNorm(2, WIDTH), channels_first),
    (lambda: nn.InstanceNorm1d(WIDTH, affine=True), channels_first),
    (lambda: nn.BatchNorm1d(WIDTH), channels_first),
    (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2), channels_first),
    (lambda: nn.Embedding(TOKENS, WIDTH), lambda f, h: h + f(torch.arange(h.shape[1]))),
    (lambda: nn.Embedding(WIDTH, WIDTH), lambda f, h: h + f(h.argmax(-1))),
    (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), state_of_lstm),
    (lambda: nn.GRU(WIDTH, WIDTH), lambda f, h: f(h.transpose(0, 1))[0].transpose(0, 1)),
    (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda f, h: f(h, h, h, need_weights=False)[0]),
    (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12), time_first),
]


class Network(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([Part(make(), use) for make, use in draw.choices(KINDS, k=draw.randint(1, 4))])
        self.residual = [draw.random() < 0.4 for _ in self.parts]
        self.pooling = draw.choice([lambda h: h.mean(1), lambda h: h[:, 0], lambda h: h.amax(1), lambda h: h[:, -1]])
        self.dropout, self.head = nn.Dropout(draw.choice([0.0, 0.2])), nn.Linear(WIDTH, 3)
        self.double().train(draw.random() < 0.7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for part, residual in zip(self.parts, self.residual, strict=True):
            h = torch.tanh(part(h)) + (h if residual else 0)
        return self.head(self.dropout(self.pooling(h)))


def drawn(seed: int) -> tuple[random.Random, Network, Any, int]:
    """A network, a scope and a batch size."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    return draw, Network(draw), draw.choice([1, 2, 3, "all"]), draw.choice([3, 4, 6, 7])


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)) % 3, reduction="none")


def test_the_chosen_engine_is_plain_autograd() -> None:
    """Rows and step in four batches, of which later ones have other rows and groups than the first."""
    chosen: Counter[str] = Counter()
    for seed in range(120):
        draw, model, scope, batch = drawn(seed)
        engine = AutoEngine(model, list(gradient_scope(model, scope).values()))
        for step in range(4):
            rows = batch - (step == 2)
            x = torch.randn(rows, TOKENS, WIDTH, dtype=torch.float64)
            error = worst_error(engine, model, x, draw.choices(range(3), k=rows), losses_of)
            assert error < 1e-6, (seed, step, engine.reason)
        assert engine.chosen is not None
        chosen[engine.chosen.name] += 1
    assert min(chosen["single_pass"], chosen["per_group with the cut"], chosen["per_group"]) > 10, chosen


Run = tuple[Tensor, Tensor, Tensor, list[Tensor]]


def trained(model: nn.Module, scope: Any, make: Callable[..., GradientEngine], seed: int, batch: int) -> Run:
    """Weights after each of three steps of CGD, parameters, the state of the random numbers, buffers."""
    parameters = list(gradient_scope(model, scope).values())
    engine = make(model, parameters)
    groups = GroupInfo(["a", "b", "c"], [90, 30, 9])
    loss_of = GroupRobustLoss(CGD(step_size=0.3), groups, parameters, engine=engine, weight_timing="next")
    optimizer, draw, weights = torch.optim.SGD(model.parameters(), 0.05), random.Random(seed), []
    torch.manual_seed(seed)
    for _ in range(3):
        x = torch.randn(batch, TOKENS, WIDTH, dtype=torch.float64)
        optimizer.zero_grad()
        with loss_of.recording():
            losses = losses_of(model, x)
        loss_of(losses, torch.tensor(draw.choices(range(3), k=batch))).backward()
        loss_of.after_backward()
        optimizer.step()
        assert loss_of.alpha is not None
        weights.append(loss_of.alpha)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return torch.stack(weights), flat, torch.get_rng_state(), [buffer.double() for buffer in model.buffers()]


@pytest.mark.parametrize("make", [AutoEngine, TensorHookEngine])
def test_a_run_is_that_of_one_backward_pass_per_group(make: Callable[..., GradientEngine]) -> None:
    """Random numbers and buffers (batch statistics, spectral norms) too; tensor hooks refuse what they cannot do."""
    compared = 0
    for seed in range(60):
        _, model, scope, batch = drawn(seed)
        twin = copy.deepcopy(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = trained(model, scope, make, seed, batch)
        except ValueError as error:
            assert make is TensorHookEngine and "tensor hooks" in str(error).lower(), (seed, error)
            continue
        expected = trained(twin, scope, lambda _, parameters: PerGroupEngine(parameters), seed, batch)
        assert (found[0] - expected[0]).abs().max() < 1e-9 and (found[1] - expected[1]).abs().max() < 1e-8, seed
        assert torch.equal(found[2], expected[2]), seed
        assert all((one - other).abs().max() < 1e-8 for one, other in zip(found[3], expected[3], strict=True)), seed
        compared += 1
    assert compared == 60 if make is AutoEngine else compared > 15, compared
