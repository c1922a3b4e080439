"""Group gradients by tensor hooks are those of one backward pass per group, or there is an error that says why not."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import parameters_of, text_dataset, tiny_distilbert
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, ResNetConfig, ResNetForImageClassification

from hf_cgd import GroupRobustLoss, GroupRobustTrainer
from hf_cgd.data.groups import GroupInfo
from hf_cgd.gradients import PerGroupEngine, TensorHookEngine, gradient_scope, gram_matrix
from hf_cgd.objectives import CGD, GroupDRO
from hf_cgd.objectives.base import GroupBatch, ObjectiveOutput

Build = Callable[..., GroupRobustTrainer]


class Mixed(nn.Module):
    """One module of every kind: convolutions, group, instance and RMS norm, embedding, a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.wide = nn.Conv2d(1, 2, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, 2)
        self.instance_norm = nn.InstanceNorm2d(2, affine=True)
        self.unused = nn.Linear(3, 3)
        self.rms = nn.RMSNorm(12)
        self.twice = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.conv(self.embed(tokens).transpose(1, 2))
        hidden = (
            self.instance_norm(self.group_norm(self.wide(hidden[:, None])).sigmoid()).relu().mean(dim=3).flatten(1)
        )
        hidden = F.relu(self.twice(self.rms(hidden)), inplace=True)
        return self.head(self.norm(self.twice(hidden)))


def both_ways(
    model: nn.Module,
    forward: Callable[[], Tensor],
    group_ids: Tensor,
    layers: Any = "all",
    weights: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Rows of the hook engine and of the oracle for the unweighted losses that `forward` gives."""
    groups = sorted(set(group_ids.tolist()))
    parameters = list(gradient_scope(model, layers).values())
    expected = PerGroupEngine(parameters).group_gradients(forward(), group_ids, groups).rows
    engine = TensorHookEngine(model, parameters, **options)
    with engine.recording():
        losses = forward()
    engine.watch(losses)
    factors = torch.tensor([0.3, 1e-6, 2.5]) if weights is None else weights
    (1024 * factors[group_ids] * losses).sum().backward()
    return engine.group_gradients(losses.detach(), group_ids, groups).rows, expected


def test_every_kind_of_module_agrees_with_the_oracle() -> None:
    """Also at a weight of 1e-6, under a loss scale, with a module that is used twice and one that is not."""
    torch.manual_seed(0)
    model, tokens, labels = Mixed(), torch.randint(0, 11, (10, 6)), torch.randint(0, 3, (10,))
    group_ids = torch.tensor([0, 1, 2, 0, 1, 2, 1, 1, 2, 0])
    with pytest.warns(match="not called in the forward pass: Linear"):
        found, expected = both_ways(model, lambda: F.cross_entropy(model(tokens), labels, reduction="none"), group_ids)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    unused = TensorHookEngine(model, list(model.parameters())).size - sum(p.numel() for p in model.parameters())
    assert unused == 0


@pytest.mark.parametrize("layers", [1, 3, ["h.1", "score"]])
def test_transposed_weights_agree_with_the_oracle(layers: Any) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, num_labels=3, pad_token_id=0,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
    model, tokens = GPT2ForSequenceClassification(config), torch.randint(1, 20, (6, 5))
    labels, group_ids = torch.randint(0, 3, (6,)), torch.tensor([2, 0, 0, 2, 2, 0])

    def forward() -> Tensor:
        return F.cross_entropy(model(tokens).logits, labels, reduction="none")

    found, expected = both_ways(model, forward, group_ids, layers)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_sketches_are_those_of_the_oracles_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 3))
    inputs, labels, group_ids = torch.randn(9, 40), torch.randint(0, 3, (9,)), torch.arange(9) % 3

    def forward() -> Tensor:
        return F.cross_entropy(model(inputs), labels, reduction="none")

    found, expected = both_ways(model, forward, group_ids, sketch=True)
    sketch = TensorHookEngine(model, list(model.parameters()), sketch=True)._group_rows.sketch  # type: ignore
    assert found.shape[1] < expected.shape[1]
    assert torch.allclose(found, torch.stack([sketch(row) for row in expected]), atol=1e-5)


def test_inner_products_alone_agree_and_nothing_is_left_behind() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.RMSNorm(7), nn.Linear(7, 3))
    parameters = list(model.parameters())
    engine, oracle = TensorHookEngine(model, parameters), PerGroupEngine(parameters)
    group_ids, factors = torch.tensor([0, 1, 1, 0, 1, 2]), torch.tensor([0.5, 0.2, 1e-4])
    for step in range(3):
        inputs, labels = torch.randn(6, 5), torch.randint(0, 3, (6,))
        exact = oracle.group_gradients(
            F.cross_entropy(model(inputs), labels, reduction="none"), group_ids, [0, 1, 2]
        ).rows
        with engine.recording():
            hidden = model[:2](inputs)
            losses = F.cross_entropy(model[2:](hidden), labels, reduction="none")
        activation = weakref.ref(hidden)
        engine.watch(losses)
        (factors[group_ids] * losses).sum().backward()
        gram = engine.group_gradients(losses.detach(), group_ids, [0, 1, 2]).gram()
        assert torch.allclose(gram, gram_matrix(exact), rtol=1e-4), step
        del hidden, losses
        gc.collect()
        assert activation() is None
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(parameter._backward_hooks in (None, {}) for parameter in parameters)
    assert sum(p.untyped_storage().nbytes() for p in engine._hooked.stand_ins[model[2]].parameters()) <= 4


def test_sums_of_recomputed_blocks_are_recorded_once(trainer: Build) -> None:
    changes = {"gradient_engine": "tensor_hooks", "step_size": 0.5}
    recomputing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    plain, again = trainer(changes), trainer({**changes, **recomputing})
    plain.train()
    again.train()
    assert torch.allclose(plain.group_weights, again.group_weights, rtol=0, atol=1e-6)
    assert (plain.group_weights - 0.5).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-6),
        ({"gradient_accumulation_steps": 2}, 1e-6),
        ({"bf16": True}, 1e-3),
        ({"interaction_momentum": 0.5}, 1e-6),
        ({"absent_groups": "zero_loss"}, 1e-6),
        ({"gradient_layers": ["word_emb", "transformer", "classifier"]}, 1e-6),
    ],
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else "",
)
def test_training_is_that_of_one_backward_pass_per_group(
    trainer: Build, changes: dict[str, Any], tolerance: float
) -> None:
    common = {**changes, "step_size": 0.5, "max_steps": 5}
    data = text_dataset(40, groups=3)
    hooks = trainer({**common, "gradient_engine": "tensor_hooks"}, train_dataset=data)
    hooks.train()
    exact = trainer({**common, "gradient_engine": "per_group", "weight_timing": "next"}, train_dataset=data)
    exact.train()
    assert hooks.robust_loss.weight_timing == "next" and hooks.robust_loss.updates == 5
    assert torch.allclose(hooks.group_weights, exact.group_weights, rtol=0, atol=tolerance)
    assert (hooks.group_weights - 1 / 3).abs().max() > 20 * tolerance
    assert torch.allclose(parameters_of(hooks.model), parameters_of(exact.model), rtol=0, atol=tolerance)


def test_a_second_train_and_another_model_start_afresh(trainer: Build) -> None:
    changes = {"gradient_engine": "tensor_hooks", "step_size": 0.5}
    run = trainer(changes, model_init=lambda: tiny_distilbert())
    run.train()
    first = run.group_weights
    run.train()
    assert torch.equal(run.group_weights, first) and run._engine_choice.tensor_hooks.belongs_to(run.model)


def test_any_loop_calls_after_backward() -> None:
    torch.manual_seed(0)
    model, groups = nn.Linear(4, 2), GroupInfo(["a", "b"], [3, 3])
    inputs, labels, group_ids = torch.randn(6, 4), torch.randint(0, 2, (6,)), torch.tensor([0, 0, 0, 1, 1, 1])
    parameters = list(model.parameters())
    hooks = GroupRobustLoss(
        CGD(step_size=0.5), groups, parameters, weight_timing="next", engine=TensorHookEngine(model, parameters)
    )
    exact = GroupRobustLoss(CGD(step_size=0.5), groups, parameters, weight_timing="next")
    for _ in range(3):
        with hooks.recording():
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
        hooks(losses, group_ids).backward()
        with pytest.raises(RuntimeError, match="middle of an optimizer step|between optimizer steps"):
            hooks.state_dict()
        hooks.after_backward()
        hooks.after_backward()
        exact(F.cross_entropy(model(inputs), labels, reduction="none"), group_ids)
        exact.after_backward()
    assert hooks.updates == exact.updates == 3
    assert hooks.alpha is not None and exact.alpha is not None
    assert torch.allclose(hooks.alpha, exact.alpha, atol=1e-7)
    with hooks.recording():
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
    hooks(losses, group_ids)
    with pytest.raises(RuntimeError, match=r"call after_backward\(\)"):
        hooks(losses, group_ids)
    with pytest.raises(RuntimeError, match=r"Call backward\(\) on the loss first"):
        hooks.after_backward()


# ---- What is refused ------------------------------------------------------------------------------------------------


class OwnLoss(CGD):
    def loss(self, batch: GroupBatch) -> ObjectiveOutput:
        return ObjectiveOutput(batch.losses.sum())


@pytest.mark.parametrize(
    ("objective", "timing", "words"),
    [
        (CGD(), "current", "expected weight_timing='next', got 'current'"),
        (CGD(min_weight=0.0), "next", "min_weight > 0"),
        (OwnLoss(), "next", r"OwnLoss has a loss\(\) of its own"),
    ],
)
def test_objectives_and_timings_that_cannot_be_are_refused(objective: CGD, timing: str, words: str) -> None:
    model, groups = nn.Linear(4, 2), GroupInfo(["a", "b"], [3, 3])
    engine = TensorHookEngine(model, list(model.parameters()))
    with pytest.raises(ValueError, match=words):
        GroupRobustLoss(objective, groups, list(model.parameters()), weight_timing=timing, engine=engine)
    GroupRobustLoss(GroupDRO(), groups, engine=engine, weight_timing="next")


def test_a_weight_of_zero_is_an_error() -> None:
    model, inputs, group_ids = nn.Linear(4, 2), torch.randn(4, 4), torch.tensor([0, 1, 2, 1])
    with pytest.raises(ValueError, match=r"groups number \[1\] took part with weight 0"):
        both_ways(model, lambda: model(inputs).sum(dim=1), group_ids, weights=torch.tensor([1.0, 0.0, 1.0]))


def test_reentrant_checkpointing_is_an_error_on_the_first_step(trainer: Build) -> None:
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="runs without a graph.*'use_reentrant': False"):
        trainer({**changes, "gradient_engine": "tensor_hooks"}).train()


@pytest.mark.parametrize("place", ["in", "behind", "before", "frozen"])
def test_batch_statistics_are_an_error_where_they_mix_the_scopes_examples(place: str) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    if place == "frozen":
        norm.eval()
    order = {"before": [norm, nn.Linear(4, 4)], "in": [nn.Linear(4, 4), norm]}.get(place, [nn.Linear(4, 4), norm])
    model, inputs = nn.Sequential(*order, nn.Linear(4, 2)), torch.randn(6, 4)
    scope = {"behind": ["^0"], "before": ["^1", "^2"]}.get(place, "all")
    group_ids = torch.tensor([0, 1, 2, 1, 1, 2])

    def forward() -> Tensor:
        return model(inputs).square().sum(dim=1)

    if place in ("before", "frozen"):
        found, expected = both_ways(model, forward, group_ids, scope)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(ValueError, match="BatchNorm1d in training mode mixes the examples"):
            both_ways(model, forward, group_ids, scope)


def test_a_residual_network_is_refused() -> None:
    config = ResNetConfig(num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=2,
                          layer_type="basic")  # fmt: skip
    model, images = ResNetForImageClassification(config), torch.randn(4, 1, 16, 16)
    with pytest.raises(ValueError, match="BatchNorm2d in training mode"):
        both_ways(model, lambda: model(images).logits.sum(dim=1), torch.tensor([0, 1, 0, 1]), 2)


@pytest.mark.parametrize("share", [1.0, 1e-4, 0.0])
def test_a_weight_that_is_used_behind_the_hooks_back_is_found_whatever_its_share(share: float) -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.inner(inputs)
            return hidden + share * F.linear(torch.tanh(hidden), self.inner.weight.T)

    model, inputs = Tied(), torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"Linear\.weight is used outside of the module that holds it"):
        both_ways(model, lambda: model(inputs).sum(dim=1), torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize("gate", [1.0, 0.0])
@pytest.mark.parametrize("place", ["in", "behind"])
def test_examples_that_influence_one_another_in_ways_of_their_own_are_found(place: str, gate: float) -> None:
    class Lend(nn.Module):
        """Every example gets a share of its neighbour's row."""

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + 0.1 * torch.cat([hidden[1:], hidden[:1]])

    torch.manual_seed(0)
    layers: list[nn.Module] = (
        [nn.Linear(4, 4), Lend(), nn.Linear(4, 4)] if place == "in" else [nn.Linear(4, 4), Lend()]
    )
    model, inputs = nn.Sequential(*layers), torch.randn(5, 4)
    with torch.no_grad():
        model[-1 if place == "in" else 0].weight.mul_(gate)
    with pytest.raises(ValueError, match="examples of a batch influence one another"):
        both_ways(model, lambda: model(inputs).square().sum(dim=1), torch.tensor([0, 1, 0, 1, 0]))


def test_inputs_without_a_batch_and_parameters_beside_modules_are_refused() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + self.positions(torch.arange(4)[None]).mean(dim=1)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(4))
            self.inner = nn.Linear(4, 4)

    model, inputs = Positions(), torch.randn(3, 4)
    with pytest.raises(ValueError, match="an input of Embedding has no entry for each example"):
        both_ways(model, lambda: model(inputs).sum(dim=1), torch.tensor([0, 1, 0]))
    scaled = Scaled()
    with pytest.raises(ValueError, match=r"Scaled holds the parameters \['gamma'\] itself.*\(inner\)"):
        TensorHookEngine(scaled, list(scaled.parameters()))
    TensorHookEngine(scaled, list(scaled.inner.parameters()))


def test_compiled_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for compiled in (torch.compile(model, backend="eager"), nn.Sequential(torch.compile(model[0], backend="eager"))):
        with pytest.raises(ValueError, match="is compiled"):
            TensorHookEngine(compiled, list(model.parameters()))
    model[1].compile(backend="eager")
    with pytest.raises(ValueError, match="Linear is compiled"):
        TensorHookEngine(model, list(model.parameters()))


def test_split_passes_are_refused(trainer: Build) -> None:
    with pytest.raises(ValueError, match="forward_mode='split'.*forward_mode='joint'"):
        trainer({"gradient_engine": "tensor_hooks", "forward_mode": "split"})
