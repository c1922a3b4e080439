"""Subclasses as people write them: their own compute_loss, training_step and loaders."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny import logged, parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import Trainer, TrainingArguments

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.monitors import GroupRobustWarning

CLASS_WEIGHTS = torch.tensor([1.0, 3.0])
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "optim": "sgd", "learning_rate": 0.1,
    "max_grad_norm": 0.0, "use_cpu": True, "report_to": [], "logging_steps": 1, "disable_tqdm": True, "max_steps": 4,
    "save_strategy": "no", "seed": 0,
}  # fmt: skip


class Strict(nn.Module):
    """Without **kwargs: a group column that reaches it is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.network = tiny_distilbert()

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        return self.network(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class WeighsClasses:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.get("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels, weight=CLASS_WEIGHTS)
        return (loss, outputs) if return_outputs else loss


class TakesLabelsAway:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = F.cross_entropy(outputs.logits, labels, label_smoothing=0.2)
        inputs["labels"] = labels
        return (loss, outputs) if return_outputs else loss


class AddsATerm:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, dict(inputs), True, num_items_in_batch)  # type: ignore[misc]
        loss = loss + 0.01 * sum((p**2).sum() for name, p in model.named_parameters() if "classifier" in name)
        return (loss, outputs) if return_outputs else loss


class StepsByItself:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


def run(
    output: Path, part: type, base: type[Trainer], *, model: type[nn.Module] = Strict, **options: Any
) -> tuple[Trainer, dict[str, float]]:
    data = text_dataset(32, groups=4)
    kind = type("Own", (part, base), {})
    if base is Trainer:
        data = data.remove_columns("group")
        args: Any = TrainingArguments(str(output), **{**COMMON, **options})
    else:
        args = GroupRobustConfig(str(output), group_column="group", **{**COMMON, **options})
    trainer = kind(model=model(), args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer, trainer.evaluate()


@predicts_one_class
@pytest.mark.parametrize("part", [WeighsClasses, TakesLabelsAway, AddsATerm, StepsByItself], ids=lambda t: t.__name__)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("network", [Strict, tiny_distilbert], ids=["strict", "keywords"])
def test_under_erm_a_subclass_trains_as_on_the_plain_trainer(
    tmp_path: Path, part: type, accumulated: int, network: Any
) -> None:
    if part is AddsATerm and accumulated == 2:
        pytest.skip("the plain Trainer adds the term once for each micro-batch where the model divides by items")
    options = {"gradient_accumulation_steps": accumulated, "model": network}
    plain, metrics = run(tmp_path / "plain", part, Trainer, **options)
    ours, own = run(tmp_path / "ours", part, GroupRobustTrainer, objective="erm", save_strategy="steps",
                    save_steps=2, **options)  # fmt: skip
    assert logged(ours) == logged(plain)
    assert torch.equal(parameters_of(ours.model), parameters_of(plain.model))
    assert own["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


class HasALoss(Strict):
    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        outputs = self.network(input_ids=input_ids, attention_mask=attention_mask)
        outputs.loss = None if labels is None else F.cross_entropy(outputs.logits, labels, weight=CLASS_WEIGHTS)
        return outputs


@predicts_one_class
@pytest.mark.filterwarnings("ignore:The model's own loss")
@pytest.mark.parametrize(
    ("part", "network", "source"),
    [
        (WeighsClasses, Strict, "Own.compute_loss"),
        (AddsATerm, Strict, "Own.compute_loss"),
        (StepsByItself, Strict, "Own.training_step"),
        (type("Nothing", (), {}), HasALoss, "HasALoss.forward"),
        (type("Nothing", (), {}), Strict, None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_reports_and_cards_tell_whose_loss_erm_has_trained(
    tmp_path: Path, part: type, network: type[nn.Module], source: str | None
) -> None:
    trainer, _ = run(tmp_path, part, GroupRobustTrainer, objective="erm", model=network)
    told = trainer.group_report().objective
    assert told == ("erm" if source is None else f"erm, loss by {source}")
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert ("It minimises the mean loss over all examples" in card) == (source is None)
    assert (r"\sum_n \ell_n" in card) == (source is None)
    assert source is None or f"It minimises the loss that `{source}` forms" in card


@predicts_one_class
def test_a_report_tells_that_losses_of_examples_are_the_users(tmp_path: Path) -> None:
    def smooth(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return F.cross_entropy(outputs.logits, labels, reduction="none", label_smoothing=0.3)

    args = GroupRobustConfig(str(tmp_path), group_column="group", objective="group_dro", **COMMON)
    data = text_dataset(32)
    trainer = GroupRobustTrainer(
        model=Strict(), args=args, train_dataset=data, eval_dataset=data, compute_loss_func=smooth
    )
    assert trainer.group_report().objective == "group_dro, loss by compute_loss_func=smooth"
    told = trainer.run_record().objective
    assert told is not None and told["name"] == "group_dro" and told["own_loss"] == "compute_loss_func=smooth"


@pytest.mark.parametrize("objective", ["group_dro", "cgd", "pgi", "irm"])
@pytest.mark.parametrize("part", [WeighsClasses, StepsByItself], ids=lambda t: t.__name__)
def test_a_loss_that_is_not_the_objectives_ends_the_run_before_its_first_step(
    tmp_path: Path, part: type, objective: str
) -> None:
    before = parameters_of(Strict())
    data = text_dataset(32, groups=4)
    args = GroupRobustConfig(str(tmp_path), group_column="group", objective=objective, **COMMON)
    trainer = type("Own", (part, GroupRobustTrainer), {})(model=Strict(), args=args, train_dataset=data)
    with pytest.raises(ValueError, match="compute_loss forms a loss of its own.*class_weights.*compute_loss_func"):
        trainer.train()
    assert torch.equal(parameters_of(trainer.model), before)


def test_calling_the_objective_twice_for_a_batch_is_refused(tmp_path: Path) -> None:
    class Twice(GroupRobustTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) + super().compute_loss(*args, **kwargs)

    args = GroupRobustConfig(str(tmp_path), group_column="group", objective="group_dro", **COMMON)
    with pytest.raises(ValueError, match="for one batch"):
        Twice(model=Strict(), args=args, train_dataset=text_dataset(32)).train()


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("objective", ["group_dro", "cgd"])
def test_a_term_that_is_added_to_the_objective_is_added_to_its_gradient(
    tmp_path: Path, objective: str, accumulated: int
) -> None:
    options: dict[str, Any] = {"objective": objective, "max_steps": 1, "gradient_accumulation_steps": accumulated}
    with_term, _ = _trained(tmp_path / "with", AddsATerm, **options)
    without, before = _trained(tmp_path / "without", type("Nothing", (), {}), **options)
    for name, parameter in with_term.model.named_parameters():
        term = 0.02 * before[name] if "classifier" in name else torch.zeros(())
        torch.testing.assert_close(without.model.get_parameter(name) - 0.1 * term, parameter, rtol=1e-5, atol=1e-7)
    assert with_term.group_weights.tolist() == without.group_weights.tolist()


def _trained(output: Path, part: type, **options: Any) -> tuple[GroupRobustTrainer, dict[str, torch.Tensor]]:
    model = Strict()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    args = GroupRobustConfig(str(output), group_column="group", **{**COMMON, **options})
    trainer = type("Own", (part, GroupRobustTrainer), {})(model=model, args=args, train_dataset=text_dataset(32))
    trainer.train()
    return trainer, before


class BuildsLoaders:
    """As in countless scripts: the Trainer's collator, a loader and a sampler of one's own."""

    def get_train_dataloader(self: Any) -> DataLoader:
        data = self._remove_unused_columns(self.train_dataset, description="training")
        sampler = WeightedRandomSampler([1.0] * len(data), len(data))
        return DataLoader(data, self.args.train_batch_size, sampler=sampler, collate_fn=self.data_collator)

    def get_eval_dataloader(self: Any, eval_dataset: Any = None) -> DataLoader:
        data = self._remove_unused_columns(eval_dataset or self.eval_dataset, description="evaluation")
        return DataLoader(data, batch_size=5, collate_fn=self.data_collator)


@predicts_one_class
@pytest.mark.parametrize("objective", ["erm", "group_dro", "cgd"])
def test_group_ids_reach_loss_and_metrics_through_loaders_of_ones_own(tmp_path: Path, objective: str) -> None:
    trainer, metrics = run(tmp_path, BuildsLoaders, GroupRobustTrainer, objective=objective)
    assert {f"eval_group_count/{k}" for k in range(4)} <= set(metrics)
    assert metrics["eval_group_count/0"] == 8
    if objective != "erm":
        assert set(trainer.robust_loss.groups.names) == {"0", "1", "2", "3"}
        assert logged(trainer, "group_loss/0")
    sub = Dataset.from_dict(text_dataset(12, groups=2)[:])
    with pytest.warns(GroupRobustWarning, match="No examples of the group"):
        assert trainer.evaluate(sub)["eval_group_count/1"] == 6


def test_the_order_of_a_loader_of_ones_own_beats_no_group_sampling_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="group_sampling has no effect"):
        run(tmp_path, BuildsLoaders, GroupRobustTrainer, objective="group_dro", group_sampling="balanced")


def test_a_loader_that_drops_the_groups_is_refused_with_the_way_out(tmp_path: Path) -> None:
    class Drops(GroupRobustTrainer):
        def get_train_dataloader(self) -> DataLoader:
            data = self.train_dataset.remove_columns("group").with_format("torch")
            return DataLoader(data, 8, collate_fn=torch.utils.data.default_collate)

    args = GroupRobustConfig(str(tmp_path), group_column="group", objective="group_dro", **COMMON)
    with pytest.raises(ValueError, match="collate_fn=self.data_collator"):
        Drops(model=Strict(), args=args, train_dataset=text_dataset(32)).train()
