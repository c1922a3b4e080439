"""Training of models of tokens: against the plain Trainer, and against group means that are formed by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import logged, parameters_of
from tiny_tokens import COMMON, batch_of, tiny_model, token_dataset, token_rows
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.models.heads import LossOptions, head_of

NAMES = ["gpt2", "llama", "t5", "masked", "tokens", "answers"]


def without_group(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "group"}


def plain(output: Path, name: str, **options: Any) -> Trainer:
    rows = [without_group(row) for row in token_rows(name)]
    args = TrainingArguments(str(output), **{"max_steps": 3, **COMMON, **options})
    trainer = Trainer(tiny_model(name), args, train_dataset=rows)
    trainer.train()
    return trainer


def ours(output: Path, name: str, objective: str = "erm", **options: Any) -> GroupRobustTrainer:
    options = {"max_steps": 3, "group_column": "group", **COMMON, **options}
    args = GroupRobustConfig(str(output), objective=objective, **options)
    trainer = GroupRobustTrainer(model=tiny_model(name), args=args, train_dataset=token_dataset(name))
    trainer.train()
    return trainer


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_erm_is_the_plain_trainer(tmp_path: Path, name: str, grouped: bool) -> None:
    options = {} if grouped else {"group_column": None}
    reference, trainer = plain(tmp_path / "plain", name), ours(tmp_path / "ours", name, **options)
    assert logged(trainer) == logged(reference)
    assert torch.equal(parameters_of(trainer.model), parameters_of(reference.model))


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("name", "smoothing"), [("gpt2", 0.0), ("gpt2", 0.2), ("llama", 0.0), ("masked", 0.2), ("tokens", 0.2)]
)
def test_erm_is_the_plain_trainer_with_accumulation(
    tmp_path: Path, name: str, smoothing: float, grouped: bool
) -> None:
    # The networks of BERT take num_items_in_batch and do not use it, so that without label smoothing the Trainer adds
    # the means of the micro-batches up. Here they are averaged; see the next test.
    options = {"gradient_accumulation_steps": 3, "label_smoothing_factor": smoothing}
    own = {} if grouped else {"group_column": None}
    reference, trainer = plain(tmp_path / "plain", name, **options), ours(tmp_path / "ours", name, **options, **own)
    assert logged(trainer) == pytest.approx(logged(reference), rel=1e-4)
    torch.testing.assert_close(parameters_of(trainer.model), parameters_of(reference.model), rtol=1e-5, atol=1e-6)


@pytest.fixture
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("unit", "accumulated"), [(None, 1), ("example", 1), ("example", 3), ("token", 1), ("token", 3)]
)
@pytest.mark.parametrize("objective", ["erm", "group_dro"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mean_is_over_what_group_unit_says(
    tmp_path: Path, name: str, objective: str, accumulated: int, unit: str | None, double_precision: None
) -> None:
    """In float64: of T5's steep start float32 keeps six digits. (Models for causal LM form their own loss in float32.)"""
    knobs = {"step_size": 0.0} if objective == "group_dro" else {}
    options = {"max_steps": 1, "per_device_train_batch_size": 12 // accumulated}
    trainer = ours(
        tmp_path, name, objective, gradient_accumulation_steps=accumulated, group_unit=unit, **options, **knobs
    )
    model, rows = tiny_model(name), token_rows(name)
    batch, head = batch_of(rows), head_of(model)
    labels = head.labels_in(batch, trainer.label_names)
    assert labels is not None
    losses = head.losses(head.scores_of(model(**batch), after_loss=True), labels, model, LossOptions())
    by_tokens = unit == "token" or (unit is None and objective == "erm")
    weights = head.num_tokens(labels).double() if by_tokens else head.labelled(labels).double()
    groups = [row["group"] for row in rows]
    parts = [torch.tensor([own == group for own in groups]) for group in "abc"]
    parts = parts if objective == "group_dro" else [torch.ones(12, dtype=torch.bool)]
    loss = torch.stack([(weights * losses)[part].sum() / weights[part].sum() for part in parts]).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
    assert logged(trainer)[0] == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(parameters_of(trainer.model), parameters_of(model), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("unit", ["example", "token"])
@pytest.mark.parametrize("name", NAMES)
def test_accumulation_changes_no_update(tmp_path: Path, name: str, unit: str, double_precision: None) -> None:
    """In float64: T5's start is so steep that in float32 the order of sums alone moves a weight by 3e-4 in two steps."""
    shared = {"group_unit": unit, "step_size": 0.5, "weight_timing": "next", "max_steps": 1, "num_train_epochs": 2}
    shared = {**shared, "max_steps": 2}
    once = ours(tmp_path / "1", name, "cgd", per_device_train_batch_size=12, **shared)
    thrice = ours(tmp_path / "3", name, "cgd", gradient_accumulation_steps=3, **shared)
    assert once.group_weights is not None and thrice.group_weights is not None
    assert (once.group_weights - 1 / 3).abs().max() > 1e-3
    torch.testing.assert_close(once.group_weights, thrice.group_weights, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(parameters_of(once.model), parameters_of(thrice.model), rtol=1e-8, atol=1e-10)


def test_rows_without_a_valid_token_count_for_nothing(tmp_path: Path) -> None:
    """Two epochs with and without such rows in the batches end in the same weights."""
    rows = token_rows("gpt2", 6)
    empty = {**rows[0], "labels": [5] + [-100] * 8, "group": "a"}
    trained = []
    for data in (rows, [*rows[:3], empty, *rows[3:], empty]):
        options = {**COMMON, "per_device_train_batch_size": len(data), "max_steps": 2, "step_size": 0.5}
        options["min_group_size"] = 1
        args = GroupRobustConfig(str(tmp_path), objective="cgd", group_column="group", **options)
        trainer = GroupRobustTrainer(tiny_model("gpt2"), args, train_dataset=data)
        trainer.train()
        trained.append((trainer.group_weights, parameters_of(trainer.model)))
    (weights, parameters), (same_weights, same) = trained
    torch.testing.assert_close(weights, same_weights, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(parameters, same, rtol=1e-5, atol=1e-6)


def test_what_has_no_meaning_for_tokens_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def build(name: str = "tokens", data: Any = None, **options: Any) -> GroupRobustTrainer:
        args = GroupRobustConfig(str(tmp_path), group_column="group", max_steps=1, **{**COMMON, **options})
        return GroupRobustTrainer(tiny_model(name), args, train_dataset=data or token_dataset(name))

    for objective in ("irm", "coral", "pgi"):
        with pytest.raises(ValueError, match=f"objective='{objective}'"):
            build(objective=objective)
    with pytest.raises(ValueError, match="class_weights: for models of whole examples"):
        build(class_weights=[1.0] * 5)
    with pytest.raises(ValueError, match="focal_gamma: for models of whole examples"):
        build(focal_gamma=2.0)
    with pytest.raises(ValueError, match="forward_mode='split': for models of whole"):
        build(forward_mode="split")
    with pytest.raises(ValueError, match="token_reduction='sum' leaves no mean"):
        build(group_unit="token", token_reduction="sum")
    with pytest.raises(ValueError, match="token_reduction must be one of"):
        build(token_reduction="max")
    with pytest.raises(ValueError, match="group_unit must be one of"):
        build(group_unit="word")
    rows = token_rows("tokens")
    rows[2]["labels"][1] = 5
    with pytest.raises(ValueError, match=r"from 0 below 5, or -100 .* got 5 \(row \d, token 1\)"):
        build(data=rows).train()
    rows = [{name: value for name, value in row.items() if name != "labels"} for row in token_rows("gpt2")]
    with pytest.raises(ValueError, match=r"to hold labels, got .*DataCollatorForLanguageModeling"):
        build("gpt2", data=rows).train()


def test_packed_rows_are_refused_where_means_are_over_examples(tmp_path: Path) -> None:
    rows = token_rows("gpt2")
    for row in rows:
        row["position_ids"] = [0, 1, 2, 3, 0, 1, 2, 3, 4]
    shared = {**COMMON, "group_column": "group", "max_steps": 1, "objective": "cgd"}
    args = GroupRobustConfig(str(tmp_path), **shared)
    with pytest.raises(ValueError, match="Row 0 of a batch is packed"):
        GroupRobustTrainer(tiny_model("gpt2"), args, train_dataset=rows).train()
    args = GroupRobustConfig(str(tmp_path), **shared, group_unit="token")
    GroupRobustTrainer(tiny_model("gpt2"), args, train_dataset=rows).train()
    # Positions of padding are no second example.
    for padding in ([0, 1, 2, 3, 4, 0, 0, 0, 0], [1, 1, 1, 0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 2, 3, 4, 5]):
        for row in rows:
            row["position_ids"] = padding
        args = GroupRobustConfig(str(tmp_path), **shared)
        GroupRobustTrainer(tiny_model("gpt2"), args, train_dataset=rows, data_collator=default_data_collator).train()
