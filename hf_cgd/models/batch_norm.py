"""BatchNorm whose statistics stay as they are, so that the examples of a batch do not act on each other."""

from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def freeze_batch_norm(model: nn.Module) -> int:
    """Keep every BatchNorm layer of a network in evaluation mode, through each later `model.train()` too.

    In training mode the statistics of a batch enter the outputs of all its examples, so the gradient of a group holds
    a part of the other groups'. Frozen layers normalise by their running statistics, which no longer move. Weights
    and biases are trained as before. The state is not saved: freeze a network again after loading it.

    Args:
        model: changed in place. Copies of it (`copy.deepcopy`, pickle) are frozen as well.

    Returns:
        how many layers there are.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:
        # On the object: a class of its own would be unknown to the layer rules, and a replaced layer to checkpoints.
        setattr(layer, "train", partial(_stay_in_evaluation, layer))  # noqa: B010 (it is no method)
        layer.train()
    return len(layers)


def has_synced(model: nn.Module) -> bool:
    """Whether processes sum the statistics of a network's SyncBatchNorm layers in training; not of frozen ones."""
    return any(_trains(layer) for layer in model.modules() if isinstance(layer, nn.SyncBatchNorm))


def _trains(layer: nn.Module) -> bool:
    """Whether `model.train()` will put a layer into training mode, whatever it is in now."""
    before = layer.training
    trains = layer.train().training
    layer.train(before)
    return trains


def _stay_in_evaluation(layer: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(layer, False)
