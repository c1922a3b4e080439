"""Runs under several objectives, all else equal: their options, a table and a picture."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from hf_cgd.cards import RunRecord, html_report, load_run
from hf_cgd.cli.command_line import RecipeConfig
from hf_cgd.cli.output_folder import has_model
from hf_cgd.metrics import GroupReport
from hf_cgd.metrics.tables import markdown, plain
from hf_cgd.objectives import KNOBS, build_objective, knobs_of
from hf_cgd.plots import comparison_figure, save_figure
from hf_cgd.trainer.checkpoints import last_complete_checkpoint
from hf_cgd.trainer.config import GroupOptions
from hf_cgd.visible_numbers import decimals
from hf_cgd.visible_text import visible_name
from hf_cgd.whole_files import write_whole

OVERALL = {"worst_group_accuracy": "worst group", "accuracy": "average", "adjusted_accuracy": "adjusted average"}
"""Rows of the table above those of the groups."""


def compared(values: Mapping[str, Any], objectives: Sequence[str]) -> list[dict[str, Any]]:
    """The options of each run: without those that its objective has no use for, in a folder of its own.

    Args:
        values: the options by name.
        objectives: names or import paths.

    Raises:
        ValueError: fewer than two of them, one twice, or one that does not exist.
    """
    if len(objectives) < 2 or len(set(objectives)) < len(objectives):
        raise ValueError(f"compare: expected two or more different objectives, got {' '.join(objectives)}.")
    defaults = {one.name: one.default for one in fields(GroupOptions)}
    runs = []
    for name in objectives:
        objective = build_objective(name, {})
        idle = [knob for knob in KNOBS if knob not in knobs_of(name)]
        idle += [] if objective.needs_gradients else ["gradient_layers", "gradient_engine"]
        idle += [] if objective.moves_weights else ["weight_timing", "nonfinite"]
        folder = Path(values["output_dir"]) / re.sub(r"\W", "_", name)
        own = {option: defaults[option] for option in idle}
        runs.append({**values, **own, "objective": name, "output_dir": str(folder)})
    return runs


def begin_or_go_on(config: RecipeConfig) -> None:
    """Under `resume_from_checkpoint=True` a run of several goes on, or begins where it has no whole checkpoint yet.

    Args:
        config: of the run; changed where it begins.

    Raises:
        ValueError: a checkpoint by its path, which can be that of one run only; or a model without a checkpoint.
    """
    resume = config.resume_from_checkpoint
    if not resume:
        return
    if resume is not True:
        raise ValueError(
            f"compare= resumes each run from its own folder, but resume_from_checkpoint={resume} names one "
            "checkpoint. Set resume_from_checkpoint=True."
        )
    assert config.output_dir is not None
    if has_model(config.output_dir):
        return
    try:
        begins = last_complete_checkpoint(config.output_dir) is None
    except ValueError:  # It was stopped while it saved for the first time.
        begins = True
    if begins:
        config.resume_from_checkpoint, config.overwrite_output_dir = None, True


def is_finished(config: RecipeConfig, splits: Iterable[str]) -> bool:
    """Whether a run that is to go on has nothing left to do: as many steps as wanted, and a report of each split.

    To train it again would move its weights: the Trainer looks at `max_steps` after a step, not before.

    Args:
        config: of the run; one that begins anew is not finished.
        splits: names of those that are evaluated.
    """
    if not config.resume_from_checkpoint:
        return False
    assert config.output_dir is not None
    folder = Path(config.output_dir)
    try:
        record, state = load_run(folder), TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    except (OSError, ValueError):  # It ended before it wrote them, or while it did.
        return False
    by_steps = config.max_steps > 0
    done = state.global_step if by_steps else state.num_train_epochs
    wanted = config.max_steps if by_steps else math.ceil(config.num_train_epochs)
    as_long_as_planned = state.global_step >= state.max_steps and done >= wanted
    return as_long_as_planned and record.steps == state.global_step and set(splits) <= set(record.reports)


def write_comparison(runs: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str], pictures: bool) -> str:
    """Write "comparison.md", "comparison.html" and, if wanted, "comparison.png"; the table as text.

    Args:
        runs: folders of the runs.
        folder: where to.
        pictures: whether to draw.
    """
    records = [load_run(run) for run in runs]
    splits = [split for split in ("test", "validation") if all(split in record.reports for record in records)]
    if not splits:
        return "No split was evaluated: there is nothing to compare."
    split, place = splits[0], Path(folder)
    by_name = {Path(run).name: record for run, record in zip(runs, records, strict=True)}
    reports = {name: record.reports[split] for name, record in by_name.items()}
    rows = _table(reports)
    advice = (
        f"{split} split; one seed, and the step sizes and penalties are the defaults or what the command line said. "
        "To choose them by validation, over several seeds: hf-cgd experiments."
    )
    write_whole(place / "comparison.md", f"{markdown(rows)}\n\n{advice}\n")
    html_report(records, place / "comparison.html")
    has_accuracies = all(row.accuracy is not None for report in reports.values() for row in report.rows if row.count)
    if pictures and has_accuracies:
        _draw(by_name, reports, split, place / "comparison.png")
    return f"\n{plain(rows)}\n\n{advice}"


def _draw(records: Mapping[str, RunRecord], reports: Mapping[str, GroupReport], split: str, path: Path) -> None:
    from matplotlib import rc_context

    # A dollar in a group's name begins no formula.
    with rc_context({"text.parse_math": False}):
        histories = {name: [record.history] for name, record in records.items() if record.weights}
        runs = {name: [report] for name, report in reports.items()}
        save_figure(comparison_figure(runs, histories or None, title=split), path, vector=None)


def _table(reports: Mapping[str, GroupReport]) -> list[list[str]]:
    """Head, the numbers over all groups, then the groups, the worst under the first objective on top."""
    first = next(iter(reports.values()))
    metric = first.metric or "accuracy"
    rows = [[metric, *reports]]
    for name, title in OVERALL.items():
        values = [report.overall.get(name) for report in reports.values()]
        if any(value is not None for value in values):
            rows.append([title, *map(decimals, values)])
    rows.append(["gap between groups", *(decimals(report.gap(metric)) for report in reports.values())])
    by_name = {method: {row.name: row.value(metric) for row in report.rows} for method, report in reports.items()}
    for row in first.ranked:
        rows.append([f"  {visible_name(row.name)}", *(decimals(values.get(row.name)) for values in by_name.values())])
    return rows
