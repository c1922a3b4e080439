"""The single-pass engine against the per-group one: equal where it is used, given up where it is not exact."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from accelerate.state import AcceleratorState
from networks import BATCH, BERT_LIKE, GROUPS, MODELS, Logits, build, close, flat, ids, losses_of
from tiny import parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from torch import Tensor, nn

from hf_cgd import GroupRobustTrainer, gradient_scope
from hf_cgd.gradients import AutoEngine, NotExactError, PerGroupEngine, SinglePassEngine, verification
from hf_cgd.gradients.autograd import unflatten
from hf_cgd.gradients.layers.linear import LinearRule, TransposedLinearRule
from hf_cgd.gradients.recording import CallRecorder

Build = Callable[..., GroupRobustTrainer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_groups", GROUPS)
@pytest.mark.parametrize("name", [name for name, (_, _, exact) in MODELS.items() if exact])
def test_group_gradients_and_the_whole_step_are_exact(name: str, num_groups: int, dtype: torch.dtype) -> None:
    model, inputs = build(name, dtype)
    scope = list(gradient_scope(model, "all" if name == "MLP" else 3).values())
    group_ids = torch.tensor(GROUPS[num_groups])
    groups = group_ids.unique().tolist()
    engine = SinglePassEngine(model, scope)
    with engine.recording():
        losses = losses_of(model, inputs)
    everything = [p for p in model.parameters() if p.requires_grad]
    expected_rows = PerGroupEngine(scope).group_gradients(losses, group_ids, groups).rows
    coefficients = torch.linspace(0.1, 0.9, 6, dtype=dtype)[group_ids]
    weighted = (coefficients * losses).sum()
    expected = flat(torch.autograd.grad(weighted, everything, retain_graph=True, allow_unused=True), everything)

    gradients = engine.group_gradients(losses, group_ids, groups)
    assert close(expected_rows, gradients.rows, dtype)
    scalar = gradients.scalar(weighted, coefficients)
    assert scalar.item() == weighted.item()
    assert all(parameter.grad is None for parameter in everything)
    (3 * scalar).backward()
    assert close(expected, flat([p.grad for p in everything], everything) / 3, dtype)


@pytest.mark.parametrize("scope", [1, 2, "all"])
@pytest.mark.parametrize("name", ["RoBERTa", "ViT", "ConvNeXt", "LSTM"])
def test_any_number_of_layers(name: str, scope: Any) -> None:
    model, inputs = build(name)
    engine = AutoEngine(model, list(gradient_scope(model, scope).values()))
    with engine.recording():
        losses = losses_of(model, inputs)
    engine.group_gradients(losses, torch.tensor(GROUPS[3]), [0, 1, 2])
    assert engine.chosen is not None and engine.chosen.name == "single_pass", engine.reason


@pytest.mark.parametrize("name", ["RoBERTa", "MLP"])
def test_trainable_gaps_in_a_scope_get_their_gradients(name: str) -> None:
    """Weights behind the cut that are not in the scope: the scalar carries their gradients too."""
    model, inputs = build(name)
    engine = AutoEngine(model, list(gradient_scope(model, [r"bias$"]).values()))
    with engine.recording():
        losses = losses_of(model, inputs)
    everything = [p for p in model.parameters() if p.requires_grad]
    coefficients = torch.linspace(0.1, 0.9, len(losses))[torch.tensor(GROUPS[3])]
    weighted = (coefficients * losses).sum()
    expected = flat(torch.autograd.grad(weighted, everything, retain_graph=True, allow_unused=True), everything)
    gradients = engine.group_gradients(losses, torch.tensor(GROUPS[3]), [0, 1, 2])
    assert engine.chosen is not None and engine.chosen.name == "single_pass", engine.reason
    gradients.scalar(weighted, coefficients).backward()
    assert close(expected, flat([p.grad for p in everything], everything), torch.float32)


def test_frozen_weights_in_the_scope_are_no_gap() -> None:
    model, inputs = build("RoBERTa")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    engine = AutoEngine(model, list(gradient_scope(model, 3).values()))
    with engine.recording():
        losses = losses_of(model, inputs)
    engine.group_gradients(losses, torch.tensor(GROUPS[3]), [0, 1, 2])
    assert engine.chosen is not None and engine.chosen.name == "single_pass", engine.reason


@pytest.mark.parametrize("name", [name for name, (_, _, exact) in MODELS.items() if not exact])
def test_where_it_is_not_exact_the_per_group_engine_is_taken(name: str) -> None:
    model, inputs = build(name)
    scope = list(gradient_scope(model, 3).values())
    engine = AutoEngine(model, scope)
    with engine.recording():
        losses = losses_of(model, inputs)
    group_ids = torch.tensor(GROUPS[3])
    expected = PerGroupEngine(scope).group_gradients(losses, group_ids, [0, 1, 2]).rows
    rows = engine.group_gradients(losses, group_ids, [0, 1, 2]).rows
    assert engine.chosen is not None and engine.chosen.name.startswith("per_group") and engine.reason
    # In networks with BatchNorm only the last stages' own cut is used; the bodies of two reach them by two ways.
    assert ("with the cut" in engine.chosen.name) == (name not in ("DeBERTa-v2", "T5 encoder")), engine.reason
    assert close(expected, rows, torch.float32)


@pytest.mark.parametrize(("factor", "name"), [(1000, "per_group with the cut"), (0, "per_group")])
def test_an_engine_may_be_as_far_off_as_the_backward_pass_is_from_itself(
    monkeypatch: pytest.MonkeyPatch, factor: float, name: str
) -> None:
    """With a tolerance below any rounding, only the noise of the ordinary backward pass lets an exact engine in."""
    monkeypatch.setitem(verification.TOLERANCE, torch.float32, 1e-12)
    monkeypatch.setattr(verification, "NOISE_FACTOR", factor)
    model, inputs = build("ResNet")
    engine = AutoEngine(model, list(gradient_scope(model, 3).values()))
    with engine.recording():
        losses = losses_of(model, inputs)
    engine.group_gradients(losses, torch.tensor(GROUPS[3]), [0, 1, 2])
    assert engine.chosen is not None and engine.chosen.name == name, engine.reason


def test_position_embeddings_that_are_looked_up_once_for_the_batch() -> None:
    """BERT looks positions up with a batch dimension of 1; each group still gets the whole table's gradient."""
    torch.manual_seed(0)
    small = {**BERT_LIKE, "hidden_size": 16, "num_hidden_layers": 1}
    model = Logits(tf.BertForSequenceClassification(tf.BertConfig(**small)))
    parameters = gradient_scope(model, "all")
    engine = AutoEngine(model, list(parameters.values()))
    inputs = ids()[:, :6]
    with engine.recording():
        losses = losses_of(model.eval(), inputs)
    group_ids = torch.tensor(GROUPS[2])
    rows = engine.group_gradients(losses, group_ids, [0, 4]).rows
    place = list(parameters).index("model.bert.embeddings.position_embeddings.weight")
    for group, row in zip((0, 4), rows, strict=True):
        mine = group_ids == group
        alone = F.cross_entropy(model(inputs[mine]), torch.tensor([0, 1, 1, 0, 1, 0])[mine], reduction="sum")
        table = torch.autograd.grad(alone, list(parameters.values()), allow_unused=True)[place]
        found = unflatten(row, list(parameters.values()))[place]
        assert found.shape == (512, 16) and torch.allclose(found, table, atol=1e-6)


def test_transposed_weights_keep_their_shape() -> None:
    """GPT-2's Conv1D stores [in, out]."""
    model, inputs = build("GPT-2")
    parameters = gradient_scope(model, [r"h\.3\.", r"ln_f", r"score"])
    engine = SinglePassEngine(model, list(parameters.values()))
    with engine.recording():
        losses = losses_of(model, inputs)
    exact = PerGroupEngine(list(parameters.values())).group_gradients(losses, torch.tensor(GROUPS[3]), [0, 1, 2]).rows
    rows = engine.group_gradients(losses, torch.tensor(GROUPS[3]), [0, 1, 2]).rows
    assert close(exact, rows, torch.float32)
    shapes = {
        name: part.shape for name, part in zip(parameters, unflatten(rows[0], list(parameters.values())), strict=True)
    }
    assert shapes["model.transformer.h.3.mlp.c_fc.weight"] == (32, 128)
    rules = {type(module).__name__: type(rule) for module, rule in engine._recorder.rules.items()}
    assert rules["Conv1D"] is TransposedLinearRule and rules["Linear"] is LinearRule


@pytest.mark.parametrize("share", [0.001, 0.6, 1.0])
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "ConvNeXt", "LSTM"])
def test_short_of_memory_the_same_comes_out_module_by_module(name: str, share: float) -> None:
    model, inputs = build(name)
    scope = list(gradient_scope(model, 3).values())
    rows = 3 * 4 * sum(parameter.numel() for parameter in scope)
    engine = SinglePassEngine(model, scope, memory_budget=share * rows)
    group_ids = torch.tensor(GROUPS[3])
    with engine.recording():
        losses = losses_of(model, inputs)
    exact = PerGroupEngine(scope).group_gradients(losses, group_ids, [0, 1, 2])
    coefficients = torch.tensor([0.1, 0.5, 0.4])[group_ids]
    weighted = (coefficients * losses).sum()
    everything = [p for p in model.parameters() if p.requires_grad]
    expected = flat(torch.autograd.grad(weighted, everything, retain_graph=True, allow_unused=True), everything)
    gradients = engine.group_gradients(losses, group_ids, [0, 1, 2])
    assert torch.allclose(gradients.gram(), exact.gram(), rtol=1e-4, atol=1e-6 * exact.gram().max().item())
    assert engine.group_rows._memory._memory is not None
    one_module = max(sum(p.numel() for p in own.values()) for own in engine.owned.values())
    assert 4 * len(engine.group_rows._memory._memory) <= max(share * rows, 3 * 4 * one_module)
    gradients.scalar(weighted, coefficients).backward()
    assert close(expected, flat([p.grad for p in everything], everything), torch.float32)


# ---- Planted ways of being wrong ----------------------------------------------------------------------------------------


class RoundTheCut(nn.Module):
    """The body reaches the loss beside the scope's first input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden.tanh()) + hidden[:, :2]


class Interacting(nn.Module):
    """Each example's output depends on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.body(x))
        return self.head(hidden - hidden.mean(dim=0))


class Unpadded(nn.Module):
    """All tokens in one long row without a batch dimension, as flash attention likes them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(99, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(0, 1)).view(*x.shape, 2).mean(dim=1)


class TimeFirst(nn.Module):
    """As many positions as examples, positions first: the shapes alone do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.stack([self.body(x) * place for place in range(1, BATCH + 1)])
        return self.head(steps).sum(dim=0)


@pytest.mark.parametrize(
    "kind,scope,reason",
    [
        (RoundTheCut, [r"^head"], "single_pass: body.weight is not in the gradient scope but reaches the loss"),
        (Interacting, [r"^middle", r"^head"], "single_pass: examples of a batch influence one another"),
        (Unpadded, [r"^head"], "single_pass: an input of Linear has no entry for each example"),
        (TimeFirst, [r"^head"], "single_pass: examples of a batch influence one another"),
    ],
)
def test_planted_errors_are_found(kind: type[nn.Module], scope: list[str], reason: str) -> None:
    torch.manual_seed(0)
    model = kind().train()
    engine = AutoEngine(model, list(gradient_scope(model, scope).values()))
    with engine.recording():
        losses = losses_of(model, ids() if kind is Unpadded else torch.randn(BATCH, 8))
    group_ids = torch.tensor(GROUPS[3])
    expected = torch.autograd.grad(losses.mean(), list(model.parameters()), retain_graph=True)
    gradients = engine.group_gradients(losses, group_ids, [0, 1, 2])
    assert engine.chosen is not None and engine.chosen.name.startswith("per_group") and reason in engine.reason
    # Only where the first input of the scope is all there is between body and loss may a pass stop there.
    assert ("with the cut" in engine.chosen.name) == (kind is not RoundTheCut), engine.reason
    gradients.scalar(losses.mean(), torch.full((BATCH,), 1 / BATCH)).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


def test_a_later_step_of_another_form_is_computed_per_group() -> None:
    """The check passed on a batch of the usual form; one without a batch dimension comes later."""

    class Sometimes(RoundTheCut):
        flat = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            return self.head(hidden.repeat(2, 1))[:BATCH] if self.flat else self.head(hidden)

    model = Sometimes()
    scope = list(model.head.parameters())
    engine = AutoEngine(model, scope)
    group_ids = torch.tensor(GROUPS[3])
    for model.flat in (False, False, True):
        x = torch.randn(BATCH, 8)
        with engine.recording():
            losses = losses_of(model, x)
        rows = engine.group_gradients(losses, group_ids, [0, 1, 2]).rows
        again = PerGroupEngine(scope).group_gradients(losses_of(model, x), group_ids, [0, 1, 2]).rows
        assert torch.allclose(rows, again, atol=1e-6)
    assert engine.chosen is not None and engine.chosen.name == "single_pass"


def test_a_cut_that_is_changed_in_place_is_noticed() -> None:
    body, head = nn.Linear(8, 8), nn.Linear(8, 2, bias=False)
    head.weight.requires_grad_(True)
    engine = SinglePassEngine(nn.ModuleList([body, head]), list(head.parameters()))
    with engine.recording():
        hidden = body(torch.randn(BATCH, 8))
        scores = head(hidden)
    with torch.no_grad():
        hidden.add_(0.0)
    with pytest.raises(NotExactError, match="changed in place"):
        engine.group_gradients(
            F.cross_entropy(scores, torch.zeros(BATCH).long(), reduction="none"), torch.zeros(BATCH).long(), [0]
        )


@pytest.mark.parametrize("kind", ["single_pass", "sketch"])
def test_an_engine_that_was_asked_for_by_name_says_why_it_cannot(kind: str) -> None:
    model, inputs = build("timm resnet")
    engine = AutoEngine(model, list(gradient_scope(model, 3).values()), kind)
    with engine.recording():
        losses = losses_of(model, inputs)
    with pytest.raises(ValueError, match=rf"gradient_engine='{kind}' cannot be used on .*BatchNorm.* mixes .*'auto'"):
        engine.group_gradients(losses, torch.tensor(GROUPS[3]), [0, 1, 2])


@pytest.mark.parametrize("kind", ["per_group", "tensor_hooks", "fast"])
def test_engines_that_need_no_check_or_do_not_exist_are_refused(kind: Any) -> None:
    model = nn.Linear(8, 2)
    with pytest.raises(ValueError, match=f"one of auto, single_pass, sketch, got '{kind}'"):
        AutoEngine(model, list(model.parameters()), kind)


def test_modules_that_were_left_out_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    engine = SinglePassEngine(model, list(model.parameters()))
    for step, hidden in enumerate((model[1], nn.Identity())):
        with engine.recording():
            losses = F.cross_entropy(
                model[2](hidden(model[0](torch.randn(4, 8)))), torch.zeros(4).long(), reduction="none"
            )
        if step:
            with pytest.raises(NotExactError, match="other modules of the scope ran"):
                engine.group_gradients(losses, torch.zeros(4).long(), [0])
        else:
            engine.group_gradients(losses, torch.zeros(4).long(), [0])


# ---- In the Trainer -----------------------------------------------------------------------------------------------------


def own_hooks(model: nn.Module) -> list[Any]:
    """Hooks that this package has put on the model."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return [hook for hook in hooks if getattr(hook, "__module__", "").startswith("hf_cgd")]


# Older Trainers have no activation_checkpointing.
CHANGES: list[dict[str, Any]] = [
    {}, {"gradient_accumulation_steps": 2}, {"weight_timing": "next"}, {"max_grad_norm": 1.0},
    *({name: True} for name in ("activation_checkpointing",) if hasattr(tf.TrainingArguments, name)),
]  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES)
def test_a_run_is_that_of_the_per_group_engine(trainer: Build, changes: dict[str, Any]) -> None:
    runs = []
    for engine in ("per_group", "auto", "single_pass"):
        run = trainer(
            {"gradient_engine": engine, "step_size": 0.5, "max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3,
             **changes},
            model=tiny_distilbert(dropout=0.1), train_dataset=text_dataset(40, groups=3),
        )  # fmt: skip
        run.train()
        runs.append((parameters_of(run.model), run.group_weights))
        assert not own_hooks(run.model)
    assert (runs[0][1] - 1 / 3).abs().max() > 1e-3
    for parameters, weights in runs[1:]:
        assert torch.allclose(parameters, runs[0][0], atol=2e-6)
        assert torch.allclose(weights, runs[0][1], rtol=0, atol=1e-6)


def test_the_choice_is_logged_in_one_line_and_made_again_after_a_resume(trainer: Build, caplog: Any) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    with caplog.at_level(logging.INFO, logger="hf_cgd"):
        run = trainer(changes)
        run.train()
        trainer(changes).train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-2")
    lines = [record.getMessage() for record in caplog.records if "Gradient engine" in record.getMessage()]
    assert len(lines) == 2 and all("single_pass" in line and "differ from per_group's by" in line for line in lines)


@predicts_one_class
def test_evaluation_runs_no_hook(trainer: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(eval_dataset=text_dataset())
    run.train()
    monkeypatch.setattr(CallRecorder, "_note", lambda *args, **kwargs: pytest.fail("a hook ran"))
    run.evaluate()
    run.predict(text_dataset())


def test_bfloat16(trainer: Build) -> None:
    """Rounding apart: two hundredths of the way that the weights have gone."""
    weights = []
    for engine in ("per_group", "single_pass"):
        run = trainer({"bf16": True, "gradient_engine": engine, "step_size": 20.0, "max_steps": 4})
        run.train()
        weights.append(run.group_weights)
    moved = (weights[0] - 0.5).abs().max()
    assert moved > 0.05 and (weights[1] - weights[0]).abs().max() < 0.02 * moved


@pytest.mark.slow
@predicts_one_class
@pytest.mark.parametrize("engine", ["auto", "per_group", "sketch"])
def test_a_compiled_run_is_the_eager_one(trainer: Build, engine: str) -> None:
    runs = []
    torch._dynamo.utils.counters.clear()
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        run = trainer(
            {
                "step_size": 5.0,
                "gradient_engine": engine,
                "max_steps": 4,
                "eval_strategy": "steps",
                "eval_steps": 2,
                **compiled,
            },
            eval_dataset=text_dataset(),
        )
        start = parameters_of(run.model)
        run.train()
        weights = [entry["group_weight/0"] for entry in run.state.log_history if "group_weight/0" in entry]
        runs.append((parameters_of(run.model), run.group_weights, run.evaluate()["eval_loss"], weights))
        if engine != "per_group":
            # Blocks share their code; that of the body, which has no hooks, must not serve those of the scope.
            chosen = run.robust_loss.engine.chosen
            assert chosen.name == ("single_pass" if engine == "auto" else engine)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    assert len(set(runs[0][3])) == 4 and (runs[0][1] - 0.5).abs().max() > 1e-2
    assert (runs[0][0] - start).abs().max() > 1e-2
    assert torch.allclose(runs[0][0], runs[1][0], rtol=0, atol=1e-6)
    assert torch.allclose(runs[0][1], runs[1][1], rtol=0, atol=1e-6)
    assert runs[0][2] == pytest.approx(runs[1][2], rel=1e-6)
    assert runs[0][3] == pytest.approx(runs[1][3], rel=1e-5)


@pytest.mark.slow
@predicts_one_class
@pytest.mark.parametrize(
    ("changes", "by_launcher"),
    [
        ({"cross_terms": "consensus"}, True),
        ({"self_term": "split_half", "weight_timing": "next"}, False),
        ({"interaction_momentum": 0.9, "weight_timing": "next"}, False),
    ],
)
def test_a_network_that_comes_compiled_gives_the_eager_run(
    trainer: Build, changes: dict[str, Any], by_launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own `compile` or the launcher's, with accumulation and the statistics pooled over micro-batches."""
    from torch._functorch import config

    config.donated_buffer = True
    runs = []
    for compiles in (False, True):
        network = tiny_distilbert()
        if compiles and by_launcher:
            monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
            AcceleratorState._reset_state(True)
        elif compiles:
            network.compile(backend="aot_eager")
        args = {"step_size": 2.0, "gradient_accumulation_steps": 2, "max_steps": 3, **changes}
        run = trainer(args, model=network, train_dataset=text_dataset(24, groups=3))
        run.train()
        assert run.robust_loss.engine.chosen.name == "single_pass"
        runs.append((parameters_of(run.model), run.group_weights))
    torch._dynamo.reset()
    if by_launcher:
        assert run.model_wrapped is not run.model
        AcceleratorState._reset_state(True)
    assert not config.donated_buffer, "the default backend would refuse a second backward pass"
    assert (runs[0][1] - 1 / 3).abs().max() > 1e-3
    assert torch.allclose(runs[0][0], runs[1][0], rtol=0, atol=1e-6)
    assert torch.allclose(runs[0][1], runs[1][1], rtol=0, atol=1e-6)
