"""What a run finds in its output folder: nothing is written over unless that is asked for."""

import logging
import re
import shutil
from pathlib import Path

from hf_cgd.cards import REPORT_FILE, RUN_FILE, SETTINGS_FILE
from hf_cgd.data.row_digests import FILE as DIGESTS_FILE
from hf_cgd.trainer.config import GroupRobustConfig
from hf_cgd.trainer.evaluation import METRICS_FILE
from hf_cgd.trainer.history import HISTORY_FILE

logger = logging.getLogger(__name__)

RESULTS = (
    re.compile(r"checkpoint-\d+"),
    re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|pytorch_model.*"),
    re.compile(
        "|".join(map(re.escape, (REPORT_FILE, RUN_FILE, SETTINGS_FILE, METRICS_FILE, HISTORY_FILE, DIGESTS_FILE)))
    ),
    re.compile(r"pictures|predictions_\w+\.csv|comparison\.(md|png|svg|html)"),
)
"""Names of what a run leaves: checkpoints, the model, tables and metrics, pictures and answers."""


def results_in(folder: str | Path) -> list[str]:
    """Names of what an earlier run has left in a folder, sorted; [] where there is no such folder."""
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if any(pattern.fullmatch(name) for pattern in RESULTS)]


def has_model(folder: str | Path) -> bool:
    """Whether a run that ended has left its model in a folder."""
    return any(RESULTS[1].fullmatch(name) for name in results_in(folder))


def prepare_output(config: GroupRobustConfig, overwrite: bool, trains: bool = True) -> None:
    """Refuse to write over an earlier run unless that, or to resume it, is asked for.

    Args:
        config: tells the folder and what to resume.
        overwrite: remove what the earlier run has left (checkpoints too, so that no later resume finds them). A run
            that only evaluates removes nothing; it writes its report over the old one.
        trains: whether the run trains.

    Raises:
        ValueError: results in the way, nothing to resume, or options that contradict each other.
    """
    assert config.output_dir is not None
    folder, resume = Path(config.output_dir), config.resume_from_checkpoint
    found = results_in(folder)
    if resume and overwrite and trains:
        raise ValueError(
            f"overwrite_output_dir=True starts anew, resume_from_checkpoint={resume} goes on: expected one of them. "
            "Leave the other out."
        )
    if not trains:
        if REPORT_FILE in found and not overwrite:
            raise ValueError(
                f"output_dir={folder} holds the {REPORT_FILE} of an earlier run, which an evaluation would "
                "write over. Choose another output_dir, or set overwrite_output_dir=True."
            )
        return
    if resume is True and not any(RESULTS[0].fullmatch(name) for name in found):
        raise ValueError(
            f"resume_from_checkpoint=True: expected a checkpoint in output_dir={folder}, found "
            f"{', '.join(found[:5]) or 'none'}. Leave the option out to start anew."
        )
    if found and not resume and not overwrite:
        raise ValueError(
            f"output_dir={folder} holds results of an earlier run ({', '.join(found[:5])}"
            f"{', …' if len(found) > 5 else ''}), which this run would write over. Choose another output_dir, go on "
            "with resume_from_checkpoint=True, or start anew with overwrite_output_dir=True."
        )
    if found and overwrite and config.process_index == 0:
        logger.info("%s: removing what an earlier run has left: %s", folder, ", ".join(found))
        for name in found:
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
