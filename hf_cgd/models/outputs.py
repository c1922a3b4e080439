"""What goes into a network and what comes out of it, whatever library it is from."""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

INPUT_NAMES = ("pixel_values", "input_ids", "input_values", "input_features")


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Arguments of the model's `forward`; those of the wrapped model for a PEFT one."""
    get_base_model = getattr(model, "get_base_model", None)
    return inspect.signature(get_base_model().forward if callable(get_base_model) else model.forward).parameters


def takes_any_argument(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a `forward` of these arguments has `**kwargs`."""
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def num_outputs_of(model: nn.Module | None) -> int | None:
    """Number of classes or of regression targets of a network, None where it does not say.

    The config of a class of one's own may be that of its encoder, so its `num_labels` counts only where the network
    ends in a linear layer of that size. A network that chooses among the answers that an example brings reads no
    `num_labels`.
    """
    declared = getattr(getattr(model, "config", None), "num_labels", None)
    own = getattr(model, "num_classes", None)
    if model is None or not declared:
        return own
    network = without_wrappers(model)
    if any(kind.__name__.endswith("ForMultipleChoice") for kind in type(network).__mro__):
        return None
    if is_of_transformers(model):
        return declared
    sizes = [layer.out_features for layer in network.modules() if isinstance(layer, nn.Linear)]
    return declared if not sizes or sizes[-1] == declared else own


def class_names_of(model: nn.Module | None) -> list[str]:
    """Names of a network's classes, [] where it has none: of its config, which calls a class without one LABEL_2."""
    names = getattr(getattr(model, "config", None), "id2label", None) or {}
    found = [str(names[number]) for number in sorted(names)]
    return [] if all(re.fullmatch(r"LABEL_\d+", name) for name in found) else found


def declared_problem_type(model: nn.Module | None) -> str | None:
    """What a network's config says about its `problem_type`, None where it does not say."""
    return getattr(getattr(model, "config", None), "problem_type", None)


def renamed_input(model: nn.Module, columns: Sequence[str], not_inputs: Sequence[str]) -> dict[str, str]:
    """For a network whose `forward(x)` has no argument named like a column: {column: argument}; {} for any other.

    Args:
        model: the network.
        columns: what the dataset has.
        not_inputs: columns that are labels or groups.

    Raises:
        ValueError: it is not clear which column the network takes.
    """
    parameters = forward_parameters(model)
    if takes_any_argument(parameters) or any(name in parameters for name in columns):
        return {}
    inputs = [name for name in columns if name not in not_inputs]
    inputs = [name for name in INPUT_NAMES if name in inputs] or inputs
    required = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    if len(inputs) != 1 or len(required) != 1:
        raise ValueError(
            f"{type(model).__name__}.forward takes {list(parameters)}, and the dataset has {list(columns)}: no "
            "column has the name of an argument. Rename the input column(s) like the argument(s)."
        )
    return {inputs[0]: required[0]}


def split_forward(model: nn.Module, inputs: Mapping[str, Any], group_ids: Tensor) -> dict[str, Tensor]:
    """One forward pass for each group present; logits of all examples in the order of the batch.

    Tensors with one entry per example are split, anything else goes to every pass as it is. Of a network that is
    spread over processes only the first pass goes through the wrapper: it waits for the others, which may hold another
    number of groups.
    """
    logits = []
    for group in group_ids.unique().tolist():
        rows = (group_ids == group).nonzero().flatten()
        part = {
            name: value[rows]
            if isinstance(value, Tensor) and value.ndim > 0 and len(value) == len(group_ids)
            else value
            for name, value in inputs.items()
        }
        logits.append(logits_of(model(**part)))
        model = model.module if isinstance(model, DistributedDataParallel) else model
    return {"logits": torch.cat(logits)[order_of_split(group_ids)]}


def logits_of(outputs: Any, after_loss: bool = False) -> Tensor:
    """The class scores or values in what a model returns, in training and evaluation alike.

    A tensor is the scores; of anything else its "logits", by key or by attribute; without these the first tensor of a
    sequence, and of a mapping the only one.

    Args:
        outputs: what the model returned.
        after_loss: the first entry of a sequence is the model's own loss, which is passed over.

    Raises:
        ValueError: there is no such tensor, or a mapping holds several and none is called "logits".
    """
    if isinstance(outputs, Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(named, Tensor):
        return named
    if isinstance(outputs, Mapping):
        found = [part for name, part in outputs.items() if name != "loss" and isinstance(part, Tensor) and part.ndim]
        if len(found) == 1:
            return found[0]
        raise ValueError(f"Expected the model to return 'logits', got {list(outputs)}.")
    parts = list(outputs)[after_loss:] if isinstance(outputs, (tuple, list)) else []
    first = next((part for part in parts if isinstance(part, Tensor) and part.ndim), None)
    if first is None:
        raise ValueError(
            f"Expected the model to return a tensor, 'logits' or a tuple with a tensor, got {type(outputs).__name__}."
        )
    return first


def own_loss_of(outputs: Any) -> Tensor | None:
    """The loss that a model computed itself, given labels; None where it returned none."""
    if isinstance(outputs, Tensor):
        return None
    if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        loss = outputs[0] if outputs else None
    else:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def with_logits(outputs: Any, logits: Tensor) -> Any:
    """What a model returned, in the same form, with other logits; a mapping is changed in place."""
    if isinstance(outputs, Tensor):
        return logits
    if isinstance(outputs, MutableMapping):
        outputs["logits"] = logits
        return outputs
    if hasattr(outputs, "_replace"):
        return outputs._replace(logits=logits)
    if isinstance(outputs, (tuple, list)):
        place = next(place for place, part in enumerate(outputs) if isinstance(part, Tensor) and part.ndim)
        return (*outputs[:place], logits, *outputs[place + 1 :])
    changed = copy.copy(outputs)
    changed.logits = logits
    return changed


def with_loss(outputs: Any, loss: Tensor) -> Any:
    """What a model returned, in the form in which the `Trainer` finds the scores: by name, or behind the loss."""
    if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "logits"):
        return (loss, *outputs)
    return named_outputs(outputs)


def named_outputs(outputs: Any) -> Any:
    """The same with a tensor, or an object with logits, as a mapping; the `Trainer` knows mappings and tuples only."""
    if isinstance(outputs, Mapping):
        return outputs
    if isinstance(outputs, Tensor) or hasattr(outputs, "logits"):
        return {"logits": logits_of(outputs)}
    return outputs


def without_wrappers(model: nn.Module) -> nn.Module:
    """The network inside of adapters (peft) or of `torch.compile`."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else getattr(model, "_orig_mod", model)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether the network is of a class of transformers' own, whose config and loss are known."""
    return type(without_wrappers(model)).__module__.startswith("transformers.")


def order_of_split(group_ids: Tensor) -> Tensor:
    """Place of each example [B] among those of the passes of `split_forward`."""
    return group_ids.argsort(stable=True).argsort()


def first_tensor(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor | None:
    """The first tensor among the arguments of a call, nested or not; None for none."""
    if arguments and isinstance(arguments[0], Tensor):
        return arguments[0]
    return next(tensors_in((arguments, keywords)), None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
