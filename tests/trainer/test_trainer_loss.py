"""The loss in the Trainer: twins of ERM, accumulation, custom losses, gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import image_dataset, logged, parameters_of, text_dataset, tiny_distilbert
from torch import nn
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, Trainer, TrainingArguments

from hf_cgd import CGD, GroupRobustConfig, GroupRobustTrainer

Build = Callable[..., GroupRobustTrainer]


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


@pytest.mark.parametrize("objective", ["erm", "group_dro", "cgd"])
@pytest.mark.parametrize(
    ("outputs", "labels", "declared", "kind"),
    [
        (1, [0.5] * 16, None, "regression"),
        (2, [[1.0, 1.0], [0.0, 1.0]] * 8, None, "multi_label_classification"),
        (2, [[1.0, 1.0], [0.0, 1.0]] * 8, "multi_label_classification", "multi_label_classification"),
    ],
)
def test_smoothing_of_what_has_no_class_is_refused_before_the_first_step(
    trainer: Build, objective: str, outputs: int, labels: list, declared: str | None, kind: str
) -> None:
    data = text_dataset().remove_columns("labels").add_column("labels", labels)
    model = tiny_distilbert(outputs, problem_type=declared)
    with pytest.raises(ValueError, match=f"label_smoothing_factor=0.1.*problem_type='{kind}'"):
        trainer({"objective": objective, "label_smoothing_factor": 0.1}, model=model, train_dataset=data)


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


def plain_loop(steps: int, step_size: float) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """CGD by hand in float64: forward, gradients of both groups, weights, step. Losses, last weights, parameters."""
    model = tiny_distilbert().double().train()
    alpha = torch.tensor([0.5, 0.5], dtype=torch.float64)
    rows, values = text_dataset().with_format("torch"), []
    for step in range(steps):
        batch = rows[4 * step : 4 * step + 4]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        losses = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        means = [losses[batch["group"] == group].mean() for group in (0, 1)]
        gradients = []
        for mean in means:
            parts = torch.autograd.grad(mean, list(model.parameters()), retain_graph=True)
            gradients.append(torch.cat([part.flatten() for part in parts]))
        exponents = [
            sum(
                (means[i] * means[j]).sqrt().item()
                * nn.functional.cosine_similarity(gradients[i], gradients[j], dim=0).item()
                for j in (0, 1)
            )
            for i in (0, 1)
        ]
        alpha = alpha * torch.tensor([step_size * e for e in exponents], dtype=torch.float64).exp()
        alpha = alpha / alpha.sum()
        loss = sum(weight.item() * mean for weight, mean in zip(alpha, means, strict=True))
        values.append(loss.item())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return values, alpha, parameters_of(model)


IN_ORDER: dict[str, Any] = {
    "step_size": 0.5, "gradient_layers": "all", "train_sampling_strategy": "sequential", "max_steps": 4,
}  # fmt: skip


def test_cgd_run_equals_a_plain_loop(trainer: Build) -> None:
    run = trainer(IN_ORDER)
    run.train()
    losses, alpha, parameters = plain_loop(4, 0.5)
    assert logged(run) == pytest.approx(losses, rel=1e-6)
    assert torch.allclose(run.group_weights, alpha, rtol=0, atol=1e-6) and (alpha - 0.5).abs().max() > 1e-3
    assert torch.allclose(parameters_of(run.model), parameters, rtol=0, atol=1e-6)


def test_a_run_in_bfloat16_is_near_the_plain_loop(trainer: Build) -> None:
    """As near as 8 bits of mantissa allow: a few per cent of the way that weights and parameters have gone."""
    run = trainer({**IN_ORDER, "bf16": True, "step_size": 20.0})
    start = parameters_of(run.model)
    run.train()
    losses, alpha, parameters = plain_loop(4, 20.0)
    assert logged(run) == pytest.approx(losses, rel=2e-3)
    assert (alpha - 0.5).abs().max() > 0.03
    assert (run.group_weights - alpha).abs().max() < 0.04 * (alpha - 0.5).abs().max()
    assert (parameters_of(run.model) - parameters).norm() < 0.05 * (parameters - start).norm()


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

    data = text_dataset() if family == "distilbert" else image_dataset(side=160)
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
    assert torch.allclose(runs[0][1], runs[1][1], rtol=0, atol=1e-6)
    assert (runs[0][1] - 1 / 3).abs().max() > 1e-3
    assert runs[0][2] == pytest.approx(runs[1][2], rel=1e-5)


def test_short_last_window(trainer: Build) -> None:
    """Four micro-batches and then two: losses are means over the examples of each group in the window, weighted."""
    data = text_dataset(24)
    run = trainer(
        {
            "learning_rate": 0.0,
            "gradient_accumulation_steps": 4,
            "max_steps": -1,
            "num_train_epochs": 1,
            "objective": "group_dro",
            "step_size": 0.5,
            "train_sampling_strategy": "sequential",
        },
        train_dataset=data,
    )
    run.train()
    rows = data.with_format("torch")[:]
    with torch.no_grad():
        model = tiny_distilbert().double()
        logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    losses = nn.functional.cross_entropy(logits, rows["labels"], reduction="none")
    alpha, expected = torch.tensor([0.5, 0.5], dtype=torch.float64), []
    for window in (slice(0, 16), slice(16, 24)):
        means = torch.stack([losses[window][rows["group"][window] == group].mean() for group in (0, 1)])
        expected.append((alpha @ means).item())
        alpha = torch.softmax(alpha.log() + 0.5 * means, 0)
    assert logged(run) == pytest.approx(expected, rel=1e-4)
    assert torch.allclose(run.group_weights, alpha, rtol=0, atol=1e-6)


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


@pytest.mark.parametrize("objective", ["erm", "group_dro", "cgd"])
def test_a_loss_function_that_divides_by_the_items_of_the_step_is_refused(trainer: Build, objective: str) -> None:
    """Its losses are averaged over the step after it: logs, step size and learning rate would shrink unseen."""

    def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        losses = nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        return losses if num_items_in_batch is None else losses / num_items_in_batch

    run = trainer({"objective": objective}, compute_loss_func=divided)
    before = parameters_of(run.model)
    with pytest.raises(ValueError, match="divides the losses of the examples by num_items_in_batch"):
        run.train()
    assert torch.equal(parameters_of(run.model), before)


def test_a_loss_function_that_looks_at_the_items_is_let_be(trainer: Build) -> None:
    def looking(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.append(None if num_items_in_batch is None else int(num_items_in_batch))
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="none")

    seen: list[int | None] = []
    changes = {"objective": "group_dro", "gradient_accumulation_steps": 2, "max_steps": 2}
    run, plain = trainer(changes, compute_loss_func=looking), trainer(changes)
    run.train()
    plain.train()
    assert torch.equal(parameters_of(run.model), parameters_of(plain.model)) and seen == [8, 8, 8, 8]


def test_a_negative_loss_names_its_group(trainer: Build) -> None:
    def shifted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="none") - 5

    with pytest.raises(ValueError, match=r"group '0' is -4\."):
        trainer(compute_loss_func=shifted).train()


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
