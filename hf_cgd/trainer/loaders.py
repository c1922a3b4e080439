"""The data side of the trainer: loaders, samplers and columns that know groups, and group ids beside a batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer
from transformers.trainer_utils import has_length

from hf_cgd.data.training_groups import is_stream
from hf_cgd.data.weight_sampling import DrawnGroups, steps_ahead
from hf_cgd.distributed.communication import Communication
from hf_cgd.gradients import needs_static_shapes
from hf_cgd.models.heads import ExampleHead, head_of
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.beside_batches import BesideBatches, without
from hf_cgd.trainer.continuity import seed_of_order, settings_of_run
from hf_cgd.trainer.group_setup import GroupSetup
from hf_cgd.trainer.host_ids import AllLabelledCollator, HostIds, HostIdsCollator
from hf_cgd.trainer.same_batches import share_failures
from hf_cgd.trainer.search import require_model

LOADERS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")


class GroupDataTrainer(Trainer):
    """A `Trainer` whose batches have group ids, also where a subclass builds its loaders itself."""

    group_objective: Objective
    _setup: GroupSetup
    _host_ids: HostIds
    _own_collator: Any = None
    """The user's collator, while `data_collator` is the one that keeps group ids."""
    _asked_for_sampler = False
    _columns_are_removed = False
    """Whether the rows of the loader that is being built hold none but those that are needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._beside = BesideBatches()
        """Group ids and example weights of the batches of the step in progress."""
        self._drawn: DrawnGroups | None = None
        """What drawing by weights remembers; None where groups are not drawn so."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in LOADERS:
            if name in cls.__dict__:
                setattr(cls, name, _with_group_collator(cls.__dict__[name], name == LOADERS[0]))

    def _read_groups(self, anew: bool = False) -> None:
        raise NotImplementedError

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of one optimizer step; group ids and weights are taken out and kept beside."""
        self._beside.forget()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return [self._beside.take(batch, self._setup.keys_beside) for batch in batches], num_items

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """See `Trainer.training_step`."""
        return super().training_step(model, self._beside.take(inputs, self._setup.keys_beside), *args, **kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs, taken = without(inputs, self._setup.keys_beside)
        prepared = super()._prepare_inputs(inputs)
        self._beside.remember(prepared, taken or self._beside.find(inputs))
        return prepared

    def _split(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """What the model takes of a batch, and what travels beside it: still in it, or taken out before."""
        rest, taken = without(inputs, self._setup.keys_beside)
        return dict(rest), taken or self._beside.find(rest)

    def _for_device(self, collator: Any) -> Any:
        """The training collator, with what can be told of a batch only before it goes to the device."""
        assert self.model is not None
        head, names = head_of(self.model), self._setup.label_names
        if needs_static_shapes(self.args.device):
            is_read = isinstance(head, ExampleHead) and head.has_classes and self.group_objective.reads
            return AllLabelledCollator(collator, names[0], self.group_objective.name) if is_read else collator
        return HostIdsCollator(collator, self._setup.key, names, head) if self._host_ids.keeps_copies else collator

    @contextmanager
    def _keeping_ids(self, dataset: Any, is_training: bool) -> Iterator[None]:
        """While a loader is built: `data_collator` keeps the group ids of the dataset's rows."""
        before, outermost = self.data_collator, self._own_collator is None
        own = self._own_collator = before if outermost else self._own_collator
        try:
            if is_training:
                self._read_groups()
                in_order = self.group_objective.needs_gradients
                self.data_collator = self._setup.training_collator(own, in_order)
                self.data_collator = self._for_device(self.data_collator)
            else:
                self.data_collator = self._setup.evaluation_collator(own, dataset)
            yield
        finally:
            self.data_collator = before
            if outermost:
                self._own_collator = None

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader:
        """Behind `get_train_dataloader`, `get_eval_dataloader` and `get_test_dataloader`."""
        is_training = bool(kwargs.get("is_training"))
        require_model(self.model)
        if not is_training:
            self._require_rows_once(dataset)
        with self._keeping_ids(dataset, is_training):
            rows = (self._setup.training if is_training else self._setup.evaluated).with_ids(dataset)
            if rows is dataset and not is_training and self.args.train_sampling_strategy != "group_by_length":
                # (Lengths are a column, which the parent reads of a data set.)
                rows = self._setup.without_group_columns(dataset, self._remove_unused_columns, self._own_collator)
                self._columns_are_removed = rows is not dataset
            try:
                with nullcontext() if is_training else self._keeping_last_batches():
                    loader = super()._get_dataloader(rows, *args, **kwargs)
            finally:
                self._columns_are_removed = False
        share_failures(loader, self._communication)
        return loader

    @property
    def _communication(self) -> Communication:
        raise NotImplementedError

    def _require_rows_once(self, dataset: Any) -> None:
        """Raise a ValueError where several processes would evaluate some rows more than once, or not all of them.

        - Of a stream that each of them reads by itself, last batches are filled up by rows that nobody can tell from
          the others, since nobody knows how many there are.
        - With batches of other sizes or numbers, one waits for another's, or takes an earlier one for it.
        - Gathered as objects, a batch of scores is a list of rows, of which the Trainer's loop keeps the first ones.
        """
        if self.accelerator.num_processes == 1:
            return
        if is_stream(dataset) and self.accelerator.dispatch_batches is False:
            raise ValueError(
                "A stream is evaluated on several processes with dispatch_batches=False: its last batches are filled "
                "up by rows that would be counted again, in every metric. Leave dispatch_batches unset in "
                "accelerator_config, evaluate on one process, or pass a map-style dataset."
            )
        size = self.args.eval_batch_size * self._sharers
        deals = not self.accelerator.even_batches and not self.accelerator.dispatch_batches
        if deals and has_length(dataset) and len(dataset) % size:
            raise ValueError(
                f"{len(dataset)} rows are evaluated on {self.accelerator.num_processes} processes with "
                "even_batches=False, which leaves the processes with batches of other sizes at the end: expected a "
                f"multiple of {size} rows. Leave even_batches at True in accelerator_config (rows that are repeated "
                "are not counted), or evaluate on one process."
            )
        if self.args.eval_use_gather_object:
            raise ValueError(
                "eval_use_gather_object=True gathers lists of objects, and loses rows of tensors on several "
                "processes. Expected False: all that is evaluated here are tensors."
            )

    @contextmanager
    def _keeping_last_batches(self) -> Iterator[None]:
        """While an evaluation loader is built: no row is left out, whatever is said for training."""
        before, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            yield
        finally:
            self.args.dataloader_drop_last = before

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        if self._columns_are_removed:
            return data_collator
        return super()._get_collator_with_removed_columns(data_collator, description)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        self._asked_for_sampler = True
        self._drawn = self._memory_of_draws()
        sampler = self._setup.training.sampler(
            self._train_batch_size,
            seed_of_order(self.args),
            self.args.dataloader_drop_last,
            self._sharers,
            self._batches_of_step,
            self._drawn,
        )
        return super()._get_train_sampler(train_dataset) if sampler is None else sampler

    @property
    def _batches_of_step(self) -> int:
        """Batches of the training loader that an optimizer step takes, on all processes together."""
        return self.args.gradient_accumulation_steps * self._sharers

    @property
    def _sharers(self) -> int:
        """Processes that take a batch of the training loader each: with split_batches all of them share one."""
        return 1 if self.accelerator.split_batches else self.accelerator.num_processes

    def _settings_of_run(self, robust_loss: GroupRobustLoss) -> dict[str, Any]:
        examples, loader = self._train_batch_size * self._batches_of_step, self.callback_handler.train_dataloader
        age_of_weights = None if self._drawn is None else self._drawn.ahead
        return settings_of_run(self.args, robust_loss, examples, loader, age_of_weights)

    def _memory_of_draws(self) -> DrawnGroups | None:
        """What drawing by weights remembers, for the loader as it is now; None where groups are not drawn so."""
        groups = self._setup.groups
        if groups is None or not self._setup.training.draws_by_weight:
            return None
        memory, args = self._drawn, self.args
        if memory is None or memory.num_groups != len(groups):
            memory = DrawnGroups(len(groups))
            memory.begin(self.group_objective.initial_weights(groups.counts_tensor()), follows=False)
        memory.ahead = steps_ahead(
            args.gradient_accumulation_steps, args.dataloader_num_workers, args.dataloader_prefetch_factor
        )
        return memory

    def _require_that_groups_were_sampled(self) -> None:
        """Raise a ValueError where a subclass builds the loader or the sampler itself and `group_sampling` is set."""
        if self._setup.training.sampling != "none" and not self._asked_for_sampler:
            raise ValueError(
                f"group_sampling has no effect: {type(self).__name__} decides the order of the training examples "
                "itself (get_train_dataloader or _get_train_sampler). Leave group_sampling unset, or take the sampler "
                "of super()._get_train_sampler(train_dataset)."
            )

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            super()._set_signature_columns_if_needed()
            assert self._signature_columns is not None
            self._signature_columns += self._setup.extra_columns


def _with_group_collator(method: Callable[..., Any], is_training: bool) -> Callable[..., Any]:
    """A subclass's method that builds a loader, with a `data_collator` that keeps group ids while it runs."""

    @wraps(method)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, GroupDataTrainer):
            return method(self, *args, **kwargs)
        dataset = self.train_dataset if is_training else _first([*args, *kwargs.values(), self.eval_dataset])
        if isinstance(dataset, str) and isinstance(self.eval_dataset, Mapping):
            dataset = self.eval_dataset[dataset]
        with self._keeping_ids(dataset, is_training):
            return method(self, *args, **kwargs)

    return build


def _first(values: list[Any]) -> Any:
    return next((value for value in values if value is not None), None)
