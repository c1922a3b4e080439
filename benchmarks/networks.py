"""Every engine against plain autograd on many small networks, with parameters that have moved: a Markdown table.

    python benchmarks/networks.py                 # all: text, vision, timm, torchvision (about ten minutes)
    python benchmarks/networks.py torchvision
    python benchmarks/networks.py text bert gpt2  # some of a family

Each network trains on three groups in float64. After the second step all parameters are moved by noise, so that what
starts at zero does not stay there. In each step the cosines between the groups' gradients, and the gradient of every
parameter, are compared with one `autograd.grad` for each group on a copy of the network.
"""

import copy
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import networks_of as catalogue
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cgd import CGD, GroupInfo, gradient_scope
from hf_cgd.functional import cosine_gram
from hf_cgd.gradients import AutoEngine, GradientEngine, TensorHookEngine
from hf_cgd.robust_loss import GroupRobustLoss

GROUPS = [[0, 0, 0, 0, 0, 0], [0, 1, 0, 2, 1, 2], [2, 1, 2, 0, 2, 1], [0, 0, 1, 1, 2, 2]]
"""Group ids of the batches; the first has one group only, as it often is where groups are rare."""
CLASSES = 3
MOVE = 0.05
MOST_PARAMETERS = 3_000_000
SECONDS = 40
ROUNDING = 1e-7
"""Share of the largest gradient that counts as rounding, for networks that compute parts of themselves in float32."""
GREATEST_ERROR = 1e-5
"""Errors above this are marked. Networks that compute parts in float32 reach 1e-6."""


@dataclass
class Result:
    """What came of one network under one engine: its choice and reason, and the worst error (-1: refused)."""

    engine: str
    reason: str
    error: float
    where: str = ""


class _OutOfTime(Exception):
    pass


def sweep(families: list[str], only: list[str]) -> Iterator[tuple[str, str, Result | None, Result | None, str]]:
    """(family, network, result of `auto`, result of tensor hooks, why there are none) for each network."""
    for family in families:
        for name, make in catalogue.FAMILIES[family]().items():
            if only and name not in only:
                continue
            signal.signal(signal.SIGALRM, _stop)
            signal.alarm(SECONDS)
            results: list[Result] = []
            problem = ""
            try:
                network = build(make)
                for engine in ("auto", "tensor_hooks"):
                    results.append(compare(network, engine))
            except _OutOfTime:
                problem = "out of time"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            finally:
                signal.alarm(0)
            padded = [*results, None, None]
            yield family, name, padded[0], padded[1], problem


def build(make: Callable[[], "catalogue.Network"]) -> "catalogue.Network":
    """The network in float64 and training mode.

    Raises:
        ValueError: it is too large to be a tiny one.
    """
    torch.manual_seed(0)
    network = make()
    size = sum(parameter.numel() for parameter in network.model.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    network.model.double().train()
    # Some networks choose their kind of attention in the first pass.
    with torch.no_grad():
        network.logits(network.model, network.inputs(torch.Generator().manual_seed(0), len(GROUPS[0])))
    return network


def compare(network: "catalogue.Network", name: str) -> Result:
    """Train a copy of a network for a few steps under an engine, and compare every one with plain autograd."""
    model = copy.deepcopy(network.model)
    scope = gradient_scope(model)
    parameters = list(scope.values())
    generator = torch.Generator().manual_seed(1)
    worst, where = 0.0, ""
    try:
        engine: GradientEngine = (
            AutoEngine(model, parameters) if name == "auto" else TensorHookEngine(model, parameters)
        )
        timing = "next" if engine.timing == "after_backward" else "current"
        groups = GroupInfo(["a", "b", "c"], [50] * 3)
        scoped = engine.parameters
        loss_of = GroupRobustLoss(CGD(step_size=0.5), groups, scoped, engine=engine, weight_timing=timing)
        for step, ids in enumerate(GROUPS):
            inputs = network.inputs(generator, len(ids))
            labels = torch.randint(0, CLASSES, (len(ids),), generator=generator)
            group_ids = torch.tensor(ids)
            before = _state(loss_of)
            found = _step(model, network, loss_of, inputs, labels, group_ids, step)
            twin = copy.deepcopy(model)
            with torch.no_grad():
                for buffer, old in zip(twin.buffers(), found.buffers, strict=True):
                    buffer.copy_(old)
            weights = before[1] if timing == "next" else _state(loss_of)[1]
            expected = _expected(twin, network, list(scope), inputs, labels, group_ids, weights, step)
            error, place = _error(found.gradients, expected.gradients)
            cosine_error = float((_state(loss_of)[0] - before[0] - expected.cosines).abs().max())
            if cosine_error > error:
                error, place = cosine_error, "cosines"
            if error > worst:
                worst, where = error, f"step {step + 1}, {place}"
            with torch.no_grad():
                for parameter in model.parameters():
                    move = MOVE * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_(move if step else 0 * move)
    except ValueError as refused:
        return Result("refused", str(refused), -1.0)
    if isinstance(engine, AutoEngine):
        return Result(engine.chosen.name if engine.chosen else "none", engine.reason, worst, where)
    return Result(name, "", worst, where)


@dataclass
class _Outcome:
    gradients: dict[str, Tensor]
    buffers: list[Tensor]
    cosines: Tensor


def _state(loss_of: GroupRobustLoss) -> tuple[Tensor, Tensor]:
    assert loss_of.interactions is not None and loss_of.alpha is not None
    return torch.tensor(loss_of.interactions.state_dict()["sums"], dtype=torch.float64), loss_of.alpha.clone()


def _step(
    model: nn.Module, network: "catalogue.Network", loss_of: GroupRobustLoss, inputs: Any, labels: Tensor,
    group_ids: Tensor, step: int,
) -> _Outcome:  # fmt: skip
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.zero_grad()
    torch.manual_seed(100 + step)
    with loss_of.recording():
        losses = F.cross_entropy(network.logits(model, inputs), labels, reduction="none")
    loss_of(losses, group_ids).backward()
    loss_of.after_backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return _Outcome(gradients, buffers, torch.empty(0))


def _expected(
    model: nn.Module, network: "catalogue.Network", scope: list[str], inputs: Any, labels: Tensor, group_ids: Tensor,
    weights: Tensor, step: int,
) -> _Outcome:  # fmt: skip
    named = dict(model.named_parameters())
    torch.manual_seed(100 + step)
    losses = F.cross_entropy(network.logits(model, inputs), labels, reduction="none")
    rows = torch.zeros(len(weights), sum(named[name].numel() for name in scope), dtype=torch.float64)
    present = group_ids.unique().tolist()
    means = {group: losses[group_ids == group].mean() for group in present}
    for group in present:
        found = torch.autograd.grad(means[group], [named[n] for n in scope], retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(named[n]) if g is None else g for n, g in zip(scope, found, strict=True)]
        rows[group] = torch.cat([part.flatten() for part in parts])
    share = weights[present].sum()
    total = sum(weights[group] / share * means[group] for group in present)
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), gradients, strict=True)]
    together = torch.tensor([group in present for group in range(len(weights))])
    cosines = torch.where(together[:, None] & together, cosine_gram(rows @ rows.T), 0.0)
    return _Outcome(dict(zip(named, filled, strict=True)), [], cosines)


def _error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Largest error relative to the parameter's own gradient, beyond what float32 parts of a network round off."""
    rounding = ROUNDING * max(float(gradient.abs().max()) for gradient in expected.values() if gradient.numel())
    errors = {"nothing": 0.0}
    for name, gradient in expected.items():
        if gradient.numel():
            difference = float((found[name] - gradient).abs().max())
            errors[name] = max(difference - rounding, 0.0) / (float(gradient.abs().max()) + 1e-300)
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def _stop(signum: int, frame: Any) -> None:
    raise _OutOfTime


def table(rows: list[tuple[str, str, Result | None, Result | None, str]]) -> str:
    """Markdown: one line for each network that was compared, and a list of those that were not built."""
    lines = [
        "| network | `auto` chose | worst error | why nothing faster | tensor hooks |",
        "| --- | --- | ---: | --- | --- |",
    ]
    missing = []
    for family, name, auto, hooks, problem in rows:
        if auto is None:
            missing.append(f"{family} {name} ({' '.join(problem.split())[:60]})")
            continue
        reason = auto.reason.split(";")[0].split(": ", 1)[-1] if auto.engine.startswith("per_group") else ""
        if hooks is None:
            by_hooks = " ".join(problem.split())[:60]
        else:
            by_hooks = f"refused: {hooks.reason.split('. ')[0][:90]}" if hooks.error < 0 else _shown(hooks)
        lines.append(f"| {family} {name} | {auto.engine} | {_shown(auto)} | {reason[:110]} | {by_hooks} |")
    chosen = [row[2].engine for row in rows if row[2] is not None]
    counts = ", ".join(f"{engine} {chosen.count(engine)}" for engine in dict.fromkeys(chosen))
    return "\n".join(
        [*lines, "", f"{len(chosen)} networks: {counts}.", "", f"Not compared: {'; '.join(missing) or 'none'}."]
    )


def _shown(result: Result) -> str:
    return f"{result.error:.0e}" if result.error <= GREATEST_ERROR else f"**{result.error:.0e}** ({result.where})"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    families = [name for name in sys.argv[1:] if name in catalogue.FAMILIES] or list(catalogue.FAMILIES)
    rows = []
    for row in sweep(families, [name for name in sys.argv[1:] if name not in catalogue.FAMILIES]):
        rows.append(row)
        print(row[0], row[1], *row[2:4], row[4][:150], file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
