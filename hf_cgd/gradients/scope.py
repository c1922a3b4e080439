"""The gradient scope: which parameters the group gradients are compared over."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from hf_cgd.models.head import classification_heads
from hf_cgd.models.heads import head_of

ALL = "all"
HEAD = "head"
WORDS = (ALL, HEAD)
"""Values of `gradient_layers` that are no regular expressions."""
GradientLayers = int | str | Sequence[str]
DEFAULT_LAYERS = 3


@dataclass(frozen=True)
class _Blocks:
    """Numbered sibling modules: the layers, blocks or stages of a network."""

    parent: str
    names: tuple[str, ...]
    num_parameters: int


def parse_gradient_layers(value: GradientLayers) -> int | str | list[str]:
    """A number of layers, "all", "head", or a list of patterns. Text is read as well: "3" is 3, alone in a list too.

    Raises:
        ValueError: a number below 1, an empty list, or a pattern that is no regular expression.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1 and (value[0] in WORDS or value[0].lstrip("-").isdigit()):
        value = value[0]
    if isinstance(value, str) and value.lstrip("-").isdigit():
        value = int(value)
    if isinstance(value, bool) or (isinstance(value, int) and value < 1) or value in ("", []):
        raise ValueError(
            f"gradient_layers must be a number of layers >= 1, 'all', 'head', or regular expressions over parameter "
            f"names, got {value!r}."
        )
    if isinstance(value, int) or value in WORDS:
        return value
    patterns = [value] if isinstance(value, str) else list(value)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"gradient_layers: {pattern!r} is not a regular expression ({error}).") from error
    return patterns


def gradient_scope(model: nn.Module, gradient_layers: GradientLayers = DEFAULT_LAYERS) -> dict[str, nn.Parameter]:
    """The trainable parameters that group gradients are taken over, by name, in the model's order.

    Args:
        model: any network.
        gradient_layers: an integer n for the last n layers. Each block or stage counts as one layer, and so does the
            head, which is all that follows the last block. Nothing before the blocks is taken, however large n is,
            and so no weight of the head that is tied to an embedding. In a network without blocks, each module with
            weights is a layer, together with a norm that follows it. "all": every parameter. "head": the layer that
            gives the logits alone (`classification_heads`), tied or not. A list of regular expressions: each is
            searched for in the parameter names, without the prefixes of `torch.compile` and DDP.

    Returns:
        {name: parameter}, never empty. A parameter with two names (tied weights) stands once, under the first.

    Raises:
        ValueError: nothing matches, or nothing that matches is trainable; the message lists what there is.
    """
    layers = parse_gradient_layers(gradient_layers)
    model = _unwrapped(model)
    named = {_plain_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    if layers == ALL:
        chosen = set(named)
    elif layers == HEAD:
        chosen = _head(model, named)
    elif isinstance(layers, int):
        chosen = _last_layers(model, list(named), layers)
    else:
        chosen = {name for name in named if any(re.search(pattern, name) for pattern in layers)}
    if not chosen:
        raise ValueError(
            f"gradient_layers={gradient_layers!r} matches no parameter of {type(model).__name__}. "
            f"Its parameters are in: {_overview(named)}."
        )
    wanted = {id(named[name]) for name in chosen if named[name].requires_grad}
    once = {_plain_name(name): p for name, p in model.named_parameters()}
    scope = {name: parameter for name, parameter in once.items() if id(parameter) in wanted}
    if not scope:
        trainable = {name: p for name, p in named.items() if p.requires_grad}
        raise ValueError(
            f"gradient_layers={gradient_layers!r} selects {_overview(chosen)}, where no parameter is trainable "
            f"(requires_grad is False everywhere). Trainable are: {_overview(trainable) or 'none'}. Unfreeze the "
            "layers, or choose others."
        )
    return scope


def _head(model: nn.Module, named: dict[str, nn.Parameter]) -> set[str]:
    """Names of the parameters of the classification head."""
    try:
        heads = classification_heads(model, head_of(model).num_outputs(model))
    except ValueError as error:
        raise ValueError(
            f"gradient_layers={HEAD!r}: {type(model).__name__} has no layer of which it is known that it gives the "
            "logits. Name its parameters by regular expressions, or give a number of layers."
        ) from error
    own = {id(parameter) for head in heads for parameter in head.parameters()}
    return {name for name, parameter in named.items() if id(parameter) in own}


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of a parameter that may be sharded by ZeRO-3, which leaves an empty one behind, or by FSDP2."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _last_layers(model: nn.Module, names: list[str], count: int) -> set[str]:
    blocks = _find_blocks(model)
    layers = _leaf_layers(model) if blocks is None else _block_layers(model, names, blocks)
    return {name for layer in layers[-count:] for name in layer}


def _block_layers(model: nn.Module, names: list[str], blocks: _Blocks) -> list[list[str]]:
    """Parameter names of each block, then those of the head. What stands between two blocks belongs to the first."""
    prefix = f"{blocks.parent}." if blocks.parent else ""
    positions = [[i for i, name in enumerate(names) if name.startswith(f"{prefix}{block}.")] for block in blocks.names]
    starts = [found[0] for found in positions] + [positions[-1][-1] + 1]
    layers = [names[start:end] for start, end in pairwise(starts)]
    head = names[starts[-1] :]
    feeders = _feeders_beside(model, blocks)
    # The weight of a head that is tied to an embedding is that of the embedding, which is before the blocks.
    first = {_plain_name(name) for name, _ in model.named_parameters()}
    head = [name for name in head if not name.startswith(feeders) and name in first]
    return [*layers, head] if head else layers


def _feeders_beside(model: nn.Module, blocks: _Blocks) -> tuple[str, ...]:
    """Prefixes of modules that are registered after the blocks but feed them, so that they are no head.

    An embedding beside the blocks (relative positions, as in DeBERTa and MPNet) shows that they do.
    """
    container, _, list_name = blocks.parent.rpartition(".")
    if not container or not blocks.names[0].isdigit():
        return ()
    children = list(model.get_submodule(container).named_children())
    place = [name for name, _ in children].index(list_name)
    later = children[place + 1 :]
    if not any(isinstance(child, nn.Embedding) for _, child in later):
        return ()
    return tuple(f"{container}.{name}." for name, _ in later)


def _find_blocks(model: nn.Module) -> _Blocks | None:
    """The outermost blocks with the most parameters; a single block only where there are no two."""
    for at_least in (2, 1):
        candidates = list(_block_runs(model, "", at_least))
        if candidates:
            return max(candidates, key=lambda blocks: blocks.num_parameters)
    return None


def _block_runs(module: nn.Module, path: str, at_least: int) -> Iterator[_Blocks]:
    """Numbered children that have parts (`layer.0`, `layer.1`; `layer1`, `layer2`), the outermost ones only."""
    children = dict(module.named_children())
    numbered: dict[str, list[str]] = {}
    for name, child in children.items():
        match = re.fullmatch(r"(.*?)(\d+)", name)
        is_composite = any(len(list(part.parameters(recurse=False))) for part in _descendants(child))
        if match and is_composite:
            numbered.setdefault(match.group(1), []).append(name)
    inside: set[str] = set()
    for stem, names in numbered.items():
        if len(names) >= (at_least if stem == "" else 2):
            size = sum(whole_shape(p).numel() for name in names for p in children[name].parameters())
            yield _Blocks(path, tuple(names), size)
            inside.update(names)
    for name, child in children.items():
        if name not in inside:
            yield from _block_runs(child, f"{path}.{name}" if path else name, at_least)


def _descendants(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if part is not module]


def _leaf_layers(model: nn.Module) -> list[list[str]]:
    """Parameter names of each module that holds weights itself; a norm counts with the module before it."""
    layers: list[list[str]] = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        names = [_plain_name(f"{path}.{name}" if path else name) for name in own]
        if layers and all(parameter.ndim <= 1 for parameter in own.values()):
            layers[-1].extend(names)
        else:
            layers.append(names)
    return layers


def _unwrapped(model: nn.Module) -> nn.Module:
    """The network inside of `torch.compile`, DataParallel and DDP."""
    while isinstance(inner := getattr(model, "_orig_mod", None) or _parallel_inner(model), nn.Module):
        model = inner
    return model


def _parallel_inner(model: nn.Module) -> nn.Module | None:
    return model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else None


def _plain_name(name: str) -> str:
    """A name without the marks that compiling a part of the network leaves in it."""
    return name.replace("_orig_mod.", "")


def _overview(names: "dict[str, nn.Parameter] | set[str] | list[str]") -> str:
    """Modules that hold the named parameters, in short."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    shown = ", ".join(modules[-12:])
    return shown if len(modules) <= 12 else f"… ({len(modules) - 12} more) {shown}"
