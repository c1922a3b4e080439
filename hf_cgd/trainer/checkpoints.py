"""Which checkpoint to resume from: the newest one that was written to its end.

What the Trainer writes last into a checkpoint is `trainer_state.json`, so a checkpoint with a whole one is complete.
"""

import json
import logging
import os
from collections.abc import Sequence

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)


def what_is_missing(checkpoint: str, needed: Sequence[str] = ()) -> str | None:
    """What keeps a checkpoint from being resumed, None for a complete one.

    Args:
        checkpoint: the folder.
        needed: files that this run needs beside those of the Trainer.
    """
    for name in (TRAINER_STATE_NAME, *needed):
        if not os.path.isfile(os.path.join(checkpoint, name)):
            return f"no {name}"
    with open(os.path.join(checkpoint, TRAINER_STATE_NAME), "rb") as file:
        try:
            json.load(file)
        except ValueError:
            return f"{TRAINER_STATE_NAME} is cut off"
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
