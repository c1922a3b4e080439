"""The group column: from any dataset into loss and metrics, and never into the model."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, Value
from tiny import predicts_one_class, text_dataset, text_rows, tiny_distilbert
from transformers import DataCollatorWithPadding, DistilBertTokenizer, TrainingArguments, default_data_collator

from hf_cgd import CGD, GroupDRO, GroupInfo, GroupRobustTrainer, GroupRobustWarning
from hf_cgd.data.collator import GroupCollator

Build = Callable[..., GroupRobustTrainer]


class Spy:
    """Keeps the inputs of every call of `compute_loss`, and what reaches `model.forward`."""

    def __init__(self, trainer: GroupRobustTrainer) -> None:
        self.batches: list[dict[str, Any]] = []
        self.forwarded: list[set[str]] = []
        inner = trainer.compute_loss

        def compute_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self.batches.append(dict(inputs))
            return inner(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss  # type: ignore[method-assign]
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs: self.forwarded.append(set(kwargs)), with_kwargs=True
        )


def rows_as_torch_dataset(rows: dict[str, list[Any]]) -> torch.utils.data.Dataset:
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]  # type: ignore[return-value]


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows: dict[str, list[Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows["labels"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError
        return {name: column[index] for name, column in self.rows.items()}


@predicts_one_class
def test_column_survives_the_default_arguments_and_stays_out_of_the_model(trainer: Build) -> None:
    data = text_dataset().add_column("text", ["some words"] * 16)
    run = trainer({"objective": "cgd"}, train_dataset=data, eval_dataset=data)
    spy = Spy(run)
    run.train()
    run.evaluate()
    assert run.args.remove_unused_columns
    training = next(iter(run.get_train_dataloader()))
    assert training["group"].dtype == torch.int64 and training["group"].shape == (4,)
    # Group ids travel beside the batch: a compute_loss of one's own does not see them.
    assert spy.batches and all({"text", "group"}.isdisjoint(batch) for batch in spy.batches)
    assert run.robust_loss.updates == run.state.global_step
    assert all("group" not in names for names in spy.forwarded)
    assert all(torch.isfinite(torch.tensor(entry["loss"])) for entry in run.state.log_history if "loss" in entry)


@predicts_one_class
def test_unused_columns_may_also_be_kept(trainer: Build) -> None:
    run = trainer({"remove_unused_columns": False}, eval_dataset=text_dataset())
    spy = Spy(run)
    run.train()
    run.evaluate()
    assert all("group" not in names for names in spy.forwarded)


def test_torch_dataset_and_custom_collator_train_the_same(trainer: Build) -> None:
    def strict(features: list[dict[str, Any]]) -> dict[str, Any]:
        assert all("group" in feature for feature in features)
        return default_data_collator(features)

    losses = []
    for dataset, collator in ((text_dataset(), None), (Rows(text_rows()), None), (Rows(text_rows()), strict)):
        run = trainer({"objective": "group_dro", "step_size": 0.5}, train_dataset=dataset, data_collator=collator)
        run.train()
        losses.append([v for e in run.state.log_history for k, v in e.items() if k.startswith("group_loss/")])
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], abs=1e-6) and losses[2] == pytest.approx(losses[0], abs=1e-6)


def tokenizer(tmp_path: Any) -> DistilBertTokenizer:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(59))]))
    return DistilBertTokenizer(str(vocabulary))


@pytest.mark.parametrize("padding", [False, True])
def test_strings_class_labels_integers_and_bools_give_the_same_run(
    trainer: Build, tmp_path: Any, padding: bool
) -> None:
    integers = text_dataset()
    names = ["land", "water"]
    strings = integers.remove_columns("group").add_column("group", [names[g] for g in integers["group"]])
    kinds = [
        integers,
        strings.cast_column("group", Value("string")),
        strings.cast_column("group", ClassLabel(names=names)),
        integers.cast_column("group", Value("bool")),
        strings.with_format("torch"),
    ]
    collator = DataCollatorWithPadding(tokenizer(tmp_path)) if padding else None
    weights = []
    for data in kinds:
        run = trainer({"objective": "group_dro", "step_size": 0.5}, train_dataset=data, data_collator=collator)
        run.train()
        weights.append(run.group_weights)
    assert not torch.equal(weights[0], torch.tensor([0.5, 0.5], dtype=torch.float64))
    for other in weights[1:]:
        assert torch.allclose(other, weights[0], atol=1e-7)
    assert run.groups is not None and run.groups.names == ("land", "water")


def test_class_labels_of_another_order_at_evaluation_are_matched_by_name(trainer: Build) -> None:
    integers = text_dataset()
    train = integers.cast_column("group", ClassLabel(names=["land", "water"]))
    flipped = integers.remove_columns("group").add_column("group", [1 - g for g in integers["group"]])
    run = trainer(train_dataset=train)
    first = run.evaluate(train)
    second = run.evaluate(flipped.cast_column("group", ClassLabel(names=["water", "land"])))
    same = [name for name in first if "runtime" not in name and "second" not in name and "preparation" not in name]
    assert {k: first[k] for k in same} == pytest.approx({k: second[k] for k in same})


@predicts_one_class
def test_crossed_columns_with_the_label_among_them(trainer: Build) -> None:
    data = text_dataset().rename_column("labels", "label")
    data = data.add_column("place", ["land" if i % 3 else "sea" for i in range(16)])
    run = trainer({"group_column": ["label", "place"]}, train_dataset=data, eval_dataset=data)
    spy = Spy(run)
    run.train()
    metrics = run.evaluate()
    counts = {}
    for label, place in zip(data["label"], data["place"], strict=True):
        name = f"label:{label} place:{place}"
        counts[name] = counts.get(name, 0) + 1
    assert dict(zip(run.groups.names, run.groups.counts, strict=True)) == counts
    assert {k.partition("/")[2]: v for k, v in metrics.items() if "group_count/" in k} == counts
    assert all({"place", "group_ids"}.isdisjoint(names) for names in spy.forwarded)
    assert next(iter(run.get_train_dataloader()))["group_ids"].shape == (4,)
    assert all("group_ids" not in batch for batch in spy.batches)


def test_the_label_itself_as_group(trainer: Build) -> None:
    run = trainer({"group_column": "labels"}, eval_dataset=text_dataset())
    run.train()
    metrics = run.evaluate()
    labels = list(text_dataset()["labels"])
    assert [metrics[f"eval_group_count/{label}"] for label in (0, 1)] == [labels.count(0), labels.count(1)]


@pytest.mark.parametrize("hide", [False, True])
def test_missing_column(trainer: Build, hide: bool) -> None:
    data = text_dataset()
    if hide:
        data.set_format("torch", columns=["input_ids", "attention_mask", "labels"])
        message = r"expected a column 'group' .* \(set_format hides \['group'\].*reset_format"
    else:
        data = data.remove_columns("group")
        message = r"column 'group' in the training dataset, which has \['input_ids', 'attention_mask', 'labels'\]. Set"
    with pytest.raises(ValueError, match=message):
        trainer(train_dataset=data)


def test_a_misspelt_column_is_recognised(trainer: Build) -> None:
    with pytest.raises(ValueError, match=r"'gruop' in the training dataset, .*\. Did you mean group\? Set it to"):
        trainer({"group_column": "gruop"})
    with pytest.raises(ValueError, match=r"'places' in the training dataset, .*'group'\]\. Set it to"):
        trainer({"group_column": "places"})


def test_of_many_small_groups_some_are_listed(trainer: Build) -> None:
    with pytest.raises(ValueError, match=r"a19 \(1\).* and 10 more\. Check the group column"):
        trainer(
            train_dataset=text_dataset(30).remove_columns("group").add_column("group", [f"a{i}" for i in range(30)])
        )


def with_groups(values: list[Any]) -> Dataset:
    return text_dataset().remove_columns("group").add_column("group", values)


@pytest.mark.parametrize(
    "values,message",
    [
        ([0, None] * 8, r"'group', row 1: expected an integer.*None"),
        ([0.0, 1.0] * 8, r"row 0: expected an integer.*float 0.0"),
        ([0, -1] * 8, r"row 1: expected integers >= 0, got -1"),
        ([[0], [1]] * 8, r"row 0: expected one integer.*list"),
        ([0] * 15 + [1], r"at least 2 examples.*fewer: 1 \(1\)"),
    ],
)
def test_bad_groups(trainer: Build, values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(train_dataset=with_groups(values))


def test_a_group_of_one_example_where_it_is_asked_for(trainer: Build) -> None:
    run = trainer({"min_group_size": 1}, train_dataset=with_groups([0] * 15 + [1]))
    run.train()
    assert run.groups.counts == (15, 1)


def test_bad_labels_and_empty_data(trainer: Build) -> None:
    data = text_dataset()
    outside = data.remove_columns("labels").add_column("labels", [0, 1, 2, 1] * 4)
    with pytest.raises(
        ValueError, match=r"'labels', row 2 of .*: expected a class in 0\.\.1, got 2 \(4 of 16 rows: .*num_labels=3"
    ):
        trainer(train_dataset=outside)
    negative = data.remove_columns("labels").add_column("labels", [0, -1, 1, 1] * 4)
    with pytest.raises(ValueError, match=r"row 1 of .*: expected a class in 0\.\.1, got -1 .*-100 to leave them out"):
        trainer(train_dataset=negative)
    with pytest.raises(ValueError, match=r"row 1 of .*: expected a label, got None \(4 of 16 rows"):
        trainer(train_dataset=data.remove_columns("labels").add_column("labels", [0, None, 1, 1] * 4))
    with pytest.raises(ValueError, match="training dataset is empty"):
        trainer(train_dataset=data.select([]))


def test_no_group_column(trainer: Build) -> None:
    with pytest.raises(ValueError, match=r"objective='cgd' needs to know the groups: set group_column"):
        trainer({"group_column": None})
    run = trainer({"group_column": None, "objective": "erm"}, eval_dataset=text_dataset())
    run.train()
    metrics = run.evaluate()
    assert "eval_loss" in metrics and not [name for name in metrics if "group" in name]
    assert run.group_weights is None and run.groups is None


def test_plain_training_arguments_and_an_objective(tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no")
    run = GroupRobustTrainer(
        tiny_distilbert(), args, train_dataset=text_dataset(), objective=CGD(step_size=0.1), group_column="group"
    )
    run.train()
    assert run.group_objective == CGD(step_size=0.1) and run.robust_loss.updates == 2
    with pytest.raises(ValueError, match="objective must be one of"):
        GroupRobustTrainer(tiny_distilbert(), args, train_dataset=text_dataset(), objective="x", group_column="group")


def test_signatures_are_those_of_the_parent() -> None:
    names = ["compute_loss", "_get_train_sampler", "prediction_step", "create_model_card", "log", "train",
             "evaluation_loop", "get_eval_dataloader", "get_batch_samples"]  # fmt: skip
    for name in names:
        parent = inspect.signature(getattr(transformers.Trainer, name)).parameters
        own = inspect.signature(getattr(GroupRobustTrainer, name)).parameters
        assert list(own) == list(parent), name


def test_a_loader_of_ones_own_without_groups_is_named(trainer: Build) -> None:
    run = trainer()
    plain = transformers.Trainer(tiny_distilbert(), run.args, train_dataset=text_dataset().remove_columns("group"))
    run.get_train_dataloader = plain.get_train_dataloader
    with pytest.raises(ValueError, match=r"group ids under 'group', got \['attention_mask', 'input_ids'\]"):
        run.train()


def test_another_training_set_is_read_when_its_loader_is_built(trainer: Build) -> None:
    run = trainer({"objective": "group_dro"})
    run.train_dataset = text_dataset(18, groups=3)
    run.train()
    assert run.groups.names == ("0", "1", "2") and run.groups.counts == (6, 6, 6)
    assert len(run.group_weights) == 3 and run.robust_loss.updates == 3


# ---- Streams ----------------------------------------------------------------------------------------------------------


def test_stream_with_counts_trains_as_a_map_style_dataset(trainer: Build) -> None:
    groups = GroupInfo(["0", "1"], [8, 8])
    changes = {"objective": "group_dro", "step_size": 0.5, "max_steps": 2, "train_sampling_strategy": "sequential"}
    mapped = trainer(changes)
    stream = trainer(changes, train_dataset=text_dataset().to_iterable_dataset(), groups=groups)
    mapped.train()
    stream.train()
    assert torch.allclose(mapped.group_weights, stream.group_weights, atol=1e-7)
    assert not torch.equal(mapped.group_weights, torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_what_a_stream_cannot_do(trainer: Build) -> None:
    stream = text_dataset().to_iterable_dataset()
    with pytest.raises(ValueError, match=r"group_sampling='balanced'.*IterableDataset.*map-style"):
        trainer({"group_sampling": "balanced"}, train_dataset=stream, groups=GroupInfo(["0", "1"], [8, 8]))
    with pytest.raises(ValueError, match=r"stream.*groups=GroupInfo\(names, counts\)"):
        trainer({"adjustment": 1.0}, train_dataset=stream)
    with pytest.raises(ValueError, match=r"adjustment > 0 needs the number of training examples"):
        trainer({"adjustment": 1.0}, train_dataset=stream, groups=GroupInfo(["0", "1"]))
    trainer(train_dataset=stream, groups=GroupInfo(["0", "1"])).train()


def test_an_unknown_group_in_a_stream_is_named(trainer: Build) -> None:
    stream = with_groups(["a", "b"] * 8).to_iterable_dataset()
    run = trainer(train_dataset=stream, groups=GroupInfo(["a", "c"]))
    with pytest.raises(ValueError, match=r"group 'b', which is not one of the known groups \['a', 'c'\]"):
        run.train()


def test_one_group_is_erm_with_a_warning(trainer: Build) -> None:
    with pytest.warns(GroupRobustWarning, match="in one group, '0'"):
        run = trainer({"objective": "group_dro", "step_size": 1.0}, train_dataset=with_groups([0] * 16))
    run.train()
    with pytest.warns(GroupRobustWarning, match="in one group, '0'"):
        erm = trainer({"objective": "erm"}, train_dataset=with_groups([0] * 16))
    erm.train()
    losses = [[entry["loss"] for entry in r.state.log_history if "loss" in entry] for r in (run, erm)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_objective_may_be_the_users_own(trainer: Build) -> None:
    class Frozen(GroupDRO):
        name = "frozen"

        def next_weights(self, alpha: torch.Tensor, statistics: Any) -> torch.Tensor:
            assert statistics.group_names == ("0", "1")
            return torch.tensor([0.25, 0.75], dtype=torch.float64)

    run = trainer(objective=Frozen())
    run.train()
    assert run.group_weights.tolist() == [0.25, 0.75]


def test_batches_of_gradient_objectives_come_in_the_order_of_the_groups(trainer: Build) -> None:
    for objective in ("cgd", "group_dro"):
        robust = trainer({"objective": objective, "per_device_train_batch_size": 8, "seed": 3})
        seen = [batch[robust.group_key].tolist() for batch in robust.get_train_dataloader()]
        in_order = [ids == sorted(ids) for ids in seen]
        assert all(in_order) if objective == "cgd" else not all(in_order)


def test_the_order_within_a_batch_goes_with_the_examples() -> None:
    groups = GroupInfo(["a", "b"], [2, 2], columns=["group"])
    rows = [{"x": 0, "group": "b"}, {"x": 1, "group": "a"}, {"x": 2, "group": "b"}, {"x": 3, "group": "a"}]
    collator = GroupCollator(
        default_data_collator, groups, batch_key="group", group_columns=["group"], in_group_order=True
    )
    batch = collator(rows)
    assert batch["group"].tolist() == [0, 0, 1, 1] and batch["x"].tolist() == [1, 3, 0, 2]
