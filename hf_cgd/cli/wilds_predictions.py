"""Predictions in the format of the WILDS leaderboard, which the package's evaluation script reads."""

from collections.abc import Mapping
from pathlib import Path

import torch
from datasets import Dataset

from hf_cgd.models.example_losses import CLASSIFICATION, REGRESSION, predictions_of
from hf_cgd.tasks.base import Task
from hf_cgd.tasks.povertymap import PovertyMap
from hf_cgd.trainer.trainer import GroupRobustTrainer
from hf_cgd.whole_files import write_whole


def write_wilds_predictions(
    trainer: GroupRobustTrainer, task: Task, splits: Mapping[str, Dataset], folder: str | Path, seed: int
) -> list[Path]:
    """Predict every split but the training one, and write a file for each: a class or a number in each line.

    The files lie in `folder`/<name of the package's dataset>, and their names say split and seed (of PovertyMap: the
    fold): `camelyon17_split:test_seed:0_epoch:best_pred.csv`. Rows stand in the order of the splits, which is that of
    the package where the data was read from its files. To be called on all processes; the main one writes.

    Raises:
        ValueError: a task that the package does not have.
    """
    known = task.info.wilds
    if known is None:
        raise ValueError(f"wilds_predictions: the wilds package does not have {task.info.name}.")
    replicate = f"fold:{task.replicate}" if isinstance(task, PovertyMap) else f"seed:{seed}"
    kind = CLASSIFICATION if task.info.label_names else REGRESSION
    written = []
    for theirs, ours in known.splits.items():
        if ours == "train":
            continue
        outputs = torch.from_numpy(trainer.predict(splits[ours], metric_key_prefix=ours).predictions)
        values = predictions_of(outputs, kind).flatten().tolist()
        path = Path(folder) / known.name / f"{known.name}_split:{theirs}_{replicate}_epoch:best_pred.csv"
        if trainer.is_world_process_zero():
            write_whole(path, "".join(f"{value!r}\n" for value in values))
        written.append(path)
    return written
