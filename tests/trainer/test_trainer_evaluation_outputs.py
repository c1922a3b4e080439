"""Evaluation takes what training takes: logits, own losses, ignored labels, NaN; and metrics that do not linger."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import ClassLabel, Dataset
from tiny import logged, predicts_one_class, text_dataset, tiny_distilbert
from tiny_tokens import tiny_model, token_dataset
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_cgd import GroupRobustConfig, GroupRobustTrainer, GroupRobustWarning

pytestmark = predicts_one_class

Build = Callable[..., GroupRobustTrainer]
OWN = pytest.mark.filterwarnings("ignore:The model's own loss")
WEIGHTS = torch.tensor([1.0, 9.0])


def rows(size: int = 24, seed: int = 0) -> Dataset:
    x = np.random.RandomState(seed).randn(size, 4).astype("float32")
    return Dataset.from_dict({"pixel_values": x, "labels": (x[:, 0] > 0).astype(int), "group": np.arange(size) % 2})


class Net(nn.Module):
    """A linear classifier that answers in a given form."""

    def __init__(self, form: str = "tensor", bias: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.head = form, nn.Linear(4, 2)
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([bias, -bias]))

    def forward(self, pixel_values: Tensor) -> Any:
        logits = self.head(pixel_values)
        forms = {"tensor": logits, "tuple": (logits, pixel_values), "mapping": {"features": -logits, "logits": logits}}
        return forms[self.form]


class Deep(Net):
    """One whose features are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.num_classes = nn.Linear(4, 4), 2

    def forward(self, pixel_values: Tensor) -> Any:
        return super().forward(self.body(pixel_values).tanh())


class Weighted(Net):
    """One with a loss of its own, in which classes have weights."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(pixel_values)
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels, weight=WEIGHTS)}
        return {**loss, "features": -logits, "logits": logits}


class Plain(Net):
    """One whose own loss is the usual one."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(pixel_values)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def oracle(model: nn.Module, data: Dataset) -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.tensor(data["labels"][:])
    with torch.no_grad():
        logits = model.head(torch.tensor(data["pixel_values"][:]))
    return logits, F.cross_entropy(logits, labels, reduction="none"), labels


# ---- Logits, in every form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["erm", "cgd"])
@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping"])
def test_metrics_are_those_of_the_logits(trainer: Build, form: str, objective: str) -> None:
    data = rows(17)
    model = Net(form)
    run = trainer({"objective": objective}, model=model, train_dataset=data, eval_dataset=data)
    logits, losses, labels = oracle(model, data)
    metrics = run.evaluate()
    right = (logits.argmax(1) == labels).float()
    groups = torch.tensor(data["group"][:])
    assert metrics["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(right.mean().item())
    assert metrics["eval_worst_group_accuracy"] == pytest.approx(min(right[groups == k].mean().item() for k in (0, 1)))


@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping"])
@pytest.mark.parametrize("batch", [1, 16])
def test_predictions_without_labels_where_a_batch_has_one_row(trainer: Build, form: str, batch: int) -> None:
    data, model = rows(17), Net(form)
    run = trainer({"per_device_eval_batch_size": batch}, model=model, train_dataset=data)
    found = run.predict(data.remove_columns("labels")).predictions
    logits = oracle(model, data)[0].numpy()
    place = {"tensor": None, "tuple": 0, "mapping": 1}[form]
    np.testing.assert_allclose(found if place is None else found[place], logits, rtol=1e-5)


def test_own_loss_functions_get_the_same_outputs_everywhere(trainer: Build) -> None:
    seen: list[Any] = []

    def of_hidden(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        seen.append(type(outputs))
        return F.cross_entropy(outputs.logits, labels, reduction="none") + outputs.hidden_states[-1][:, 0].pow(2).mean(
            1
        )

    data = text_dataset(15)
    model = tiny_distilbert(output_hidden_states=True)
    run = trainer(model=model, train_dataset=data, eval_dataset=data, compute_loss_func=of_hidden)
    batch = data.with_format("torch")[:]
    with torch.no_grad():
        outputs = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        losses = of_hidden(outputs, batch["labels"])
    metrics = run.evaluate()
    assert metrics["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert metrics["eval_group_loss/1"] == pytest.approx(losses[1::2].mean().item(), rel=1e-5)
    run.train()
    assert len(set(seen)) == 1

    def of_tensor(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="none")

    raw = trainer(model=Net(), train_dataset=rows(), eval_dataset=rows(), compute_loss_func=of_tensor)
    raw.train()
    assert raw.evaluate()["eval_loss"] == pytest.approx(oracle(raw.model, rows())[1].mean().item(), rel=1e-5)


def test_one_output_for_two_classes(trainer: Build) -> None:
    def binary(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs.logits.view(-1), labels.float(), reduction="none")

    data, model = text_dataset(15), tiny_distilbert(num_labels=1)
    batch = data.with_format("torch")[:]
    run = trainer(model=model, train_dataset=data, eval_dataset=data, compute_loss_func=binary)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.view(-1)
    expected = ((logits > 0).long() == batch["labels"]).float().mean().item()
    assert run.evaluate()["eval_accuracy"] == pytest.approx(expected)


# ---- A loss of the model's own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_erm_trains_and_reports_the_models_own_loss(trainer: Build, accumulation: int) -> None:
    data = rows(8)
    size = dict(per_device_train_batch_size=8 // accumulation, per_device_eval_batch_size=8, max_steps=1)
    options = {**size, "gradient_accumulation_steps": accumulation, "objective": "erm"}
    model, twin = Weighted(), Weighted()
    own = twin(torch.tensor(data["pixel_values"][:]), torch.tensor(data["labels"][:]))["loss"].item()
    run = trainer(options, model=model, train_dataset=data, eval_dataset=data)
    with pytest.warns(GroupRobustWarning, match=r"own loss .* objective='erm' trains the model's own"):
        assert run.evaluate()["eval_loss"] == pytest.approx(own, rel=1e-5)
    args = TrainingArguments(
        run.args.output_dir, gradient_accumulation_steps=accumulation, per_device_train_batch_size=8 // accumulation,
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0, use_cpu=True, report_to=[],
        save_strategy="no", max_steps=1, seed=0, disable_tqdm=True,
    )  # fmt: skip
    Trainer(twin, args, train_dataset=data.remove_columns("group")).train()
    run.train()
    torch.testing.assert_close(model.head.weight, twin.head.weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("objective", ["erm_uw", "group_dro", "cgd"])
@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_other_objectives_say_once_that_they_replace_it(trainer: Build, objective: str, bias: float) -> None:
    model = Weighted(bias=bias)
    if bias == 0.0:
        # Both losses are log 2 at first, but their gradients differ.
        nn.init.zeros_(model.head.weight)
    data = rows(16)
    run = trainer(
        {"objective": objective, "learning_rate": 0.0, "per_device_train_batch_size": 16}, model=model,
        train_dataset=data, eval_dataset=data,
    )  # fmt: skip
    with pytest.warns(GroupRobustWarning, match=r"compute_loss_func\(outputs, labels") as seen:
        run.train()
        metrics = run.evaluate()
    assert len([entry for entry in seen if "own loss" in str(entry.message)]) == 1
    assert metrics["eval_loss"] == pytest.approx(oracle(model, data)[1].mean().item(), rel=1e-5)


def test_a_loss_that_cannot_be_looked_at_is_said_to_be_replaced(
    trainer: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under FSDP, DeepSpeed and XLA no batch can be run without the wrappers."""
    monkeypatch.setattr("hf_cgd.trainer.trainer.EXAMINED", ())
    data = rows(16)
    run = trainer({"objective": "group_dro"}, model=Weighted(), train_dataset=data, eval_dataset=data)
    with pytest.warns(
        GroupRobustWarning, match="If Weighted has a loss of its own .* no effect.*compute_loss_func"
    ) as seen:
        run.train()
        run.evaluate()
    assert len([entry for entry in seen if "a loss of its own" in str(entry.message)]) == 1
    # The loss of a class of transformers' own is known. Warnings are errors here.
    trainer({"objective": "group_dro"}).train()


def test_the_comparison_leaves_no_trace(trainer: Build) -> None:
    class Norm(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
            self.norm.eval()

        def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(self.drop(self.norm(pixel_values)), labels)

    class Silent(Norm):
        def forward(self, pixel_values: Tensor) -> Any:  # type: ignore[override]
            return super().forward(pixel_values)

    runs = [trainer({"objective": "cgd"}, model=kind(), train_dataset=rows()) for kind in (Norm, Silent)]
    for run in runs:
        torch.manual_seed(0)
        run.train()
    one, two = (run.model.state_dict() for run in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)


# ---- Labels of -100 ---------------------------------------------------------------------------------------------------


def ignoring(size: int = 24) -> tuple[Dataset, Dataset]:
    """A set in which a third has no label, and the same without these rows."""
    data = rows(size)
    labels = [-100 if row % 3 == 0 else label for row, label in enumerate(data["labels"][:])]
    data = data.remove_columns("labels").add_column("labels", labels)
    return data, data.filter(lambda row: row["labels"] != -100)


def test_ignored_examples_count_in_no_metric(trainer: Build) -> None:
    data, labelled = ignoring()
    sets = [trainer(model=Net(), train_dataset=rows(), eval_dataset=part).evaluate() for part in (data, labelled)]
    names = [name for name in sets[0] if not name.endswith(("runtime", "per_second", "preparation_time"))]
    assert {name: sets[0][name] for name in names} == pytest.approx({name: sets[1][name] for name in names})
    nothing = data.map(lambda row: {"labels": -100})
    metrics = trainer(model=Net(), train_dataset=rows(), eval_dataset=nothing)
    with pytest.warns(GroupRobustWarning, match="not defined"):
        assert "eval_accuracy" not in metrics.evaluate()


def test_ignored_examples_are_not_among_the_counts_of_their_group(trainer: Build) -> None:
    data, labelled = ignoring()
    for objective in ("erm_uw", "pgi"):
        runs = [trainer({"objective": objective}, model=Net(), train_dataset=part) for part in (data, labelled)]
        assert runs[0].groups == runs[1].groups and sum(runs[0].groups.counts or ()) == 16
    only = data.map(lambda row: {"labels": -100 if row["group"] else row["labels"]})
    with pytest.raises(ValueError, match=r"at least 2 examples with a label, .*fewer: 1 \(0\)"):
        trainer({"min_group_size": 2}, model=Net(), train_dataset=only)


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "group_dro"},
        {"objective": "cgd", "gradient_engine": "per_group"},
        {"objective": "cgd", "gradient_engine": "single_pass"},
        {"objective": "cgd", "self_term": "split_half"},
        {"objective": "cgd", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 12},
        {"objective": "irm"},
        {"objective": "coral"},
    ],
    ids=str,
)
def test_training_with_ignored_examples_is_training_without_them(trainer: Build, options: dict[str, Any]) -> None:
    data, labelled = ignoring()
    options = {"per_device_train_batch_size": 24, "max_steps": 3, "step_size": 0.5, **options}
    if options["objective"] in ("irm", "coral"):
        del options["step_size"]
    # Halves, and micro-batches, are formed in the order of the examples.
    options["train_sampling_strategy"] = "sequential"
    runs = []
    for part in (data, labelled):
        size = options["per_device_train_batch_size"] * len(part) // 24
        runs.append(trainer({**options, "per_device_train_batch_size": size}, model=Deep(), train_dataset=part))
        runs[-1].train()
    one, two = runs
    torch.testing.assert_close(one.model.head.weight, two.model.head.weight, rtol=1e-4, atol=1e-6)
    if one.group_weights is not None:
        torch.testing.assert_close(one.group_weights, two.group_weights, rtol=1e-5, atol=1e-7)
    assert logged(one, "group_loss/0") == pytest.approx(logged(two, "group_loss/0"), rel=1e-4)


def test_targets_that_are_not_finite_stop_a_run_before_the_first_step(trainer: Build) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            for row in text_dataset(16):
                yield {**row, "labels": float("nan") if row["group"] else 0.5}

    from hf_cgd import GroupInfo

    model = tiny_distilbert(num_labels=1)
    before = model.classifier.weight.clone()
    run = trainer(
        {"objective": "group_dro"}, model=model, train_dataset=Stream(), groups=GroupInfo(["0", "1"], [8, 8])
    )
    with pytest.raises(ValueError, match="xpected finite .*got nan in its row 1"):
        run.train()
    assert torch.equal(model.classifier.weight, before)


# ---- NaN, undefined and lingering -------------------------------------------------------------------------------------


def test_a_dead_model_is_right_nowhere_and_never_the_best(trainer: Build) -> None:
    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            with torch.no_grad():
                model.head.bias.copy_(torch.tensor([float("nan")] * 2 if state.global_step != 2 else [-9.0, 9.0]))

    data = rows(16).remove_columns("labels").add_column("labels", [0] * 15 + [1])
    options = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
                   metric_for_best_model="worst_group_accuracy", max_steps=3, objective="erm")  # fmt: skip
    run = trainer(options, model=Net(), train_dataset=data, eval_dataset=data, callbacks=[Kill()])
    run.group_evaluation._warned_one_class = True
    with pytest.warns(GroupRobustWarning, match="NaN for 16 of 16|not defined"):
        run.train()
    assert run.state.best_global_step in (None, 2)
    assert logged(run, "eval_accuracy")[0] == 0 and logged(run, "eval_accuracy")[2] == 0


@pytest.mark.parametrize("wanted", ["worst_group_accuracy", "eval_group_accuracy/0", "accuracy"])
def test_a_model_of_one_class_is_the_best_only_while_there_is_no_other(trainer: Build, wanted: str) -> None:
    """Twelve of sixteen rows are of class 1. Steps: all 1 (.75), some of each (at most .75), all 1 again."""
    always = [-9.0, 9.0]

    class Set(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            with torch.no_grad():
                model.head.bias.copy_(torch.tensor(always if state.global_step != 2 else [0.0, 0.0]))

    data = rows(16).remove_columns("labels").add_column("labels", [1, 1, 0, 0, *[1, 1, 1, 1] * 2, 1, 1, 0, 0])
    options = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
                   metric_for_best_model=wanted, max_steps=3, objective="erm", learning_rate=0.0)  # fmt: skip
    run = trainer(options, model=Net(), train_dataset=data, eval_dataset=data, callbacks=[Set()])
    run.group_evaluation._warned_one_class = True
    run.train()
    assert logged(run, "eval_one_class_predicted") == [1, 0, 1]
    assert logged(run, "eval_accuracy")[1] < 0.75
    assert run.state.best_global_step == (1 if wanted == "accuracy" else 2)


@pytest.mark.parametrize("metrics", [None, lambda prediction: {"f1": 1.0}])
@pytest.mark.parametrize("wanted", ["f1", "worst_group_accuracy", "accuracy"])
def test_metrics_that_a_loss_alone_does_not_give_are_refused(trainer: Build, metrics: Any, wanted: str) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "prediction_loss_only": True,
        "metric_for_best_model": wanted,
    }
    with pytest.raises(ValueError, match="that the evaluation gives: loss. prediction_loss_only=True leaves no other"):
        trainer(options, model=Net(), train_dataset=rows(), eval_dataset=rows(), compute_metrics=metrics)


def test_metrics_of_an_earlier_evaluation_do_not_linger(trainer: Build) -> None:
    data = rows(24)
    run = trainer({"eval_strategy": "epoch", "num_train_epochs": 1, "max_steps": -1}, model=Net(), train_dataset=data,
                  eval_dataset=data)  # fmt: skip
    run.predict(data)
    run.train()
    with pytest.raises(ValueError, match=r"No metrics start with 'test'; there are those of \['eval'\]"):
        run.group_report("test")
    assert run.predict(data).metrics["test_accuracy"] == run.group_report("test").overall["accuracy"]
    with pytest.warns(GroupRobustWarning, match="No examples of the group"):
        run.evaluate(data.filter(lambda row: row["group"] == 0))
    assert [row.count for row in run.group_report().rows] == [12, None]
    written = json.loads((Path(run.args.output_dir) / "metrics.json").read_text())
    assert "eval_group_accuracy/1" not in written and "test_group_accuracy/1" in written


def test_counts_and_weights_stand_beside_training_groups_only(trainer: Build) -> None:
    data = rows(24).add_column("region", [0] * 6 + [1] * 18)
    run = trainer({"eval_group_column": "region"}, model=Net(), train_dataset=data, eval_dataset=data)
    assert "eval_adjusted_accuracy" not in run.evaluate()
    assert [(row.train_count, row.weight, row.count) for row in run.group_report().rows] == [
        (None, None, 6),
        (None, None, 18),
    ]


@pytest.mark.parametrize("value", [[0.5], {"a": {"b": None}}, None, "text", np.eye(2), np.float32(0.5), float("nan")])
def test_metrics_of_any_kind(trainer: Build, value: Any) -> None:
    run = trainer({"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "save_strategy": "steps", "save_steps": 1},
                  model=Net(), train_dataset=rows(), eval_dataset=rows())  # fmt: skip
    run.compute_metrics = lambda prediction: {"mine": value}
    run.train()
    assert "mine" in json.dumps(json.loads((Path(run.args.output_dir) / "metrics.json").read_text()))


def test_metrics_may_be_assigned_later_and_subclasses_see_plain_labels(trainer: Build, config: Any) -> None:
    seen: list[Any] = []

    class Looking(GroupRobustTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            seen.append(labels.shape)
            return loss, logits, labels

    data = rows(8)
    run = Looking(model=Net(), args=config(), train_dataset=data, eval_dataset=data)
    run.preprocess_logits_for_metrics = lambda logits, labels: logits[: labels.shape[0]].argmax(-1)
    run.compute_metrics = lambda prediction: {"mine": (prediction.predictions == prediction.label_ids).mean()}
    metrics = run.evaluate()
    assert metrics["eval_mine"] == metrics["eval_accuracy"] and seen == [(4,), (4,)]
    run.compute_metrics = None
    assert "eval_worst_group_accuracy" in run.evaluate()


@pytest.mark.parametrize(
    ("metric", "greater", "said"),
    [
        ("my_cost", None, "Nothing says whether higher or lower values of metric_for_best_model='my_cost'"),
        ("my_cost", False, None),
        ("my_f1", None, None),
        ("my_error_rate", None, None),
        ("my_error_rate", True, "Higher values of metric_for_best_model='my_error_rate' are taken .* the opposite"),
        ("my_f1", False, "Lower values of metric_for_best_model='my_f1' are taken .* the opposite"),
        ("group_accuracy_low/cost", None, None),
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_a_best_model_by_a_guess_or_against_the_name_is_warned_of(
    tmp_path: Path, metric: str, greater: bool | None, said: str | None, plain: bool
) -> None:
    """`TrainingArguments` do not tell what was given from what they made of the name: higher, but for "…loss"."""
    data = rows(8).remove_columns("group").add_column("group", ["cost", "b"] * 4)
    own: dict[str, Any] = {"metric_for_best_model": metric, "greater_is_better": greater, "use_cpu": True}
    if plain:
        args: Any = TrainingArguments(str(tmp_path), report_to=[], **own)
        if metric == "my_error_rate":
            said = "Higher values of metric_for_best_model='my_error_rate' are taken .* the opposite"
        elif greater is None:
            said = None
    else:
        args = GroupRobustConfig(str(tmp_path), report_to="none", **own)
    given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data, "group_column": "group"}
    with nullcontext() if said is None else pytest.warns(GroupRobustWarning, match=said):
        built = GroupRobustTrainer(Net(), args, compute_metrics=lambda _: {metric: 1.0}, **given)
    if greater is not None:
        assert built.args.greater_is_better is greater


def test_a_model_whose_classes_are_in_another_order_than_the_datas_is_warned_of(tmp_path: Path) -> None:
    """The oracle: what it answers by name, counted by hand, is what it gets once the labels are aligned."""
    data = text_dataset(seed=1).cast_column("labels", ClassLabel(names=["no", "yes"]))
    model = tiny_distilbert(id2label={0: "yes", 1: "no"}, label2id={"yes": 0, "no": 1})
    tensors = data.with_format("torch")[:]
    with torch.no_grad():
        logits = model.eval()(input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"]).logits
    answers = [model.config.id2label[number] for number in logits.argmax(dim=1).tolist()]
    right = np.mean([given == ["no", "yes"][label] for given, label in zip(answers, data["labels"][:], strict=True)])
    args = GroupRobustConfig(str(tmp_path), objective="erm", group_column="group", report_to="none", use_cpu=True)
    with pytest.warns(GroupRobustWarning, match="'no' is not the same number in both, so that its right answers"):
        wrong = GroupRobustTrainer(model, args, eval_dataset=data).evaluate()
    aligned = data.align_labels_with_mapping(model.config.label2id, "labels")
    found = GroupRobustTrainer(model, args, eval_dataset=aligned).evaluate()
    assert found["eval_accuracy"] == right == 1 - wrong["eval_accuracy"]


def test_the_direction_under_plain_arguments(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), metric_for_best_model="group_accuracy/hair loss", use_cpu=True, report_to=[]
    )
    assert args.greater_is_better is False
    data = rows(8).remove_columns("group").add_column("group", ["hair loss", "b"] * 4)
    GroupRobustTrainer(Net(), args, train_dataset=data, eval_dataset=data, group_column="group", objective="group_dro")
    assert args.greater_is_better is True


@OWN
@pytest.mark.filterwarnings("ignore:The model gave NaN")
@pytest.mark.filterwarnings("ignore:These metrics are not defined")
@pytest.mark.parametrize("kind", [Net, Weighted])
def test_rows_without_a_finite_loss_are_not_left_out_of_the_mean(trainer: Build, kind: Any) -> None:
    """The Trainer passes over batches whose loss is not finite: the mean of the others would flatter the model."""
    data = rows(16)
    pixels = np.array(data["pixel_values"][:])
    pixels[3] = np.nan
    broken = Dataset.from_dict({"pixel_values": pixels, "labels": data["labels"][:], "group": data["group"][:]})
    run = trainer({"objective": "erm"}, model=kind(), train_dataset=data, eval_dataset=broken)
    metrics = run.evaluate()
    assert np.isnan(metrics["eval_loss"]) and run.args.logging_nan_inf_filter
    assert "loss n/a" in str(run.group_report())
    assert json.loads(Path(run.args.output_dir or "", "metrics.json").read_text())["eval_loss"] is None


def test_a_set_without_any_label_has_no_loss(trainer: Build) -> None:
    """A network's own loss takes rows without an answer for such whose answer is the first token."""
    data = token_dataset("answers", 4).map(lambda row: {"start_positions": -100, "end_positions": -100})
    run = trainer({"objective": "erm"}, model=tiny_model("answers"), train_dataset=token_dataset("answers"))
    with pytest.warns(GroupRobustWarning, match="not defined"):
        assert np.isnan(run.evaluate(data)["eval_loss"])


def test_a_group_whose_name_ends_like_a_metric_is_reported(trainer: Build) -> None:
    data = rows(16).remove_columns("group").add_column("group", ["x_runtime", "one_class_predicted"] * 8)
    run = trainer({"objective": "erm"}, model=Net(), train_dataset=data, eval_dataset=data)
    run.evaluate()
    assert run.group_evaluation.prefixes == ["eval"]
    assert [row.name for row in run.group_report().rows] == ["one_class_predicted", "x_runtime"]
