"""On an accelerator no step waits for the device: the CPU poses as one, and every look at a value is counted."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hf_cgd.arithmetic
from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.arithmetic import DeviceArithmetic
from hf_cgd.data.groups import GroupInfo
from hf_cgd.distributed.communication import Communication
from hf_cgd.gradients import AutoEngine, GradientEngine, PerGroupEngine, TensorHookEngine
from hf_cgd.objectives import CGD, CORAL, ERMUW, IRM, PGI, GroupDRO, Objective
from hf_cgd.robust_loss import GroupRobustLoss
from hf_cgd.trainer.host_ids import HOST_IDS

CPU = torch.device("cpu")
GROUPS = GroupInfo(["a", "b", "c", "absent"], [9, 9, 9, 9], class_counts=((5, 4, 4, 5), (4, 5, 5, 4)))
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
LABELS = torch.tensor([0, 1, 0, 1, 0, 1, 1, 0])
READING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique2", "_unique2"}
"""Operations whose result, or its shape, the host has to wait for."""
READING_METHODS = {"tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__"}


class Waits:
    """Follows what stands for a tensor on a device, and notes whatever makes the host look at its values."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}
        self.found: list[str] = []

    def put_on_device(self, value: Any) -> Any:
        """Count the tensors in a value as the device's."""
        for part in _tensors(value):
            storage = part.untyped_storage()
            # Kept, or its number would be given to another one.
            self._storages[storage._cdata] = storage
        return value

    def is_on_device(self, value: Any) -> bool:
        return any(part.untyped_storage()._cdata in self._storages for part in _tensors(value))

    def note(self, name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and "/hf_cgd/" not in frame.f_code.co_filename:
            frame = frame.f_back
        place = "elsewhere" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.found.append(f"{name} at {place}")


class Operations(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        on_device = self.waits.is_on_device((args, kwargs))
        masks = name in ("index", "index_put", "index_put_") and any(
            part.dtype == torch.bool for part in _tensors(args[1])
        )
        if on_device and (name in READING or masks):
            self.waits.note(name)
        result = func(*args, **(kwargs or {}))
        return self.waits.put_on_device(result) if on_device else result


class Methods(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING_METHODS and self.waits.is_on_device(args):
            self.waits.note(name)
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """What is sent from the host arrives on the device that the CPU poses as, and nothing there may be looked at."""
    found = Waits()
    send = hf_cgd.arithmetic.moved

    def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        there = send(tensor, device, dtype)
        return there if found.is_on_device(there) else found.put_on_device(there.clone())

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("hf_cgd."):
            if getattr(module, "moved", None) is send:
                monkeypatch.setattr(module, "moved", moved)
            if hasattr(module, "is_on_host"):
                monkeypatch.setattr(module, "is_on_host", lambda tensor: not found.is_on_device(tensor))
    return found


class Network(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.norm(self.first(x)).tanh()
        return self.head(features), features


def engine_of(name: str, network: nn.Module, scope: list[nn.Parameter]) -> GradientEngine:
    if name == "per_group":
        return PerGroupEngine(scope)
    if name == "tensor_hooks":
        return TensorHookEngine(network, scope)
    if name == "cut":
        engine = AutoEngine(network, scope)
        del engine._candidates[0]
        return engine
    return AutoEngine(network, scope, name)  # type: ignore[arg-type]


class Run:
    """Steps of a robust loss on the network, with numbers where `arithmetic` says."""

    def __init__(self, objective: Objective, engine: str | None, way: str, arithmetic: Any = None) -> None:
        torch.manual_seed(0)
        self.network = Network()
        self.micro_batches = 2 if way == "accumulation" else 1
        scope = list(self.network.parameters())
        communication = Communication(lambda tensor: 2 * tensor, 2, 0) if way == "processes" else None
        scale: Any = None
        if way == "scaler":
            scale = (lambda: torch.tensor(8.0)) if arithmetic is None else (lambda: self.scale)
        late = way == "accumulation" or engine == "tensor_hooks"
        self.loss_of = GroupRobustLoss(
            objective, GROUPS, scope if objective.needs_gradients else (),
            engine=engine_of(engine, self.network, scope) if engine else None,
            weight_timing="next" if late else "current", communication=communication,
            loss_scale=scale, arithmetic=arithmetic,
        )  # fmt: skip
        self.scale = torch.tensor(8.0)
        self.inputs = torch.randn(self.micro_batches, 8, 5)
        self.labels = LABELS.clone()

    def tensors(self) -> list[Tensor]:
        """What is on the device."""
        return [*self.network.parameters(), self.inputs, self.labels, self.scale]

    def step(self) -> None:
        self.loss_of.open_window([IDS] * self.micro_batches)
        for x in self.inputs.unbind():
            with self.loss_of.recording():
                logits, features = self.network(x)
            losses = F.cross_entropy(logits, self.labels, reduction="none")
            given = {"logits": logits, "labels": self.labels, "features": features}
            read = {name: given[name] for name in self.loss_of.objective.reads if name in given}
            loss = self.loss_of(losses, IDS, **read)
            if self.loss_of._loss_scale is not None:
                loss = loss * self.scale
            loss.backward()
            self.loss_of.after_backward()
        for parameter in self.network.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None


OBJECTIVES = [ERMUW(), GroupDRO(), IRM(), PGI(), CORAL()]
ENGINES = ["auto", "cut", "sketch", "per_group", "tensor_hooks"]
WAYS = ["plain", "accumulation", "processes", "scaler"]
CASES = [(objective, None, way) for objective in OBJECTIVES for way in WAYS]
CASES += [(CGD(), engine, way) for engine in ENGINES for way in WAYS if (engine, way) != ("tensor_hooks", "scaler")]
CASES += [
    (CGD(self_term="split_half"), "auto", way) for way in WAYS
] + [(CGD(interaction_momentum=0.5), "auto", way) for way in WAYS]  # fmt: skip
CASES += [(CGD(cross_terms="consensus"), "auto", way) for way in ("plain", "processes")]
CASES += [(CGD(variant="reference"), "auto", "plain"), (CGD(scaling="gradient"), "per_group", "processes")]


@pytest.mark.parametrize(("objective", "engine", "way"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_a_step_between_log_entries_waits_for_no_device(
    waits: Waits, objective: Objective, engine: str | None, way: str
) -> None:
    here = Run(objective, engine, way)
    there = Run(objective, engine, way, DeviceArithmetic(CPU, fixed_shapes=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            here.step()
            there.step()
        waits.found.clear()
        waits.put_on_device(there.tensors())
        there.loss_of.drain_group_losses()
        with Methods(waits), Operations(waits):
            there.step()
            there.step()
        here.step()
        here.step()
    assert waits.found == []
    # The numbers are those of a run on the host.
    for one, other in zip(here.network.parameters(), there.network.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    if objective.has_weights:
        assert torch.allclose(here.loss_of.alpha, there.loss_of.alpha, rtol=1e-6)
    if here.loss_of.interactions is not None:
        cosines = here.loss_of.interactions.cosines, there.loss_of.interactions.cosines
        assert torch.allclose(*cosines, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert here.loss_of.updates == there.loss_of.updates


def test_a_look_at_the_device_is_noticed(waits: Waits) -> None:
    value = waits.put_on_device(torch.ones(3))
    looks = [
        lambda: bool(value.sum() > 1), lambda: value[value > 0], value.tolist, value.nonzero,
        lambda: (value * 2).numpy(), lambda: float(hf_cgd.arithmetic.moved(torch.ones(()), CPU)),
    ]  # fmt: skip
    with Methods(waits), Operations(waits):
        for place, look in enumerate(looks[:-1]):
            look()
            assert len(waits.found) > place
        waits.found.clear()
        torch.ones(3).tolist()
        assert waits.found == []


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_gradient_that_is_not_finite_moves_no_weight_on_a_device(momentum: float) -> None:
    run = Run(CGD(interaction_momentum=momentum), "per_group", "plain", DeviceArithmetic(CPU, fixed_shapes=False))
    run.inputs[0, 0] = float("nan")
    before = run.loss_of.alpha.clone()
    run.loss_of.open_window([IDS])
    logits, _ = run.network(run.inputs[0])
    run.loss_of(F.cross_entropy(logits, LABELS, reduction="none"), IDS)
    assert torch.equal(run.loss_of.alpha, before)
    with pytest.warns(UserWarning, match="not finite"):
        run.loss_of.drain_group_losses()
    assert (run.loss_of.updates, run.loss_of.skipped_updates) == (0, 1)
    # What was left out is no part of the running averages.
    assert run.loss_of.state_tensors() == {}
    clean = Run(CGD(interaction_momentum=momentum), "per_group", "plain", DeviceArithmetic(CPU, fixed_shapes=False))
    run.inputs.copy_(clean.inputs)
    run.step()
    clean.step()
    assert torch.allclose(run.loss_of.alpha, clean.loss_of.alpha)


def test_an_update_that_a_scaler_takes_back_is_counted_once_on_a_device() -> None:
    run = Run(CGD(), "per_group", "scaler", DeviceArithmetic(CPU, fixed_shapes=False))
    before = run.loss_of.alpha.clone()
    run.inputs[0, 0, 0] = 1e30
    run.scale.fill_(1e30)
    run.loss_of.open_window([IDS])
    logits, _ = run.network(run.inputs[0])
    run.loss_of(F.cross_entropy(logits, LABELS, reduction="none"), IDS)
    run.loss_of.undo_update()
    run.loss_of.drain_group_losses()
    assert torch.equal(run.loss_of.alpha, before)
    assert (run.loss_of.updates, run.loss_of.skipped_updates) == (0, 1)


class WithLoss(nn.Module):
    """Two layers that compute a loss of their own where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.classifier = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.classifier(self.first(x).relu())
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("objective", ["erm", "erm_uw", "group_dro", "cgd"])
def test_a_step_of_the_trainer_waits_for_no_device(
    waits: Waits, objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's part of a step as well: ids, labels, the losses of the examples; plain ERM among the objectives."""
    monkeypatch.setattr("hf_cgd.trainer.engine_choice.arithmetic_on", lambda device: DeviceArithmetic(CPU, False))
    torch.manual_seed(0)
    rows = [{"x": torch.randn(5).tolist(), "labels": place % 2, "group": "abc"[place % 3]} for place in range(8)]
    args = GroupRobustConfig(str(tmp_path), objective=objective, group_column="group", use_cpu=True, report_to="none")
    trainer = GroupRobustTrainer(model=WithLoss(), args=args, train_dataset=rows)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])

    def step() -> None:
        batch = {"x": x, "labels": labels, "group": group_ids, HOST_IDS: ids.numpy()}
        trainer.training_step(trainer.model, batch)

    x, labels, group_ids = torch.randn(8, 5), LABELS.clone(), ids.clone()
    step()
    step()
    waits.found.clear()
    waits.put_on_device([*trainer.model.parameters(), x, labels, group_ids])
    trainer.robust_loss.drain_group_losses()
    with Methods(waits), Operations(waits):
        step()
        step()
    assert waits.found == []
    losses = trainer.robust_loss.drain_group_losses()
    assert set(losses) == {"a", "b", "c"}, "the steps were counted"


@pytest.mark.parametrize("of_device", [False, True])
def test_a_run_without_a_log_tells_at_its_end_of_losses_that_are_not_finite(
    of_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host the step itself tells; on a device, where no step looks, nothing else would."""
    if of_device:
        monkeypatch.setattr("hf_cgd.trainer.engine_choice.arithmetic_on", lambda device: DeviceArithmetic(CPU, False))
    torch.manual_seed(0)
    rows = [
        {"x": [1.0] * 4 + [1e38 * (place == 5)], "labels": place % 2, "group": "ab"[place % 2]} for place in range(8)
    ]
    options = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "use_cpu": True, "max_steps": 2}
    args = GroupRobustConfig(
        str(tmp_path), objective="group_dro", group_column="group", nonfinite="raise", learning_rate=0.0, **options
    )
    model = WithLoss()
    with torch.no_grad():
        model.first.weight.fill_(1e3)
    with pytest.raises(
        FloatingPointError, match=r"step\(s\) up to number 2.*b" if of_device else "In optimizer step 1.*b"
    ):
        GroupRobustTrainer(model=model, args=args, train_dataset=rows).train()
