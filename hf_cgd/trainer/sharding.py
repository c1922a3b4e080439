"""Refuses group gradients where a model is spread over processes in a way that would make them wrong."""

import os
from collections.abc import Iterator

from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

SHARDED_ENGINES = ("auto", "tensor_hooks", "sketch")
"""Values of `gradient_engine` that work with sharded parameters."""


def is_sharded(model: nn.Module, accelerator: Accelerator) -> bool:
    """Whether FSDP or DeepSpeed shards the parameters, or a call of `fully_shard` has done so."""
    by_accelerate = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    return by_accelerate or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def is_compiled(args: TrainingArguments, accelerator: Accelerator) -> bool:
    """Whether the network will be compiled: by `torch_compile`, or by the launcher's `--dynamo_backend`."""
    launched = getattr(accelerator.state, "dynamo_plugin", None)
    return args.torch_compile or (launched is not None and launched.backend != DynamoBackend.NO)


def require_that_fsdp_runs(accelerator: Accelerator) -> None:
    """Raise a ValueError where FSDP was asked for, and accelerate set up something else without a word.

    On CPUs it sets up plain DDP, or processes that never average their gradients.
    """
    wanted = getattr(accelerator.state, "fsdp_plugin", None) is not None
    wanted = wanted or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if wanted and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"FSDP was asked for, but accelerate runs {accelerator.num_processes} process(es) as "
            f"{accelerator.distributed_type.value}: it has FSDP on GPUs and the like only, not on CPUs. Launch "
            "without FSDP (DDP), or on such devices."
        )


def require_supported(
    objective: str,
    model: nn.Module,
    args: TrainingArguments,
    accelerator: Accelerator,
    engine: str,
    timing: str | None,
) -> None:
    """Raise a ValueError unless group gradients are exact for the way in which the model is spread over processes.

    Args:
        objective: its name, for the message.
        model: the network.
        args: the run's arguments.
        accelerator: the Trainer's.
        engine: `gradient_engine`.
        timing: `weight_timing`, None where the set-up decides.
    """
    alternative = "Use plain data parallelism (DDP), or objective='group_dro', which needs the losses only."
    for reason in _parallelism_against(model, args, accelerator):
        raise ValueError(
            f"objective={objective!r} takes gradients of the groups, which {reason} does not go with. {alternative}"
        )
    if not is_sharded(model, accelerator):
        if engine == "tensor_hooks" and is_compiled(args, accelerator):
            raise ValueError(
                "gradient_engine='tensor_hooks' does not see the layers of compiled code (torch_compile, or a "
                "launcher's dynamo_backend). Use gradient_engine='auto', or do not compile."
            )
        return
    if engine not in SHARDED_ENGINES:
        raise ValueError(
            f"gradient_engine={engine!r} takes gradients of parameters, which are sharded here "
            f"({accelerator.distributed_type.value}). Expected one of {', '.join(SHARDED_ENGINES)}."
        )
    if timing == "current":
        raise ValueError(
            "weight_timing='current' needs the gradients before the backward pass of the step, which FSDP and "
            "DeepSpeed do not allow. Leave weight_timing unset: it is 'next' with sharded parameters."
        )
    for reason in _sharding_against(args, accelerator):
        raise ValueError(f"objective={objective!r} with sharded parameters cannot be had with {reason}. {alternative}")


def _parallelism_against(model: nn.Module, args: TrainingArguments, accelerator: Accelerator) -> Iterator[str]:
    plan = getattr(accelerator, "parallelism_config", None) or getattr(args, "parallelism_config", None)
    if plan is not None and (plan.tp_enabled or plan.cp_enabled or plan.sp_enabled):
        yield "tensor, context or sequence parallelism"
    if (getattr(model, "tp_size", None) or 1) > 1:
        yield "tensor parallelism"
    if getattr(model, "is_distributed_loading_by_transformers", False):
        yield "a model that from_pretrained(distributed_config=…) spread"
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        yield "Megatron-LM"
    if args.fsdp and isinstance(args.fsdp_config, dict) and args.fsdp_config.get("xla", False):
        yield "FSDP on XLA"


def _sharding_against(args: TrainingArguments, accelerator: Accelerator) -> Iterator[str]:
    if accelerator.mixed_precision == "fp16":
        yield "fp16, where the gradients of groups with small weights vanish (bf16 is fine)"
    if is_compiled(args, accelerator):
        yield "torch_compile, under which tensor hooks never fire"
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    offload = getattr(fsdp, "cpu_offload", None)
    if isinstance(offload, CPUOffloadPolicy) or getattr(offload, "offload_params", False):
        yield "parameters offloaded to the CPU, which has not been tested"
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    zero = {} if deepspeed is None else deepspeed.deepspeed_config.get("zero_optimization", {})
    for key in ("offload_param", "offload_optimizer"):
        if zero.get(key, {}).get("device", "none") != "none":
            yield f"DeepSpeed's {key}, which has not been tested"
