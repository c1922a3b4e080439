"""BatchNorm that stays in evaluation mode."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from networks import flat
from tiny import image_dataset, predicts_one_class
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_cgd.cli import image_classifier
from hf_cgd.gradients.engines.single_pass import SinglePassEngine
from hf_cgd.models.batch_norm import freeze_batch_norm

BUILD: dict[str, Callable[[], nn.Module]] = {
    "raw timm": lambda: timm.create_model("test_resnet", num_classes=2),
    "wrapped timm": lambda: image_classifier("test_resnet", ["a", "b"], pretrained=False)[0],
    # Its norms are timm's own class, with the activation in it.
    "norm and activation in one": lambda: timm.create_model("test_efficientnet", num_classes=2),
}


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


@pytest.mark.parametrize("kind", BUILD)
def test_training_mode_does_not_reach_it(kind: str) -> None:
    model = BUILD[kind]()
    assert freeze_batch_norm(model) == len(norms(model)) > 0
    for frozen in (model.train(), copy.deepcopy(model).train(), _pickled(model).train()):
        assert frozen.training and not any(layer.training for layer in norms(frozen))
    # A copy is frozen by itself: the other keeps its own layers.
    assert not {id(layer) for layer in norms(copy.deepcopy(model).train())} & {id(layer) for layer in norms(model)}
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.randn(4, 3, 64, 64))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert all(parameter.requires_grad for parameter in model.parameters())


def _pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_the_gradient_of_an_example_is_its_own() -> None:
    """In a batch as alone; a twin whose norms are trained gives another one."""
    torch.manual_seed(0)
    images, gradients = torch.randn(6, 3, 64, 64), {}
    for frozen in (True, False):
        torch.manual_seed(1)
        model = timm.create_model("test_resnet", num_classes=2)
        if frozen:
            freeze_batch_norm(model)
        for rows in (1, 6):
            loss = model.train()(images[:rows])[0, 0]
            parameters = list(model.parameters())
            gradients[frozen, rows] = flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)
    torch.testing.assert_close(gradients[True, 1], gradients[True, 6], rtol=1e-4, atol=1e-5)
    assert (gradients[False, 1] - gradients[False, 6]).norm() > 0.1 * gradients[False, 6].norm()


@predicts_one_class
@pytest.mark.parametrize("kind", ["raw timm", "wrapped timm"])
def test_a_run_in_one_pass_equals_one_backward_pass_per_group(kind: str, trainer: Any) -> None:
    """Where BatchNorm trains, examples mix and the fast engine is refused; frozen, it is taken and gives the same."""
    weights = {}
    for engine in ("auto", "per_group"):
        torch.manual_seed(0)
        model = BUILD[kind]()
        freeze_batch_norm(model)
        options = {
            "objective": "cgd",
            "gradient_engine": engine,
            "max_steps": 3,
            "step_size": 0.5,
            "learning_rate": 1e-3,
        }
        data = image_dataset(12, 64)
        run = trainer(options, model=model, train_dataset=data, eval_dataset=data)
        run.train()
        run.evaluate()
        assert not any(layer.training for layer in norms(run.model.train()))
        weights[engine] = run.group_weights
        if engine == "auto":
            assert isinstance(run.robust_loss.engine.chosen, SinglePassEngine)
    torch.testing.assert_close(weights["auto"], weights["per_group"], rtol=1e-5, atol=1e-7)


@predicts_one_class
@pytest.mark.parametrize("frozen", [False, True])
def test_nine_rows_in_balanced_batches_of_four(frozen: bool, trainer: Any) -> None:
    """No batch of one is left over, of which 1 x 1 pixels have no deviation; there are as many steps as promised."""
    model = BUILD["raw timm"]()
    if frozen:
        freeze_batch_norm(model)
    options = {"group_sampling": "balanced", "max_steps": -1, "num_train_epochs": 1, "objective": "cgd"}
    run = trainer(options, model=model, train_dataset=image_dataset(9, 32))
    run.train()
    assert run.state.global_step == len(run.get_train_dataloader()) == 3
