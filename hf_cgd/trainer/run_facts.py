"""What a card says of a run besides its groups: the model, the data, the settings, the versions."""

import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.modelcard import TASK_MAPPING

from hf_cgd.cards import DataFacts, ModelFacts
from hf_cgd.models.outputs import class_names_of, is_of_transformers
from hf_cgd.objectives import KNOBS, OBJECTIVES, Objective
from hf_cgd.trainer.config import GroupOptions

PACKAGES = (
    "hf-cgd",
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "huggingface_hub",
    "tokenizers",
    "timm",
    "peft",
)
"""Whose versions a card tells."""
OF_THE_MACHINE = re.compile(
    r"output_dir|logging_dir|run_name|project|report_to|push_to_hub|resume_from_checkpoint|local_rank|disable_tqdm|debug|"
    r"deepspeed|fsdp.*|accelerator_config|parallelism_config|do_(train|eval|predict)|overwrite_output_dir|"
    r"(hub|trackio|log|ddp|dataloader)_(?!drop_last).*|.*token.*|use_cpu|skip_memory_metrics"
)
"""Training options that say where and how a run was done, not what was trained; they stand in no card."""
MORE_TASKS = {"ForVideoClassification": "video-classification", "ForMultipleChoice": "multiple-choice"}
"""Tasks of the Hub that transformers does not list, by the end of the class's name."""
HUB_FILE = re.compile(r"hf://datasets/([^/@]+/[^/@]+|[^/@]+)@")
"""How `datasets` names the files that a data set was read from on the Hub."""


def model_facts(
    model: nn.Module, finetuned_from: str | None = None, task: str | None = None, class_names: Sequence[str] = ()
) -> ModelFacts:
    """What is known of a model.

    Args:
        model: the network, unwrapped.
        finetuned_from, task: what the user says; None for what the model tells.
        class_names: of the labels in the data, for a model that has none.
    """
    adapters = getattr(model, "peft_config", None)
    network: Any = model
    inner = network.get_base_model() if adapters and hasattr(model, "get_base_model") else model
    library = None
    if adapters:
        library = "peft"
    elif isinstance(model, PreTrainedModel):
        library = "transformers"
    elif is_timm(model):
        library = "timm"
    named = getattr(getattr(inner, "config", None), "_name_or_path", None)
    base = finetuned_from if finetuned_from is not None else named
    kind = type(inner).__name__
    if task is None:
        task = "image-classification" if is_timm(inner) or "TimmWrapper" in kind else _task_of(type(inner))
    labels = class_names_of(inner) or list(class_names)
    module = "transformers" if is_of_transformers(inner) else type(inner).__module__
    module = "your_script" if module == "__main__" else module
    return ModelFacts(kind, library, task, base if finetuned_from or is_hub_id(base) else None, labels, module)


def is_timm(model: nn.Module) -> bool:
    """Whether a network is one that `timm.create_model` made."""
    return isinstance(getattr(model, "pretrained_cfg", None), Mapping) and hasattr(model, "get_classifier")


def is_hub_id(name: Any) -> bool:
    """Whether a name is the id of a repository on the Hub, and no folder of this machine."""
    if not isinstance(name, str) or not name or os.path.exists(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def data_facts(
    sets: Mapping[str, Any], tags: Sequence[str] = (), names: Sequence[str] = (), config: str | None = None
) -> DataFacts:
    """What is known of the data.

    Args:
        sets: data sets by name ("train", "validation", …), of any kind.
        tags, names, config: what the user says; () and None for what the data sets tell.
    """
    known = {name: data for name, data in sets.items() if isinstance(data, datasets.Dataset)}
    splits = {name: str(data.split) for name, data in known.items() if data.split is not None and name != "train"}
    ids = list(tags) or list(dict.fromkeys(found for data in known.values() for found in _hub_ids(data)))
    configs = [data.config_name for data in known.values() if data.config_name not in (None, "default")]
    if config is None and ids and not tags:
        config = next(iter(configs), None)
    return DataFacts(ids, ", ".join(names) or None, config, splits)


def settings_of(objective: Objective, options: GroupOptions, columns: Sequence[str]) -> dict[str, Any]:
    """Options of group-robust training as they were in force, in the form that a config takes."""
    found = {option.name: getattr(options, option.name) for option in fields(GroupOptions)}
    own = type(objective)
    is_ours = OBJECTIVES.get(objective.name) is own
    found["objective"] = objective.name if is_ours else f"{own.__module__}:{own.__qualname__}"
    found |= dict.fromkeys(KNOBS) | (objective.knobs() if is_ours else {})
    found["group_column"] = list(columns) or None
    return {name: _plain(value) for name, value in found.items()}


def training_of(args: TrainingArguments) -> dict[str, Any]:
    """Options of ordinary training that differ from their defaults; none of this machine, no paths, no tokens."""
    ours = {option.name for option in fields(GroupOptions)}
    found = {}
    for option in fields(TrainingArguments):
        name = option.name
        if name in ours or name.startswith("_") or not option.init or OF_THE_MACHINE.fullmatch(name):
            continue
        value = _plain(getattr(args, name, None))
        default = option.default_factory() if option.default_factory is not MISSING else option.default
        # What None means is settled in __post_init__ for switches.
        is_off = value is None or (value is False and default is None)
        if not is_off and value != _plain(default) and not _is_path(value):
            found[name] = value
    return found


def models_compared(log_history: Sequence[Mapping[str, Any]], metric: str | None) -> int | None:
    """How many models of a run the best one was chosen among, by the Trainer's log; None before anything was trained.

    Evaluations behind the entry that ends a run are of the model that was chosen.
    """
    ends = next((place for place, entry in enumerate(log_history) if "train_runtime" in entry), len(log_history))
    if metric is None or not any("loss" in entry or "train_runtime" in entry for entry in log_history):
        return None
    name = f"eval_{metric.removeprefix('eval_')}"
    return len({entry["step"] for entry in log_history[:ends] if name in entry})


def versions() -> dict[str, str]:
    """Of the libraries that are installed, and of Python."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_timm_config(model: nn.Module, class_names: Sequence[str], folder: str | os.PathLike[str]) -> None:
    """Write the config by which timm builds a network anew, `timm.create_model("hf-hub:…")`, beside its weights."""
    from timm.models import _hub

    names = {"label_names": list(class_names)} if class_names else {}
    path: Any = Path(folder) / "config.json"  # Newer versions of timm take a string too.
    _hub.save_config_for_hf(model, path, model_config=names)


def _task_of(network: type) -> str | None:
    """That of a class, or of the first of its bases that has one."""
    mapping: Any = TASK_MAPPING
    for kind in (one.__name__ for one in network.__mro__):
        for task, classes in mapping.items():
            if kind in classes.values() or any(
                kind in names for names in classes.values() if isinstance(names, tuple)
            ):
                return str(task)
        for end, task in MORE_TASKS.items():
            if kind.endswith(end):
                return task
    return None


def _hub_ids(dataset: datasets.Dataset) -> Iterable[str]:
    for name in dataset.info.download_checksums or {}:
        match = HUB_FILE.match(str(name))
        if match is not None:
            yield match[1]


def _is_path(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_path, value.values()))
    if isinstance(value, list):
        return any(map(_is_path, value))
    begins = isinstance(value, str) and (os.path.isabs(value) or value.startswith(("~", "./", "../")))
    return begins or (isinstance(value, str) and os.sep in value and os.path.exists(value))


def _plain(value: Any) -> Any:
    """A value as YAML and JSON have it; None for what they cannot."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else None
