"""Models of every make in the Trainer, in one pass and in one pass per group."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from tiny import image_dataset, logged, parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from torch import nn
from transformers import TrainerCallback

from hf_cgd import GroupRobustTrainer, GroupRobustWarning

pytestmark = predicts_one_class

Build = Callable[..., GroupRobustTrainer]


@pytest.mark.parametrize("num_labels,labels", [(1, [0.5, -1.0, 2.0, 0.0] * 4), (3, [[0.0, 1, 1], [1.0, 0, 0]] * 8)])
def test_regression_and_multi_label(trainer: Build, num_labels: int, labels: list) -> None:
    data = text_dataset().remove_columns("labels").add_column("labels", labels)
    for objective in ("erm", "cgd"):
        run = trainer(
            {"objective": objective}, model=tiny_distilbert(num_labels), train_dataset=data, eval_dataset=data
        )
        run.train()
        metrics = run.evaluate()
        rows = data.with_format("torch")[:]
        with torch.no_grad():
            logits = run.model.eval()(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        targets = rows["labels"].view_as(logits)
        kind = nn.functional.binary_cross_entropy_with_logits if num_labels == 3 else nn.functional.mse_loss
        losses = kind(logits, targets, reduction="none").mean(dim=1)
        assert metrics["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        worst = max(losses[rows["group"] == group].mean().item() for group in (0, 1))
        assert metrics["eval_worst_group_loss"] == pytest.approx(worst, rel=1e-5)
        if num_labels == 3:
            right = ((logits > 0) == targets.bool()).all(dim=1).double()
            worst = min(right[rows["group"] == group].mean().item() for group in (0, 1))
            assert metrics["eval_worst_group_accuracy"] == pytest.approx(worst)
        else:
            assert metrics["eval_mse"] == pytest.approx(losses.mean().item(), rel=1e-5)


# ---- Models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["erm", "erm_uw", "group_dro", "cgd"])
def test_a_raw_timm_network(trainer: Build, objective: str) -> None:
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False, num_classes=2)
    data = image_dataset(seed=1)
    run = trainer({"objective": objective}, model=network, train_dataset=image_dataset(), eval_dataset=data)
    before = parameters_of(network)
    run.train()
    assert (parameters_of(network) - before).norm() > 1e-2
    metrics, rows = run.evaluate(), data[:]
    with torch.no_grad():
        losses = nn.functional.cross_entropy(network.eval()(rows["pixel_values"]), rows["labels"], reduction="none")
    for group in (0, 1):
        mean = losses[rows["group"] == group].mean().item()
        assert metrics[f"eval_group_loss/{group}"] == pytest.approx(mean, rel=1e-5)
        assert metrics[f"eval_group_count/{group}"] == 6
    assert run.predict(image_dataset().remove_columns(["labels", "group"])).predictions.shape == (12, 2)
    assert run.predict(image_dataset().remove_columns(["labels", "group"]).select([0])).predictions.shape == (1, 2)


def test_a_raw_network_without_groups(trainer: Build) -> None:
    network = timm.create_model("test_resnet", pretrained=False, num_classes=2)
    run = trainer(
        {"objective": "erm", "group_column": None},
        model=network,
        train_dataset=image_dataset(),
        eval_dataset=image_dataset(),
    )
    before = parameters_of(network)
    run.train()
    assert (parameters_of(network) - before).norm() > 1e-2
    rows = image_dataset()[:]
    loss = run.evaluate()["eval_loss"]
    with torch.no_grad():
        expected = nn.functional.cross_entropy(network.eval()(rows["pixel_values"]), rows["labels"])
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_models_that_return_tuples(trainer: Build) -> None:
    runs = []
    for return_dict in (True, False):
        for objective in ("erm", "cgd"):
            run = trainer(
                {"objective": objective}, model=tiny_distilbert(return_dict=return_dict), eval_dataset=text_dataset()
            )
            run.train()
            runs.append([run.evaluate()["eval_loss"], logged(run), logged(run, "group_loss/0")])
    assert runs[0] == runs[2] and runs[1] == runs[3]


def test_any_module_that_returns_logits(trainer: Build) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.EmbeddingBag(64, 8)
            self.head = nn.Linear(8, 2)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(input_ids))

    run = trainer(model=Bag(), eval_dataset=text_dataset())
    run.train()
    rows = text_dataset().with_format("torch")[:]
    right = (run.model(rows["input_ids"]).argmax(dim=1) == rows["labels"]).double()
    worst = min(right[rows["group"] == group].mean().item() for group in (0, 1))
    assert run.evaluate()["eval_worst_group_accuracy"] == pytest.approx(worst)


def test_a_network_whose_input_cannot_be_told(trainer: Build) -> None:
    data = text_dataset().rename_columns({"input_ids": "a", "attention_mask": "b"})
    with pytest.raises(ValueError, match=r"Linear.forward takes \['input'\], and the dataset has \['a', 'b'"):
        trainer(model=nn.Linear(8, 2), train_dataset=data)


@pytest.mark.parametrize("changes", [dict(model="frozen head"), dict(model="unused layer")])
def test_frozen_and_unused_layers_among_the_last(trainer: Build, changes: dict) -> None:
    runs = []
    for engine in ("auto", "per_group"):
        model = tiny_distilbert()
        if changes["model"] == "frozen head":
            model.pre_classifier.requires_grad_(False)
        else:
            model.classifier_extra = nn.Linear(4, 4)
        run = trainer({"step_size": 0.5, "gradient_engine": engine}, model=model)
        run.train()
        assert run.robust_loss.updates == 3 and (run.group_weights - 0.5).abs().max() > 1e-3
        untouched = tiny_distilbert().pre_classifier.weight
        assert torch.equal(model.pre_classifier.weight, untouched) == (changes["model"] == "frozen head")
        runs.append(run.group_weights)
    assert torch.allclose(*runs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", ["auto", "per_group"])
def test_layers_that_the_losses_do_not_use_are_refused(trainer: Build, engine: str) -> None:
    """Their gradients are zero, so that the weights would stay equal and the run be that of equal weights."""
    model = tiny_distilbert()
    model.decoder = nn.Linear(4, 4)
    before = parameters_of(model)
    run = trainer({"gradient_layers": ["decoder"], "gradient_engine": engine}, model=model)
    with pytest.raises(ValueError, match="The losses depend on none of the 2 parameters .*set gradient_layers to"):
        run.train()
    assert torch.equal(parameters_of(model), before)


def test_everything_selected_is_frozen(trainer: Build) -> None:
    model = tiny_distilbert()
    for name in ("pre_classifier", "classifier"):
        getattr(model, name).requires_grad_(False)
    with pytest.raises(ValueError, match=r"gradient_layers=1 selects .*no parameter is trainable"):
        trainer({"gradient_layers": 1}, model=model)


# ---- Forward modes ----------------------------------------------------------------------------------------------------


def test_split_forward_equals_joint_where_examples_do_not_interact(trainer: Build) -> None:
    runs = []
    for mode in ("joint", "split"):
        run = trainer({"forward_mode": mode, "step_size": 0.5, "max_steps": 4})
        run.train()
        runs.append((parameters_of(run.model), run.group_weights))
    assert torch.allclose(runs[0][0], runs[1][0], atol=1e-6)
    assert torch.allclose(runs[0][1], runs[1][1], atol=1e-6)


def test_split_forward_gives_each_group_its_own_batch_statistics(trainer: Build) -> None:
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False, num_classes=2)
    run = trainer(
        {"forward_mode": "split", "objective": "group_dro", "step_size": 0.0},
        model=network,
        train_dataset=image_dataset(),
    )
    batch = next(iter(run.get_train_dataloader()))
    network.train()
    loss = run.compute_loss(network, dict(batch))
    means = []
    for group in (0, 1):
        rows = batch["group"] == group
        logits = network(batch["x"][rows])
        means.append(nn.functional.cross_entropy(logits, batch["labels"][rows]))
    assert loss.item() == pytest.approx((sum(means) / 2).item(), rel=1e-5)


def test_split_forward_under_erm(trainer: Build) -> None:
    """ERM's loss is the mean over the examples there too, each group with its own batch statistics."""
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False, num_classes=2)
    run = trainer({"forward_mode": "split", "objective": "erm"}, model=network, train_dataset=image_dataset())
    batch = next(iter(run.get_train_dataloader()))
    loss = run.compute_loss(network.train(), dict(batch))
    total = torch.tensor(0.0)
    for group in (0, 1):
        rows = batch["group"] == group
        if rows.any():
            total = total + nn.functional.cross_entropy(
                network(batch["x"][rows]), batch["labels"][rows], reduction="sum"
            )
    assert loss.item() == pytest.approx(total.item() / 4, rel=1e-5)


def test_batchnorm_with_a_last_batch_of_one(trainer: Build) -> None:
    network = timm.create_model("test_resnet", pretrained=False, num_classes=2)
    run = trainer(
        {"group_sampling": "balanced", "max_steps": -1, "num_train_epochs": 1},
        model=network,
        train_dataset=image_dataset(9),
    )
    assert len(run.get_train_dataloader()) == 3
    run.train()
    assert run.state.global_step == 3


# ---- Layers that are unfrozen by and by -------------------------------------------------------------------------------


class Unfreezes(TrainerCallback):
    """Makes the body trainable when the second of three epochs begins."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.epoch >= 1:
            kwargs["model"].distilbert.requires_grad_(True)


@pytest.mark.parametrize("layers,warns", [(3, 1), ("head", 0)])
def test_unfreezing_that_would_change_the_scope_is_warned_of(trainer: Build, layers: int | str, warns: int) -> None:
    model = tiny_distilbert()
    model.distilbert.requires_grad_(False)
    settings = {"objective": "cgd", "gradient_layers": layers, "num_train_epochs": 3, "max_steps": -1}
    run = trainer(settings, model=model, train_dataset=text_dataset(), callbacks=[Unfreezes()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GroupRobustWarning)
        run.train()
    found = [str(each.message) for each in caught if "unfrozen since the run began" in str(each.message)]
    assert len(found) == warns
    for message in found:
        assert "still compared over pre_classifier.weight … classifier.bias" in message
        assert "now choose distilbert.transformer.layer.0" in message
