"""The networks that recipes train: pretrained classifiers with a new head, by name."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
        model = _loaded(AutoModelForImageClassification, name, label_names)
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
