"""What a run leaves in its folder besides the model: card, pictures, the answers for each row; and where it all is."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
from scipy.special import softmax
from transformers.trainer_utils import PredictionOutput

from hf_cgd.cards import (
    CARD_FILE,
    REPORT_FILE,
    RUN_FILE,
    SETTINGS_FILE,
    load_reports,
    load_run,
    write_card,
    write_reports,
)
from hf_cgd.cards.pictures import PICTURES
from hf_cgd.data.columns import read_columns
from hf_cgd.metrics import GroupReport
from hf_cgd.metrics.values import as_json
from hf_cgd.models.outputs import class_names_of
from hf_cgd.trainer.history import HISTORY_FILE
from hf_cgd.trainer.trainer import GroupRobustTrainer
from hf_cgd.whole_files import whole_file

PREDICTIONS = "predictions_{}.csv"
"""The answers for each row of a split, in the folder of the run."""
PLACES = {
    "model": ("*.safetensors", "pytorch_model*.bin"),
    "card": (CARD_FILE,),
    "pictures": (f"{PICTURES}/*.png", "comparison.png"),
    "groups": (REPORT_FILE,),
    "groups of each run": (f"*/{REPORT_FILE}",),
    "table": ("comparison.md",),
    "page to hand on": ("comparison.html",),
    "predictions": (PREDICTIONS.format("*"),),
    "weights over time": (HISTORY_FILE,),
    "settings": (SETTINGS_FILE,),
}
"""What a folder of results may hold, and under which names."""


def write_results(
    trainer: GroupRobustTrainer,
    reports: Mapping[str, GroupReport],
    trained: bool,
    pictures: bool = True,
    data_name: str | None = None,
) -> None:
    """Write the card of a run and all that it speaks of, in the folder of the run.

    Args:
        trainer: after its evaluations.
        reports: by split.
        trained: whether the run trained the model. Where it did not, the card of a training is left as it is.
        pictures: whether to draw them.
        data_name: what the data is called; None for what the data sets tell.
    """
    assert trainer.args.output_dir is not None
    folder = Path(trainer.args.output_dir)
    if trained and pictures:
        trainer.create_model_card(dataset=data_name)
    elif trained:
        write_card(trainer.run_record(dataset=[data_name] if data_name else ()), folder, draw=False)
    elif _has_card_of_training(folder):
        write_reports(reports, folder)
    else:
        # How the model was trained is not known here.
        record = trainer.run_record(dataset=[data_name] if data_name else ())
        unknown: dict[str, Any] = {
            "objective": None,
            "settings": {},
            "training": {},
            "weights": {},
            "steps": None,
            "kept_step": None,
            "compared": None,
        }
        write_card(replace(record, reports=reports, groups=None, **unknown), folder, draw=pictures)


def _has_card_of_training(folder: Path) -> bool:
    if (folder / RUN_FILE).exists():
        return load_run(folder).objective is not None
    return (folder / CARD_FILE).exists()


def write_predictions(
    trainer: GroupRobustTrainer,
    rows: Any,
    split: str,
    output: PredictionOutput,
    folder: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the model's answer for each row of a split, beside what the data says of the row; where it is.

    The columns: those of the data that hold single values, then "prediction", "correct" and "probability" (that of the
    answer), or the predicted values of a regression. The main process writes.

    Args:
        trainer: with the model.
        rows: the split.
        split: its name.
        output: what `trainer.predict` gave for the rows.
        folder: where to; None for that of the run.
    """
    path = Path(folder or trainer.args.output_dir or "") / PREDICTIONS.format(split)
    if not trainer.is_world_process_zero():
        return path
    table = _columns_of(rows)
    answers = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
    scores = np.asarray(answers, dtype=np.float64)
    labels = np.asarray(output.label_ids)
    if np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1 and scores.ndim == 2 and scores.shape[1] > 1:
        names = class_names_of(trainer.model) or [str(number) for number in range(scores.shape[1])]
        # As evaluations have it: a score of -inf stands for a class that is ruled out.
        answered = np.asarray(~np.isnan(scores).any(axis=1))
        best = np.where(answered[:, None], scores, 0.0).argmax(axis=1)
        given = [names[place] if known else "" for place, known in zip(best, answered, strict=True)]
        with np.errstate(invalid="ignore"):
            chances = softmax(scores, axis=1)[np.arange(len(best)), best]
        ours = {"prediction": given, "correct": (best == labels) & answered, "probability": chances.round(6)}
    else:
        values = scores.reshape(len(scores), -1)
        names = ["prediction", *(f"prediction_{place}" for place in range(1, values.shape[1]))]
        ours = dict(zip(names, values.T, strict=True))
    table = {f"{name} (data)" if name in ours else name: values for name, values in table.items()}
    with whole_file(path) as unfinished:
        pd.DataFrame({**table, **ours}).to_csv(unfinished, index=False, encoding="utf-8")
    return path


def _columns_of(rows: Any) -> dict[str, Any]:
    """The columns of single values; of images the paths, classes by name."""
    features = getattr(rows, "features", None) or {}
    single = [name for name, kind in features.items() if isinstance(kind, (datasets.Value, datasets.ClassLabel))]
    stored = [name for name, kind in features.items() if isinstance(kind, datasets.Image) and not kind.decode]
    table: dict[str, Any] = {}
    for name, column in read_columns(rows, [*single, *stored]).items():
        known = column.class_names
        if name in stored:
            table[name] = [None if image is None else image.get("path") for image in column.values]
        elif known is None:
            table[name] = column.values
        else:
            table[name] = [known[v] if isinstance(v, int) and 0 <= v < len(known) else v for v in column.values]
    return table


def left_in(folder: str | os.PathLike[str]) -> dict[str, list[str]]:
    """The files that a run has left in its folder, by what they are; what is not there is left out."""
    place = Path(folder)
    found = {
        what: sorted(path.relative_to(place).as_posix() for pattern in patterns for path in place.glob(pattern))
        for what, patterns in PLACES.items()
    }
    return {what: files for what, files in found.items() if files}


def where_it_is(folder: str | os.PathLike[str]) -> str:
    """The last lines of a run: where the things are."""
    found = left_in(folder)
    width = max(map(len, found), default=0)
    lines = [f"  {what:{width}}  {', '.join(files)}" for what, files in found.items()]
    page = "" if "page to hand on" in found else f"\nOne page to hand on: hf-cgd report {folder} --output report.html"
    return "\n".join([f"In {folder}:", *lines]) + page


def summary_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """A run as JSON: {"output_dir": …, "reports": {split: …}, "files": {what: […]}}."""
    reports = {name: report.to_dict() for name, report in load_reports(folder).items()}
    cautions = load_run(folder).data.cautions
    summary: dict[str, Any] = as_json(
        {"output_dir": str(folder), "reports": reports, "cautions": cautions, "files": left_in(folder)}
    )
    return summary
