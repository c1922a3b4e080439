"""The classification head of a network, and what goes into it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_cgd.models.outputs import tensors_in

HEAD_NAMES = ("classifier", "score", "classification_head", "logits_proj")
"""What `transformers` calls its heads; a layer inside a module of such a name is preferred."""
POSITION_TOLERANCE = 1e-3
"""How far, relative to the logits, a position's scores may be from them where the head runs on each token."""


def classification_heads(model: nn.Module, num_outputs: int | None = None) -> list[nn.Module]:
    """The layer that computes the logits; several only for timm networks that average several heads.

    It is what `get_classifier()` gives for a timm network (wrapped or not), else the last linear or convolutional
    layer with `num_outputs` outputs, among those in a module with one of the `HEAD_NAMES` if there are any.

    Args:
        model: any network, also a PEFT-wrapped, compiled or DDP-wrapped one.
        num_outputs: number of classes or of regression targets, None where it is not known.

    Raises:
        ValueError: there is no such layer; the message lists the ones there are.
    """
    for module in model.modules():
        get_classifier = getattr(module, "get_classifier", None)
        if callable(get_classifier):
            found = get_classifier()
            heads = [part for part in (found if isinstance(found, (tuple, list)) else (found,)) if part is not None]
            if heads and not any(isinstance(head, nn.Identity) for head in heads):
                return heads
    layers = list(_output_layers(model))
    fitting = [(path, layer) for path, layer, size in layers if num_outputs in (None, size)]
    named = [(path, layer) for path, layer in fitting if set(path.split(".")) & set(HEAD_NAMES)]
    if not fitting:
        there = ", ".join(f"{path} ({size})" for path, _, size in layers[-8:]) or "none"
        raise ValueError(
            f"Expected {type(model).__name__} to end in a linear layer with {num_outputs or 'some'} outputs, whose "
            f"input are the features that CORAL compares. Its last linear layers and their outputs: {there}. Set "
            "num_labels of its config (num_classes of another network) to the number of outputs, or use another "
            "objective."
        )
    return [(named or fitting)[-1][1]]


class HeadInput:
    """Keeps what goes into the classification head during a forward pass; no hook is left behind.

        head = HeadInput(model)
        with head.recording():
            logits = model(x)
        features = head.features(logits)

    Args:
        model: any network.
        num_outputs: see `classification_heads`.

    Raises:
        ValueError: see `classification_heads`.
    """

    def __init__(self, model: nn.Module, num_outputs: int | None = None) -> None:
        self.heads = classification_heads(model, num_outputs)
        size = _size_of(self.heads[-1])
        self._path = next((path for path, module in model.named_modules() if module is self.heads[-1]), "")
        self._alone = sum(other == size for _, _, other in _output_layers(model)) == 1
        self._known = bool(set(self._path.split(".")) & set(HEAD_NAMES)) or size is None
        """Whether the head is one for certain: by its name, or because it gave the logits."""
        self._calls: list[list[tuple[Tensor, Tensor]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Goes around the forward pass (or around several, one for each part of a batch)."""
        self._calls = [[] for _ in self.heads]
        hooks = [
            head.register_forward_hook(self._hook(calls), with_kwargs=True)
            for head, calls in zip(self.heads, self._calls, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def features(self, logits: Tensor, order: Tensor | None = None) -> Tensor:
        """Features [B, D] of the recorded pass, with graph; used up.

        Args:
            logits: [B, C] that the network gave. Where the head runs on every token they tell which one counts.
            order: [B] place of each example of the batch among those of the recorded passes; None for the same.

        Raises:
            ValueError: see `values`; or nothing before the head is trainable.
        """
        features = self.values(logits, order)
        if not features.requires_grad:
            raise ValueError(
                "The features that go into the classification head do not depend on any trainable parameter, so CORAL "
                "cannot change them. Unfreeze a part of the network, or use another objective."
            )
        return features

    def values(self, logits: Tensor, order: Tensor | None = None) -> Tensor:
        """The same, [B, D], whether or not there is a graph.

        Raises:
            ValueError: the head did not run, or gave something else than the logits.
        """
        recorded, self._calls = self._calls, []
        pooled = []
        for head, calls in zip(self.heads, recorded, strict=True):
            if not calls:
                raise ValueError(
                    f"The head {type(head).__name__} did not run in the forward pass, so there are no features."
                )
            inputs, outputs = (torch.cat(parts) for parts in zip(*calls, strict=True))
            if len(inputs) != len(logits):
                raise ValueError(
                    f"Expected the head {type(head).__name__} to be given the {len(logits)} examples of the batch, "
                    f"got {len(inputs)} rows. It must run once in a forward pass, on one row per example."
                )
            if order is not None:
                inputs, outputs = inputs[order], outputs[order]
            elif len(calls) > 1 and not _agree(outputs, logits):
                raise ValueError(
                    f"The head {type(head).__name__} runs {len(calls)} times in a forward pass, and what it gives is "
                    "not the logits in the order of the batch, so it is not clear which features belong to an "
                    "example. Call it once, on all examples."
                )
            if len(self.heads) == 1:
                self._require_to_be_the_head(head, outputs, logits)
            pooled.append(_pooled(head, inputs, outputs, logits))
        return torch.cat(pooled, dim=1)

    def _require_to_be_the_head(self, head: nn.Module, outputs: Tensor, logits: Tensor) -> None:
        """Raise a ValueError unless a layer that may only be the last one of the network's code gives the logits."""
        if self._known or outputs.ndim != 2:
            return
        if outputs.numel() == logits.numel():
            # What a single layer gives may be scaled or capped behind it. A device is waited for once.
            self._known = self._alone or _agree(outputs, logits)
        if not self._known:
            raise ValueError(
                f"It is not clear which layer is the head: {self._path} gives scores {tuple(outputs.shape)} that are "
                f"not the logits {tuple(logits.shape)}. Name the layer that gives the logits 'classifier'."
            )

    def _hook(self, calls: list[tuple[Tensor, Tensor]]) -> Any:
        def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            calls.append((next(tensors_in((arguments, keywords))), next(tensors_in(output)).detach()))

        return note


def _pooled(head: nn.Module, inputs: Tensor, outputs: Tensor, logits: Tensor) -> Tensor:
    """One feature vector per example out of a head's inputs: [B, D], [B, D, ...] of a convolution, or [B, ..., D]."""
    if isinstance(head, nn.modules.conv._ConvNd):
        return inputs.flatten(2).mean(dim=2)
    if inputs.ndim == 2:
        return inputs
    inputs, outputs = inputs.flatten(1, -2), outputs.flatten(1, -2).to(logits.dtype)
    targets = logits.detach().reshape(len(logits), 1, -1)
    if outputs.shape[-1] == targets.shape[-1]:
        allowed = POSITION_TOLERANCE * (1 + targets.abs().amax().nan_to_num())
        # Of equal positions the last: causal models pool there.
        distances = (outputs - targets).abs().amax(dim=-1).nan_to_num().flip(1)
        nearest, place = distances.min(dim=1)
        if bool((nearest <= allowed).all()):
            return inputs[torch.arange(len(inputs), device=inputs.device), inputs.shape[1] - 1 - place]
        if bool(((outputs.mean(dim=1, keepdim=True) - targets).abs() <= allowed).all()):
            return inputs.mean(dim=1)
    raise ValueError(
        f"The head {type(head).__name__} runs on {inputs.shape[1]} positions per example, but the logits "
        f"{tuple(logits.shape)} are neither its scores {tuple(outputs.shape)} at one of them nor their mean, so it is "
        "not clear which features belong to an example. Use another objective for this network."
    )


def _agree(outputs: Tensor, logits: Tensor) -> bool:
    """Whether what a head gave is the logits."""
    if outputs.numel() != logits.numel():
        return False
    given, wanted = outputs.flatten().to(logits.dtype), logits.detach().flatten()
    allowed = POSITION_TOLERANCE * (1 + wanted.abs().amax().nan_to_num())
    return bool(((given - wanted).abs().nan_to_num() <= allowed).all())


def _size_of(layer: nn.Module) -> int | None:
    """Number of outputs of a linear or convolutional layer, also of one that PEFT wraps; None for any other."""
    base = getattr(layer, "base_layer", layer)
    if isinstance(base, nn.modules.conv._ConvNd):
        return base.out_channels
    return base.out_features if isinstance(base, nn.Linear) else None


def _output_layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, int]]:
    """Linear and convolutional layers in order, with their paths and numbers of outputs.

    A layer that PEFT wraps counts as one (its `base_layer` tells the size); of a head that PEFT trains a copy of, the
    copies in use are looked at.
    """
    size = _size_of(module)
    if size is not None:
        yield path, module, size
        return
    children = dict(module.named_children())
    copies = children.get("modules_to_save")
    if "original_module" in children and isinstance(copies, nn.ModuleDict):
        active = [name for name in getattr(module, "active_adapters", ()) if name in copies]
        children = {name: copies[name] for name in active} or {"": children["original_module"]}
    for name, child in children.items():
        yield from _output_layers(child, f"{path}.{name}".lstrip("."))
