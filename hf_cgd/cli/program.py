"""A program that a launcher may have started several times, from its beginning to its end."""

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Words = ParamSpec("Words")
Result = TypeVar("Result")


def run_program(main: Callable[Words, Result], *words: Words.args, **options: Words.kwargs) -> Result:
    """Call `main`, then leave what connects this process with others; what `main` returned.

    A process that ends while it is still connected may abort behind its last line: the threads of gloo let go of
    tensors while Python is being taken down, and a launcher counts the finished run as failed (exit code -6).

    Args:
        main: the program. An error of its own ends this process as it is, so that no other is waited for.
        *words: what `main` is called with.
        **options: the same, by name.
    """
    result = main(*words, **options)
    # A command that did without torch is not made to import it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    return result
