"""What a verdict on an engine rests on, besides the batch: when this changes, it is taken anew."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_cgd.gradients.autograd import owned_parameters


class ScopeSignature:
    """Tells whether the modules of the scope are what they were.

    Args:
        model: the network.
        parameters: the gradient scope.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        owners = owned_parameters(model, parameters)
        self._modules = list(dict.fromkeys(part for module in owners for part in module.modules()))
        self._parameters = list(model.parameters())

    def now(self) -> tuple[Any, ...]:
        """Training modes, ways to compute, hooks, parts and trainable parameters.

        Hooks of parameters change gradients on their way to them, where a fast engine may not bring them by.
        """
        trainable = tuple([(one.requires_grad, *(one._backward_hooks or ())) for one in self._parameters])
        return trainable, tuple([_of_module(module) for module in self._modules])


def _of_module(module: nn.Module) -> tuple[Any, ...]:
    return (
        module.training,
        type(module),
        id(vars(module).get("forward")),
        tuple([(name, id(parameter)) for name, parameter in module._parameters.items()]),
        tuple([id(part) for part in module._modules.values()]),
        len(module._forward_hooks),
        len(module._forward_pre_hooks),
    )
