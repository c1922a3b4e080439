"""What a checkpoint holds that is written before a step is over: all as it was when the step began."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.robust_loss.state import LossState


class StepStart:
    """Remembers how things stood before the batches of a step were fetched.

    A signal (`enable_jit_checkpoint`) may have a checkpoint written between the forward pass and the optimizer. The
    parameters are those of the last completed step then; weights, counters, running statistics of BatchNorm and random
    numbers have moved on, and would move twice in the resumed run.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._loss: GroupRobustLoss | None = None
        self._state: LossState | None = None
        self._random: list[object] | None = None
        self._statistics: list[tuple[Tensor, Tensor]] = []

    def note(self, step: int, robust_loss: GroupRobustLoss | None, network: nn.Module | None = None) -> None:
        """Take note of everything before optimizer step number `step`.

        Args:
            step: completed optimizer steps.
            robust_loss: that of the run; None without groups.
            network: its running statistics and the random numbers are kept as well; None where no signal is awaited.
        """
        self._step, self._loss = step, robust_loss
        self._state = None if robust_loss is None else robust_loss.snapshot()
        self._random, self._statistics = None, []
        if network is not None:
            self._random = _random_states()
            self._statistics = [(buffer, buffer.clone()) for buffer in _running_statistics(network)]

    def state_of(self, robust_loss: GroupRobustLoss, step: int) -> LossState:
        """The loss's state after that many completed steps: that of the step's start in mid-step, else the present."""
        if self._state is not None and self._step == step and self._loss is robust_loss:
            return self._state
        return robust_loss.snapshot()

    @contextmanager
    def put_back(self, step: int) -> Iterator[None]:
        """While a checkpoint is written in mid-step: random numbers and running statistics of the step's start."""
        if self._random is None or self._step != step:
            yield
            return
        now = _random_states(), [buffer.clone() for buffer, _ in self._statistics]
        _set_random_states(self._random)
        for buffer, value in self._statistics:
            buffer.copy_(value)
        try:
            yield
        finally:
            _set_random_states(now[0])
            for (buffer, _), value in zip(self._statistics, now[1], strict=True):
                buffer.copy_(value)


def _running_statistics(network: nn.Module) -> list[Tensor]:
    modules = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer for module in modules for buffer in module.buffers(recurse=False)]


def _random_states() -> list[object]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [random.getstate(), np.random.get_state(), torch.get_rng_state(), devices]


def _set_random_states(states: list[object]) -> None:
    python, numpy, cpu, devices = states
    random.setstate(python)  # type: ignore[arg-type]
    np.random.set_state(numpy)  # type: ignore[arg-type]
    torch.set_rng_state(cpu)  # type: ignore[arg-type]
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(devices)  # type: ignore[arg-type]
