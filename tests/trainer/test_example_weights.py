"""Class weights, example weights and focal loss: against sums over the whole step that are formed by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from tests.support.tiny import logged, parameters_of, text_rows, tiny_distilbert

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 6, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "use_cpu": True,
    "report_to": [], "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "seed": 0,
    "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential",
}  # fmt: skip
SIZE = 16


def rows() -> dict[str, list[Any]]:
    made = text_rows(SIZE, groups=3)
    made["group"] = [0, 1, 1, 2, 0, 1, 1, 1, 2, 0, 1, 2, 2, 1, 0, 1]
    made["importance"] = [0.5 + (row % 5) for row in range(SIZE)]
    return made


def trained(output: Path, objective: str, **options: Any) -> GroupRobustTrainer:
    options = {"max_steps": 1, "group_column": "group", **COMMON, **options}
    args = GroupRobustConfig(str(output), objective=objective, **options)
    trainer = GroupRobustTrainer(model=tiny_distilbert(), args=args, train_dataset=Dataset.from_dict(rows()))
    trainer.train()
    return trainer


def by_hand(objective: str, size: int, weights: torch.Tensor, gamma: float = 0.0) -> tuple[float, torch.Tensor]:
    """Loss of the first `size` rows as one step, and the parameters after a step of 0.1 down its gradient."""
    model, made = tiny_distilbert(), rows()
    ids, labels, groups = (torch.tensor(made[name][:size]) for name in ("input_ids", "labels", "group"))
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    probability = logits.softmax(dim=1)[torch.arange(size), labels]
    losses = (1 - probability) ** gamma * -probability.log()
    weights = weights[:size]
    if objective == "erm":
        loss = (weights * losses).sum() / weights.sum()
    else:
        means = [(weights * losses)[groups == k].sum() / weights[groups == k].sum() for k in groups.unique()]
        loss = torch.stack(means).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    return loss.item(), parameters_of(model)


@pytest.mark.parametrize("accumulated", [1, 2, 3])
@pytest.mark.parametrize("objective", ["erm", "erm_uw", "group_dro", "cgd", "irm"])
@pytest.mark.parametrize("kind", ["classes", "column", "both and focal"])
def test_a_mean_is_one_of_weighted_losses_over_the_whole_step(
    tmp_path: Path, objective: str, accumulated: int, kind: str
) -> None:
    made, options = (
        rows(),
        {"classes": {"class_weights": [1.0, 3.0]}, "column": {"example_weight_column": "importance"}},
    )
    options["both and focal"] = {**options["classes"], **options["column"], "focal_gamma": 2.0}
    weights = torch.ones(SIZE)
    if kind != "column":
        weights = weights * torch.tensor([1.0, 3.0])[torch.tensor(made["labels"])]
    if kind != "classes":
        weights = weights * torch.tensor(made["importance"])
    knobs = {"step_size": 0.0} if objective in ("group_dro", "cgd") else {}
    knobs |= {"penalty_weight": 0.0} if objective == "irm" else {}
    trainer = trained(tmp_path, objective, gradient_accumulation_steps=accumulated, **options[kind], **knobs)
    # Of three micro-batches of 6 the last holds 4 rows.
    loss, parameters = by_hand(objective, min(6 * accumulated, SIZE), weights, 2.0 if "focal" in kind else 0.0)
    torch.testing.assert_close(parameters_of(trainer.model), parameters, rtol=1e-5, atol=1e-7)
    assert logged(trainer)[0] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("objective", ["pgi", "coral"])
def test_the_mean_loss_of_the_penalties_is_weighted_as_under_erm(tmp_path: Path, objective: str) -> None:
    options: dict[str, Any] = {"class_weights": "balanced", "example_weight_column": "importance"}
    of_penalty = trained(tmp_path / "penalty", objective, penalty_weight=0.0, **options)
    of_erm = trained(tmp_path / "erm", "erm", **options)
    torch.testing.assert_close(parameters_of(of_penalty.model), parameters_of(of_erm.model))


@pytest.mark.parametrize("grouped", [True, False])
def test_class_weights_under_erm_train_as_the_plain_script(tmp_path: Path, grouped: bool) -> None:
    class Plain(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits, inputs["labels"], weight=torch.tensor([1.0, 3.0]))
            return (loss, outputs) if return_outputs else loss

    data = Dataset.from_dict(rows()).remove_columns(["group", "importance"])
    args = TrainingArguments(str(tmp_path / "plain"), max_steps=5, **COMMON)
    plain = Plain(model=tiny_distilbert(), args=args, train_dataset=data)
    plain.train()
    column = "group" if grouped else None
    ours = trained(tmp_path / "ours", "erm", max_steps=5, class_weights=[1.0, 3.0], group_column=column)
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-6)
    torch.testing.assert_close(parameters_of(ours.model), parameters_of(plain.model), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("accumulated", [2, 3])
def test_without_groups_a_step_is_one_mean_as_well(tmp_path: Path, accumulated: int) -> None:
    options = {"gradient_accumulation_steps": accumulated, "example_weight_column": "importance"}
    trainer = trained(tmp_path, "erm", group_column=None, **options)
    loss, parameters = by_hand("erm", min(6 * accumulated, SIZE), torch.tensor(rows()["importance"]))
    torch.testing.assert_close(parameters_of(trainer.model), parameters, rtol=1e-5, atol=1e-7)
    assert logged(trainer)[0] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("objective", ["group_dro", "cgd"])
def test_weights_of_groups_follow_the_weighted_losses_whatever_the_scale_of_the_weights(
    tmp_path: Path, objective: str
) -> None:
    runs = [
        trained(tmp_path / str(scale), objective, step_size=1.0, max_steps=4, class_weights=[scale, 3 * scale])
        for scale in (1.0, 8.0)
    ]
    plain = trained(tmp_path / "plain", objective, step_size=1.0, max_steps=4)
    assert runs[0].group_weights.tolist() == pytest.approx(runs[1].group_weights.tolist(), rel=1e-9)
    assert runs[0].group_weights.tolist() != pytest.approx(plain.group_weights.tolist(), rel=1e-3)
    ones = trained(tmp_path / "ones", objective, step_size=1.0, max_steps=4, class_weights=[1.0, 1.0])
    assert ones.group_weights.tolist() == pytest.approx(plain.group_weights.tolist(), rel=1e-6)


def test_balanced_weights_are_those_of_the_training_set(tmp_path: Path) -> None:
    counts = torch.bincount(torch.tensor(rows()["labels"])).double()
    expected = (SIZE / (2 * counts)).tolist()
    balanced = trained(tmp_path / "balanced", "group_dro", class_weights="balanced")
    given = trained(tmp_path / "given", "group_dro", class_weights=expected)
    assert torch.equal(parameters_of(balanced.model), parameters_of(given.model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_weights": [1.0, 2.0, 3.0]}, "each of the model's 2 classes"),
        ({"class_weights": [1.0, 0.0]}, "finite number > 0"),
        ({"class_weights": "equal"}, "'balanced' or"),
        ({"example_weight_column": "missing"}, "example_weight_column"),
        ({"example_weight_column": "signed"}, "numbers > 0, got -1.0 \\(row 1\\)"),
        ({"focal_gamma": -1.0}, "focal_gamma"),
        ({"focal_gamma": 2.0, "label_smoothing_factor": 0.1}, "two losses"),
    ],
    ids=str,
)
def test_weights_that_mean_nothing_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    data = Dataset.from_dict({**rows(), "signed": [1.0, -1.0] * (SIZE // 2)})
    with pytest.raises(ValueError, match=message):
        args = GroupRobustConfig(str(tmp_path), group_column="group", **{**COMMON, **options})
        GroupRobustTrainer(model=tiny_distilbert(), args=args, train_dataset=data)


def test_numbers_given_as_text_are_numbers(tmp_path: Path) -> None:
    text = {
        "learning_rate": "1e-2",
        "max_steps": "1e1",
        "step_size": "1e-1",
        "weight_decay": "0",
        "min_weight": "1e-4",
    }
    args = GroupRobustConfig(str(tmp_path), group_column="group", **text)
    numbers = (args.learning_rate, args.max_steps, args.step_size, args.weight_decay, args.min_weight)
    assert numbers == (0.01, 10, 0.1, 0.0, 1e-4) and isinstance(args.max_steps, int)
    with pytest.raises(ValueError, match="learning_rate must be a number, got 'fast'"):
        GroupRobustConfig(str(tmp_path), group_column="group", learning_rate="fast")
