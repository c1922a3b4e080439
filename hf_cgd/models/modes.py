"""Training modes of a network, kept over a pass that changes them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in training or evaluation mode as it was before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
