"""Networks that `torch.compile` compiles: what has to be set for several backward passes, and for hooks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Hook = TypeVar("Hook", bound=Callable[..., Any])

_networks_are_compiled = False


def prepare_for_compiled_networks() -> None:
    """Make compiled backward passes repeatable, and hooks of engines that are built from now on run as they stand."""
    import torch._dynamo.config
    import torch._functorch.config

    global _networks_are_compiled
    _networks_are_compiled = True
    # Compiled code may else reuse the memory of saved activations in the first of them, and refuses a second.
    torch._functorch.config.donated_buffer = False
    # Blocks of one class share their code. Without this, that of a block without hooks serves those that have some.
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def networks_are_compiled() -> bool:
    """Whether a run of this process has asked for it."""
    return _networks_are_compiled


def as_hook(function: Hook) -> Hook:
    """The function as a hook that a compiler runs and does not trace: traced, it breaks into a graph for each line."""
    return torch.compiler.disable(function) if _networks_are_compiled else function
