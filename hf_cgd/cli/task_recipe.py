"""The recipe of a benchmark: from its task to a trained model, with the published numbers beside those of the run."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Literal

import torch
from datasets import DatasetDict
from transformers import set_seed

from hf_cgd.cli.command_line import RecipeConfig, parse_command_line, readable_errors
from hf_cgd.cli.data_notes import DataNotes
from hf_cgd.cli.epoch_decay import EpochDecay
from hf_cgd.cli.model_inputs import columns_beside_images, tokenized
from hf_cgd.cli.networks import image_classifier, text_classifier
from hf_cgd.cli.own_data_options import CHANNELS_LAST, MAX_LENGTH
from hf_cgd.cli.published import published_table
from hf_cgd.cli.text_length import require_room_for
from hf_cgd.cli.tiny_networks import tiny_text_classifier
from hf_cgd.cli.training import metric_prefixes, run, task_options
from hf_cgd.cli.wilds_predictions import write_wilds_predictions
from hf_cgd.data.image_preparation import IMAGENET_MEAN, IMAGENET_STD
from hf_cgd.data.image_reading import with_pixels
from hf_cgd.models.batch_norm import freeze_batch_norm
from hf_cgd.tasks.base import Task, TaskInfo
from hf_cgd.trainer.trainer import GroupRobustTrainer


def _option(name: str, kind: Any, default: Any, help_text: str) -> tuple[str, Any, Any]:
    return name, kind, field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class TaskRecipe:
    """The program of a benchmark: `TaskRecipe(Waterbirds).main()`.

    Attributes:
        task: the benchmark; its fields are options of the command line.
        preset: whose hyperparameters are the defaults; None for the first of `TaskInfo.presets`.
        prefers: further defaults.
    """

    task: type[Task]
    preset: str | None = None
    prefers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> type:
        """The options of the recipe besides those of every run, a dataclass."""
        info = self.task().info
        presets = Literal.__getitem__(info.presets)
        options = [
            _option("model", str | None, None, "Hub id, local folder or timm architecture; None for the preset's."),
            _option(
                "source", str | None, None,
                f"Where the data comes from: {', '.join(info.sources)} or the folder of its files; None for the files "
                "in data_dir, or else the Hub.",
            ),
            _option("data_dir", str | None, None, "Folder of the data: its own files, or what the source reads."),
            _option("preset", presets, self.preset or info.presets[0], "Who states the hyperparameters."),
        ]  # fmt: skip
        if "demo" in info.sources:
            options.append(_option("demo", bool, False, "Made-up data and a tiny untrained model; offline."))
        if info.kind == "text":
            options.append(_option("max_length", int, MAX_LENGTH, "Tokens of an input; longer ones are cut."))
            options.append(_option("num_proc", int | None, None, "Processes that tokenise; None for this one."))
        if info.kind == "image":
            options += [
                _option("pretrained", bool, True, "Start from published weights, or from scratch."),
                _option("weights", str | None, None, "File of such weights, in place of the Hub's (timm)."),
                _option("freeze_bn", bool, False, "Keep the statistics of BatchNorm, so that groups do not mix."),
                _option("lr_decay_per_epoch", float, 1.0, "Factor of the learning rate after each epoch."),
            ]
        if info.kind != "text":
            options.append(_option("channels_last", bool, False, CHANNELS_LAST))
        if info.wilds is not None:
            to_write = "Folder for files of predictions in the WILDS leaderboard's format."
            options.append(_option("wilds_predictions", str | None, None, to_write))
        taken = {name for name, _, _ in options} | {one.name for one in fields(RecipeConfig)}
        own = [
            (
                one.name,
                one.type,
                field(default=one.default, default_factory=one.default_factory, metadata=one.metadata),
            )
            for one in fields(self.task)
            if one.name not in taken
        ]
        return make_dataclass("Options", [*options, *own])

    def defaults(self, chosen: Namespace) -> dict[str, Any]:
        """Defaults of all options, for what was chosen so far."""
        task = self._task(chosen)
        options = task_options(task, _preset(chosen), chosen.objective)
        if task.info.kind != "text":
            # The pixels come with reading, so no column may be taken away before that.
            options["remove_unused_columns"] = False
        if task.info.kind == "image" and not _is_demo(chosen):
            options["dataloader_num_workers"] = min(8, os.cpu_count() or 1)
        return options | dict(self.prefers)

    def main(self, arguments: Sequence[str] | None = None) -> GroupRobustTrainer:
        """The program; `arguments` are the command line, `sys.argv` by default."""
        own, config = parse_command_line(self.options, self.defaults, arguments)
        spellings = {"source=demo": "--demo"}
        with readable_errors(own, config, spellings=spellings), config.main_process_first():
            task = self._task(own, config)
            splits = task.load("demo" if _is_demo(own) else own.source, own.data_dir)
            set_seed(config.seed)
            model, processor = self._network(task, own, splits)
            notes = _notes_on(task.info, _is_demo(own), speaks=config.process_index == 0)
            splits = self._prepared(task, own, config, splits, model, processor, notes)
        trained: dict[str, Any] = {} if task.info.kind == "pixels" else {"processing_class": processor}
        if getattr(own, "lr_decay_per_epoch", 1.0) != 1.0:
            trained["callbacks"] = [EpochDecay(own.lr_decay_per_epoch)]
        trainer = run(config, model, splits, notes, **trained)
        if getattr(own, "wilds_predictions", None):
            write_wilds_predictions(trainer, task, splits, own.wilds_predictions, config.seed)
        if trainer.is_world_process_zero():
            reports = {name: trainer.group_report(prefix).overall for name, prefix in metric_prefixes(splits).items()}
            print("\n" + published_table(task.info, config.objective, reports, made_up=_is_demo(own)))
        return trainer

    def _task(self, *options: Any) -> Task:
        """The benchmark in the settings of the command line, of which the config's own come from there."""
        named = {name: value for given in reversed(options) for name, value in vars(given).items()}
        return self.task(**{one.name: named[one.name] for one in fields(self.task) if one.name in named})

    def _network(self, task: Task, own: Any, splits: DatasetDict) -> tuple[torch.nn.Module, Any]:
        info = task.info
        if info.kind == "text":
            if own.model is None:
                return tiny_text_classifier([splits["train"][column][:] for column in info.inputs], info.label_names)
            return text_classifier(own.model, info.label_names)
        options = {**info.image_format, "channels_last": own.channels_last}
        if info.kind == "pixels":
            return image_classifier(own.model, info.label_names, pretrained=False, **options)
        model, processor = image_classifier(
            own.model, info.label_names, own.pretrained and not _is_demo(own), weights=own.weights, **options
        )
        if own.freeze_bn:
            freeze_batch_norm(model)
        return model, processor

    def _prepared(
        self,
        task: Task,
        own: Any,
        config: RecipeConfig,
        splits: DatasetDict,
        model: torch.nn.Module,
        processor: Any,
        notes: DataNotes,
    ) -> DatasetDict:
        info = task.info
        if info.kind == "text":
            splits, cut = tokenized(splits, info.inputs, processor, own.max_length, own.num_proc)
            notes.add_cut_texts(cut, splits, config.group_column or (), own.max_length)
            require_room_for(model, splits, "max_length", own.max_length)
            return splits
        if info.kind == "pixels":
            return splits
        preparation = task.image_preparation(_preset(own))
        mean, std = scale_of(processor)
        return with_pixels(
            splits,
            info.inputs[0],
            task.open_image,
            lambda training: preparation.steps(training, mean, std),
            columns_beside_images(config),
        )


def scale_of(processor: Any) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and deviation of a network's training data by its image processor; ImageNet's where it tells none."""
    stated = getattr(processor, "data_config", None) or {}
    mean, std = (stated.get(name) or getattr(processor, f"image_{name}", None) for name in ("mean", "std"))
    return mean or IMAGENET_MEAN, std or IMAGENET_STD


def _notes_on(info: TaskInfo, made_up: bool, speaks: bool) -> DataNotes:
    """What card and record call a benchmark's data, and that it was made up, where it was."""
    if not made_up:
        return DataNotes(info.name, speaks=speaks)
    notes = DataNotes(f"made-up data in the form of {info.name}", speaks=speaks)
    notes.add(f"The data was made up: nothing here tells how a model fares on {info.name}.", is_loud=False)
    return notes


def _is_demo(chosen: Any) -> bool:
    return bool(getattr(chosen, "demo", False)) or getattr(chosen, "source", None) == "demo"


def _preset(chosen: Any) -> str:
    return "demo" if _is_demo(chosen) else str(chosen.preset)
