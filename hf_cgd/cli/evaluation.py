"""Evaluating a model that is there already: its network, its data in the model's own classes, its report."""

import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from hf_cgd.cards import load_run
from hf_cgd.cards.record import EVALUATED_ONLY, REPORT_FILE, RUN_FILE
from hf_cgd.cli.command_line import readable_errors, show_messages
from hf_cgd.cli.data_notes import DataNotes, preparation_of
from hf_cgd.cli.model_inputs import tokenized, with_pixel_values
from hf_cgd.cli.networks import NO_NAME
from hf_cgd.cli.output_folder import prepare_output
from hf_cgd.cli.own_data_options import MAX_LENGTH
from hf_cgd.cli.results import summary_of, where_it_is, write_predictions, write_results
from hf_cgd.cli.run_folder import run_folder_of
from hf_cgd.cli.text_length import require_room_for
from hf_cgd.data import sources
from hf_cgd.data.columns import class_names_of, read_columns, require_columns
from hf_cgd.data.row_digests import RowDigests, digests_of_images, digests_of_texts
from hf_cgd.data.table_places import listed
from hf_cgd.data.tables import read_table
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.config import GroupRobustConfig
from hf_cgd.trainer.trainer import GroupRobustTrainer
from hf_cgd.visible_text import quoted_name


@dataclass
class _Flags:
    """Options whose names stand in messages of the library."""

    dataset: str = ""
    label_column: str = ""
    text_column: str = ""
    image_column: str = ""
    group_column: str = ""
    output_dir: str = ""
    max_length: int | None = None


def evaluate(own: Namespace) -> dict[str, Any]:
    """Evaluate as the command line says (see `hf_cgd.cli.evaluate`); what was left, on the main process."""
    show_messages()
    spellings = {"dataset: ": "DATA: ", "overwrite_output_dir=True": "--overwrite_output_dir"}
    with readable_errors(_Flags, spellings=spellings):
        kind = own.kind or kind_of(own.model)
        config = GroupRobustConfig(
            own.output_dir or f"outputs/evaluate/{Path(own.model.rstrip('/')).name}",
            objective="erm",
            group_column=own.group_column,
            per_device_eval_batch_size=own.batch_size,
            remove_unused_columns=kind == "text",
            report_to="none",
            use_cpu=own.use_cpu,
        )
        prepare_output(config, own.overwrite_output_dir, trains=False)
        with config.main_process_first():
            split, rows = split_of(own.data, own.dataset_config, own.split)
            inputs = (
                [column for column in (own.text_column, own.text_pair_column) if column]
                if kind == "text"
                else [own.image_column]
            )
            for option, columns in {f"{kind}_column": inputs, "label_column": [own.label_column],
                                    "group_column": own.group_column}.items():  # fmt: skip
                require_columns(rows, columns, option, f"{split} split", f"Pass {option}= with one of these.")
            model, processor = trained_network(own.model, kind)
            _require_no_label_in_the_way(own, kind, rows, inputs)
            notes = DataNotes(sources.name_of_file(own.data), speaks=config.process_index == 0)
            rows = in_classes_of(model, rows, own.label_column, own.labels)
            _note_classes(notes, split, rows)
            rows = _prepared(own, kind, split, rows, inputs, processor, notes)
            if kind == "text":
                require_room_for(model, DatasetDict({split: rows}), "max_length", notes.preparation["max_length"])
        trainer = GroupRobustTrainer(model=model, args=config, eval_dataset=rows, processing_class=processor)
        trainer.data_preparation, trainer.data_cautions = notes.preparation, notes.cautions
        prefix = "eval" if split == "validation" else split
        output = trainer.predict(rows, metric_key_prefix=prefix)
        if own.predictions:
            write_predictions(trainer, rows, split, output)
        if trainer.is_world_process_zero():
            report = replace(trainer.group_report(prefix), objective=EVALUATED_ONLY)
            print(f"\n{split}, {len(rows):,} rows\n{report}")
            write_results(trainer, {split: report}, trained=False, pictures=not own.no_pictures, data_name=notes.name)
            print(f"\n{where_it_is(config.output_dir or '')}")
            return summary_of(config.output_dir or "")
    return {}


def _require_no_label_in_the_way(own: Namespace, kind: str, rows: Dataset, inputs: Sequence[str]) -> None:
    """A column "label" gives way to the classes of `label_column`, so it can be neither a group nor an input."""
    taken = {"group_column": own.group_column, f"{kind}_column": inputs}
    for option, columns in taken.items():
        if own.label_column != "label" and "label" in columns and "label" in rows.column_names:
            raise ValueError(
                f"--{option}: the column 'label' of the data would give way to the classes of "
                f"--label_column {own.label_column}. Rename it in the data, and name it by that."
            )


def _note_classes(notes: DataNotes, split: str, rows: Dataset) -> None:
    """Tell of classes that no row has: nothing is known of how the model does on these."""
    names = rows.features["label"].names
    there = set(rows["label"][:])
    absent = [name for code, name in enumerate(names) if code not in there]
    if absent:
        told = listed([quoted_name(one) for one in absent])
        notes.add(
            f"{split}: no row is of the class{'es' * (len(absent) > 1)} {told}. "
            "How the model does on rows of it is not known, and a model that never answers otherwise looks right.",
            is_loud=len(there) < 2,
        )


def _note_training_rows(
    own: Namespace, notes: DataNotes, split: str, rows: Dataset, digests: Callable[[], np.ndarray]
) -> None:
    """Tell how many rows are training rows of the model.

    Where the run's folder has no digests of them, only the name tells: that of a file, or of the training split.
    """
    if not Path(own.model).is_dir():
        return
    folder = run_folder_of(own.model)
    notes.training_rows = RowDigests.load(folder)
    if notes.training_rows is not None:
        notes.add_training_rows(split, digests(), rows, own.group_column)
        return
    if not (folder / RUN_FILE).is_file():
        return
    record = load_run(folder)
    if record.objective is not None and notes.name == record.data.name and (
        Path(own.data).is_file() or split == "train"
    ):  # fmt: skip
        notes.add(
            f"The model was trained on {notes.name}. If these are the same rows, it has seen most of them, and its "
            "numbers flatter it.",
            f"Evaluate rows that it was not trained on; {folder}/{REPORT_FILE} has those of its validation rows.",
        )


def kind_of(name: str) -> str:
    """What a model takes, "text" or "image", by the class that its config names.

    Raises:
        OSError: there is no such model.
        ValueError: it tells neither.
    """
    config = _config_of(name)
    classes = " ".join(config.architectures or [])
    if "ImageClassification" in classes or config.model_type == "timm_wrapper":
        return "image"
    if "SequenceClassification" in classes:
        return "text"
    raise ValueError(
        f"{name}: a text or image classifier was expected, its config says {classes or 'nothing'}. Pass --kind."
    )


def trained_network(name: str, kind: str) -> tuple[nn.Module, Any]:
    """A trained classifier with its own classes, and its tokenizer or image processor.

    Args:
        name: local folder, or id on the Hub.
        kind: "text" or "image".

    Raises:
        OSError: there is no such model, or it lacks its tokenizer or processor.
        ValueError: some of its weights are not there, so that it was never trained.
    """
    config = _config_of(name)
    if getattr(config, "model_args", None):
        # timm's own configs tell the number of classes twice, which the wrapper does not take.
        config.model_args.pop("num_classes", None)
    network: Any = AutoModelForImageClassification if kind == "image" else AutoModelForSequenceClassification
    processors: Any = AutoImageProcessor if kind == "image" else AutoTokenizer
    model, found = network.from_pretrained(name, config=config, output_loading_info=True)
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise ValueError(
            f"{name}: these weights are not there, so the model has not been trained as a classifier: "
            f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}. Name a trained model, or hf-cgd train one."
        )
    processor = processors.from_pretrained(name)
    if kind == "text" and model.config.pad_token_id is None:
        processor.pad_token = processor.pad_token or processor.eos_token
        model.config.pad_token_id = processor.pad_token_id
    return model, processor


def _config_of(name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(
            f"MODEL: expected a local folder with a config.json, or a model on the Hub, which needs a connection or a "
            f"cached copy, got {name!r}. {' '.join(str(error).split())[:200]}"
        ) from error


def split_of(
    data: str, config_name: str | None, wanted: str | None, default: str | None = None
) -> tuple[str, Dataset]:
    """One split of data, and its name.

    Args:
        data: see `hf_cgd.data.sources.load_splits`; a folder of tables needs no "train" here.
        config_name: configuration of a dataset on the Hub.
        wanted: "train", "validation" or "test"; None for the default.
        default: None for the last of these that there is; of a single file, "test".

    Raises:
        ValueError: there is no such split.
        FileNotFoundError, ConnectionError: see `load_splits`.
    """
    if Path(data).is_file():
        return wanted or default or "test", read_table(data)
    splits: Any = _tables_in(data) if Path(data).is_dir() else {}
    splits = splits or sources.load_splits(data, config_name)
    last = next(split for split in reversed(sources.SPLIT_NAMES) if split in splits)
    name = wanted or (default if default is not None and default in splits else last)
    if name not in splits:
        raise ValueError(f"split: {data} has {', '.join(splits)}, got {name!r}. Name one of these.")
    return name, splits[name]


def _tables_in(folder: str) -> DatasetDict:
    aliases = {alias: split for split, names in sources.SPLIT_NAMES.items() for alias in reversed(names)}
    return DatasetDict(
        {aliases[stem]: read_table(path) for stem, path in sources.find_tables(folder, aliases).items()}
    )


def in_classes_of(model: nn.Module, rows: Dataset, column: str, names: Sequence[str] | None) -> Dataset:
    """The rows with a column "label" of the model's own classes, matched by name.

    Numbers from 0 are taken for the model's own where its outputs have no other names.

    Args:
        model: tells the names of its outputs.
        rows: with the column of the classes.
        column: its name.
        names: of the model's outputs in order, where it does not tell them; None for what it tells.

    Raises:
        ValueError: a class that the model does not have, or rows without one.
    """
    config: Any = model.config
    if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
        raise ValueError(
            f"MODEL: expected a classifier of one class for each row, its config says num_labels={config.num_labels}, "
            f"problem_type={config.problem_type!r}. For other predictions: hf_cgd.group_metrics."
        )
    outputs = [str(config.id2label[place]) for place in range(config.num_labels)]
    if names is not None:
        if len(names) != len(outputs):
            raise ValueError(f"--labels: the model has {len(outputs)} outputs, got {len(names)} names: {list(names)}.")
        if sorted(names) == sorted(outputs) and list(names) != outputs:
            warnings.warn(
                f"--labels: the model calls its outputs {outputs}, the same names in another order than "
                f"{list(names)}. They are taken as you say; if the model is right, all answers are misread.",
                GroupRobustWarning,
                stacklevel=2,
            )
        outputs = list(names)
        config.id2label, config.label2id = dict(enumerate(outputs)), {name: i for i, name in enumerate(outputs)}
    own = class_names_of(rows, column)
    values = read_columns(rows, [column])[column].values
    given = [own[value] if own and isinstance(value, int) and 0 <= value < len(own) else value for value in values]
    missing = [row for row, value in enumerate(given) if value is None or value == ""]
    if missing:
        raise ValueError(
            f"--label_column {column!r}: {len(missing):,} of {len(given):,} rows have no class, the first is row "
            f"{missing[0]}. Drop them, or name another column or --split."
        )
    codes = {name: place for place, name in enumerate(outputs)}
    if all(name.startswith(NO_NAME) for name in outputs):
        codes |= {str(place): place for place in range(len(outputs))}
    unknown = sorted({str(value) for value in given if str(value) not in codes})
    if unknown:
        raise ValueError(
            f"--label_column {column!r}: the model's classes are {outputs[:10]}, the data has {unknown[:5]} besides. "
            "Write them alike, or say with --labels what the model's outputs are, in order."
        )
    if column != "label" and "label" in rows.column_names:
        rows = rows.rename_column("label", "label (data)")
    labels = [codes[str(value)] for value in given]
    rest = rows.remove_columns([column])
    for name in dict.fromkeys((column, "label")):
        rest = rest.add_column(name, labels, feature=ClassLabel(names=outputs))
    return rest


def _prepared(
    own: Namespace, kind: str, split: str, rows: Dataset, inputs: Sequence[str], processor: Any, notes: DataNotes
) -> Dataset:
    splits = DatasetDict({split: rows})
    if kind == "text":
        sources.require_text(splits, inputs)
        _note_training_rows(own, notes, split, rows, lambda: digests_of_texts(rows, inputs))
        trained_as = preparation_of(own.model)
        length = trained_as.get("max_length", MAX_LENGTH) if own.max_length is None else own.max_length
        notes.add_other_texts(trained_as, inputs)
        splits, cut = tokenized(splits, inputs, processor, length)
        notes.preparation["text_columns"] = list(inputs)
        notes.add_cut_texts(cut, splits, own.group_column, length)
        return splits[split]
    source = own.data if os.path.exists(own.data) else "."
    rows = sources.with_images(splits, own.image_column, source)[split]
    _note_training_rows(own, notes, split, rows, lambda: digests_of_images(rows, own.image_column))
    return with_pixel_values(rows, own.image_column, ["label", *own.group_column], processor)
