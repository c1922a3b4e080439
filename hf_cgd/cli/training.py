"""A run from its config to its files: train, report the groups, save."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_cgd.cli.command_line import show_messages
from hf_cgd.tasks.base import Task
from hf_cgd.trainer.config import GroupRobustConfig
from hf_cgd.trainer.trainer import GroupRobustTrainer

BEST_WORST_GROUP: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "worst_group_accuracy",
}
"""Options of a run that ends with the epoch whose worst validation group did best."""
REPORT_FILE = "group_report.json"
"""What `run` leaves of the groups in the folder of a run."""


def task_options(task: Task, source: str, objective: str) -> dict[str, Any]:
    """Defaults of a recipe for a benchmark: its groups, its metric, and its hyperparameters.

    Args:
        task: the benchmark.
        source: who states the hyperparameters, see `Task.hyperparameters`.
        objective: what is trained.
    """
    info = task.info
    own: dict[str, Any] = {"output_dir": f"outputs/{info.name}", "group_column": list(info.group_columns)}
    if info.evaluation_group_columns is not None:
        own["eval_group_column"] = list(info.evaluation_group_columns)
    best = BEST_WORST_GROUP | {"metric_for_best_model": info.metric}
    return own | best | task.hyperparameters(source, objective=objective)


def run(
    config: GroupRobustConfig,
    model: nn.Module,
    splits: Mapping[str, Any],
    **trainer_options: Any,
) -> GroupRobustTrainer:
    """Train on `splits["train"]`, report the groups of "validation" and "test" where there are any, save.

    Prints the tables of groups (on the main process) and writes model, `metrics.json` and `group_report.json` to
    `config.output_dir`.

    Args:
        config: the run.
        model: the network.
        splits: datasets by name: "train", and optionally "validation" and "test".
        trainer_options: passed on to `GroupRobustTrainer` (`processing_class`, `data_collator`, …).

    Returns:
        the trainer, after training.
    """
    show_messages()
    trainer = GroupRobustTrainer(
        model=model,
        args=config,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        **trainer_options,
    )
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    if "validation" in splits:
        trainer.evaluate()
    if "test" in splits:
        trainer.predict(splits["test"])
    trainer.save_model()
    if trainer.is_world_process_zero():
        prefixes = {"validation": "eval", "test": "test"}
        reports = {name: trainer.group_report(prefix) for name, prefix in prefixes.items() if name in splits}
        for name, report in reports.items():
            print(f"\n{name}\n{report}")
        assert config.output_dir is not None
        content = {name: report.to_dict() for name, report in reports.items()}
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (Path(config.output_dir) / REPORT_FILE).write_text(text, encoding="utf-8")
    return trainer
