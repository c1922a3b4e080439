"""Networks that `torch.compile` compiles: what has to be set for several backward passes, and for hooks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., Any])

_is_compiled: ContextVar[bool] = ContextVar("is_compiled", default=False)


def prepare_for_compiled_networks() -> None:
    """Make compiled backward passes repeatable, and hooks count when compiled code is chosen, in the whole process."""
    import torch._dynamo.config
    import torch._functorch.config

    # Compiled code may else reuse the memory of saved activations in the first of them, and refuses a second.
    torch._functorch.config.donated_buffer = False
    # Blocks of one class share their code. Without this, that of a block without hooks serves those that have some.
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def compiled_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that were compiled by `torch.compile` or by their own `compile`."""
    # Before it is imported, which takes a second, nothing has been compiled.
    if "torch._dynamo" not in sys.modules:
        return
    for part in model.modules():
        if isinstance(part, torch._dynamo.OptimizedModule) or part._compiled_call_impl is not None:
            yield part


@contextmanager
def engines_for(network_is_compiled: bool) -> Iterator[None]:
    """Goes around the construction of engines: within, they are made for a network that is compiled, or is not."""
    before = _is_compiled.set(network_is_compiled)
    try:
        yield
    finally:
        _is_compiled.reset(before)


def network_is_compiled() -> bool:
    """Whether the engine that is being built is for a compiled network."""
    return _is_compiled.get()


def as_hook(function: Hook) -> Hook:
    """The function as a hook that a compiler runs and does not trace: traced, it breaks into a graph for each line."""
    return torch.compiler.disable(function) if _is_compiled.get() else function
