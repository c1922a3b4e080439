"""Which checkpoint to resume from: the newest one that was written to its end."""

import json
import logging
import os
from collections.abc import Sequence

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
"""What the Trainer writes last into a checkpoint."""


def what_is_missing(checkpoint: str, needed: Sequence[str] = ()) -> str | None:
    """What keeps a checkpoint from being resumed, None for a complete one.

    Args:
        checkpoint: the folder.
        needed: files that this run needs beside those of the Trainer.
    """
    for name in (STATE_FILE, *needed):
        if not os.path.isfile(os.path.join(checkpoint, name)):
            return f"no {name}"
    with open(os.path.join(checkpoint, STATE_FILE), "rb") as file:
        try:
            json.load(file)
        except ValueError:
            return f"{STATE_FILE} is cut off"
    return None


def last_complete_checkpoint(output_dir: str, needed: Sequence[str] = ()) -> str | None:
    """The complete checkpoint of the highest step, None where there is no checkpoint at all.

    A process that is killed while it saves leaves a folder that only looks like the newest checkpoint.

    Raises:
        ValueError: there are checkpoints, but none is complete.
    """
    start = f"{PREFIX_CHECKPOINT_DIR}-"
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    steps = [
        int(name.removeprefix(start)) for name in names if name.startswith(start) and name[len(start) :].isdigit()
    ]
    problems = []
    for step in sorted(steps, reverse=True):
        checkpoint = os.path.join(output_dir, f"{start}{step}")
        missing = what_is_missing(checkpoint, needed)
        if missing is None:
            return checkpoint
        problems.append(f"{start}{step} ({missing})")
        logger.warning("%s was not written to its end (%s) and is passed over", checkpoint, missing)
    if problems:
        raise ValueError(
            f"No checkpoint in {output_dir} is complete: {', '.join(problems)}. Start without resume_from_checkpoint."
        )
    return None


def require_complete(checkpoint: str, needed: Sequence[str] = ()) -> None:
    """Raise a ValueError that says what is missing, unless the checkpoint was written to its end."""
    missing = what_is_missing(checkpoint, needed)
    if missing is not None:
        raise ValueError(
            f"The checkpoint {checkpoint} cannot be resumed: {missing}. It was not written to its end, or by another "
            "program. Use an older one, or resume_from_checkpoint=True for the newest complete one."
        )


def forget_state(checkpoint: str | None) -> None:
    """Before a checkpoint is written over: from now on it is not complete."""
    if checkpoint is not None and os.path.exists(os.path.join(checkpoint, STATE_FILE)):
        os.remove(os.path.join(checkpoint, STATE_FILE))
