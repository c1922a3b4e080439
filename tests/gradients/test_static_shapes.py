"""Steps whose shapes depend on no value, as XLA devices want them: the same numbers, one graph, nothing read."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from networks import GROUPS, MODELS, build, close, flat, losses_of
from tiny import parameters_of, predicts_one_class, text_rows
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_cgd.trainer.engine_choice
import hf_cgd.trainer.loaders
from hf_cgd import (
    CGD,
    CORAL,
    ERMUW,
    IRM,
    PGI,
    GroupDRO,
    GroupInfo,
    GroupRobustLoss,
    GroupRobustTrainer,
    GroupRobustWarning,
    Objective,
    gradient_scope,
)
from hf_cgd.arithmetic import DeviceArithmetic
from hf_cgd.distributed.communication import Communication
from hf_cgd.gradients import (
    AutoEngine,
    PerGroupEngine,
    StaticShapesEngine,
    gram_matrix,
    gram_on_device,
    needs_static_shapes,
)

Build = Callable[..., GroupRobustTrainer]
CPU = torch.device("cpu")
NAMES = "abcde"
INFO = GroupInfo(NAMES, [50, 9, 4, 30, 2], class_counts=[[10, 6, 2, 16, 1], [40, 3, 2, 14, 1]])
MAKE_UPS = [[0, 0, 1, 1, 2, 2, 3, 3], [3, 0, 3, 0, 1, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4], [1, 2, 1, 4, 0, 3, 3, 3]]
"""Groups of the examples of a batch: of one size, out of order and with absent ones, of one group, of all sizes."""
MOVING = {
    "erm_uw": ERMUW(adjustment=2.0),
    "group_dro": GroupDRO(step_size=0.3),
    "group_dro, adjusted": GroupDRO(step_size=0.3, adjustment=1.5, absent_groups="zero_loss"),
    "cgd": CGD(step_size=0.3),
    "cgd, adjusted": CGD(step_size=0.3, adjustment=1.5, interaction="mean", min_weight=0.01),
    "cgd, zero_loss": CGD(step_size=0.3, absent_groups="zero_loss"),
    "cgd, reference": CGD(step_size=0.3, variant="reference", adjustment=1.0),
    "cgd, equation 3": CGD(step_size=0.3, scaling="gradient"),
}
PENALTIES = {"pgi": PGI(penalty_weight=0.5), "irm": IRM(penalty_weight=0.5), "coral": CORAL(penalty_weight=0.5)}


class Features(nn.Module):
    """A small network whose features are at hand, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.norm(self.body(x)).tanh()
        return features, self.head(features)


class Twin(Communication):
    """The first of two processes with the same examples each."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: 2 * tensor, num_processes=2, rank=0)

    def stacked(self, part: Tensor) -> Tensor:
        return torch.stack([part, part.detach()])


def batches(count: int = 8) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for ids in itertools.islice(itertools.cycle(MAKE_UPS), count):
        x = torch.randn(len(ids), 6, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 2, (len(ids),), generator=generator), torch.tensor(ids)


# ---- The engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", GROUPS)
@pytest.mark.parametrize("name", [name for name, (_, _, exact) in MODELS.items() if exact])
def test_the_engine_equals_one_backward_pass_per_group(name: str, num_groups: int) -> None:
    """Gradients of all seven groups, absent ones included, and the gradient of the whole step."""
    model, inputs = build(name, torch.float64)
    scope = list(gradient_scope(model, "all" if name == "MLP" else 3).values())
    group_ids = torch.tensor(GROUPS[num_groups])
    engine = StaticShapesEngine(model, scope)
    with engine.recording():
        losses = losses_of(model, inputs)
    everything = [p for p in model.parameters() if p.requires_grad]
    expected_rows = PerGroupEngine(scope).group_gradients(losses, group_ids, range(7)).rows
    coefficients = torch.linspace(0.1, 0.9, 7, dtype=torch.float64)[group_ids]
    weighted = (coefficients * losses).sum()
    expected = flat(torch.autograd.grad(weighted, everything, retain_graph=True, allow_unused=True), everything)

    gradients = engine.group_gradients(losses, group_ids, range(7))
    assert close(expected_rows, gradients.rows, torch.float64)
    assert not bool(gradients.rows[[group for group in range(7) if group not in GROUPS[num_groups]]].any())
    scalar = gradients.scalar(weighted, coefficients)
    assert scalar.item() == weighted.item()
    (3 * scalar).backward()
    assert close(expected, flat([p.grad for p in everything], everything) / 3, torch.float64)


@pytest.mark.parametrize(("groups", "size"), [(1, 1), (2, 1024), (3, 5000), (13, 1500)])
def test_gram_on_device_equals_the_exact_one(groups: int, size: int) -> None:
    rows = torch.randn(groups, size, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(gram_on_device(rows).double(), gram_matrix(rows), rtol=1e-6, atol=1e-5 * size**0.5)
    assert gram_on_device(rows).dtype == torch.float64


def test_gram_on_device_of_millions_of_columns() -> None:
    rows = torch.randn(2, 3_000_000, generator=torch.Generator().manual_seed(0))
    exact = rows.double() @ rows.double().T
    assert (gram_on_device(rows) - exact).abs().max() < 1e-5 * exact.max()


@pytest.mark.parametrize(
    ("name", "chosen"), [("ConvNeXt", "static_shapes"), ("GPT-2", "static_shapes"), ("timm resnet", "per_group")]
)
def test_the_first_batch_decides_between_static_engines(name: str, chosen: str) -> None:
    model, inputs = build(name)
    engine = AutoEngine(model, list(gradient_scope(model).values()), static=True)
    with engine.recording():
        losses = losses_of(model, inputs)
    engine.group_gradients(losses, torch.tensor(GROUPS[3]), range(7))
    assert engine.chosen is not None and engine.chosen.name == chosen, engine.reason


# ---- The loss -------------------------------------------------------------------------------------------------------


def run(objective: Objective, static: bool, engine: str = "auto", parts: int = 1, **options: Any) -> dict[str, Any]:
    model = Features()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scope = list(model.parameters())
    chosen = AutoEngine(model, scope, static=static) if engine == "auto" else PerGroupEngine(scope)
    loss_of = GroupRobustLoss(
        objective, INFO, scope, engine=chosen, arithmetic=DeviceArithmetic(CPU) if static else None, weight_timing="current" if parts == 1 else "next", **options
    )  # fmt: skip
    weights, values = [], []
    for x, labels, ids in batches():
        loss_of.open_window(list(ids.chunk(parts)))
        optimizer.zero_grad()
        total = 0.0
        for part, own, group_ids in zip(x.chunk(parts), labels.chunk(parts), ids.chunk(parts), strict=True):
            with loss_of.recording():
                features, logits = model(part)
            losses = F.cross_entropy(logits, own, reduction="none")
            loss = loss_of(losses, group_ids, logits=logits, labels=own, features=features) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        values.append(total)
        if loss_of.alpha is not None:
            weights.append(loss_of.alpha.double())
    group_losses = loss_of.drain_group_losses()
    return {
        "weights": torch.stack(weights) if weights else torch.zeros(0),
        "losses": torch.tensor(values, dtype=torch.float64),
        "parameters": parameters_of(model),
        "group_losses": torch.tensor([group_losses[name] for name in NAMES], dtype=torch.float64),
        "interactions": torch.zeros(0) if loss_of.interactions is None else loss_of.interactions.cosines.nan_to_num(7),
        "counters": torch.tensor([loss_of.steps, loss_of.updates, loss_of.skipped_updates]),
    }


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        (name, engine)
        for name, objective in (MOVING | PENALTIES).items()
        for engine in (("auto", "per_group") if objective.needs_gradients else ("auto",))
    ],
)
def test_static_steps_give_the_numbers_of_ordinary_ones(name: str, engine: str, parts: int) -> None:
    """Eight batches of four kinds of make-up; float32 in place of float64 is all that differs."""
    objective = (MOVING | PENALTIES)[name]
    ordinary, static = (run(objective, static, engine, parts) for static in (False, True))
    for what in ordinary:
        assert torch.allclose(ordinary[what], static[what], rtol=2e-5, atol=2e-6), what
    assert bool((static["losses"] > 0).all()) and (static["parameters"] - parameters_of(Features())).norm() > 0.1
    if name in MOVING and name != "erm_uw":
        assert (static["weights"].diff(dim=0).abs().amax(dim=1) > 1e-3).any()


@pytest.mark.parametrize("objective", [GroupDRO(step_size=0.3), CGD(step_size=0.3), *PENALTIES.values()])
def test_static_steps_of_several_processes_give_the_numbers_of_ordinary_ones(objective: Objective) -> None:
    ordinary, static = (run(objective, static, communication=Twin()) for static in (False, True))
    for what in ordinary:
        assert torch.allclose(ordinary[what], static[what], rtol=2e-5, atol=2e-6), what


def bad_batch(value: float) -> tuple[Tensor, Tensor]:
    losses = torch.tensor([1.0, 2.0, value, 3.0], requires_grad=True)
    return losses, torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_losses_that_are_not_finite_leave_the_weights_and_come_to_light_later(value: float) -> None:
    loss_of = GroupRobustLoss(GroupDRO(step_size=0.3), INFO, arithmetic=DeviceArithmetic(CPU))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(*bad_batch(1.0))
        before = loss_of.alpha
        loss_of(*bad_batch(value))
    assert before is not None and loss_of.alpha is not None and torch.equal(before, loss_of.alpha)
    with pytest.warns(GroupRobustWarning, match=r"In 1 optimizer step\(s\) up to number 2 .*\['c'\]"):
        loss_of.drain_group_losses()
    assert (loss_of.updates, loss_of.skipped_updates, loss_of.steps) == (1, 1, 2)
    raising = GroupRobustLoss(GroupDRO(step_size=0.3), INFO, arithmetic=DeviceArithmetic(CPU), nonfinite="raise")
    raising(*bad_batch(value))
    with pytest.raises(FloatingPointError, match="'c'"):
        raising.state_dict()


def test_negative_losses_are_refused_when_they_are_read() -> None:
    layer = nn.Linear(3, 1)
    loss_of = GroupRobustLoss(CGD(), INFO, list(layer.parameters()), arithmetic=DeviceArithmetic(CPU))
    loss_of(layer(torch.randn(4, 3)).squeeze(1) ** 2 - 5, torch.tensor([1, 1, 1, 1]))
    with pytest.raises(ValueError, match="needs losses >= 0, but the mean loss of group 'b'"):
        loss_of.drain_group_losses()


def test_warnings_about_the_weights_come_late_but_come() -> None:
    loss_of = GroupRobustLoss(GroupDRO(step_size=5.0), GroupInfo("ab", [5, 5]), arithmetic=DeviceArithmetic(CPU))
    for step in range(50):
        values = torch.tensor([1.0, 9.0] if step % 2 else [9.0, 1.0], requires_grad=True)
        loss_of(values, torch.tensor([0, 1]))
    with pytest.warns(GroupRobustWarning, match="The group weights swing: over the last 50 updates before step 50"):
        loss_of.drain_group_losses()


def test_state_goes_from_a_static_run_to_an_ordinary_one_and_back() -> None:
    static = GroupRobustLoss(GroupDRO(step_size=0.3), INFO, arithmetic=DeviceArithmetic(CPU))
    static(*bad_batch(2.0))
    ordinary = GroupRobustLoss(GroupDRO(step_size=0.3), INFO)
    ordinary.load_state_dict(static.state_dict())
    again = GroupRobustLoss(GroupDRO(step_size=0.3), INFO, arithmetic=DeviceArithmetic(CPU))
    again.load_state_dict(ordinary.state_dict())
    assert again.alpha is not None and static.alpha is not None and torch.equal(again.alpha, static.alpha)
    assert again.alpha.dtype == torch.float32 and ordinary.alpha is not None and ordinary.alpha.dtype == torch.float64
    assert again.updates == 1


@pytest.mark.parametrize(
    ("objective", "name"),
    [(CGD(self_term="split_half"), "split_half"), (CGD(interaction_momentum=0.5), "interaction_momentum")],
)
def test_options_with_changing_shapes_are_refused(objective: Objective, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        GroupRobustLoss(objective, INFO, [nn.Parameter(torch.zeros(1))], arithmetic=DeviceArithmetic(CPU))


# ---- The Trainer ----------------------------------------------------------------------------------------------------


def test_xla_is_what_needs_static_shapes() -> None:
    assert needs_static_shapes(torch.device("xla", 0))
    assert not any(needs_static_shapes(torch.device(kind)) for kind in ("cpu", "cuda", "mps", "meta"))


@pytest.fixture
def as_on_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_cgd.trainer.engine_choice, "needs_static_shapes", lambda device: True)
    monkeypatch.setattr("hf_cgd.objectives.base.is_on_host", lambda tensor: False)


def uneven(steps: int = 6) -> Dataset:
    """Rows whose every eight are of another make-up."""
    ids = list(itertools.islice(itertools.cycle(itertools.chain(*MAKE_UPS)), 8 * steps))
    rows = {**text_rows(8 * steps), "group": [NAMES[place] for place in ids]}
    # transformers reads in every forward pass whether a mask masks anything.
    del rows["attention_mask"]
    return Dataset.from_dict(rows)


def trainer_of(build: Build, objective: str, unlabelled: Sequence[int] = (), **args: Any) -> GroupRobustTrainer:
    options = {
        "objective": objective, "per_device_train_batch_size": 8, "train_sampling_strategy": "sequential", "max_steps": 6,
        "learning_rate": 0.3, "logging_steps": 2, **args,
    }  # fmt: skip
    if objective in ("group_dro", "cgd"):
        options.setdefault("step_size", 0.5)
    data = uneven().map(lambda row, place: {"labels": -100} if place in unlabelled else row, with_indices=True)
    return build(options, train_dataset=data, eval_dataset=uneven(2))


OBJECTIVES = ("erm", "erm_uw", "group_dro", "cgd", *PENALTIES)


@predicts_one_class
@pytest.mark.filterwarnings("ignore:No examples of the group")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("unlabelled", [(), (1, 9, 10, 30)])
def test_a_run_as_on_xla_gives_the_numbers_of_an_ordinary_one(
    trainer: Build, objective: str, unlabelled: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = trainer_of(trainer, objective, unlabelled)
    ordinary.train()
    for room in (hf_cgd.trainer.engine_choice, hf_cgd.trainer.loaders):
        monkeypatch.setattr(room, "needs_static_shapes", lambda device: True)
    static = trainer_of(trainer, objective, unlabelled)
    if unlabelled and objective in PENALTIES:
        with pytest.raises(ValueError, match=rf"{objective}.* on an XLA device: expected a label .* got 1 of -100"):
            static.train()
        return
    static.train()
    assert torch.allclose(parameters_of(ordinary.model), parameters_of(static.model), atol=2e-6)
    if objective == "cgd":
        assert static.robust_loss is not None and isinstance(static.robust_loss._engine, AutoEngine)
        assert isinstance(static.robust_loss._engine.chosen, StaticShapesEngine)
        assert torch.allclose(ordinary.group_interactions, static.group_interactions, atol=1e-5, equal_nan=True)
    for one, other in zip(ordinary.state.log_history, static.state.log_history, strict=True):
        assert one.keys() == other.keys()
        names = [name for name in one if name.startswith("group_") or name == "loss"]
        assert [one[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-5, abs=2e-6)
    assert static.evaluate()["eval_group_accuracy/a"] == ordinary.evaluate()["eval_group_accuracy/a"]
    if ordinary.group_weights is not None:
        assert torch.allclose(ordinary.group_weights, static.group_weights, atol=2e-6)
        assert static.group_weights.dtype == torch.float64


class Recorded(TorchDispatchMode):
    """Takes note of every operation, the types and shapes of what it is given, and its other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, _ = torch.utils._pytree.tree_flatten((args, kwargs or {}))
        shown = [(str(leaf.dtype), *leaf.shape) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        self.operations.append((str(func), *shown))
        return func(*args, **(kwargs or {}))

    def forbidden(self) -> list[tuple[Any, ...]]:
        """Operations whose result has a shape that depends on values, or that take a value to Python."""
        names = (
            "nonzero",
            "_local_scalar_dense",
            "masked_select",
            "unique",
            "is_nonzero",
            "equal.default",
            "repeat_interleave",
        )
        return [
            operation
            for operation in self.operations
            if any(name in operation[0] for name in names)
            or ("aten.index" in operation[0] and any(isinstance(a, tuple) and a[0] == "torch.bool" for a in operation[2:]))
        ]  # fmt: skip


def recorded_steps(trainer: GroupRobustTrainer, monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """What each training step does, from the counts of the groups to the end of the backward pass."""
    steps: list[Recorded] = []
    open_window, training_step = GroupRobustLoss.open_window, GroupRobustTrainer.training_step

    def window(*args: Any) -> None:
        steps.append(Recorded())
        with steps[-1]:
            open_window(*args)

    def step(*args: Any, **kwargs: Any) -> Tensor:
        if trainer.group_objective.name == "erm":
            steps.append(Recorded())
        with steps[-1]:
            return training_step(*args, **kwargs)

    monkeypatch.setattr(GroupRobustLoss, "open_window", window)
    monkeypatch.setattr(GroupRobustTrainer, "training_step", step)
    # On a CPU, and nowhere else, the scalar of an engine looks whether its factor is 1.
    monkeypatch.setattr("hf_cgd.gradients.autograd._WithGradients.backward", staticmethod(times_factor))
    trainer.train()
    return steps


def times_factor(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
    return (None, None, *(gradient * factor for gradient in ctx.gradients))


@pytest.mark.parametrize(
    ("objective", "engine", "timing"),
    [
        *((objective, "auto", "current") for objective in OBJECTIVES),
        ("group_dro", "auto", "next"),
        ("cgd", "auto", "next"),
        ("cgd", "per_group", "current"),
        ("cgd", "per_group", "next"),
    ],
)
def test_every_step_is_one_and_the_same_graph(
    trainer: Build, objective: str, engine: str, timing: str, as_on_xla: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on, whatever the make-up of its batch, and whether or not a log entry came before it."""
    args: dict[str, Any] = {}
    if engine == "per_group":
        args["gradient_engine"] = engine
    if timing == "next":
        args["weight_timing"] = timing
    _, *others = recorded_steps(trainer_of(trainer, objective, **args), monkeypatch)
    assert len(others) == 5 and len(others[0].operations) > 50
    for step in others:
        assert step.forbidden() == []
        assert step.operations == others[0].operations


def test_an_ordinary_run_would_be_seen_to_change_its_graph(trainer: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *others = recorded_steps(trainer_of(trainer, "cgd"), monkeypatch)
    assert len({str(step.operations) for step in others}) > 1 and all(step.forbidden() for step in others)


@pytest.mark.parametrize("objective", ["group_dro", "cgd"])
def test_a_resumed_run_as_on_xla_ends_like_one_that_was_not_interrupted(
    trainer: Build, objective: str, as_on_xla: None
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "save_only_model": False}
    whole = trainer_of(trainer, objective, **saving)
    whole.train()
    resumed = trainer_of(trainer, objective, **saving)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    assert torch.equal(parameters_of(whole.model), parameters_of(resumed.model))
    assert torch.equal(whole.group_weights, resumed.group_weights)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"forward_mode": "split"}, "forward_mode='split' runs the network on batches of another size"),
        ({"gradient_engine": "sketch"}, "Expected one of auto, single_pass, per_group"),
        ({"gradient_engine": "tensor_hooks"}, "Expected one of auto, single_pass, per_group"),
        ({"self_term": "split_half"}, "self_term='split_half' cannot be had on XLA"),
        ({"interaction_momentum": 0.9}, "interaction_momentum > 0 cannot be had on XLA"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_first_step(
    trainer: Build, args: dict[str, Any], message: str, as_on_xla: None
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(trainer, "cgd", **args)
