"""What a checkpoint holds of the groups, and how a run goes on from it.

A run is resumed in this order:

1. `train(resume_from_checkpoint)` asks `RunState.find` for the last checkpoint that was written to its end.
2. The `Trainer` restores model, optimizer, random numbers and its own state, then says `on_train_begin`.
3. `RunState.begin` builds the loss of the run, once, on the parameters that will be trained.
4. It loads weights, counters and running averages into the loss, which matches the groups by name, and warns of
   settings that are others than the checkpoint's (`continuity.py`).
5. It cuts the history at the checkpoint's step.
6. `tell_sampler` tells the sampler which epoch it is; with the run's seed, that fixes the order.

A checkpoint holds `saved_entry` in `trainer_state.json`, and the tensors of `save_tensors` in a file beside it. One
that is written in mid-step holds what was when the step began (`mid_step.py`).
Before it is written, `mark_incomplete` takes the mark from an older one of the same name.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hf_cgd.data.weight_sampling import DrawnGroups
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.robust_loss.state import LossState
from hf_cgd.trainer.checkpoints import last_complete_checkpoint, require_complete
from hf_cgd.trainer.continuity import steps_of_epoch, warn_of_other_settings
from hf_cgd.trainer.history import GroupLog
from hf_cgd.whole_files import whole_file

GROUP_TENSORS_FILE = "group_gradients.safetensors"
"""In a checkpoint, where running averages of group gradients are kept."""
ENTRY = "GroupStateCallback"
"""Name of our entry among the `stateful_callbacks` of `trainer_state.json`: that of the callback's class."""


class RunState:
    """Finds and restores the group state of a trainer's runs."""

    def __init__(self) -> None:
        self.resumed_from: str | None = None
        """The checkpoint that the latest run was resumed from, None for a run from the start."""
        self.is_told = False
        """Whether a warning has said that the rest of the epoch holds other examples."""

    def find(self, wanted: str | bool | None, output_dir: str | None, objective: Objective) -> str | bool | None:
        """The checkpoint to resume from, for `Trainer.train`.

        Args:
            wanted: a folder; True for the newest complete checkpoint in `output_dir`; None or False for none.
            output_dir: where the checkpoints are.
            objective: that of the run.

        Raises:
            ValueError: the checkpoint, or every one of them, was not written to its end.
        """
        found = wanted
        if wanted is True:
            assert output_dir is not None
            needed = [GROUP_TENSORS_FILE] if objective.average_kept > 0 else []
            found = last_complete_checkpoint(output_dir, needed) or True
        elif wanted:
            require_complete(wanted)
        self.resumed_from = found if isinstance(found, str) else None
        return found

    def begin(
        self,
        build_loss: Callable[[], GroupRobustLoss | None],
        folder: str,
        state: TrainerState,
        drawn: DrawnGroups | None,
        settings_of: Callable[[GroupRobustLoss], Mapping[str, Any]],
    ) -> tuple[GroupRobustLoss | None, GroupLog | None]:
        """The loss and the log of a run, with the checkpoint's state where the run is resumed.

        Args:
            build_loss: builds the loss on the model as it is now; None without groups.
            folder: where the history goes.
            state: that of the Trainer, which is the checkpoint's.
            drawn: what drawing by weights remembers; None where groups are not drawn so.
            settings_of: gives `settings_of_run`, to be compared with those of the checkpoint.

        Raises:
            ValueError: the checkpoint has no group state, or that of other groups or another objective.
        """
        assert isinstance(state.stateful_callbacks, dict)
        self.is_told = False
        entry = state.stateful_callbacks.get(ENTRY)
        # The Trainer expects an entry for every callback that has a state when it saves.
        state.stateful_callbacks.setdefault(ENTRY, saved_entry(None))
        robust_loss = build_loss()
        if robust_loss is None:
            return None, None
        if drawn is not None:
            assert robust_loss.alpha is not None
            drawn.begin(robust_loss.alpha)
        if state.global_step > 0:
            saved = None if entry is None else entry["attributes"]["saved"]
            self._restore(robust_loss, saved, drawn)
            if saved is not None and state.is_world_process_zero:
                self.is_told = warn_of_other_settings(saved, settings_of(robust_loss), robust_loss.groups)
        return robust_loss, GroupLog(
            folder if state.is_world_process_zero else None,
            robust_loss.groups.names,
            state.global_step,
            state.max_steps,
            robust_loss.objective.has_weights,
        )

    def _restore(
        self, robust_loss: GroupRobustLoss, saved: Mapping[str, Any] | None, drawn: DrawnGroups | None
    ) -> None:
        if saved is not None:
            robust_loss.load_state_dict(saved, self._tensors(robust_loss.objective))
            if drawn is not None:
                assert robust_loss.alpha is not None
                names = list(saved["groups"]["names"])
                order = [names.index(name) for name in robust_loss.groups.names]
                drawn.load_state_dict(saved["drawn"], order, robust_loss.alpha)
        elif robust_loss.objective.has_weights or robust_loss.objective.reads:
            raise ValueError(
                "The checkpoint holds no group weights or counters: it was not written by a GroupRobustTrainer with "
                "groups. Load its model with from_pretrained and start a new run."
            )

    def _tensors(self, objective: Objective) -> dict[str, Tensor]:
        if objective.average_kept == 0:
            return {}
        path = os.path.join(self.resumed_from or "", GROUP_TENSORS_FILE)
        if not os.path.exists(path):
            raise ValueError(
                f"interaction_momentum needs the running averages of the checkpoint, but there is no {path}. Resume "
                "from an older checkpoint, or start a new run from the saved model."
            )
        return load_file(path)


def saved_entry(
    robust_loss: GroupRobustLoss | None,
    of_steps: LossState | None = None,
    drawn: dict[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Our entry in `trainer_state.json`, in the form that the Trainer wants.

    Args:
        robust_loss: that of the run, None for none.
        of_steps: its state to be saved, None for the present one.
        drawn: what drawing by weights remembers; None where groups are not drawn so.
        settings: `settings_of_run`, None for none.
    """
    saved = None if robust_loss is None else robust_loss.state_dict(of_steps)
    if saved is not None and drawn is not None:
        saved["drawn"] = drawn
    if saved is not None and settings is not None:
        saved["settings"] = dict(settings)
    return {"args": {}, "attributes": {"saved": saved}}


class WeightsThen(NamedTuple):
    """Group weights by name, and the optimizer steps after which they were so."""

    weights: dict[str, float]
    steps: int


def saved_weights(checkpoint: str) -> WeightsThen | None:
    """The group weights of a checkpoint; None where it holds none."""
    state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
    assert isinstance(state.stateful_callbacks, dict)
    saved = state.stateful_callbacks.get(ENTRY, saved_entry(None))["attributes"]["saved"]
    if saved is None or saved["alpha"] is None:
        return None
    return WeightsThen(dict(zip(saved["groups"]["names"], saved["alpha"], strict=True)), saved["steps"])


def save_tensors(robust_loss: GroupRobustLoss, of_steps: LossState, folder: str, writes: bool) -> None:
    """Put the large part of the state, where there is any, into a checkpoint.

    All processes have to call. `writes`: whether this one does; with save_on_each_node one of each node.
    """
    tensors = robust_loss.state_tensors(of_steps)
    if tensors and writes:
        with whole_file(os.path.join(folder, GROUP_TENSORS_FILE)) as unfinished:
            save_file(tensors, unfinished)


def mark_incomplete(checkpoint: str | None) -> None:
    """Before a checkpoint is written over: from now on it is not complete."""
    if checkpoint is not None and os.path.exists(os.path.join(checkpoint, TRAINER_STATE_NAME)):
        os.remove(os.path.join(checkpoint, TRAINER_STATE_NAME))


def tell_sampler(loader: Any, args: TrainingArguments, state: TrainerState, last: int | None = None) -> int:
    """Tell a loader's sampler its epoch, which the Trainer does not where several processes resume in mid-epoch.

    Args:
        loader: of the run, or None.
        args, state: those of the Trainer.
        last: the epoch before, which a callback may have cut short; None at the beginning of a run.

    Returns:
        the epoch, from 0.
    """
    steps = steps_of_epoch(loader, args) or 1
    epoch = state.global_step // steps if last is None else last + 1
    # A resumed run passes over the batches of the epoch's first steps, unless told to ignore them.
    passes_over = last is None and not args.ignore_data_skip
    first_step = epoch * steps if passes_over else state.global_step
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            if hasattr(sampler, "set_first_step"):
                sampler.set_first_step(first_step)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return epoch
