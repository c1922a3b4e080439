"""`diagnose_groups`: some training steps that change nothing, and what their statistics say of the groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hf_cgd.data.rows import undisturbed
from hf_cgd.metrics.diagnosis import GroupDiagnosis, diagnosis_of
from hf_cgd.models.modes import modes_kept
from hf_cgd.objectives import GroupStatistics, Objective
from hf_cgd.objectives.base import Statistic
from hf_cgd.trainer.beside_batches import BesideBatches
from hf_cgd.trainer.config import options_of
from hf_cgd.trainer.host_ids import HostIds
from hf_cgd.trainer.own_loss import OwnLoss
from hf_cgd.trainer.sharding import is_sharded

if TYPE_CHECKING:
    from hf_cgd.trainer.trainer import GroupRobustTrainer

STEPS = 20
"""Steps of a probe."""


@dataclass(frozen=True)
class Probe(Objective):
    """Equal weights that stay equal; keeps the statistics of every step."""

    kept: list[GroupStatistics] = field(default_factory=list, compare=False)

    name: ClassVar[str] = "probe"

    @property
    def statistics(self) -> frozenset[Statistic]:
        """Losses, inner products, and those between two halves of a group's examples."""
        return frozenset({"losses", "gram", "self_products"})

    def next_weights(self, alpha: Tensor, statistics: GroupStatistics) -> Tensor:
        """The same weights [K]."""
        self.kept.append(statistics)
        return alpha


def diagnose(trainer: "GroupRobustTrainer", steps: int) -> GroupDiagnosis:
    """See `GroupRobustTrainer.diagnose_groups`."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if trainer.groups is None:
        raise ValueError("diagnose_groups needs training groups: set group_column.")
    hooks = options_of(trainer.args).gradient_engine == "tensor_hooks"
    if hooks or is_sharded(trainer._network, trainer.accelerator):
        raise ValueError(
            "diagnose_groups compares two halves of each group, which sharded parameters and "
            "gradient_engine='tensor_hooks' rule out. Call it on one device, or under DDP."
        )
    probe = Probe()
    with _undisturbed(trainer):
        # A step may be in progress, whose group ids are needed yet; and what is said of a loss of the model's own, the
        # run's objective is to say.
        trainer._beside, trainer._own_loss = BesideBatches(), OwnLoss()
        trainer._host_ids = HostIds(trainer._communication, trainer.args.device)
        trainer._own_loss.is_settled = True
        trainer.robust_loss = trainer._build_loss(probe)
        trainer._drawn = None if trainer._drawn is None else trainer._drawn.still()
        model = trainer.model
        assert model is not None
        model.train()
        for batches, num_items in _steps(trainer, steps):
            for batch in batches:
                with trainer.compute_loss_context_manager():
                    inputs = trainer._prepare_inputs(batch)
                    trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        trainer._host_ids.require_same()
    return diagnosis_of(probe.kept)


def _steps(trainer: "GroupRobustTrainer", steps: int) -> Iterator[tuple[list[Any], Any]]:
    """The micro-batches of so many optimizer steps, from as many epochs as they take."""
    loader = trainer.get_train_dataloader()
    epoch, iterator, fresh = 0, iter(loader), True
    while steps:
        size, device = trainer.args.gradient_accumulation_steps, trainer.args.device
        batches, num_items = trainer.get_batch_samples(iterator, size, device)
        if batches:
            steps, fresh = steps - 1, False
            yield batches, num_items
            continue
        if fresh:
            raise ValueError("An epoch of the training set has no batch. Give it more rows, or smaller batches.")
        epoch, fresh = epoch + 1, True
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        iterator = iter(loader)


@contextmanager
def _undisturbed(trainer: "GroupRobustTrainer") -> Iterator[None]:
    """Afterwards trainer, model and random numbers are as they were before."""
    model: nn.Module = trainer._network
    before = dict(vars(trainer))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        # Collators and data sets draw by Python's and numpy's random numbers too, or by generators of their own.
        with modes_kept(model), undisturbed([trainer.train_dataset, trainer.data_collator]):
            yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
