"""Stand-ins for modules whose parameters are sharded: the same computation, with parameters of their own."""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_cgd.gradients.compiled import compiled_parts
from hf_cgd.gradients.scope import whole_shape


def placeholder_of(parameter: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    """A parameter of the whole shape in the memory of one element; `device` None is where the parameter is."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    zero = torch.zeros((), device=parameter.device if device is None else device, dtype=dtype)
    return nn.Parameter(zero.expand(whole_shape(parameter)))


def stand_in_for(module: nn.Module, placeholders: dict[str, nn.Parameter]) -> nn.Module:
    """A module that computes what `module` does, with no hooks, and with the placeholders for its parameters."""
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    bare = set(vars(twin))
    vars(twin).update({name: value for name, value in vars(module).items() if name not in bare})
    for name, child in module.named_children():
        twin.add_module(name, child)
    for name, buffer in module._buffers.items():
        # One that is None, too: norms without running statistics look for it.
        twin.register_buffer(name, buffer)
    for name, parameter in module._parameters.items():
        # A bias that is None has to be there as None.
        frozen = None if parameter is None else nn.Parameter(torch.zeros(()).expand(whole_shape(parameter)), False)
        twin.register_parameter(name, placeholders.get(name, frozen))
    return twin


def own_names(module: nn.Module) -> list[str]:
    """Names of the parameters that the module holds itself."""
    return [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]


def set_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Give the module these parameters, by name."""
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)


def refuse_flat_or_compiled(model: nn.Module) -> None:
    """Check that the parameters have their shapes and that hooks on outputs run.

    Raises:
        ValueError: the model, or a part of it, is wrapped by FSDP or compiled.
    """
    for part in model.modules():
        if isinstance(part, FullyShardedDataParallel):
            raise ValueError(
                "The model was wrapped by FSDP before the gradient scope was chosen, so that the parameters have lost "
                "their shapes. Pass the plain model (model=, not model_init=) and let the Trainer wrap it, or use "
                "FSDP2 (fsdp_version: 2)."
            )
    for part in compiled_parts(model):
        raise ValueError(
            f"{type(part).__name__} is compiled, and tensor hooks on what a compiled module puts out never fire. "
            "Train without torch.compile, or without sharding (DDP)."
        )


def require_trainable(module: nn.Module, names: list[str]) -> None:
    """Check in a training step that parameters of the scope are still trainable.

    Raises:
        ValueError: they were frozen in mid-run.
    """
    frozen = [name for name in names if not getattr(module, name).requires_grad]
    if frozen and torch.is_grad_enabled():
        raise ValueError(
            f"{', '.join(frozen)} of {type(module).__name__} was trainable when the run began and is frozen now. "
            "Tensor hooks cannot change their gradient scope in mid-run: start a new train() after freezing, or "
            "train without sharding (DDP), where gradient_engine='auto' follows."
        )
