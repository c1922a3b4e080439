"""What every recipe does with its data and its model: read the command line, train, report."""

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers import HfArgumentParser

from hf_cgd.config import GroupRobustConfig
from hf_cgd.trainer import GroupRobustTrainer


def parse_command_line(
    options: type, defaults: Mapping[str, Any] | None = None, arguments: Sequence[str] | None = None
) -> tuple[Any, GroupRobustConfig]:
    """Options of a recipe and a `GroupRobustConfig` from the command line.

    The first argument may be a YAML or JSON file of options; further ones take precedence over it.

    Args:
        options: the recipe's own options, a dataclass.
        defaults: values of either dataclass that the recipe prefers to the dataclass's own.
        arguments: the command line, `sys.argv` by default.

    Raises:
        ValueError: the file holds a name that is no option.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    kinds: list[Any] = [options, GroupRobustConfig]
    parser = HfArgumentParser(kinds)
    chosen = dict(defaults or {})
    if arguments and Path(arguments[0]).suffix in (".yaml", ".yml", ".json"):
        path = Path(arguments.pop(0))
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        known = {f.name for kind in kinds for f in fields(kind)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"{path}: no such option: {', '.join(unknown)}. Run the recipe with --help to see them all."
            )
        chosen |= values
    parser.set_defaults(**chosen)
    own, config = parser.parse_args_into_dataclasses(arguments)
    return own, config


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
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    trainer = GroupRobustTrainer(
        model=model,
        args=config,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        **trainer_options,
    )
    trainer.train()
    reports = {}
    if "validation" in splits:
        trainer.evaluate()
        reports["validation"] = trainer.group_report("eval")
    if "test" in splits:
        trainer.predict(splits["test"])
        reports["test"] = trainer.group_report("test")
    trainer.save_model()
    if trainer.is_world_process_zero():
        for name, report in reports.items():
            print(f"\n{name}\n{report}")
        assert config.output_dir is not None
        with open(os.path.join(config.output_dir, "group_report.json"), "w", encoding="utf-8") as file:
            json.dump({name: report.to_dict() for name, report in reports.items()}, file, indent=2, ensure_ascii=False)
    return trainer
