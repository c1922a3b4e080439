"""The networks that recipes train: pretrained classifiers with a new head, by name."""

import json
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)


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
        model = _loaded(AutoModelForSequenceClassification, name, label_names)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def image_classifier(
    name: str,
    label_names: Sequence[str],
    pretrained: bool = True,
    *,
    weights: str | Path | None = None,
    in_chans: int = 3,
    channels_last: bool = False,
    **image_format: Any,
) -> tuple[nn.Module, Any]:
    """A network for image classification with a head for these labels, and its image processor.

    Args:
        name: a timm architecture (`resnet18`, `timm/resnet18`); Hub id or local folder of a `transformers` model; or
            a local folder that timm wrote, with or without timm's "local-dir:" before it.
        label_names: names of the classes, stored with the model; () for a regression, which has one output.
        pretrained: whether to load weights; without, only the architecture is taken from `name`.
        weights: a local file (.pth, .bin, .safetensors) with timm's or torchvision's weights of the architecture, in
            place of the Hub's. Its head is left out; a first layer of three channels is adapted to `in_chans`.
        in_chans: channels of the inputs. The processor is for three; others come as `pixel_values`.
        channels_last: keep weights of convolutions, and with them activations, with the channels innermost in memory.
            The same numbers to rounding; a third less time for ResNets on most CPUs, and on GPUs in half precision.
        image_format: entries of timm's `pretrained_cfg` to replace (`input_size=(3, 64, 64)`, `mean`, `std`,
            `crop_pct`). Like `weights` and `in_chans` for timm architectures only.

    Raises:
        OSError: there is no such model, the Hub cannot be reached, or the file does not hold its weights.
        ImportError: timm is not installed.
        ValueError: an unknown architecture, or an option of timm's for another kind of model.
    """
    name = name.removeprefix(LOCAL_DIR)
    folder = _timm_folder(name)
    architecture = name.removeprefix("timm/")
    of_timm = [*image_format, *(["weights"] if weights else []), *(["in_chans"] if in_chans != 3 else [])]
    if folder is not None:
        architecture, stated, file = folder
        own = (weights or file) if pretrained else weights
        model, processor = _timm_classifier(
            architecture, label_names, pretrained, own, in_chans, {**stated, **image_format}
        )
    elif not os.path.isdir(name) and "/" not in architecture:
        model, processor = _timm_classifier(architecture, label_names, pretrained, weights, in_chans, image_format)
    elif of_timm:
        raise ValueError(
            f"The size and scale of images belong to the model {name!r} itself: remove {', '.join(of_timm)}, or "
            "name a timm architecture such as resnet18."
        )
    else:
        model, processor = _transformers_classifier(name, label_names, pretrained)
    return (model.to(memory_format=torch.channels_last) if channels_last else model), processor


def _transformers_classifier(name: str, label_names: Sequence[str], pretrained: bool) -> tuple[nn.Module, Any]:
    with _naming_the_model(name):
        processor = AutoImageProcessor.from_pretrained(name)
        if not pretrained:
            config = AutoConfig.from_pretrained(name, **_label_options(label_names))
            return AutoModelForImageClassification.from_config(config), processor
        return _loaded(AutoModelForImageClassification, name, label_names), processor


def _timm_folder(name: str) -> tuple[str, dict[str, Any], Path] | None:
    """Of a folder in timm's own form the architecture, the format of its images and its weights; None for others."""
    config = Path(name) / "config.json"
    if not config.is_file():
        return None
    content = json.loads(config.read_text(encoding="utf-8"))
    if "model_type" in content or "architecture" not in content:
        return None
    files = [file for ending in TIMM_WEIGHTS if (file := Path(name) / ending).is_file()]
    if not files:
        raise FileNotFoundError(f"--model: expected {' or '.join(TIMM_WEIGHTS)} beside {config}, found neither.")
    stated = content.get("pretrained_cfg") or {}
    image_format = {key: tuple(v) if isinstance(v, list) else v for key, v in stated.items() if key in IMAGE_FORMAT}
    return content["architecture"], image_format, files[0]


NO_NAME = "LABEL_"
"""How transformers begins the names of outputs that have none."""
LOCAL_DIR = "local-dir:"
"""What timm takes before the path of a folder."""
TIMM_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
IMAGE_FORMAT = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
"""What a network's `pretrained_cfg` says of its images."""


def _timm_classifier(
    name: str,
    label_names: Sequence[str],
    pretrained: bool,
    weights: str | Path | None,
    in_chans: int,
    image_format: Mapping[str, Any],
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
    channels = {} if in_chans == 3 else {"in_chans": in_chans}
    config = TimmWrapperConfig(**options, model_args=channels or None)
    model = TimmWrapperForImageClassification(config)
    options = {"num_classes": config.num_labels, **channels}
    # The wrapper draws weights of its own; these are timm's.
    if weights is not None:
        model.timm_model = _timm_from_file(name, Path(weights), options)
    else:
        with _naming_the_model(name):
            model.timm_model = timm.create_model(name, pretrained=pretrained, **options)
    return model, TimmWrapperImageProcessor(image_config, architecture=name)


def _timm_from_file(name: str, file: Path, options: Mapping[str, Any]) -> nn.Module:
    import timm

    if not file.is_file():
        raise FileNotFoundError(f"weights: expected a file with the weights of {name}, but there is no {file}.")
    state = torch.get_rng_state()
    drawn = timm.create_model(name, **options).state_dict()
    torch.set_rng_state(state)
    try:
        model: Any = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(file)}, **options)
    except (RuntimeError, OSError, pickle.UnpicklingError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise OSError(
            f"weights: expected the weights of {name} in {file}, but they cannot be loaded ({reason}). Check the "
            "architecture, or fetch the file again."
        ) from error
    head = [id(weight) for weight in model.get_classifier().parameters()]
    # timm passes over what a file lacks. A matrix that is still as it was drawn was not in it.
    lacking = [
        key
        for key, weight in model.named_parameters()
        if weight.ndim > 1 and id(weight) not in head and torch.equal(weight, drawn[key])
    ]
    if lacking:
        raise OSError(
            f"weights: expected the weights of {name} in {file}, but it lacks {len(lacking)} of them, such as "
            f"{lacking[0]}. Check the architecture."
        )
    return model


def classes_of(name: str | Path) -> tuple[str, ...]:
    """Names of a trained classifier's classes in the order of its outputs; () where it is none, or has no names.

    Args:
        name: local folder, or id of a model on the Hub with its owner.
    """
    place = str(name).removeprefix(LOCAL_DIR)
    if not os.path.isdir(place) and ("/" not in place or place.startswith("timm/")):
        # A bare network, whose head is new.
        return ()
    try:
        config = AutoConfig.from_pretrained(place)
    except (OSError, ValueError):
        # Loading it tells what is wrong.
        return ()
    kinds = " ".join(config.architectures or [])
    if not (config.model_type == "timm_wrapper" or re.search("(Sequence|Image)Classification", kinds)):
        return ()
    names = tuple(str(config.id2label.get(number, number)) for number in range(config.num_labels))
    return () if all(one.startswith(NO_NAME) for one in names) else names


def untrained_weights(model: nn.Module) -> list[str]:
    """Names of the weights that a network of `text_classifier` or `image_classifier` did not find where it came from.

    Of any other network: all of them.
    """
    new = getattr(model, _NEW_WEIGHTS, None)
    return [name for name, _ in model.named_parameters()] if new is None else list(new)


_NEW_WEIGHTS = "hf_cgd_new_weights"


def _loaded(kind: Any, name: str, label_names: Sequence[str]) -> Any:
    model, found = kind.from_pretrained(
        name, ignore_mismatched_sizes=True, output_loading_info=True, **_label_options(label_names)
    )
    other_shape = [entry if isinstance(entry, str) else entry[0] for entry in found["mismatched_keys"]]
    setattr(model, _NEW_WEIGHTS, sorted({*found["missing_keys"], *other_shape}))
    return model


def _label_options(label_names: Sequence[str]) -> dict[str, Any]:
    if not label_names:
        return {"num_labels": 1, "problem_type": "regression"}
    return {
        "num_labels": len(label_names),
        # A checkpoint's own may be left over from another task.
        "problem_type": "single_label_classification",
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
