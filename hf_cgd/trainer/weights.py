"""Weights of a checkpoint: loaded whole, through the conversions of `transformers`, or not at all.

`save_pretrained` writes some models under the names (and in the shapes) of their original checkpoints; the Trainer
loads by the names of the model and passes over what it does not find. ViT keeps 32 of 40 tensors that way.
"""

import json
import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

logger = logging.getLogger(__name__)
SHOWN = 5


class WholeWeightsTrainer(Trainer):
    """A `Trainer` that never loads a part of a checkpoint's weights."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        target = self.model if model is None else model
        if self._loads_by_name and load_converted(target, resume_from_checkpoint):
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        checkpoint = self.state.best_model_checkpoint
        if self._loads_by_name and checkpoint is not None and load_converted(self.model, checkpoint):
            return
        super()._load_best_model()

    @property
    def _loads_by_name(self) -> bool:
        return not (self.is_fsdp_enabled or self.is_deepspeed_enabled)


def load_converted(model: Any, checkpoint: str) -> bool:
    """Load weights whose names are not the model's; False, and nothing done, where they are.

    Args:
        model: what is trained.
        checkpoint: the folder.

    Raises:
        ValueError: the checkpoint lacks weights of the model, or holds others.
    """
    saved = saved_names(checkpoint)
    if saved is None:
        return False
    missing, unexpected = misfits(model, saved)
    if not missing and not unexpected:
        return False
    logger.info("The weights in %s go by other names than the model's and are converted.", checkpoint)
    if isinstance(model, PreTrainedModel):
        # Weights that are missing are drawn, which is nobody's business: such a checkpoint is refused.
        with torch.random.fork_rng():
            loaded: Any = type(model).from_pretrained(
                checkpoint, config=model.config, dtype=model.dtype, output_loading_info=True
            )
        whole, report = loaded
        missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
        unexpected += [str(entry) for entry in report["mismatched_keys"]]
        if not missing and not unexpected:
            model.load_state_dict(whole.state_dict(), strict=True)
            return True
    raise ValueError(
        f"The weights in {checkpoint} do not fit the model {type(model).__name__}: "
        f"{_told('missing', missing)}; {_told('not of the model', unexpected)}. Expected those of a run of the same "
        "model. Load what fits with from_pretrained and start a new run, or choose another checkpoint."
    )


def saved_names(checkpoint: str) -> set[str] | None:
    """Names of the weights in a checkpoint; None where there are no weights of a whole model in a file of ours."""
    for index in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        path = os.path.join(checkpoint, index)
        if os.path.isfile(path) and not os.path.isfile(os.path.join(checkpoint, SAFE_WEIGHTS_NAME)):
            with open(path, encoding="utf-8") as file:
                return set(json.load(file)["weight_map"])
    path = os.path.join(checkpoint, SAFE_WEIGHTS_NAME)
    if os.path.isfile(path):
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    path = os.path.join(checkpoint, WEIGHTS_NAME)
    if os.path.isfile(path):
        return set(torch.load(path, map_location="meta", weights_only=True))
    return None


def misfits(model: nn.Module, saved: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names of the model that are not among the saved ones, and the other way round.

    A tied weight is saved under one of its names. What the model says it does not save is not missing.
    """
    state, names = model.state_dict(keep_vars=True), set(saved)
    held = {_place(state[name]) for name in names & state.keys()}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    missing = [name for name, tensor in state.items() if name not in names | ignored and _place(tensor) not in held]
    return missing, sorted(names - state.keys())


def _place(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape


def _told(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
