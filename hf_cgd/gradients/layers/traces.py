"""Whether a run of a module leaves a trace: then it is not to be run a second time."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_cgd.gradients.layers.base import version_of
from hf_cgd.models.outputs import tensors_in


class Trace:
    """The random states and the module's own tensors as they are before it runs.

    Args:
        module: about to run.
        inputs: anything that holds its inputs; they tell the device.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        self._module = module
        self._device = next((tensor.device for tensor in tensors_in(inputs)), torch.device("cpu"))
        self._before = self._state()

    def is_left(self) -> bool:
        """Whether the run since has moved a random state or changed a buffer or parameter in place.

        Not every device tells its random state, so a module that drops something counts as random there.
        """
        drops = any(_drops(part) for part in self._module.modules())
        if drops and (self._device.type not in ("cpu", "cuda") or isinstance(self._module, nn.RNNBase)):
            return True
        before, after = self._before, self._state()
        same_tensors = all(torch.equal(one, other) for one, other in zip(before[0], after[0], strict=True))
        return not same_tensors or before[1:] != after[1:]

    def _state(self) -> tuple[list[torch.Tensor], Any, Any, list[int]]:
        states = [torch.random.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        numbers = np.random.get_state(legacy=False)["state"]
        own = [*self._module.buffers(), *self._module.parameters()]
        drawn = (numbers["key"].tobytes(), numbers["pos"])
        return states, random.getstate(), drawn, [version_of(tensor) for tensor in own]


def _drops(module: nn.Module) -> bool:
    share = next((getattr(module, name) for name in ("p", "drop_prob", "dropout") if hasattr(module, name)), 0)
    named = "drop" in type(module).__name__.lower() or isinstance(module, nn.RNNBase)
    return module.training and named and share != 0
