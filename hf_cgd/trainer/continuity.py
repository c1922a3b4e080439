"""What a checkpoint says of the settings of its run, and warnings where a resumed run is not the one that began."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.training_groups import is_stream
from hf_cgd.gradients.scope import DEFAULT_LAYERS, parse_gradient_layers
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.objectives import KNOBS
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.config import GroupOptions, options_of

COUNTS = "training examples of the groups"
SIZE = "training examples of a step"
EPOCH = "steps of an epoch"
ORDER = ("seed of the order", "group_sampling", "train_sampling_strategy", SIZE, EPOCH, COUNTS)
"""Settings that say which examples a step is of."""
REFUSED = ("objective", *KNOBS, "excess_clip")
"""Options that a checkpoint of another value is refused for, elsewhere."""
WITHOUT_EFFECT = ("group_column", "eval_group_column", "gradient_engine", "nonfinite", "min_group_size")
"""Options that change no number of the training, as long as the groups have the same names."""


def seed_of_order(args: TrainingArguments) -> int:
    """The seed that the order of the training examples depends on."""
    return args.seed if args.data_seed is None else args.data_seed


def steps_of_epoch(loader: Any, args: TrainingArguments) -> int | None:
    """Optimizer steps that the batches of a loader are, as the `Trainer` counts them; None for a stream."""
    return max(1, math.ceil(len(loader) / args.gradient_accumulation_steps)) if has_length(loader) else None


def settings_of_run(
    args: TrainingArguments,
    robust_loss: GroupRobustLoss,
    examples_of_step: int,
    loader: Any,
    age_of_weights: int | None,
) -> dict[str, Any]:
    """What a checkpoint keeps, JSON-ready, to be compared where a run is resumed: values in force, not None.

    Args:
        args: those of the run.
        robust_loss: that of the run.
        examples_of_step: of an optimizer step, on all devices together.
        loader: of the training examples.
        age_of_weights: in steps, where groups are drawn by them; None elsewhere.
    """
    options = options_of(args)
    names = [option.name for option in fields(GroupOptions)]
    kept = {name: getattr(options, name) for name in names if name not in (*REFUSED, *WITHOUT_EFFECT, *ORDER)}
    if robust_loss.objective.needs_gradients:
        kept["gradient_layers"] = parse_gradient_layers(options.gradient_layers or DEFAULT_LAYERS)
    kept["weight_timing"] = robust_loss.weight_timing
    kept["group_unit"] = options.unit_of(robust_loss.objective)
    kept["label_smoothing_factor"] = args.label_smoothing_factor
    kept["steps from the weights to the draws by them"] = age_of_weights
    sampling = (seed_of_order(args), options.group_sampling, args.train_sampling_strategy)
    order = (*sampling, examples_of_step, steps_of_epoch(loader, args))
    # The counts of the groups are in the checkpoint anyway.
    return dict(zip(ORDER[:-1], order, strict=True)) | kept


def warn_of_other_settings(saved: Mapping[str, Any], own: Mapping[str, Any], groups: GroupInfo) -> bool:
    """One warning with every setting that differs from the checkpoint's; none where all are the same.

    Args:
        saved: what the checkpoint holds of the groups. A setting that it does not know, because it is of an older
            version, is passed over.
        own: `settings_of_run` of the run that goes on.
        groups: of its training set.

    Returns:
        whether the order of the examples is another.
    """
    own = {COUNTS: _counts_of(groups.to_dict()), **own}
    saved = {COUNTS: _counts_of(saved["groups"]), **saved.get("settings", {})}
    others = {name: (saved[name], value) for name, value in own.items() if name in saved and saved[name] != value}
    if SIZE in others or COUNTS in others:
        # Which is why an epoch has other steps.
        others.pop(EPOCH, None)
    if not others:
        return False
    listed = "; ".join(f"{name} {_words(before, now)}" for name, (before, now) in others.items())
    is_another = any(name in ORDER for name in others)
    order = (
        " So the rest of the epoch holds other examples: some come a second time, others not at all."
        if is_another
        else ""
    )
    warnings.warn(
        f"The run goes on with other settings than its checkpoint was trained with: {listed}.{order} Model, optimizer "
        "and group weights go on from the checkpoint. Resume with its settings for the run that was begun.",
        GroupRobustWarning,
        stacklevel=2,
    )
    return is_another


def warn_of_another_order(dataset: Any, args: TrainingArguments, state: TrainerState, loader: Any = None) -> None:
    """Warn where the `Trainer` cannot go on in the order that was begun.

    It takes all epochs before for whole ones, of which a callback may have cut some short. It does not know how long
    an epoch of a stream is, so in a later one it passes over the batches of all steps as if they were of the first, up
    to its end. And it draws the order by length from the global random numbers, which are those of the start in the
    first epoch, and of the checkpoint only where that ends an epoch.

    Args:
        dataset, args, state: of the run; the state is the checkpoint's.
        loader: of the training examples; None where other settings have told why its place in the epochs is another.
    """
    epoch = math.ceil(state.epoch or 0)
    if state.global_step == 0 or args.ignore_data_skip or not state.is_world_process_zero:
        return
    place = None if loader is None else _place_in_epochs(loader, args, state.global_step)
    if place is not None and abs(place - (state.epoch or 0)) > 1e-6:
        warnings.warn(
            f"The run is resumed at step {state.global_step}, which the checkpoint says is {state.epoch:.4g} epochs, "
            f"and the Trainer takes for {place:.4g}: epochs were cut short (should_epoch_stop), or had other batches. "
            "So the rest of the epoch holds other examples: some come a second time, others not at all.",
            GroupRobustWarning,
            stacklevel=2,
        )
    if epoch <= 1:
        return
    if is_stream(dataset):
        warnings.warn(
            f"The run is resumed in epoch {epoch} of a stream. The Trainer cannot tell how long such an epoch is, and "
            "begins it anew: its first examples come a second time. Resume from a checkpoint of the first epoch, or "
            "train on a data set with a length, for the run that was begun.",
            GroupRobustWarning,
            stacklevel=2,
        )
    elif args.train_sampling_strategy == "group_by_length" and epoch != state.epoch:
        warnings.warn(
            f"The run is resumed within epoch {epoch} under train_sampling_strategy='group_by_length', whose order "
            "the Trainer draws anew: some examples of the epoch come a second time, others not at all. Resume from a "
            "checkpoint at the end of an epoch for the run that was begun.",
            GroupRobustWarning,
            stacklevel=2,
        )


def _place_in_epochs(loader: Any, args: TrainingArguments, step: int) -> float | None:
    """The epochs after that many steps, each of them a whole one, as the `Trainer` counts; None for a stream."""
    steps = steps_of_epoch(loader, args)
    if steps is None:
        return None
    batches = min(step % steps * args.gradient_accumulation_steps, len(loader))
    return step // steps + batches / len(loader)


def _counts_of(groups: Mapping[str, Any]) -> dict[str, int] | None:
    return None if groups["counts"] is None else dict(zip(groups["names"], groups["counts"], strict=True))


def _words(before: Any, now: Any) -> str:
    """What has changed; of numbers for each group the ones that have."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        changed = [name for name in now if before.get(name) != now[name]]
        shown = ", ".join(f"{name!r} {before.get(name)} -> {now[name]}" for name in changed[:5])
        return f"{shown}, and {len(changed) - 5} more" if len(changed) > 5 else shown
    return f"{before!r} -> {now!r}"
