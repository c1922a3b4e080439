"""The loss in the Trainer: twins of ERM, accumulation, custom losses, models of every make."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from datasets import Dataset
from tiny import parameters_of, text_dataset, tiny_distilbert
from torch import nn
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, Trainer, TrainingArguments

from hf_cgd import CGD, GroupRobustConfig, GroupRobustTrainer

Build = Callable[..., GroupRobustTrainer]


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def images(size: int = 12, side: int = 32, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    return Dataset.from_dict(
        {
            "pixel_values": torch.randn(size, 3, side, side, generator=generator).tolist(),
            "labels": torch.randint(0, 2, (size,), generator=generator).tolist(),
            "group": [row % 2 for row in range(size)],
        }
    ).with_format("torch")


# ---- Twins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"label_smoothing_factor": 0.1}])
def test_erm_is_the_plain_trainer_bit_for_bit(config: Callable[..., GroupRobustConfig], changes: dict) -> None:
    options = dict(objective="erm", optim="adamw_torch", learning_rate=1e-3, max_steps=5, seed=0, **changes)
    args = config(**options)
    runs = []
    for kind in (GroupRobustTrainer, Trainer):
        run = kind(tiny_distilbert(dropout=0.1), args, train_dataset=text_dataset(32))
        run.train()
        runs.append((parameters_of(run.model), logged(run)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_group_dro_without_steps_equals_erm_on_balanced_batches(trainer: Build) -> None:
    runs = []
    for objective, knobs in (
        ("erm", {}),
        ("group_dro", {"step_size": 0.0}),
        ("erm_uw", {}),
        ("cgd", {"step_size": 0.0}),
    ):
        run = trainer({"objective": objective, "group_sampling": "balanced", "max_steps": 5, **knobs})
        run.train()
        runs.append((parameters_of(run.model), logged(run)))
    for parameters, losses in runs[1:]:
        assert torch.allclose(parameters, runs[0][0], atol=1e-6)
        assert losses == pytest.approx(runs[0][1], rel=1e-5)


def test_cgd_run_equals_a_plain_loop(trainer: Build) -> None:
    """The Trainer's run against the update written out by hand: forward, gradients of both groups, alpha, step."""
    data = text_dataset()
    run = trainer(
        {"step_size": 0.5, "gradient_layers": "all", "train_sampling_strategy": "sequential", "max_steps": 4}
    )
    run.train()
    model = tiny_distilbert().train()
    alpha = torch.tensor([0.5, 0.5], dtype=torch.float64)
    rows = data.with_format("torch")
    for step in range(4):
        batch = rows[4 * step : 4 * step + 4]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        losses = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        means = [losses[batch["group"] == group].mean() for group in (0, 1)]
        gradients = []
        for mean in means:
            parts = torch.autograd.grad(mean, list(model.parameters()), retain_graph=True)
            gradients.append(torch.cat([part.flatten() for part in parts]).double())
        exponents = [
            sum(
                (means[i] * means[j]).sqrt().item()
                * torch.nn.functional.cosine_similarity(gradients[i], gradients[j], dim=0).item()
                for j in (0, 1)
            )
            for i in (0, 1)
        ]
        alpha = alpha * torch.tensor([0.5 * e for e in exponents], dtype=torch.float64).exp()
        alpha = alpha / alpha.sum()
        loss = sum(weight.item() * mean for weight, mean in zip(alpha, means, strict=True))
        assert logged(run)[step] == pytest.approx(loss.item(), rel=1e-4)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    assert torch.allclose(run.group_weights, alpha, atol=1e-6)
    assert torch.allclose(parameters_of(run.model), parameters_of(model), atol=1e-6)


# ---- Accumulation -----------------------------------------------------------------------------------------------------


class Fixed(torch.utils.data.Dataset):
    """The same four rows over and over."""

    def __init__(self, rows: list[dict[str, Any]], times: int) -> None:
        self.rows = rows * times

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


@pytest.mark.parametrize("objective", ["group_dro", "cgd", "erm_uw", "erm", "pgi", "irm", "coral"])
@pytest.mark.parametrize("family", ["distilbert", "timm wrapper"])
def test_accumulating_the_same_micro_batch_changes_nothing(trainer: Build, objective: str, family: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        if family == "distilbert":
            return tiny_distilbert()
        return TimmWrapperForImageClassification(TimmWrapperConfig(architecture="test_vit", num_labels=2)).eval()

    data = text_dataset() if family == "distilbert" else images(side=160)
    rows = [data[row] for row in range(4)]
    changes = dict(objective=objective, learning_rate=1e-2, max_steps=1, train_sampling_strategy="sequential")
    if objective in ("group_dro", "cgd"):
        changes["step_size"] = 0.0
    moves, losses = [], []
    for accumulation in (1, 4):
        run = trainer(
            {**changes, "gradient_accumulation_steps": accumulation},
            model=model(),
            train_dataset=Fixed(rows, accumulation),
        )
        start = parameters_of(run.model)
        run.train()
        moves.append(parameters_of(run.model) - start)
        losses.append(logged(run)[0])
    assert (moves[1].norm() / moves[0].norm()).item() == pytest.approx(1, abs=1e-4)
    assert (moves[1] - moves[0]).norm() < 1e-3 * moves[0].norm()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_weights_move_once_per_optimizer_step(trainer: Build) -> None:
    run = trainer({"step_size": 0.1, "gradient_accumulation_steps": 2, "max_steps": 3}, train_dataset=text_dataset(32))
    run.train()
    assert run.robust_loss.updates == 3
    assert run.robust_loss.weight_timing == "next"


@pytest.mark.parametrize("objective", ["group_dro", "cgd"])
def test_micro_batches_of_eight_equal_a_batch_of_32_under_next(trainer: Build, objective: str) -> None:
    runs = []
    for accumulation in (1, 4):
        run = trainer(
            {
                "objective": objective,
                "step_size": 0.5,
                "weight_timing": "next",
                "per_device_train_batch_size": 32 // accumulation,
                "gradient_accumulation_steps": accumulation,
                "max_steps": 4,
            },
            train_dataset=text_dataset(100, groups=3),
        )
        run.train()
        runs.append((parameters_of(run.model), run.group_weights, logged(run)))
    assert torch.allclose(runs[0][0], runs[1][0], atol=1e-6)
    assert torch.allclose(runs[0][1], runs[1][1], atol=1e-6)
    assert runs[0][2] == pytest.approx(runs[1][2], rel=1e-5)


def test_short_last_window(trainer: Build) -> None:
    run = trainer(
        {
            "learning_rate": 0.0,
            "gradient_accumulation_steps": 4,
            "max_steps": -1,
            "num_train_epochs": 1,
            "objective": "group_dro",
        },
        train_dataset=text_dataset(24),
    )
    run.train()
    losses = logged(run)
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], abs=1e-2)
    assert losses[1] > 0.6


# ---- Custom losses ----------------------------------------------------------------------------------------------------


def test_a_loss_function_of_the_users_own_counts_per_example(trainer: Build) -> None:
    def doubled(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return 2 * nn.functional.cross_entropy(outputs.logits, labels, reduction="none")

    for objective in ("erm", "group_dro"):
        changes = {"objective": objective, "learning_rate": 0.0, "gradient_accumulation_steps": 2}
        plain = trainer(changes, train_dataset=text_dataset(32), eval_dataset=text_dataset())
        custom = trainer(
            changes, train_dataset=text_dataset(32), eval_dataset=text_dataset(), compute_loss_func=doubled
        )
        plain.train()
        custom.train()
        assert logged(custom) == pytest.approx([2 * loss for loss in logged(plain)], rel=1e-4)
        assert custom.evaluate()["eval_worst_group_loss"] == pytest.approx(
            2 * plain.evaluate()["eval_worst_group_loss"]
        )


@pytest.mark.parametrize("objective", ["erm", "cgd"])
def test_a_loss_function_that_averages_is_refused(trainer: Build, objective: str) -> None:
    def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels)

    with pytest.raises(
        ValueError, match=r"compute_loss_func must return one loss per example, shape \(4,\).*got \(\)"
    ):
        trainer({"objective": objective}, compute_loss_func=mean).train()


def test_a_negative_loss_names_its_group(trainer: Build) -> None:
    def shifted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="none") - 5

    with pytest.raises(ValueError, match=r"group '0' is -4\."):
        trainer(compute_loss_func=shifted).train()


@pytest.mark.parametrize("num_labels,labels", [(1, [0.5, -1.0] * 8), (3, [[0.0, 1, 1], [1.0, 0, 0]] * 8)])
def test_regression_and_multi_label(trainer: Build, num_labels: int, labels: list) -> None:
    data = text_dataset().remove_columns("labels").add_column("labels", labels)
    for objective in ("erm", "cgd"):
        run = trainer(
            {"objective": objective}, model=tiny_distilbert(num_labels), train_dataset=data, eval_dataset=data
        )
        run.train()
        metrics = run.evaluate()
        expected = "eval_worst_group_accuracy" if num_labels == 3 else "eval_mse"
        assert expected in metrics and metrics["eval_worst_group_loss"] >= metrics["eval_loss"] - 1e-6


# ---- Models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["erm", "erm_uw", "group_dro", "cgd"])
def test_a_raw_timm_network(trainer: Build, objective: str) -> None:
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False, num_classes=2)
    run = trainer({"objective": objective}, model=network, train_dataset=images(), eval_dataset=images(seed=1))
    run.train()
    metrics = run.evaluate()
    assert metrics["eval_group_count/0"] == 6
    assert run.predict(images().remove_columns(["labels", "group"])).predictions.shape == (12, 2)
    assert run.predict(images().remove_columns(["labels", "group"]).select([0])).predictions.shape == (1, 2)


def test_a_raw_network_without_groups(trainer: Build) -> None:
    network = timm.create_model("test_resnet", pretrained=False, num_classes=2)
    run = trainer(
        {"objective": "erm", "group_column": None}, model=network, train_dataset=images(), eval_dataset=images()
    )
    run.train()
    assert run.evaluate()["eval_loss"] > 0


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
    assert 0 <= run.evaluate()["eval_worst_group_accuracy"] <= 1


def test_a_network_whose_input_cannot_be_told(trainer: Build) -> None:
    data = text_dataset().rename_columns({"input_ids": "a", "attention_mask": "b"})
    with pytest.raises(ValueError, match=r"Linear.forward takes \['input'\], and the dataset has \['a', 'b'"):
        trainer(model=nn.Linear(8, 2), train_dataset=data)


def test_a_batch_without_labels(trainer: Build) -> None:
    run = trainer()
    batch = next(iter(run.get_train_dataloader()))
    batch.pop("labels")
    with pytest.raises(ValueError, match=r"Expected the batch to hold 'labels', got"):
        run.compute_loss(run.model.train(), batch)


def test_a_batch_without_groups(trainer: Build) -> None:
    run = trainer()
    batch = next(iter(run.get_train_dataloader()))
    batch.pop("group")
    with pytest.raises(ValueError, match=r"group ids under 'group', got"):
        run.compute_loss(run.model.train(), batch)


def test_compute_loss_can_be_called_by_hand(trainer: Build) -> None:
    run = trainer({"step_size": 0.1})
    batch = next(iter(run.get_train_dataloader()))
    loss, outputs = run.compute_loss(run.model.train(), batch, return_outputs=True)
    loss.backward()
    assert outputs["logits"].shape == (4, 2) and run.robust_loss.updates == 1


@pytest.mark.parametrize("changes", [dict(model="frozen head"), dict(model="unused layer")])
def test_frozen_and_unused_layers_among_the_last(trainer: Build, changes: dict) -> None:
    model = tiny_distilbert()
    if changes["model"] == "frozen head":
        model.pre_classifier.requires_grad_(False)
    else:
        model.classifier_extra = nn.Linear(4, 4)
    run = trainer({"step_size": 0.5}, model=model)
    run.train()
    assert run.robust_loss.updates == 3


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
        {"forward_mode": "split", "objective": "group_dro", "step_size": 0.0}, model=network, train_dataset=images()
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
    run = trainer({"forward_mode": "split", "objective": "erm"}, model=network, train_dataset=images())
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
        {"group_sampling": "balanced", "max_steps": -1, "num_train_epochs": 1}, model=network, train_dataset=images(9)
    )
    assert len(run.get_train_dataloader()) == 3
    run.train()
    assert run.state.global_step == 3


# ---- Gradients --------------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_changes_nothing(trainer: Build) -> None:
    runs = []
    for checkpointing in (False, True):
        run = trainer({"gradient_checkpointing": checkpointing, "step_size": 0.5})
        run.train()
        runs.append((parameters_of(run.model), run.group_weights))
    assert torch.allclose(runs[0][0], runs[1][0], atol=1e-6)
    assert torch.allclose(runs[0][1], runs[1][1], atol=1e-6)


def test_group_gradients_leave_grad_clean(trainer: Build) -> None:
    run = trainer()
    run.compute_loss(run.model.train(), next(iter(run.get_train_dataloader())))
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_bfloat16_autocast(trainer: Build) -> None:
    run = trainer({"bf16": True, "step_size": 0.5})
    run.train()
    assert bool(run.group_weights.isfinite().all()) and run.group_weights.sum().item() == pytest.approx(1)


def test_several_gpus_in_one_process_are_refused(config: Callable[..., GroupRobustConfig]) -> None:
    args = config()
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"2 GPUs are visible to one process.*accelerate launch"):
        GroupRobustTrainer(tiny_distilbert(), args, train_dataset=text_dataset())


def test_hyperparameters_set_between_runs_reach_the_objective(trainer: Build) -> None:
    run = trainer({"step_size": 0.1})
    run.args.step_size = 0.7
    run.train()
    assert run.group_objective == CGD(step_size=0.7) == run.robust_loss.objective


def test_plain_arguments_default_to_cgd(tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    assert (
        GroupRobustTrainer(tiny_distilbert(), args, train_dataset=text_dataset(), group_column="group").group_objective
        == CGD()
    )
