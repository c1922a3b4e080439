"""Processes that take the same steps: what one meets while it reads its batches, all of them learn, and end alike."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import has_length

from hf_cgd.distributed.communication import Communication

FAILED = -1
"""Stands for the number of batches of a process that could not read one."""
REMEDY = (
    "Their steps would no longer be the same: some would wait for others for ever, or train on another epoch. Let "
    "one process read for all (dispatch_batches unset or True in accelerator_config, the default for streams), leave "
    "even_batches at True, or cut the data so that all processes have as many batches."
)


class SameBatches:
    """The batches of each step, of which every process has to have as many.

    Args:
        communication: of the processes.
        asks: whether the others are asked in every step; not where that would wait for a device.
    """

    def __init__(self, communication: Communication, asks: bool) -> None:
        self._communication = communication
        self._asks = asks and communication.num_processes > 1
        self._is_over = False

    def begin_epoch(self) -> None:
        """All processes have batches again."""
        self._is_over = False

    def require_same_length(self, loader: Any) -> None:
        """Raise a ValueError where the processes will have other numbers of batches in an epoch; a collective."""
        if self._asks:
            _require_same(self._numbers_of_all(len(loader) if has_length(loader) else 0), "in an epoch")

    def take(self, batches: Iterator[Any], wanted: int, look: Callable[[Any], None] = lambda batch: None) -> list[Any]:
        """The next batches of this process, `wanted` of them or what is left of the epoch; a collective.

        Args:
            batches: of the epoch.
            wanted: for a step.
            look: raises an error for a batch that cannot be trained on; called where there are other processes.

        Raises:
            ValueError: the processes have other numbers of batches left.
            RuntimeError: another process could not read its batches; this one raises whatever it met itself.
        """
        taken: list[Any] = []
        failure = None
        try:
            for _ in range(wanted):
                taken.append(next(batches))
                if self._asks:
                    look(taken[-1])
        except StopIteration:
            pass
        except Exception as error:
            if not self._asks:
                raise
            failure = error
        if not self._asks or (self._is_over and not taken and failure is None):
            return taken
        numbers = self._numbers_of_all(len(taken) if failure is None else FAILED)
        if FAILED in numbers:
            raise_everywhere(failure, self._communication)
        _require_same(numbers, "left for a step")
        self._is_over = not taken
        return taken

    def _numbers_of_all(self, own: int) -> list[int]:
        return [int(number) for number in self._communication.gather(torch.tensor([own])).tolist()]


def _require_same(numbers: list[int], where: str) -> None:
    if len(set(numbers)) > 1:
        raise ValueError(f"The processes have {numbers} batches {where}, one number for each process. {REMEDY}")


def raise_everywhere(failure: Exception | None, communication: Communication) -> None:
    """End all processes where some have failed: with their own error, elsewhere with what it says; a collective.

    Args:
        failure: of this process; None where it has not failed.
        communication: of the processes.

    Raises:
        RuntimeError: another process has failed.
    """
    texts = communication.texts("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"process {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failed:
        raise RuntimeError(f"The batches could not be read, so that all processes end. {' | '.join(failed)}")


def share_failures(loader: Any, communication: Communication) -> None:
    """Have a loader with which one process reads for all tell all of them where it cannot go on.

    The others wait for its next batch otherwise, for ever where that process does not end.
    """
    if not isinstance(loader, DataLoaderDispatcher) or communication.num_processes == 1:
        return
    fetch = loader._fetch_batches

    def fetch_or_fail(iterator: Any) -> Any:
        failure = None
        try:
            found = fetch(iterator)
        except Exception as error:
            if communication.rank != 0:
                raise
            failure = error
            # What the others wait for: that there are no more batches.
            if loader._stop_iteration:
                broadcast_object_list([None, True])
            else:
                fetch(iter(()))
            found = None
        if loader._stop_iteration:
            raise_everywhere(failure, communication)
        return found

    loader._fetch_batches = fetch_or_fail
