"""Batches as people make them, in a whole trainer: collators, transforms, odd rows, parts of data sets, label checks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset
from tiny import logged, parameters_of, predicts_one_class, text_dataset, text_rows, tiny_distilbert
from torch import nn
from torch.utils.data import ConcatDataset, Subset
from transformers import Trainer, TrainingArguments

from hf_cgd import GroupInfo, GroupRobustTrainer

Build = Callable[..., GroupRobustTrainer]
ONE_STEP = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 8}


def rows() -> list[dict[str, Any]]:
    return text_dataset().to_list()


def stack(given: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in given]) for name in ("input_ids", "attention_mask", "labels")}


def losses_by_group(kept: Callable[[int], bool] = lambda row: True) -> list[float]:
    """The mean loss of each group of the untrained model, row by row."""
    model, found = tiny_distilbert(), {0: [], 1: []}  # type: ignore[var-annotated]
    for number, row in enumerate(rows()):
        if kept(number):
            with torch.no_grad():
                logits = model(torch.tensor([row["input_ids"]])).logits
            found[row["group"]].append(nn.functional.cross_entropy(logits, torch.tensor([row["labels"]])).item())
    return [float(np.mean(found[group])) for group in (0, 1)]


COLLATORS: dict[str, tuple[Callable[..., Any], Callable[[int], bool]]] = {
    "backwards": (lambda given: stack(given[::-1]), lambda row: True),
    "odd rows first": (lambda given: stack(given[1::2] + given[::2]), lambda row: True),
    "filtered": (lambda given: stack([row for row in given if row["input_ids"][0] % 3]),
                 lambda row: rows()[row]["input_ids"][0] % 3 != 0),
    "doubled": (lambda given: stack([row for row in given for _ in (0, 1)]), lambda row: True),
}  # fmt: skip


@predicts_one_class
@pytest.mark.parametrize("objective", ["erm", "group_dro", "cgd"])
@pytest.mark.parametrize("name", COLLATORS)
def test_group_losses_are_those_of_the_rows(trainer: Build, name: str, objective: str) -> None:
    collator, kept = COLLATORS[name]
    args = {**ONE_STEP, "objective": objective, "remove_unused_columns": False}
    run = trainer(args, train_dataset=rows(), eval_dataset=rows(), data_collator=collator)
    metrics = run.evaluate()
    run.train()
    expected = losses_by_group(kept)
    assert [metrics[f"eval_group_loss/{group}"] for group in (0, 1)] == pytest.approx(expected, abs=1e-6)
    assert [logged(run, f"group_loss/{group}")[0] for group in (0, 1)] == pytest.approx(expected, abs=1e-4)


class SumOfVectors(nn.Module):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors, self.head = nn.Embedding(64, 8), nn.Linear(8, outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.vectors(tokens).sum(1))


def test_a_transform_may_make_the_inputs_and_drop_the_group(trainer: Build) -> None:
    stored = text_dataset().rename_column("labels", "label").add_column("place", ["sea", "land"] * 8)
    plain = [{"tokens": row["input_ids"], "label": row["label"], "place": row["place"]} for row in stored]
    seen = stored.with_transform(lambda b: {"tokens": [torch.tensor(i) for i in b["input_ids"]], "label": b["label"]})
    args = {"objective": "group_dro", "step_size": 0.5, "group_column": "place"}
    weights = []
    for dataset in (plain, seen, Subset(seen, range(16)), ConcatDataset([seen])):
        run = trainer(args, model=SumOfVectors(), train_dataset=dataset, eval_dataset=dataset)
        run.train()
        weights.append(run.group_weights)
        assert run.evaluate()["eval_group_count/sea"] == 8
    assert not torch.equal(weights[0], torch.full_like(weights[0], 0.5))
    assert all(torch.equal(other, weights[0]) for other in weights)


def test_inputs_of_a_module_that_only_the_collator_makes(trainer: Build) -> None:
    texts = [{"text": row["input_ids"], "label": row["labels"], "group": row["group"]} for row in rows()]

    def collate(given: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([row["text"] for row in given]),
                "labels": torch.tensor([row["label"] for row in given])}  # fmt: skip

    args = {"objective": "group_dro", "step_size": 0.5, "remove_unused_columns": False}
    made = trainer(args, model=SumOfVectors(), train_dataset=texts, data_collator=collate)
    columns = [{"tokens": row["text"], "label": row["label"], "group": row["group"]} for row in texts]
    plain = trainer(args, model=SumOfVectors(), train_dataset=columns)
    made.train()
    plain.train()
    assert torch.equal(parameters_of(made.model), parameters_of(plain.model))
    assert torch.equal(made.group_weights, plain.group_weights)


class RandomRows(torch.utils.data.Dataset):
    """Turns a row round where a draw says so; row 5 is None."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        row, turned = rows()[index], torch.rand(()) + np.random.rand() > 1
        return None if index == 5 else {**row, "input_ids": row["input_ids"][:: -1 if turned else 1]}


def test_erm_on_random_rows_is_the_plain_trainer(trainer: Build, tmp_path: Any) -> None:
    def collate(given: list[Any]) -> dict[str, torch.Tensor]:
        return stack([row for row in given if row is not None])

    args = {"objective": "erm", "remove_unused_columns": False}
    run = trainer(args, train_dataset=RandomRows(), data_collator=collate)
    run.train()
    fields = ("max_steps", "per_device_train_batch_size", "optim", "learning_rate", "lr_scheduler_type", "use_cpu",
              "max_grad_norm", "report_to", "save_strategy", "seed", "remove_unused_columns")  # fmt: skip
    same = TrainingArguments(str(tmp_path), disable_tqdm=True, **{name: getattr(run.args, name) for name in fields})
    plain = Trainer(tiny_distilbert(), same, train_dataset=RandomRows(), data_collator=collate)
    plain.train()
    assert torch.equal(parameters_of(run.model), parameters_of(plain.model))
    assert run.groups.counts == (8, 7)


@pytest.mark.parametrize("sampling", ["balanced", "weighted"])
def test_samplers_leave_rows_out_that_are_none(trainer: Build, sampling: str) -> None:
    run = trainer({"group_sampling": sampling, "objective": "erm"}, train_dataset=[*rows()[:7], None, *rows()[8:]])
    drawn = list(run._get_train_sampler(run.train_dataset))
    assert 7 not in drawn and len(drawn) == 16


def test_parts_that_number_their_groups_differently(trainer: Build) -> None:
    values = text_dataset()["group"][:]
    parts = [
        text_dataset().cast_column("group", ClassLabel(names=["land", "water"])).select(range(8)),
        text_dataset().remove_columns("group").add_column("group", [1 - value for value in values])
        .cast_column("group", ClassLabel(names=["water", "land"])).select(range(8, 16)),
    ]  # fmt: skip
    whole = text_dataset().cast_column("group", ClassLabel(names=["land", "water"]))
    runs = [
        trainer({"objective": "group_dro", "step_size": 0.5}, train_dataset=d) for d in (ConcatDataset(parts), whole)
    ]
    for run in runs:
        run.train()
    assert runs[0].groups.names == ("land", "water") and runs[0].groups.counts == (8, 8)
    assert torch.equal(runs[0].group_weights, runs[1].group_weights)
    labels = [
        part.cast_column("labels", ClassLabel(names=n))
        for part, n in zip(parts, (["a", "b"], ["b", "a"]), strict=True)
    ]
    with pytest.raises(ValueError, match="parts of the training dataset number the classes of 'labels' differently"):
        trainer(train_dataset=ConcatDataset(labels))


# ---- Labels -----------------------------------------------------------------------------------------------------------


def with_labels(values: list[Any]) -> Dataset:
    return text_dataset().remove_columns("labels").add_column("labels", values)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("bad", "message"),
    [(None, "expected a label, got None"), (-1, "got -1"), (7, "got 7"), (0.5, "got "), ("x", "got ")],
)
def test_evaluation_sets_are_checked_when_the_trainer_is_built(
    trainer: Build, bad: Any, message: str, several: bool
) -> None:
    labels = [str(i) for i in range(15)] if isinstance(bad, str) else [0, 1, 1] * 5
    evaluated = with_labels([*labels, bad])
    with pytest.raises(ValueError, match=f"of the evaluation dataset{' .other.' if several else ''}: .*{message}"):
        trainer(eval_dataset={"one": text_dataset(), "other": evaluated} if several else evaluated)
    run = trainer()
    with pytest.raises(ValueError, match=message):
        run.predict(evaluated)


def test_ignored_rows_and_swapped_classes(trainer: Build) -> None:
    trainer(train_dataset=with_labels([0, 1, 1, -100] * 4), eval_dataset=with_labels([0, 1, 1, -100] * 4))
    named = [text_dataset().cast_column("labels", ClassLabel(names=names)) for names in (["a", "b"], ["b", "a"])]
    with pytest.raises(ValueError, match=r"expected the classes in the order of training, \['a', 'b'\]"):
        trainer(train_dataset=named[0], eval_dataset=named[1])


@pytest.mark.parametrize("objective", ["erm", "group_dro"])
@pytest.mark.parametrize("kind", [bool, np.uint8, lambda v: [v], lambda v: torch.tensor([v])])
@pytest.mark.parametrize("column", ["labels", "label"])
def test_integers_of_any_kind_train_as_integers(trainer: Build, kind: Any, column: str, objective: str) -> None:
    given = [{**{k: v for k, v in row.items() if k != "labels"}, column: kind(row["labels"])} for row in rows()]
    runs = [trainer({"objective": objective}, train_dataset=dataset) for dataset in (given, rows())]
    for run in runs:
        run.train()
    assert torch.equal(parameters_of(runs[0].model), parameters_of(runs[1].model))


@pytest.mark.parametrize("left_over", ["regression", "multi_label_classification"])
@pytest.mark.parametrize("objective", ["erm", "cgd", "irm"])
def test_a_problem_type_of_another_task_is_refused(trainer: Build, left_over: str, objective: str) -> None:
    with pytest.raises(ValueError, match=rf"problem_type='{left_over}' and num_labels=2, got single ones .*left over"):
        trainer({"objective": objective}, model=tiny_distilbert(problem_type=left_over))
    run = trainer({"objective": "group_dro"}, model=tiny_distilbert(problem_type=left_over), groups=GroupInfo(["0", "1"]),
                  train_dataset=text_dataset().to_iterable_dataset())  # fmt: skip
    with pytest.raises(ValueError, match="as many targets per row as the model has outputs, 2"):
        run.train()


class OwnHead(nn.Module):
    """Keeps the config of its encoder, whose num_labels is 2."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        model = tiny_distilbert()
        self.encoder, self.config = model.distilbert, model.config
        self.head = nn.Linear(32, outputs)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.encoder(input_ids, attention_mask).last_hidden_state[:, 0])}


@predicts_one_class
def test_the_head_decides_how_many_classes_there_are(trainer: Build) -> None:
    five = with_labels([i % 5 for i in range(16)])
    for objective in ("cgd", "coral", "pgi"):
        run = trainer({"objective": objective}, model=OwnHead(5), train_dataset=five, eval_dataset=five)
        run.train()
        assert "eval_accuracy" in run.evaluate()
    with pytest.raises(ValueError, match=r"a class in 0\.\.4, got 5"):
        trainer(model=OwnHead(5), train_dataset=with_labels([i % 6 for i in range(16)]))
    ages = with_labels(list(range(20, 36)))
    assert (
        "eval_mse" in trainer({"objective": "erm"}, model=OwnHead(1), train_dataset=ages, eval_dataset=ages).evaluate()
    )
    with pytest.raises(ValueError, match="1 output"):
        trainer({"objective": "pgi"}, model=OwnHead(1), train_dataset=ages)


@predicts_one_class
def test_shares_of_classes_have_their_cross_entropy(trainer: Build) -> None:
    def mixed(given: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        own = nn.functional.one_hot(torch.tensor([row["label"] for row in given]), 3).float()
        tokens = torch.tensor([row["tokens"] for row in given])
        return {"tokens": tokens, "labels": 0.7 * own + 0.3 * own.flip(0)}

    data = [{"tokens": row["input_ids"], "label": i % 3, "group": row["group"]} for i, row in enumerate(rows())]
    args = {**ONE_STEP, "objective": "group_dro", "train_sampling_strategy": "sequential",
            "per_device_eval_batch_size": 16}  # fmt: skip
    run = trainer(args, model=SumOfVectors(3), train_dataset=data, eval_dataset=data, data_collator=mixed)
    run.train()
    batch = mixed(data)
    logits = SumOfVectors(3)(batch["tokens"])
    losses = -(batch["labels"] * logits.log_softmax(1)).sum(1)
    for group in (0, 1):
        assert logged(run, f"group_loss/{group}")[0] == pytest.approx(losses[group::2].mean().item(), abs=1e-4)
    right = (logits.argmax(1) == batch["labels"].argmax(1)).float().mean().item()
    assert run.evaluate()["eval_accuracy"] == pytest.approx(right)


class LabelsRequired(SumOfVectors):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, label_weights: Any = None) -> Any:  # type: ignore[override]
        logits = super().forward(tokens)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_arguments_that_are_named_like_labels(trainer: Build) -> None:
    data = [{"tokens": row["input_ids"], "labels": row["labels"], "group": row["group"]} for row in rows()]
    runs = [
        trainer({"objective": "group_dro"}, model=model, train_dataset=data)
        for model in (LabelsRequired(), SumOfVectors())
    ]
    for run in runs:
        run.train()
    assert runs[0].label_names == ["labels"]
    assert torch.equal(parameters_of(runs[0].model), parameters_of(runs[1].model))


# ---- Streams ----------------------------------------------------------------------------------------------------------


@predicts_one_class
@pytest.mark.parametrize("names", [["land", "water"], ["0", "1"]])
def test_a_stream_knows_the_names_of_its_classes(trainer: Build, names: list[str]) -> None:
    data = Dataset.from_dict(text_rows()).cast_column("group", ClassLabel(names=["land", "water"]))
    stream = data.to_iterable_dataset()
    run = trainer(
        {"objective": "group_dro"}, train_dataset=stream, eval_dataset=stream, groups=GroupInfo(names, [8, 8])
    )
    run.train()
    metrics = run.evaluate()
    assert run.groups.names == tuple(names) and [metrics[f"eval_group_count/{name}"] for name in names] == [8, 8]
