"""Group weights with parameters that FSDP or DeepSpeed shards over two processes: those of one process that does not."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType, DynamoBackend
from paths import SUPPORT
from programs import run_together
from sharded_processes import SETUPS, result_of, train
from tiny import predicts_one_class, tiny_distilbert
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from hf_cgd import CGD, GroupDRO, GroupInfo, GroupRobustTrainer
from hf_cgd.models.batch_norm import freeze_batch_norm
from hf_cgd.trainer.engine_choice import EngineChoice
from hf_cgd.trainer.sharding import is_sharded, require_supported, require_that_fsdp_runs

WRAPPED = {
    "fsdp1": ("FullyShardedDataParallel", ["Parameter"]),
    "fsdp2": ("FSDPDistilBertForSequenceClassification", ["DTensor"]),
    "zero1": ("DeepSpeedEngine", ["Parameter"]),
    "zero2": ("DeepSpeedEngine", ["Parameter"]),
    "zero3": ("DeepSpeedEngine", ["Parameter"]),
}
EVERY_SETUP = [pytest.param(launcher, name, id=name) for launcher, setups in SETUPS.items() for name in setups]
RESUMED = [case for case in EVERY_SETUP if "save_strategy" in SETUPS[case.values[0]][case.values[1]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What the two processes of a launcher found; each launcher is started once."""
    found: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}

    def of(launcher: str) -> list[dict[str, Any]]:
        assert launcher not in failed, failed[launcher]
        if launcher not in found:
            failed[launcher] = "did not end"
            place = tmp_path_factory.mktemp(launcher)
            try:
                run_together(2, "-W", "ignore", SUPPORT / "sharded_processes.py", launcher, place)
            except AssertionError as error:
                failed[launcher] = str(error)
                raise
            del failed[launcher]
            found[launcher] = [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(2)]
        return found[launcher]

    return of


def unsharded(tmp_path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The same run by one process: one batch, one backward pass per group, weights that serve the next step."""
    kept = {"objective", "interaction_momentum", "lora", "gradient_engine"}
    changes = {name: value for name, value in changes.items() if name in kept}
    if "objective" not in changes:
        changes = {"gradient_engine": "per_group", **changes, "weight_timing": "next"}
    return result_of(train(str(tmp_path), **changes))


@pytest.mark.slow
@predicts_one_class
@pytest.mark.parametrize(("launcher", "name"), EVERY_SETUP)
def test_two_sharded_processes_equal_one(
    results: Callable[[str], list[dict[str, Any]]], tmp_path: Path, launcher: str, name: str
) -> None:
    first, second = (rank[name] for rank in results(launcher))
    one = unsharded(tmp_path, SETUPS[launcher][name])
    wrapped, kinds = WRAPPED[name.split()[0]]
    is_lora, is_low = "lora" in name, "bf16" in name
    assert (first["world"], one["world"]) == (2, 1)
    assert first["wrapped"] == (wrapped.replace("DistilBert", "PeftModel") if is_lora else wrapped)
    assert first["parameter_types"] == kinds
    assert first["precision"] == ("bf16" if is_low else "no")
    if "group_dro" not in name:
        assert first["engine"] == second["engine"] == "tensor_hooks" and first["timing"] == "next"
        assert max(first["weights"]) - min(first["weights"]) > 0.05
    assert first["updates"] == one["updates"] == 5
    assert first["weights"] == second["weights"]
    assert first["weights"] == pytest.approx(one["weights"], abs=2e-3 if is_low else 1e-6)
    found, expected = torch.tensor(first["parameters"]), torch.tensor(one["parameters"])
    assert torch.allclose(found, expected, rtol=0, atol=5e-3 if is_low else 1e-5)
    assert first["losses"] == pytest.approx(one["losses"], rel=2e-2 if is_low else 1e-5)
    assert first["metrics"] == pytest.approx(one["metrics"], rel=2e-2 if is_low else 1e-4)
    assert first["metrics"] == second["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "name"), RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(
    results: Callable[[str], list[dict[str, Any]]], launcher: str, name: str
) -> None:
    for rank in results(launcher):
        straight, resumed = rank[name], rank[f"{name} resumed"]
        assert resumed["weights"] == straight["weights"]
        assert resumed["parameters"] == straight["parameters"]
        assert resumed["updates"] == straight["updates"] == 5
        assert resumed["losses"] == straight["losses"]
        assert resumed["metrics"] == straight["metrics"]


# ---- What is refused ------------------------------------------------------------------------------------------------


def accelerator(kind: DistributedType = DistributedType.FSDP, **changes: Any) -> Any:
    parts = {"distributed_type": kind, "mixed_precision": "no", "parallelism_config": None, "num_processes": 2}
    state = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=None)
    for plugin in ("fsdp_plugin", "deepspeed_plugin", "dynamo_plugin"):
        setattr(state, plugin, changes.pop(plugin, None))
    return SimpleNamespace(**{**parts, **changes, "state": state})


def deepspeed_plugin(**zero: Any) -> Any:
    return SimpleNamespace(deepspeed_config={"zero_optimization": zero})


ARGS = SimpleNamespace(fsdp=False, fsdp_config=None, torch_compile=False, parallelism_config=None)
SHARDED_AND = {
    "fp16": (accelerator(mixed_precision="fp16"), {}, "fp16.*bf16 is fine"),
    "compile": (accelerator(), {"torch_compile": True}, "torch_compile"),
    "a launcher's compile": (
        accelerator(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.INDUCTOR)),
        {},
        "tensor hooks never fire",
    ),
    "offload": (accelerator(fsdp_plugin=SimpleNamespace(cpu_offload=CPUOffloadPolicy())), {}, "offloaded"),
    "zero offload": (
        accelerator(DistributedType.DEEPSPEED, deepspeed_plugin=deepspeed_plugin(offload_param={"device": "cpu"})),
        {},
        "offload_param",
    ),
    "tensor parallel": (
        accelerator(parallelism_config=SimpleNamespace(tp_enabled=True, cp_enabled=False, sp_enabled=False)),
        {},
        "tensor, context or sequence",
    ),
    "megatron": (accelerator(DistributedType.MEGATRON_LM), {}, "Megatron"),
    "xla": (accelerator(), {"fsdp": True, "fsdp_config": {"xla": True}}, "FSDP on XLA"),
}


@pytest.mark.parametrize("case", SHARDED_AND)
def test_what_is_untested_or_wrong_with_sharding_is_refused(case: str) -> None:
    kind, changes, words = SHARDED_AND[case]
    args = SimpleNamespace(**{**vars(ARGS), **changes})
    with pytest.raises(ValueError, match=rf"(?s)'cgd'.*{words}.*group_dro"):
        require_supported("cgd", torch.nn.Linear(2, 2), args, kind, "auto", None)


def test_engines_and_timings_that_sharding_rules_out_are_named() -> None:
    plain, model = accelerator(fsdp_plugin=SimpleNamespace(cpu_offload=OffloadPolicy())), torch.nn.Linear(2, 2)
    for engine in ("auto", "tensor_hooks", "sketch"):
        require_supported("cgd", model, ARGS, plain, engine, "next")
    with pytest.raises(ValueError, match="'per_group' takes gradients of parameters.*tensor_hooks"):
        require_supported("cgd", model, ARGS, plain, "per_group", None)
    with pytest.raises(ValueError, match="weight_timing='current'.*'next'"):
        require_supported("cgd", model, ARGS, plain, "auto", "current")
    unsharded_kind = accelerator(DistributedType.MULTI_CPU)
    compiled = SimpleNamespace(**{**vars(ARGS), "torch_compile": True})
    with pytest.raises(ValueError, match="'tensor_hooks' does not see the layers of compiled code.*'auto'"):
        require_supported("cgd", model, compiled, unsharded_kind, "tensor_hooks", None)
    require_supported("cgd", model, compiled, unsharded_kind, "auto", None)
    require_supported("cgd", model, ARGS, unsharded_kind, "per_group", "current")
    assert is_sharded(model, plain) and not is_sharded(model, unsharded_kind)


def network(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 4), *layers, torch.nn.Linear(4, 2))


def frozen(network: torch.nn.Module) -> torch.nn.Module:
    assert freeze_batch_norm(network) == 1
    return network


SYNCED = [network(torch.nn.SyncBatchNorm(4)), network(torch.nn.SyncBatchNorm(4)).eval()]
UNSYNCED = [network(torch.nn.BatchNorm1d(4)), frozen(network(torch.nn.SyncBatchNorm(4))), network()]


def test_a_forward_pass_for_each_group_is_refused_where_each_waits_for_all(config: Callable[..., Any]) -> None:
    """Sharded parameters are gathered in it, SyncBatchNorm sums over the processes in it; frozen it does not."""
    split = EngineChoice(config(forward_mode="split"))
    ddp, alone = accelerator(DistributedType.MULTI_CPU), accelerator(DistributedType.NO, num_processes=1)
    for sharded in (accelerator(fsdp_plugin=SimpleNamespace()), accelerator(DistributedType.DEEPSPEED)):
        with pytest.raises(ValueError, match="forward_mode='split' .* sharded parameters .*'joint'"):
            split.require_supported(GroupDRO(), network(), sharded)
    for synced in SYNCED:
        modes = [layer.training for layer in synced.modules()]
        with pytest.raises(ValueError, match="forward_mode='split' .* SyncBatchNorm .*'joint'"):
            split.require_supported(GroupDRO(), synced, ddp)
        assert [layer.training for layer in synced.modules()] == modes
        EngineChoice(config()).require_supported(GroupDRO(), synced, ddp)
        split.require_supported(GroupDRO(), synced, alone)
    for unsynced in UNSYNCED:
        split.require_supported(GroupDRO(), unsynced, ddp)


def test_group_gradients_through_sync_batch_norm_are_refused(config: Callable[..., Any]) -> None:
    """The passes of several processes are not of the same groups, nor as many."""
    groups, choice = GroupInfo(["a", "b"], [5, 5]), EngineChoice(config(gradient_layers=["0.weight"]))
    ddp = accelerator(DistributedType.MULTI_CPU, scaler=None, reduce=None, process_index=0)
    alone = accelerator(DistributedType.NO, num_processes=1, scaler=None)
    for synced in SYNCED:
        with pytest.raises(ValueError, match="SyncBatchNorm each pass adds up .*freeze_batch_norm.*group_dro"):
            choice.build_loss(CGD(), groups, synced, ddp)
        choice.build_loss(CGD(), groups, synced, alone)
        choice.build_loss(GroupDRO(), groups, synced, ddp)
        # A pass to the head ends before it.
        EngineChoice(config(gradient_layers="head")).build_loss(CGD(), groups, synced, ddp)
    for unsynced in UNSYNCED:
        choice.build_loss(CGD(), groups, unsynced, ddp)


def test_a_run_of_a_compiled_network_says_so_once(
    config: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The loss is built when the trainer is and when a run begins."""
    groups, alone = GroupInfo(["a", "b"], [5, 5]), accelerator(DistributedType.NO, num_processes=1, scaler=None)
    compiled = network()
    compiled.compile(backend="eager")
    for model, lines in ((compiled, 1), (network(), 0)):
        caplog.clear()
        choice = EngineChoice(config(gradient_layers="all"))
        for _ in range(2):
            loss = choice.build_loss(CGD(), groups, model, alone)
        assert "torch.compile" not in caplog.text
        choice.log_run(loss, model)
        assert caplog.text.count("torch.compile: group gradients are compared on the first step") == lines


def test_a_static_graph_is_refused_where_a_pass_for_group_gradients_would_be_taken_for_its_only_one(
    config: Callable[..., Any],
) -> None:
    """Trained on two processes so, their parameters were 1e-2 apart after five steps, without a word."""
    groups = GroupInfo(["a", "b"], [5, 5])
    static = {"ddp_handler": SimpleNamespace(static_graph=True), "scaler": None, "reduce": None, "process_index": 0}
    ddp = accelerator(DistributedType.MULTI_CPU, **static)
    for engine in ("auto", "per_group", "sketch"):
        choice = EngineChoice(config(gradient_layers=["0.weight"], gradient_engine=engine))
        with pytest.raises(ValueError, match="ddp_static_graph=True .*models of their own.*'tensor_hooks'"):
            choice.build_loss(CGD(), groups, network(), ddp)
        choice.build_loss(GroupDRO(), groups, network(), ddp)
        choice.build_loss(CGD(), groups, network(), accelerator(DistributedType.NO, **{**static, "num_processes": 1}))
        each = {**static, "ddp_handler": SimpleNamespace(static_graph=False)}
        choice.build_loss(CGD(), groups, network(), accelerator(DistributedType.MULTI_CPU, **each))
    hooks = EngineChoice(config(gradient_layers=["0.weight"], gradient_engine="tensor_hooks"))
    hooks.build_loss(CGD(), groups, network(), ddp)


def test_fsdp_that_accelerate_leaves_out_is_noticed(
    trainer: Callable[..., GroupRobustTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs accelerate sets up something else without a word."""
    trainer()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP was asked for, but accelerate runs 1 process"):
        trainer(model=tiny_distilbert())
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    require_that_fsdp_runs(accelerator(DistributedType.FSDP, fsdp_plugin=SimpleNamespace()))
