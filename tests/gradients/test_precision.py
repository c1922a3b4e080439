"""Half precision, loss scaling, and numbers that are not finite."""

import json
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import parameters_of, text_dataset, tiny_distilbert
from torch import Tensor, nn

from hf_cgd import CGD, GroupInfo, GroupRobustConfig, GroupRobustLoss, GroupRobustTrainer, GroupRobustWarning
from hf_cgd.gradients import AutoEngine, GradientEngine, PerGroupEngine, StaticShapesEngine, gradient_scope

Build = Callable[..., GroupRobustTrainer]
TWO = GroupInfo(["a", "b"], [5, 5])
ENGINES = ("per_group", "single_pass", "sketch")


class Network(nn.Module):
    """A body, and in the scope a kind of layer that the single pass has to run again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8)
        self.middle = nn.Conv1d(1, 4, 3)
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.middle(torch.relu(self.body(x))[:, None]))
        return self.head(hidden.flatten(1))

    @property
    def scope(self) -> list[nn.Parameter]:
        return [*self.middle.parameters(), *self.head.parameters()]


def one_step(
    engine: str,
    half: torch.dtype | None,
    factor: float = 1.0,
    scale: float | None = None,
    inside: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weights, and gradients of all parameters times 1 / factor, after one step on losses that are times `factor`."""
    network = Network()
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    robust_loss = GroupRobustLoss(
        CGD(step_size=2.0, exponent=0.0),
        GroupInfo("abcd", [5] * 4),
        network.scope,
        engine=PerGroupEngine(network.scope) if engine == "per_group" else AutoEngine(network, network.scope, engine),
        loss_scale=None if scaler is None else scaler.get_scale,
    )
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(8, 8, generator=generator), torch.randint(0, 2, (8,), generator=generator)
    group_ids = torch.arange(8) % 4
    context: Any = nullcontext() if half is None else torch.autocast("cpu", half)
    with context:
        with robust_loss.recording():
            logits = network(x)
        losses = F.cross_entropy(logits.float(), labels, reduction="none") * factor
        if inside:
            loss = robust_loss(losses, group_ids)
    if not inside:
        loss = robust_loss(losses, group_ids)
    if scaler is None:
        loss.backward()
    else:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    assert robust_loss.alpha is not None
    gradients = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])  # type: ignore[union-attr]
    return robust_loss.alpha, gradients / factor


# ---- Autocast -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ENGINES)
def test_half_precision_is_close_to_single(engine: str, half: torch.dtype, inside: bool) -> None:
    alpha, gradients = one_step(engine, half, inside=inside)
    exact_alpha, exact = one_step(engine, None)
    assert (exact_alpha - 1 / 4).abs().max() > 0.05
    assert torch.allclose(alpha, exact_alpha, rtol=0, atol=5e-3)
    assert (gradients - exact).norm() < 2e-2 * exact.norm()


def _engine_of(name: str, model: nn.Module, scope: list[nn.Parameter]) -> GradientEngine:
    if name == "per_group":
        return PerGroupEngine(scope)
    return StaticShapesEngine(model, scope) if name == "static_shapes" else AutoEngine(model, scope, name)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", [*ENGINES, "static_shapes"])
def test_a_network_that_is_kept_in_half_precision_is_close_to_single(engine: str, kept: torch.dtype) -> None:
    """Its weights, those of its norms too, are in half precision, as after `from_pretrained(dtype=torch.bfloat16)`."""
    rows, groups = text_dataset(32, groups=4).with_format("torch"), torch.arange(32) % 4
    found = []
    for dtype in (kept, torch.float32):
        # The same numbers in both: those that half precision can hold.
        model = tiny_distilbert().to(kept).to(dtype)
        scope = list(gradient_scope(model, 3).values())
        robust_loss = GroupRobustLoss(
            CGD(step_size=2.0, exponent=0.0),
            GroupInfo("abcd", [8] * 4),
            scope,
            engine=_engine_of(engine, model, scope),
        )
        with robust_loss.recording():
            logits = model(input_ids=rows["input_ids"][:], attention_mask=rows["attention_mask"][:]).logits
        robust_loss(F.cross_entropy(logits.float(), rows["labels"][:], reduction="none"), groups).backward()
        assert robust_loss.alpha is not None
        gradients = [
            parameter.grad.flatten().float() for parameter in model.parameters() if parameter.grad is not None
        ]
        found.append((robust_loss.alpha, torch.cat(gradients)))
    (alpha, own), (exact_alpha, exact) = found
    assert torch.allclose(alpha, exact_alpha, rtol=0, atol=2e-2) and (exact_alpha - 1 / 4).abs().max() > 0.04
    assert len(own) == len(exact) and (own - exact).norm() < 5e-2 * exact.norm()


def test_statistics_are_not_formed_in_half_precision() -> None:
    """Rows and losses that are exact in float32 and not in bfloat16, with autocast on."""
    generator = torch.Generator().manual_seed(0)
    rows, values = torch.randn(2, 301, generator=generator), torch.rand(2, generator=generator)
    weights = []
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        parameter = nn.Parameter(torch.zeros(301))
        robust_loss = GroupRobustLoss(CGD(step_size=3.0), TWO, [parameter])
        losses = (rows * parameter).sum(dim=1) + values
        with context:
            robust_loss(losses, torch.tensor([0, 1])).backward()
        weights.append(robust_loss.alpha)
        assert parameter.grad is not None
        expected = robust_loss.alpha.float() @ rows
        assert torch.allclose(parameter.grad, expected, atol=1e-6)
    assert torch.equal(*weights)


def test_losses_in_half_precision_are_summed_in_single() -> None:
    """512 times 1.0078125 (exact in bfloat16) has a sum that bfloat16 cannot hold."""
    value = 1.0078125
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    robust_loss = GroupRobustLoss(CGD(step_size=0.1), TWO, [parameter])
    losses = parameter * torch.full((512,), value, dtype=torch.bfloat16)
    loss = robust_loss(losses, torch.arange(512) % 2)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(value, rel=1e-6)
    assert robust_loss.drain_group_losses() == {"a": value, "b": value}


# ---- Loss scaling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_small_gradients_survive_float16_under_the_loss_scale(engine: str) -> None:
    """Gradients of 1e-8 are zero in float16; under the scale they are not, and cosines and step are right."""
    exact_alpha, exact = one_step(engine, None, factor=1e-7)
    alpha, gradients = one_step(engine, torch.float16, factor=1e-7, scale=2.0**20)
    assert torch.allclose(alpha, exact_alpha, atol=5e-3)
    assert (gradients - exact).norm() < 2e-2 * exact.norm()
    lost, _ = one_step("per_group", torch.float16, factor=1e-7)
    assert not torch.allclose(lost, exact_alpha, atol=2e-2)


def with_scaler(run: GroupRobustTrainer, **options: Any) -> GroupRobustTrainer:
    """The trainer with a real scaler; transformers itself asks for a GPU before it makes one."""
    run.accelerator.scaler = torch.amp.GradScaler("cpu", **options)
    return run


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_scale_that_is_a_power_of_two_changes_no_bit(trainer: Build, engine: str, accumulation: int) -> None:
    changes = {"gradient_engine": engine, "step_size": 0.5, "gradient_accumulation_steps": accumulation}
    plain = trainer(changes)
    plain.train()
    scaled = with_scaler(trainer(changes), init_scale=2.0**16)
    scaled.train()
    assert scaled.accelerator.scaler.get_scale() == 2.0**16
    assert torch.equal(scaled.group_weights, plain.group_weights)
    assert torch.equal(parameters_of(scaled.model), parameters_of(plain.model))


SAME_BATCHES = {"train_sampling_strategy": "sequential", "step_size": 0.5}


def same_batches() -> Any:
    data = text_dataset(4).to_dict()
    from datasets import Dataset

    return Dataset.from_dict({name: column * 6 for name, column in data.items()})


@pytest.mark.parametrize("knobs", [{"objective": "group_dro"}, {"objective": "cgd"},
                                   {"objective": "cgd", "interaction_momentum": 0.7}])  # fmt: skip
def test_a_step_that_the_scaler_leaves_out_leaves_the_weights(trainer: Build, knobs: dict[str, Any]) -> None:
    """Four steps of which the first overflows are three steps, bit for bit."""
    three = trainer({**SAME_BATCHES, **knobs, "max_steps": 3}, train_dataset=same_batches())
    three.train()
    four = with_scaler(
        trainer({**SAME_BATCHES, **knobs, "max_steps": 4}, train_dataset=same_batches()),
        init_scale=2.0**127, backoff_factor=2.0**-117, growth_interval=100,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", GroupRobustWarning)
        four.train()
    assert four.accelerator.scaler.get_scale() == 2.0**10
    assert torch.equal(four.group_weights, three.group_weights)
    assert torch.equal(parameters_of(four.model), parameters_of(three.model))
    assert (four.robust_loss.updates, four.robust_loss.skipped_updates) == (3, 1)
    assert [entry.get("skipped_weight_updates") for entry in four.state.log_history[:4]] == [1, 1, 1, 1]
    if knobs["objective"] == "cgd":
        # The step that overflowed said nothing about the engines.
        assert four.robust_loss._engine.chosen.name == "single_pass"


def test_an_overflow_outside_of_the_scope_takes_the_update_back(trainer: Build) -> None:
    changes = {**SAME_BATCHES, "interaction_momentum": 0.7}
    three = trainer({**changes, "max_steps": 3}, train_dataset=same_batches())
    three.train()
    four = with_scaler(trainer({**changes, "max_steps": 4}, train_dataset=same_batches()), init_scale=2.0**10)

    def overflow(gradient: Tensor) -> Tensor:
        return gradient * math.inf if four.state.global_step == 1 else gradient

    four.model.distilbert.embeddings.word_embeddings.weight.register_hook(overflow)
    four.train()
    assert torch.equal(four.group_weights, three.group_weights)
    assert torch.equal(parameters_of(four.model), parameters_of(three.model))
    assert (four.robust_loss.updates, four.robust_loss.skipped_updates) == (3, 1)


# ---- Not finite -----------------------------------------------------------------------------------------------------


class Spoilt:
    """A loss whose values for group b are spoilt in the second step, without harm to the parameters.

    Groups alternate in the data; under CGD a batch comes in the order of its groups.
    """

    def __init__(self, value: float, objective: str) -> None:
        self.value = value
        self.in_group_order = objective == "cgd"
        self.calls = 0

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        self.calls += 1
        losses = F.cross_entropy(outputs["logits"], labels, reduction="none")
        spoilt = torch.tensor([0.0, self.value] * (len(labels) // 2))
        if self.in_group_order:
            spoilt = spoilt.view(-1, 2).T.flatten()
        return losses + spoilt if self.calls == 2 else losses


def named_groups() -> Any:
    data = text_dataset()
    return data.remove_columns("group").add_column("group", ["ab"[group] for group in data["group"]])


@pytest.mark.parametrize("objective", ["group_dro", "cgd"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_spoilt_step_is_skipped_flagged_and_named(trainer: Build, objective: str, value: float) -> None:
    run = trainer(
        {"objective": objective, "step_size": 0.5, "max_steps": 4, "train_sampling_strategy": "sequential"},
        compute_loss_func=Spoilt(value, objective), train_dataset=named_groups(),
    )  # fmt: skip
    with pytest.warns(GroupRobustWarning, match=r"In optimizer step 2 the loss or gradient of the group\(s\) \['b'\]"):
        run.train()
    logs = [entry for entry in run.state.log_history if "group_weight/a" in entry]
    assert [entry.get("skipped_weight_updates") for entry in logs] == [None, 1, 1, 1]
    assert logs[1]["group_weight/a"] == logs[0]["group_weight/a"] != logs[2]["group_weight/a"]
    assert bool(run.group_weights.isfinite().all()) and run.group_weights.sum().item() == pytest.approx(1, abs=1e-9)
    text = json.dumps(run.state.log_history)
    assert "group_loss/a" in text


def test_it_may_stop_the_run(trainer: Build) -> None:
    run = trainer(
        {"nonfinite": "raise", "max_steps": 4, "train_sampling_strategy": "sequential"},
        compute_loss_func=Spoilt(math.nan, "cgd"), train_dataset=named_groups(),
    )  # fmt: skip
    with pytest.raises(FloatingPointError, match=r"In optimizer step 2 .* group\(s\) \['b'\] is not finite"):
        run.train()
    assert run.state.global_step == 1


class Overflowing(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].where(gradients[0] == 0, math.inf)


def test_a_gradient_that_is_not_finite_counts_as_well() -> None:
    parameter = nn.Parameter(torch.ones(3))
    robust_loss = GroupRobustLoss(CGD(step_size=0.5), TWO, [parameter])
    losses = torch.stack([parameter.sum(), Overflowing.apply(parameter.sum())])
    with pytest.warns(GroupRobustWarning, match=r"In optimizer step 1 .*\['b'\]"):
        robust_loss(losses, torch.tensor([0, 1]))
    assert robust_loss.alpha is not None and robust_loss.alpha.tolist() == [0.5, 0.5]


def test_the_option_is_checked(config: Callable[..., GroupRobustConfig], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nonfinite must be one of 'skip', 'raise', got 'ignore'"):
        config(nonfinite="ignore")
    with pytest.raises(ValueError, match="nonfinite has no effect on objective='erm'"):
        config(objective="erm", nonfinite="raise")
    with pytest.raises(ValueError, match="nonfinite must be one of"):
        GroupRobustLoss(CGD(), TWO, [nn.Parameter(torch.zeros(1))], nonfinite="stop")
