"""Run by every process of tests/trainer/test_sharding.py: trains under one set-up after the other, and writes what came out.

Accelerate turns FSDP on for GPUs and the like only; here it is told that two CPU processes are such, so that its own
plugin and the Trainer's own path run with real sharding over gloo. DeepSpeed needs nothing of the kind.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tiny import text_dataset, tiny_distilbert, with_lora
from transformers import DistilBertForSequenceClassification

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.cli import run_program

CHECKPOINTED = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}
ACCUMULATING = {"gradient_accumulation_steps": 2}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
SETUPS: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp": {
        "fsdp2": CHECKPOINTED,
        "fsdp2 accumulating": {**ACCUMULATING, **CHECKPOINTING},
        "fsdp2 sketch": {"gradient_engine": "sketch"},
        "fsdp2 bf16": {},
        "fsdp2 lora": {"lora": True},
        "fsdp2 group_dro": {"objective": "group_dro"},
        "fsdp1": CHECKPOINTED,
        "fsdp1 flat": ACCUMULATING,
    },
    "zero": {
        "zero1": {},
        "zero2": CHECKPOINTED,
        "zero2 accumulating": {**ACCUMULATING, **CHECKPOINTING},
        "zero3": {**CHECKPOINTED, "interaction_momentum": 0.5},
        "zero3 loaded in shards": {},
        "zero3 lora": {"lora": True},
        "zero3 group_dro": {"objective": "group_dro"},
    },
}
"""By launcher and set-up, the changes to the run."""


def train(
    output_dir: str, resume: str | None = None, lora: bool = False, shards: str | None = None, **changes: Any
) -> GroupRobustTrainer:
    """Five steps of eight rows, on however many processes there are."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    accumulation = changes.get("gradient_accumulation_steps", 1)
    options = dict(
        objective="cgd", group_column="group", max_steps=5, use_cpu=world == 1, ddp_backend="gloo" if world > 1 else None, report_to=[],
        per_device_train_batch_size=8 // world // accumulation, per_device_eval_batch_size=2, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0, save_strategy="no", logging_steps=1,
        disable_tqdm=True, train_sampling_strategy="sequential", step_size=0.5,
    )  # fmt: skip
    args = GroupRobustConfig(output_dir, **{**options, **changes})
    # Groups 0 and 2 fill the first rows of each batch, so that the processes hold different groups.
    data = text_dataset(40)
    data = data.remove_columns("group").add_column("group", [0, 0, 0, 2, 1, 1, 2, 1] * 5)
    model = with_lora(tiny_distilbert()) if lora else tiny_distilbert()
    if shards is not None:
        model = DistilBertForSequenceClassification.from_pretrained(shards)
        assert all(parameter.numel() == 0 for parameter in model.parameters())
    trainer = GroupRobustTrainer(model, args, train_dataset=data, eval_dataset=text_dataset(7, groups=3))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def result_of(trainer: GroupRobustTrainer, start: float = 0.0) -> dict[str, Any]:
    """What came out, with the parameters whole."""
    # Some set-ups give the first process all of it and the others nothing.
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    kinds = sorted({type(parameter).__name__ for parameter in trainer.model_wrapped.parameters()})
    metrics = trainer.evaluate()
    names = sorted(state)
    engine = trainer.robust_loss._engine
    precision = trainer.accelerator.mixed_precision
    return {
        "world": trainer.accelerator.num_processes,
        "wrapped": type(trainer.model_wrapped).__name__,
        "parameter_types": kinds,
        "engine": None if engine is None else engine.name,
        "seconds": round(time.monotonic() - start, 1),
        "precision": precision,
        "updates": trainer.robust_loss.updates,
        "timing": trainer.robust_loss.weight_timing,
        "weights": trainer.group_weights.tolist(),
        "parameters": [value for name in names for value in state[name].double().flatten().tolist()],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "metrics": {k: v for k, v in metrics.items() if "accuracy" in k or "loss" in k or "count" in k},
    }


def write_deepspeed_config(path: Path, stage: int, accumulation: int) -> str:
    """A DeepSpeed config for plain SGD in float32."""
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}
    config = {
        "zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.0,
        "gradient_accumulation_steps": accumulation, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return str(path)


def prepare(name: str, output_dir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Say to accelerate what the set-up is; the arguments that say it to the Trainer."""
    kind = name.split()[0]
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if "bf16" in name else "no"
    if kind.startswith("zero"):
        path = output_dir / f"{name} {os.environ['RANK']}.json"
        accumulation = changes.get("gradient_accumulation_steps", 1)
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = write_deepspeed_config(path, int(kind[-1]), accumulation)
        in_shards = "in shards" in name
        os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = str(in_shards).lower()
        return {"shards": str(output_dir / os.environ["RANK"])} if in_shards else {}
    config: dict[str, Any] = {
        "version": int(kind[-1]), "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["TransformerBlock"], "state_dict_type": "SHARDED_STATE_DICT",
    }  # fmt: skip
    config["cpu_ram_efficient_loading"] = kind == "fsdp2"
    if kind == "fsdp1":
        config |= {"use_orig_params": "flat" not in name, "sync_module_states": False}
    return {"fsdp": True, "fsdp_config": config}


def main(launcher: str, output_dir: Path) -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if launcher == "fsdp":
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    else:
        import deepspeed.ops

        tiny_distilbert().save_pretrained(output_dir / os.environ["RANK"])
        # Processes of one machine that share memory need a C++ compiler; these talk over gloo.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    results = {}
    for name, changes in SETUPS[launcher].items():
        place = output_dir / name
        start = time.monotonic()
        trainer = train(str(place), **changes, **prepare(name, output_dir, changes))
        results[name] = result_of(trainer, start)
        if changes.get("save_strategy") == "steps":
            start = time.monotonic()
            resumed = train(str(place), str(place / "checkpoint-3"), **changes, **prepare(name, output_dir, changes))
            results[f"{name} resumed"] = result_of(resumed, start)
    (output_dir / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The end of every run collects garbage: not through all modules each time, which takes longer than the run.
    gc.freeze()
    run_program(main, sys.argv[1], Path(sys.argv[2]))
