"""Training on one's own data: texts or images, under one objective or under several that are compared."""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import TrainingArguments, set_seed

from hf_cgd.cards import RUN_FILE, load_run
from hf_cgd.cli.command_line import RecipeConfig, read_command_line, readable_errors, show_messages
from hf_cgd.cli.comparison import begin_or_go_on, compared, is_finished, write_comparison
from hf_cgd.cli.data_check import load_checked
from hf_cgd.cli.data_notes import DataNotes, preparation_of
from hf_cgd.cli.model_inputs import columns_beside_images, require_images, tokenized, with_pixel_values
from hf_cgd.cli.networks import classes_of, image_classifier, text_classifier
from hf_cgd.cli.output_folder import prepare_output
from hf_cgd.cli.own_data_options import ImageOptions, TextOptions
from hf_cgd.cli.results import left_in, summary_of, where_it_is
from hf_cgd.cli.run_folder import run_folder_of
from hf_cgd.cli.text_length import require_room_for
from hf_cgd.cli.training import BEST_WORST_GROUP, complete_results, run
from hf_cgd.data import sources
from hf_cgd.data.row_digests import MOST, RowDigests, digests_of_images, digests_of_texts
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.trainer import GroupRobustTrainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnDataRecipe:
    """A program that trains on one's own data: `TEXT.main()`.

    Attributes:
        options: the dataclass of its own options.
        defaults: what it prefers to the config's defaults.
        load: the options and the config to the splits, checked.
        network: the options and the names of the classes to a network and its processor.
        prepare: the options, the config, the splits, the processor and the notes to splits that the network takes.
        digests: the options and a split to a digest of each row's inputs, uint64 [N].
    """

    options: type
    defaults: dict[str, Any]
    load: Callable[[Any, RecipeConfig], DatasetDict]
    network: Callable[[Any, Sequence[str]], tuple[Any, Any]]
    prepare: Callable[[Any, RecipeConfig, DatasetDict, Any, DataNotes], DatasetDict]
    digests: Callable[[Any, Dataset], np.ndarray]

    def main(self, arguments: Sequence[str] | None = None, program: str | None = None) -> GroupRobustTrainer | None:
        """Train, under one objective or all of `--compare`; the trainer, the last one of several.

        None where a comparison was resumed whose runs were all finished.

        Args:
            arguments: the command line, `sys.argv` by default.
            program: what the program is called in messages; None for the name of its file.
        """
        return self._run(*self._read(arguments, program))

    def train(self, arguments: Sequence[str], program: str) -> dict[str, Any]:
        """The same, for what was left: the `summary_of` the run, or of all runs and what compares them.

        Other processes than the main one get nothing.
        """
        own, configs, folder = self._read(arguments, program)
        self._run(own, configs, folder)
        if configs[0].process_index != 0:
            return {}
        if own.compare is None:
            return summary_of(folder)
        runs = {config.objective: summary_of(config.output_dir or "") for config in configs}
        return {"output_dir": folder, "runs": runs, "files": left_in(folder)}

    def _read(self, arguments: Sequence[str] | None, program: str | None) -> tuple[Any, list[RecipeConfig], str]:
        """The own options, the config of each run, and the folder of all."""
        parser, values = read_command_line(self.options, self.defaults, arguments, program)
        compare = values["compare"]
        with readable_errors(self.options, RecipeConfig):
            if compare is not None and not values["do_train"]:
                raise ValueError("compare= trains under each objective, do_train=False does not. Leave one out.")
            parsed = [parser.parse_dict(one) for one in ([values] if compare is None else compared(values, compare))]
        return parsed[0][0], [config for _, config in parsed], str(values["output_dir"])

    def _run(self, own: Any, configs: Sequence[RecipeConfig], folder: str) -> GroupRobustTrainer | None:
        config = configs[0]
        with readable_errors(own, config), config.main_process_first():
            splits = _in_classes_of_the_model(self.load(own, config), own, config)
            names = splits["train"].features["label"].names
            set_seed(config.seed)
            if not config.do_train:
                _warn_of_another_draw(own, config)
            model, processor = self.network(own, names)
            notes = DataNotes(sources.name_of_file(own.dataset), speaks=config.process_index == 0)
            if config.process_index == 0 and own.data_check != "off":
                self._note_training_rows(own, config, splits, notes)
            splits = self.prepare(own, config, splits, processor, notes)
            if isinstance(own, TextOptions):
                require_room_for(model, splits, "max_length", own.max_length)
        if own.compare is None:
            return run(config, model, splits, notes, processing_class=processor)
        evaluated = [name for name in splits if name != "train"]
        finished = []
        with readable_errors(own, config):
            for one in configs:
                begin_or_go_on(one)
                finished.append(is_finished(one, evaluated))
                if not finished[-1]:
                    prepare_output(one, one.overwrite_output_dir)
                # What an earlier run has left is removed now.
                one.overwrite_output_dir = False
        trainer = None
        show_messages()
        for number, config in enumerate(configs, start=1):
            logger.info("\n%s, %d of %d", config.objective, number, len(configs))
            if finished[number - 1]:
                logger.info("It was finished before: nothing is trained, and what is in its folder stays as it is.")
                with readable_errors(own, config):
                    added = complete_results(
                        config, lambda: self.network(own, names)[0], splits, processing_class=processor
                    )
                if added:
                    logger.info("Written now, as it was not asked for before: %s.", ", ".join(added))
                continue
            if number > 1:
                set_seed(config.seed)
                model, _ = self.network(own, names)
            trainer = run(config, model, splits, notes, processing_class=processor)
        if config.process_index == 0:
            print(write_comparison([config.output_dir or "" for config in configs], folder, config.pictures))
            print(f"\n{where_it_is(folder)}")
        return trainer

    def _note_training_rows(self, own: Any, config: RecipeConfig, splits: DatasetDict, notes: DataNotes) -> None:
        """Note by what the training rows are known again, and tell of those that other splits have too."""
        if config.do_train:
            notes.training_rows = RowDigests.of(self.digests(own, splits["train"]))
        else:
            notes.training_rows = RowDigests.load(_where_it_was_trained(own, config))
        if notes.training_rows is None:
            return
        for name, rows in splits.items():
            if name != "train":
                notes.add_training_rows(name, self.digests(own, rows), rows, config.group_column or ())
        notes.training_rows = notes.training_rows.at_most(MOST)


def _in_classes_of_the_model(splits: DatasetDict, own: Any, config: RecipeConfig) -> DatasetDict:
    """The splits with their classes in the order of the model's outputs, where it has a trained head for these.

    Raises:
        ValueError: a model is to be evaluated whose classes are others.
    """
    names, resumed = splits["train"].features["label"].names, config.resume_from_checkpoint
    place = resumed if isinstance(resumed, str) and Path(resumed).is_dir() else own.model
    theirs = classes_of(place)
    if theirs and sorted(theirs) == sorted(names):
        return sources.in_class_order(splits, list(dict.fromkeys((own.label_column, "label"))), theirs)
    if theirs and not config.do_train:
        raise ValueError(
            f"do_train=False evaluates {place}, whose classes are {list(theirs)}; those of the data are {names}. "
            "Write them alike, or say which stands for which: hf-cgd evaluate MODEL DATA --labels."
        )
    return splits


def _where_it_was_trained(own: Any, config: RecipeConfig) -> Path:
    """The folder of the run that left the model, if it is one."""
    checkpoint = config.resume_from_checkpoint
    if checkpoint is True:
        return Path(config.output_dir or "")
    if isinstance(checkpoint, str) and Path(checkpoint).is_dir():
        return run_folder_of(checkpoint)
    return run_folder_of(own.model)


def _warn_of_another_draw(own: Any, config: RecipeConfig) -> None:
    """Warn where a model is evaluated on validation rows that are drawn otherwise than when it was trained."""
    folder = _where_it_was_trained(own, config)
    if not (folder / RUN_FILE).is_file() or "validation" in sources.load_splits(own.dataset, own.dataset_config):
        return
    record = load_run(folder)
    columns, seed = record.settings.get("group_column"), record.training.get("seed", TrainingArguments.seed)
    if record.objective is not None and (columns, seed) != (config.group_column, config.seed):
        warnings.warn(
            f"{folder} was trained with group_column {columns} and seed {seed}. With {config.group_column} and "
            f"{config.seed} other validation rows are drawn, and it has been trained on most of these: their numbers "
            "flatter it. Repeat the options of its training; eval_group_column looks at other groups.",
            GroupRobustWarning,
            stacklevel=2,
        )


def _text_splits(own: TextOptions, config: RecipeConfig) -> DatasetDict:
    columns = {name: getattr(own, name) for name in ("text_column", "text_pair_column", "label_column")}
    splits = load_checked(own.dataset, own.dataset_config, columns, config, own.data_check, _texts(own))
    sources.require_text(splits, [own.text_column, own.text_pair_column])
    return splits


def _texts(own: TextOptions) -> list[str]:
    return [column for column in (own.text_column, own.text_pair_column) if column is not None]


def _tokenized(
    own: TextOptions, config: RecipeConfig, splits: DatasetDict, tokenizer: Any, notes: DataNotes
) -> DatasetDict:
    if not config.do_train:
        notes.add_other_texts(preparation_of(_where_it_was_trained(own, config)), _texts(own), own.max_length)
    splits, cut = tokenized(splits, _texts(own), tokenizer, own.max_length)
    notes.preparation["text_columns"] = _texts(own)
    notes.add_cut_texts(cut, splits, config.group_column or (), own.max_length)
    return splits


def _image_splits(own: ImageOptions, config: RecipeConfig) -> DatasetDict:
    columns = {name: getattr(own, name) for name in ("image_column", "label_column")}
    splits = load_checked(own.dataset, own.dataset_config, columns, config, own.data_check)
    splits = sources.with_images(splits, own.image_column, own.dataset or "")
    if own.data_check != "off" and config.process_index == 0:
        require_images(splits, own.image_column)
    return splits


def _image_network(own: ImageOptions, names: Sequence[str]) -> tuple[Any, Any]:
    side = own.image_size
    options: dict[str, Any] = {"weights": own.weights, "channels_last": own.channels_last}
    if side is not None:
        options["input_size"] = (3, side, side)
    return image_classifier(own.model, names, own.pretrained, **options)


def _read_images(
    own: ImageOptions, config: RecipeConfig, splits: DatasetDict, processor: Any, notes: DataNotes
) -> DatasetDict:
    kept = columns_beside_images(config)
    return DatasetDict(
        {
            name: with_pixel_values(
                rows, own.image_column, kept, processor, own.augmentation if name == "train" else "none"
            )
            for name, rows in splits.items()
        }
    )


_SIZES = {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 64}
TEXT = OwnDataRecipe(
    TextOptions,
    BEST_WORST_GROUP | _SIZES | {"output_dir": "outputs/text_classification", "learning_rate": 2e-5},
    _text_splits,
    lambda own, names: text_classifier(own.model, names),
    _tokenized,
    lambda own, rows: digests_of_texts(rows, _texts(own)),
)
IMAGE = OwnDataRecipe(
    ImageOptions,
    # The pixels come with reading, so no column may be taken away before that.
    BEST_WORST_GROUP | _SIZES
    | {"output_dir": "outputs/image_classification", "learning_rate": 1e-4, "remove_unused_columns": False},
    _image_splits,
    _image_network,
    _read_images,
    lambda own, rows: digests_of_images(rows, own.image_column),
)  # fmt: skip
RECIPES = {"text": TEXT, "image": IMAGE}
"""The recipes by kind of input."""
