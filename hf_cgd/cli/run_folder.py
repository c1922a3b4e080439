"""Which run has left a model that lies in a folder."""

import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_cgd.cards import REPORT_FILE, RUN_FILE, load_run
from hf_cgd.data.row_digests import FILE as DIGESTS_FILE

NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")


def run_folder_of(model: str | Path) -> Path:
    """The folder with the record of the run that left a model: of a checkpoint's folder the one above.

    A folder that has a record of a training itself is no checkpoint, whatever it is called; and where there is no such
    record above either, nothing is known of its run.

    Args:
        model: a folder, or an id on the Hub, which stays what it is.
    """
    folder = Path(model)
    if _has_record(folder) or not folder.is_dir():
        return folder
    # Under any name or link.
    itself = folder.resolve()
    is_checkpoint = NAME.fullmatch(itself.name) or (itself / TRAINER_STATE_NAME).is_file()
    return itself.parent if is_checkpoint and _has_record(itself.parent) else folder


def _has_record(folder: Path) -> bool:
    """Whether it tells how a model was trained; a report of an evaluation alone does not."""
    if (folder / DIGESTS_FILE).is_file():
        return True
    if not any((folder / name).is_file() for name in (RUN_FILE, REPORT_FILE)):
        return False
    try:
        return load_run(folder).objective is not None
    except ValueError:
        # Whoever reads it says what is wrong with it.
        return True
