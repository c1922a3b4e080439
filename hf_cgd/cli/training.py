"""A run from its config to its files: train, report the groups, save."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers.trainer_utils import PredictionOutput

from hf_cgd.cards import RunRecord, load_run, write_card
from hf_cgd.cards.pictures import PICTURES
from hf_cgd.cards.record import EVALUATED_ONLY
from hf_cgd.cli.command_line import RecipeConfig, readable_errors, show_messages
from hf_cgd.cli.data_notes import DataNotes
from hf_cgd.cli.networks import untrained_weights
from hf_cgd.cli.output_folder import has_model, prepare_output
from hf_cgd.cli.results import PREDICTIONS, where_it_is, write_predictions, write_results
from hf_cgd.tasks.base import Task
from hf_cgd.trainer.checkpoints import last_complete_checkpoint
from hf_cgd.trainer.config import GroupRobustConfig
from hf_cgd.trainer.trainer import GroupRobustTrainer

ROUNDING = 0.01
"""Accuracies of one model on one set differ by less: an answer may tip over on another machine."""
BEST_WORST_GROUP: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "worst_group_accuracy",
}
"""Options of a run that ends with the epoch whose worst validation group did best."""


def task_options(task: Task, source: str, objective: str) -> dict[str, Any]:
    """Defaults of a recipe for a benchmark: its groups, its metric, and its hyperparameters.

    Args:
        task: the benchmark.
        source: who states the hyperparameters, see `Task.hyperparameters`.
        objective: what is trained.
    """
    info = task.info
    own: dict[str, Any] = {"output_dir": f"outputs/{task.run_name}", "group_column": list(info.group_columns)}
    if info.evaluation_group_columns is not None:
        own["eval_group_column"] = list(info.evaluation_group_columns)
    best = BEST_WORST_GROUP | {"metric_for_best_model": info.metric}
    return own | best | task.hyperparameters(source, objective=objective)


def run(
    config: GroupRobustConfig,
    model: nn.Module,
    splits: Mapping[str, Any],
    notes: DataNotes | None = None,
    **trainer_options: Any,
) -> GroupRobustTrainer:
    """Train on `splits["train"]`, report the groups of "validation", "test" and all further splits, save.

    Prints the tables of groups and where things are (on the main process). Writes the model and all that
    `hf_cgd.cli.results` does to `config.output_dir`. A folder that holds an earlier run ends the program with a
    message, see `prepare_output`.

    Args:
        config: the run. A `RecipeConfig` with `do_train=False` evaluates: the model as it was loaded, or the
            checkpoint that it names.
        model: the network.
        splits: datasets by name: "train", and optionally "validation", which chooses, and others, which are reported.
        notes: what is known of the data; None for what the splits tell.
        trainer_options: passed on to `GroupRobustTrainer` (`processing_class`, `data_collator`, …).

    Returns:
        the trainer, after training.
    """
    show_messages()
    own = config if isinstance(config, RecipeConfig) else None
    trains = own is None or own.do_train
    with readable_errors(config):
        prepare_output(config, own is not None and own.overwrite_output_dir, trains)
        if not trains:
            _require_trained(config, model)
    trainer = GroupRobustTrainer(
        model=model,
        args=config,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        **trainer_options,
    )
    notes = notes or DataNotes()
    trainer.data_preparation, trainer.data_cautions = notes.preparation, notes.cautions
    if trains:
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        # The log of the whole run: the checkpoint that is kept may be an earlier one.
        trainer.save_state()
    else:
        with readable_errors(config):
            _load_for_evaluation(trainer)
    prefixes, writes = metric_prefixes(splits), own is not None and own.predictions
    outputs: dict[str, PredictionOutput] = {}
    for name, prefix in prefixes.items():
        if name == "validation":
            trainer.evaluate()
        if name != "validation" or writes:
            output = trainer.predict(splits[name], metric_key_prefix=prefix)
            if writes:
                outputs[name] = output
    if trains:
        trainer.save_model()
    for name, output in outputs.items():
        write_predictions(trainer, splits[name], name, output)
    if trainer.is_world_process_zero():
        reports = {name: trainer.group_report(prefix) for name, prefix in prefixes.items()}
        if not trains:
            reports = {name: replace(report, objective=EVALUATED_ONLY) for name, report in reports.items()}
        for name, report in reports.items():
            print(f"\n{name}\n{report}")
        assert config.output_dir is not None
        write_results(trainer, reports, trains, own is None or own.pictures, notes.name)
        if trains and notes.training_rows is not None:
            notes.training_rows.save(config.output_dir)
        print(f"\n{where_it_is(config.output_dir)}")
    return trainer


def complete_results(
    config: RecipeConfig, network: Callable[[], nn.Module], splits: Mapping[str, Any], **trainer_options: Any
) -> list[str]:
    """Write what a finished run was not asked for at the time, and now is: predictions, pictures; their names.

    All else in its folder stays as it is, but for the card, which gets the pictures.

    Args:
        config: of the run; `output_dir` holds its model and record.
        network: builds its network, with whatever weights: those of the run are loaded.
        splits, trainer_options: see `run`.

    Raises:
        ValueError: predictions are wanted and the model is not there, or it answers otherwise than its report says.
    """
    assert config.output_dir is not None
    folder = Path(config.output_dir)
    record, is_main, written = load_run(folder), config.process_index == 0, []
    wanted = metric_prefixes(splits) if config.predictions else {}
    missing = {name: prefix for name, prefix in wanted.items() if not (folder / PREDICTIONS.format(name)).exists()}
    if missing and not has_model(folder):
        raise ValueError(
            f"predictions=True: the run in {folder} was finished without them, and its model is not there any more. "
            "Leave the option out, or train anew with overwrite_output_dir=True and without resume_from_checkpoint."
        )
    if missing:
        with TemporaryDirectory() as elsewhere:
            # Metrics of the predictions would take the place of those of the run.
            aside = copy.copy(config)
            aside.output_dir = elsewhere
            trainer = GroupRobustTrainer(
                model=network(), args=aside, train_dataset=splits["train"], eval_dataset=splits.get("validation"),
                **trainer_options,
            )  # fmt: skip
            trainer._load_from_checkpoint(str(folder))
            for name, prefix in missing.items():
                output = trainer.predict(splits[name], metric_key_prefix=prefix)
                _require_as_reported(output.metrics or {}, prefix, record, name)
                written.append(write_predictions(trainer, splits[name], name, output, folder).name)
    if config.pictures and is_main and not (folder / PICTURES).exists():
        drawn = write_card(record, folder)
        written += [path.name for path in drawn if path.parent.name == PICTURES]
    return written


def _require_as_reported(metrics: Mapping[str, float], prefix: str, record: RunRecord, split: str) -> None:
    now, then = metrics.get(f"{prefix}_accuracy"), record.reports[split].overall.get("accuracy")
    if now is not None and then is not None and abs(now - then) > ROUNDING:
        raise ValueError(
            f"{record.name}: the model that is in its folder has accuracy {now:.4f} on the {split} set, but the "
            f"report says {then:.4f}: the model or the data is another by now. Train anew with "
            "overwrite_output_dir=True and without resume_from_checkpoint."
        )


def metric_prefixes(splits: Mapping[str, Any]) -> dict[str, str]:
    """The splits that are evaluated, "validation" first, and the prefix of the metrics of each."""
    names = sorted((name for name in splits if name != "train"), key=lambda name: name != "validation")
    return {name: "eval" if name == "validation" else name for name in names}


def _require_trained(config: GroupRobustConfig, model: nn.Module) -> None:
    new = [] if config.resume_from_checkpoint else untrained_weights(model)
    if new:
        raise ValueError(
            f"do_train=False evaluates a trained model, but these weights were loaded from nowhere: "
            f"{', '.join(new[:5])}{', …' if len(new) > 5 else ''}. Pass model= with the folder of a trained model, or "
            "resume_from_checkpoint= with a checkpoint."
        )


def _load_for_evaluation(trainer: GroupRobustTrainer) -> None:
    """The weights of the checkpoint that is named, if one is; group weights of a training there are none."""
    wanted = trainer.args.resume_from_checkpoint
    if wanted:
        assert trainer.args.output_dir is not None
        folder = last_complete_checkpoint(trainer.args.output_dir) if wanted is True else wanted
        if folder is None:
            raise ValueError(
                f"resume_from_checkpoint=True: expected a checkpoint in {trainer.args.output_dir}, found none."
            )
        trainer._load_from_checkpoint(folder)
    trainer.robust_loss = None
