"""What every recipe does with its data and its model: read the command line, load a classifier, train, report."""

import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)

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


def parse_command_line(
    options: type,
    defaults: Mapping[str, Any] | Callable[[Namespace], Mapping[str, Any]] | None = None,
    arguments: Sequence[str] | None = None,
) -> tuple[Any, GroupRobustConfig]:
    """Options of a recipe and a `GroupRobustConfig` from the command line.

    The first argument may be a YAML or JSON file of options; further ones take precedence over it.

    Args:
        options: the recipe's own options, a dataclass.
        defaults: values of either dataclass that the recipe prefers to the dataclass's own; or a function that gives
            them for the options chosen so far, for defaults that depend on other options.
        arguments: the command line, `sys.argv` by default.

    Raises:
        ValueError: the file holds a name that is no option, or is no mapping of names to values.
    """
    _show_messages()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    kinds: list[Any] = [options, GroupRobustConfig]
    parser = HfArgumentParser(kinds)
    from_file: dict[str, Any] = {}
    if arguments and Path(arguments[0]).suffix in (".yaml", ".yml", ".json"):
        from_file = _read_options(Path(arguments.pop(0)), {f.name for kind in kinds for f in fields(kind)})
        parser.set_defaults(**from_file)
    if callable(defaults):
        # A call for help has to wait until the parser knows the defaults that it is to show.
        asked = [argument for argument in arguments if argument not in ("-h", "--help")]
        defaults = defaults(parser.parse_known_args(asked)[0])
    parser.set_defaults(**{**(defaults or {}), **from_file})
    own, config = parser.parse_args_into_dataclasses(arguments)
    return own, config


def _read_options(path: Path, known: set[str]) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected lines of the form `option: value`, got {str(values)[:60]!r}.")
    unknown = sorted(str(name) for name in set(values) - known)
    if unknown:
        raise ValueError(f"{path}: no such option: {', '.join(unknown)}. Run the recipe with --help to see them all.")
    return values


def _show_messages() -> None:
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_main else logging.WARNING, format="%(message)s")
    # Its lines on every request would drown ours.
    logging.getLogger("httpx").setLevel(logging.WARNING)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Within, an error about a file, the Hub, a value or a missing package ends the program with its message alone."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"{error}") from error


def text_classifier(name: str, label_names: Sequence[str]) -> tuple[nn.Module, Any]:
    """A pretrained network for sequence classification with a head for these labels, and its tokenizer.

    Args:
        name: Hub id or local folder.
        label_names: names of the classes, stored with the model.

    Raises:
        OSError: there is no such model, or the Hub cannot be reached.
    """
    with _naming_the_model(name):
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSequenceClassification.from_pretrained(
            name, ignore_mismatched_sizes=True, **_label_options(label_names)
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def image_classifier(
    name: str, label_names: Sequence[str], pretrained: bool = True, **image_format: Any
) -> tuple[nn.Module, Any]:
    """A network for image classification with a head for these labels, and its image processor.

    Args:
        name: a timm architecture (`resnet18`, `timm/resnet18`), or Hub id or local folder of a `transformers` model.
        label_names: names of the classes, stored with the model.
        pretrained: whether to load weights; without, only the architecture is taken from `name`.
        image_format: entries of timm's `pretrained_cfg` to replace (`input_size=(3, 64, 64)`, `mean`, `std`,
            `crop_pct`), for timm architectures only.

    Raises:
        OSError: there is no such model, or the Hub cannot be reached.
        ImportError: timm is not installed.
        ValueError: an unknown architecture, or `image_format` for another kind of model.
    """
    architecture = name.removeprefix("timm/")
    if not os.path.isdir(name) and "/" not in architecture:
        return _timm_classifier(architecture, label_names, pretrained, image_format)
    if image_format:
        raise ValueError(
            f"The size and scale of images belong to the model {name!r} itself: remove {', '.join(image_format)}, or "
            "name a timm architecture such as resnet18."
        )
    with _naming_the_model(name):
        processor = AutoImageProcessor.from_pretrained(name)
        if not pretrained:
            config = AutoConfig.from_pretrained(name, **_label_options(label_names))
            return AutoModelForImageClassification.from_config(config), processor
        model = AutoModelForImageClassification.from_pretrained(
            name, ignore_mismatched_sizes=True, **_label_options(label_names)
        )
    return model, processor


def _timm_classifier(
    name: str, label_names: Sequence[str], pretrained: bool, image_format: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    try:
        import timm
        from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, TimmWrapperImageProcessor
    except ImportError as error:
        raise ImportError(
            f'The model {name!r} is a network of timm, which is not installed: pip install "hf-cgd[vision]"'
        ) from error
    if not timm.is_model(name):
        raise ValueError(
            f"--model: timm has no network {name!r}. Expected one of timm.list_models(), such as "
            f"{timm.list_models(f'{name[:6]}*')[:5] or 'resnet18'}, a Hub id with its owner, or a local folder."
        )
    published = timm.get_pretrained_cfg(name)
    image_config = {**(published.to_dict() if published is not None else {}), **image_format}
    options = {"architecture": name, "pretrained_cfg": image_config, **_label_options(label_names)}
    config = TimmWrapperConfig(**options)
    model = TimmWrapperForImageClassification(config)
    with _naming_the_model(name):
        # The wrapper draws weights of its own; these are timm's.
        model.timm_model = timm.create_model(name, pretrained=pretrained, num_classes=len(label_names))
    return model, TimmWrapperImageProcessor(image_config, architecture=name)


def _label_options(label_names: Sequence[str]) -> dict[str, Any]:
    return {
        "num_labels": len(label_names),
        "id2label": dict(enumerate(label_names)),
        "label2id": {name: i for i, name in enumerate(label_names)},
    }


@contextmanager
def _naming_the_model(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"--model: expected {name!r} to be a local folder or a model on the Hub, which needs a connection or a "
            f"cached copy.\nIt failed: {' '.join(str(error).split())[:200]}\n"
            "Pass the path of a local folder, or check the id, the connection and HF_HUB_OFFLINE. (Image networks can "
            "start untrained: --pretrained false.)"
        ) from error


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
    _show_messages()
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
        with open(os.path.join(config.output_dir, REPORT_FILE), "w", encoding="utf-8") as file:
            json.dump({name: report.to_dict() for name, report in reports.items()}, file, indent=2, ensure_ascii=False)
    return trainer
