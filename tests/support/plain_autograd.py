"""A step of an engine beside plain autograd, one backward pass for each group."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from networks import losses_of
from torch import Tensor, nn

from hf_cgd.gradients import AutoEngine, PerGroupEngine


def worst_error(
    engine: AutoEngine | PerGroupEngine,
    model: nn.Module,
    inputs: Tensor,
    ids: list[int],
    losses_of: Callable[[nn.Module, Tensor], Tensor] = losses_of,
) -> float:
    """Error of one step, rows and every parameter's gradient, each relative to its own size, against autograd."""
    group_ids = torch.tensor(ids)
    groups = group_ids.unique().tolist()
    with engine.recording():
        losses = losses_of(model, inputs)[: len(ids)]
    coefficients = torch.linspace(0.2, 0.9, 3, dtype=losses.dtype)[group_ids]
    weighted = (coefficients * losses).sum()
    scope = [parameter for parameter in engine.parameters if parameter.requires_grad]
    rows = {}
    for group in groups:
        loss = losses[group_ids == group].sum()
        rows[group] = torch.autograd.grad(loss, scope, retain_graph=True, allow_unused=True) if scope else ()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = torch.autograd.grad(weighted, trainable, retain_graph=True, allow_unused=True)
    before = random_states()
    found = engine.group_gradients(losses, group_ids, groups)
    errors = []
    for group, row in zip(groups, found.rows, strict=True):
        pieces = row.split([parameter.numel() for parameter in engine.parameters])
        of_scope = [p for p, piece in zip(engine.parameters, pieces, strict=True)]
        by_id = {id(p): piece for p, piece in zip(of_scope, pieces, strict=True)}
        errors += [error(g, by_id[id(p)].view_as(p)) for p, g in zip(scope, rows[group], strict=True)]
        frozen = [by_id[id(p)] for p in engine.parameters if not p.requires_grad]
        assert all(not bool(piece.any()) for piece in frozen)
    model.zero_grad()
    found.scalar(weighted, coefficients).backward()
    assert all(one == other for one, other in zip(before, random_states(), strict=True)), "the random state has moved"
    unused = [p for p, gradient in zip(trainable, step, strict=True) if gradient is None]
    assert all(p.grad is None for p in unused), "an optimizer would move what the losses do not depend on"
    return max(errors + [error(g, p.grad) for p, g in zip(trainable, step, strict=True)])


def error(expected: Tensor | None, found: Tensor | None) -> float:
    if expected is None or found is None:
        return 0.0 if all(one is None or not bool(one.any()) for one in (expected, found)) else 1.0
    # Biases in front of a norm have gradients that are zero but for rounding.
    return float((expected - found).abs().max() / (expected.abs().max() + 1e-8))


def random_states() -> list[Any]:
    numbers = np.random.get_state(legacy=False)["state"]
    return [torch.random.get_rng_state().tolist(), random.getstate(), numbers["key"].tolist(), numbers["pos"]]
