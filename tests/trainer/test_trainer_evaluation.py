"""Group metrics in evaluate() and predict(), best-model selection, and what user functions see."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import DatasetDict
from tiny import parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from tiny_tokens import tiny_model, token_dataset
from transformers import EarlyStoppingCallback, EvalPrediction, Seq2SeqTrainingArguments

from hf_cgd import GroupRobustTrainer, GroupRobustWarning
from hf_cgd.trainer.example_results import CollectedResults

pytestmark = predicts_one_class

Build = Callable[..., GroupRobustTrainer]
RUN_TIME = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


def stable(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.endswith(RUN_TIME)}


def biased(bias: tuple[float, float]) -> torch.nn.Module:
    model = tiny_distilbert()
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor(bias))
    return model


def test_metrics_against_predictions_of_the_model_alone(trainer: Build) -> None:
    data = text_dataset(30, groups=3)
    run = trainer(train_dataset=text_dataset(30, groups=3), eval_dataset=data)
    run.train()
    metrics = run.evaluate()
    batch = data.with_format("torch")[:]
    with torch.no_grad():
        logits = run.model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
    correct = (logits.argmax(1) == batch["labels"]).float()
    assert metrics["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(correct.mean().item())
    groups = [batch["group"] == group for group in range(3)]
    for group, rows in enumerate(groups):
        assert metrics[f"eval_group_accuracy/{group}"] == pytest.approx(correct[rows].mean().item())
        assert metrics[f"eval_group_loss/{group}"] == pytest.approx(losses[rows].mean().item(), rel=1e-5)
    assert metrics["eval_worst_group_accuracy"] == pytest.approx(min(correct[rows].mean().item() for rows in groups))


@pytest.mark.parametrize("objective", ["erm", "cgd"])
def test_metrics_do_not_depend_on_the_batch_size(trainer: Build, objective: str) -> None:
    results = []
    for size in (1, 4, 7, 64):
        run = trainer({"objective": objective, "per_device_eval_batch_size": size}, eval_dataset=text_dataset(15))
        results.append(stable(run.evaluate()))
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)


def test_no_row_is_left_out_of_an_evaluation(trainer: Build) -> None:
    """Incomplete batches are left out of training only: here three rows of the 15 would go, all of group 0 or 1."""
    data = text_dataset(15)
    robust = trainer({"dataloader_drop_last": True, "per_device_eval_batch_size": 4}, eval_dataset=data)
    metrics = robust.evaluate()
    whole = trainer({"per_device_eval_batch_size": 4}, eval_dataset=data).evaluate()
    assert {k: v for k, v in metrics.items() if "count" in k} == {"eval_group_count/0": 8, "eval_group_count/1": 7}
    assert metrics["eval_loss"] == whole["eval_loss"]
    assert len(robust.predict(data).predictions) == 15
    robust.train_dataset = data
    assert robust.args.dataloader_drop_last and len(robust.get_train_dataloader()) == 3


@pytest.mark.filterwarnings("ignore:No examples of the group")
@pytest.mark.parametrize(("kind", "unit"), [("classes", "example"), ("gpt2", "example"), ("gpt2", "token")])
def test_the_loss_alone_is_the_loss_beside_other_metrics(trainer: Build, kind: str, unit: str) -> None:
    """A mean over the examples (or tokens) of batches that hold other numbers of labels."""
    data = text_dataset(7) if kind == "classes" else token_dataset(kind, 7)
    data = data.map(lambda row, number: {"labels": some_labels(row["labels"], number)}, with_indices=True)
    parts: dict[str, Any] = (
        {} if kind == "classes" else {"model": tiny_model(kind), "train_dataset": token_dataset(kind)}
    )
    args = {"objective": "erm", "per_device_eval_batch_size": 3}
    robust = trainer(args if kind == "classes" else {**args, "group_unit": unit}, eval_dataset=data, **parts)
    both = [robust.evaluation_loop(robust.get_eval_dataloader(), "Loss", alone) for alone in (True, False)]
    alone, beside = (output.metrics["eval_loss"] for output in both)
    assert alone == pytest.approx(beside, rel=1e-6) and len(both[1].metrics) > len(both[0].metrics)


def some_labels(labels: Any, number: int) -> Any:
    """Without those of row 1, and of sequences without the first ones."""
    if isinstance(labels, list):
        return [-100 if place < 2 * number else label for place, label in enumerate(labels)]
    return -100 if number == 1 else labels


def test_evaluation_moves_no_weights(trainer: Build) -> None:
    run = trainer({"eval_strategy": "steps", "eval_steps": 1, "step_size": 0.5}, eval_dataset=text_dataset(seed=1))
    before = run.evaluate()
    assert np.isfinite(before["eval_loss"])
    run.train()
    twin = trainer({"step_size": 0.5})
    twin.train()
    assert torch.equal(run.group_weights, twin.group_weights)
    weights, updates = run.group_weights, run.robust_loss.updates
    run.evaluate()
    run.predict(text_dataset(seed=2))
    assert torch.equal(run.group_weights, weights) and run.robust_loss.updates == updates == 3
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in run.model.parameters())


def test_a_set_that_lacks_one_of_several_labels_is_announced(trainer: Build) -> None:
    """The Trainer takes it for one without labels: no loss, no metrics."""
    both = text_dataset().add_column("more", [0] * 16)
    run = trainer({"label_names": ["labels", "more"], "remove_unused_columns": False}, train_dataset=both)
    with pytest.warns(GroupRobustWarning, match="has labels, but not more, which label_names lists") as told:
        metrics = run.evaluate(text_dataset())
    assert len(told) == 1 and "eval_accuracy" not in metrics


class Strict(torch.nn.Module):
    """Takes nothing that it has no use for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_distilbert()
        self.config = self.inner.config

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize("objective", ["erm", "cgd"])
@pytest.mark.parametrize("names", [["labels", "group"], ["group", "labels"], ["number", "labels", "group"]])
def test_columns_for_metrics_among_the_labels_change_nothing_else(
    trainer: Build, objective: str, names: list[str]
) -> None:
    plain = text_dataset(32)
    data = plain.add_column("number", list(range(32))) if "number" in names else plain
    seen = {}

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.update(zip(names, prediction.label_ids, strict=True))
        return {}

    changes = {"objective": objective, "remove_unused_columns": False}
    twin = trainer(changes, model=Strict(), train_dataset=plain, eval_dataset=plain)
    run = trainer(
        {**changes, "label_names": names}, model=Strict(), train_dataset=data, eval_dataset=data,
        compute_metrics=compute_metrics,
    )  # fmt: skip
    for each in (twin, run):
        each.train()
    assert torch.equal(parameters_of(run.model), parameters_of(twin.model))
    assert stable(run.evaluate()) == stable(twin.evaluate())
    for name in names:
        assert list(seen[name]) == data[name]


def test_a_group_column_first_among_the_labels_is_refused(trainer: Build) -> None:
    data = text_dataset().rename_column("labels", "target")
    with pytest.raises(ValueError, match=r"label_names=\['group', 'target'\] begins with the group column 'group'"):
        trainer({"label_names": ["group", "target"]}, train_dataset=data)


# ---- User functions -----------------------------------------------------------------------------------------------------


def test_user_metrics_see_plain_labels_and_win_over_ours(trainer: Build) -> None:
    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        assert isinstance(prediction.label_ids, np.ndarray) and prediction.label_ids.ndim == 1
        logits, labels = prediction
        return {"accuracy": float((logits.argmax(-1) == labels).mean()) + 10, "worst_group_accuracy": -1.0}

    plain = trainer(eval_dataset=text_dataset()).evaluate()
    run = trainer(eval_dataset=text_dataset(), compute_metrics=compute_metrics)
    with pytest.warns(GroupRobustWarning, match=r"returns accuracy=10.* \(ours: 0\..*worst_group_accuracy=-1") as told:
        metrics = run.evaluate()
    run.evaluate()
    assert len(told) == 1
    assert metrics["eval_worst_group_accuracy"] == -1
    assert metrics["eval_accuracy"] == pytest.approx(plain["eval_accuracy"] + 10)
    assert metrics["eval_mean_group_accuracy"] == plain["eval_mean_group_accuracy"]


def test_user_metrics_of_our_names_and_values_need_no_word(trainer: Build) -> None:
    """Fractions of another package, rounded to three places."""

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        return {"accuracy": round(float((prediction.predictions.argmax(-1) == prediction.label_ids).mean()), 3)}

    metrics = trainer(eval_dataset=text_dataset(11), compute_metrics=compute_metrics).evaluate()
    assert metrics["eval_accuracy"] == round(metrics["eval_accuracy"], 3) not in (0, 1)


def test_preprocessed_logits(trainer: Build) -> None:
    def classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert labels.ndim == 1
        return logits.argmax(-1)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        assert prediction.predictions.ndim == prediction.label_ids.ndim == 1
        return {"mine": float((prediction.predictions == prediction.label_ids).mean())}

    plain = stable(trainer(eval_dataset=text_dataset()).evaluate())
    run = trainer(eval_dataset=text_dataset(), compute_metrics=compute_metrics, preprocess_logits_for_metrics=classes)
    metrics = stable(run.evaluate())
    assert metrics.pop("eval_mine") == pytest.approx(metrics["eval_accuracy"])
    assert metrics == pytest.approx(plain)


def test_metrics_batch_by_batch(trainer: Build) -> None:
    seen: list[int] = []

    def compute_metrics(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        assert prediction.label_ids.ndim == 1
        seen.append(len(prediction.label_ids))
        return {"rows": float(sum(seen))} if compute_result else {}

    plain = stable(trainer(eval_dataset=text_dataset(15)).evaluate())
    run = trainer({"batch_eval_metrics": True}, eval_dataset=text_dataset(15), compute_metrics=compute_metrics)
    metrics = stable(run.evaluate())
    assert metrics.pop("eval_rows") == 15
    # The loss as well, although the last batch is smaller.
    assert metrics == pytest.approx(plain)


def test_metrics_of_batches_that_are_not_joined(trainer: Build) -> None:
    plain = stable(trainer(eval_dataset=text_dataset(15)).evaluate())
    run = trainer({"eval_do_concat_batches": False}, eval_dataset=text_dataset(15))
    assert stable(run.evaluate()) == pytest.approx(plain)


@pytest.mark.parametrize(("stride", "expected_size"), [(None, 0), (None, 5), (2, 100)])
def test_collected_results_are_those_of_all_batches(stride: int | None, expected_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes, widths = (3, 4, 1, 4, 2), (2, 5, 5, 1, 3)
    batches = [
        (torch.rand(size, generator=generator), torch.randint(9, (size, width), generator=generator))
        for size, width in zip(sizes, widths, strict=True)
    ]
    collected = CollectedResults(stride, expected_size)
    for losses, labels in batches:
        ids, answers = torch.arange(len(losses)), torch.ones(len(losses), dtype=torch.int32)
        collected.add((labels, ids, losses.bfloat16() if stride else losses, answers))
    results = collected.take()
    assert results is not None and collected.take() is None and collected.arrays() is results
    expected = np.full((sum(sizes), max(widths)), -100)
    row = 0
    for _, labels in batches:
        expected[row : row + len(labels), : labels.shape[1]] = labels
        row += len(labels)
    np.testing.assert_array_equal(results.labels, expected)
    np.testing.assert_array_equal(results.group_ids, np.concatenate([np.arange(size) for size in sizes]))
    np.testing.assert_allclose(
        results.losses, torch.cat([losses for losses, _ in batches]), rtol=1e-2 if stride else 0
    )
    assert results.predictions.dtype == np.int32 and results.token_counts is None


def test_collected_results_take_the_wider_type_and_no_other_shape() -> None:
    collected = CollectedResults()
    collected.add([torch.tensor([1, 2])])
    collected.add([torch.tensor([0.5])])
    with pytest.raises(ValueError, match=r"keeps results of shape \(\) for each example, but a batch has \(3,\)"):
        collected.add([torch.ones(2, 3)])
    assert collected._rows[0].tensor.tolist() == [1, 2, 0.5]


def test_predict_returns_plain_labels_and_prefixed_metrics(trainer: Build) -> None:
    data = text_dataset(15)
    output = trainer().predict(data)
    assert output.label_ids.tolist() == data["labels"] and output.predictions.shape == (15, 2)
    assert output.metrics["test_group_count/0"] == 8
    unlabelled = trainer().predict(data.remove_columns(["labels", "group"]))
    assert unlabelled.label_ids is None and not [name for name in unlabelled.metrics if "accuracy" in name]


# ---- Sets and columns ---------------------------------------------------------------------------------------------------


def test_a_set_without_the_group_column_is_evaluated_as_a_whole(trainer: Build) -> None:
    with pytest.warns(
        GroupRobustWarning, match="evaluation dataset has no column 'group', so it is evaluated as a whole"
    ):
        run = trainer(eval_dataset=text_dataset().remove_columns("group"))
    metrics = run.evaluate()
    assert "eval_accuracy" in metrics and "eval_loss" in metrics
    assert not [name for name in metrics if "group" in name]


def test_the_metric_of_the_best_model_is_missed_with_the_column_that_would_give_it(trainer: Build) -> None:
    options = {"metric_for_best_model": "worst_group_accuracy", "eval_strategy": "steps"}
    with (
        pytest.warns(GroupRobustWarning, match="has no column 'group'"),
        pytest.raises(ValueError, match=r"gives: accuracy, .*loss\. .* evaluation dataset, without .*\['group'\]"),
    ):
        trainer(options, eval_dataset=text_dataset().remove_columns("group"))
    with pytest.raises(ValueError, match="no metrics of groups without group_column"):
        trainer(options | {"objective": "erm", "group_column": None, "step_size": None}, eval_dataset=text_dataset())


def test_an_evaluation_without_labels_says_that_it_measures_nothing(trainer: Build) -> None:
    run = trainer(eval_dataset=text_dataset(15).remove_columns("labels"))
    with pytest.warns(GroupRobustWarning, match=r"no labels, so nothing of it was measured: expected \['labels'\]"):
        metrics = run.evaluate()
    assert stable(metrics) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", GroupRobustWarning)
        run.predict(text_dataset(15).remove_columns("labels"))


def test_options_that_evaluations_here_do_not_follow(trainer: Build, tmp_path: Path) -> None:
    with pytest.warns(GroupRobustWarning, match="load_best_model_at_end=True has no effect under eval_strategy='no'"):
        trainer({"load_best_model_at_end": True, "save_strategy": "no"}, eval_dataset=text_dataset())
    args = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, report_to=[], use_cpu=True)
    with pytest.raises(
        ValueError, match="predict_with_generate=True: evaluations do not generate texts here.*to False"
    ):
        GroupRobustTrainer(tiny_distilbert(), args, train_dataset=text_dataset(), group_column="group")


def test_a_column_to_evaluate_by_that_no_set_has_is_refused(trainer: Build) -> None:
    with pytest.raises(ValueError, match=r"eval_group_column: expected a column 'regoin' .*which has .*'group'"):
        trainer({"eval_group_column": "regoin"}, eval_dataset=text_dataset())
    # A set that comes later may have it; one that has not is evaluated without groups, whatever its other columns hold.
    places = text_dataset(16).remove_columns("group").add_column("group", ["a", "b"] * 8)
    run = trainer({"eval_group_column": "region"}, train_dataset=places, eval_dataset=None)
    assert "eval_loss" in run.evaluate(places)
    with_region = places.add_column("region", ["n", "s"] * 8)
    assert run.evaluate(with_region)["eval_group_count/n"] == 8


def test_what_is_no_dataset_is_named(trainer: Build) -> None:
    with pytest.raises(ValueError, match=r"training dataset: .* got a DatasetDict of \['train'\].*splits\['train'\]"):
        trainer(train_dataset=DatasetDict(train=text_dataset()))
    with pytest.raises(ValueError, match="evaluation dataset: .* DataFrame.*from_pandas"):
        trainer(eval_dataset=text_dataset().to_pandas())


def test_groups_that_training_never_saw_and_groups_that_are_missing(trainer: Build) -> None:
    data = text_dataset(16).remove_columns("group").add_column("group", [1, 2] * 8)
    run = trainer(eval_dataset=data)
    with pytest.warns(GroupRobustWarning, match=r"No examples of the group\(s\) \['0'\]"):
        metrics = run.evaluate()
    assert {name for name in metrics if "group_count/" in name} == {"eval_group_count/1", "eval_group_count/2"}
    # The shares of the training set say nothing of a set that lacks one of its groups.
    assert "eval_adjusted_accuracy" not in metrics
    assert [row.name for row in run.group_report().rows] == ["0", "1", "2"]


def test_evaluation_by_another_column(trainer: Build) -> None:
    data = text_dataset(16).add_column("region", ["n", "s", "s", "s"] * 4)
    run = trainer({"eval_group_column": "region"}, train_dataset=data, eval_dataset=data)
    run.train()
    metrics = run.evaluate()
    assert (metrics["eval_group_count/n"], metrics["eval_group_count/s"]) == (4, 12)
    assert run.groups.names == ("0", "1")


def test_erm_without_training_groups_may_be_evaluated_by_groups(trainer: Build) -> None:
    data = text_dataset(16).add_column("region", ["n", "s", "s", "s"] * 4)
    run = trainer(
        {"objective": "erm", "group_column": None, "eval_group_column": "region"},
        train_dataset=data,
        eval_dataset=data,
    )
    run.train()
    assert run.evaluate()["eval_group_count/s"] == 12


def test_string_columns_of_training_and_evaluation_stay_out_of_a_padding_collator(trainer: Build) -> None:
    def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([feature[name] for feature in features]) for name in features[0]}

    data = text_dataset(16).add_column("region", ["n", "s", "s", "s"] * 4)
    data = data.remove_columns("group").add_column("group", ["a", "b"] * 8)
    run = trainer({"eval_group_column": "region"}, train_dataset=data, eval_dataset=data, data_collator=collate)
    run.train()
    assert run.evaluate()["eval_group_count/n"] == 4


def test_an_evaluation_set_is_read_once(trainer: Build) -> None:
    class Counting(torch.utils.data.Dataset):
        reads = 0

        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, Any]:
            Counting.reads += 1
            return text_dataset()[index]

    run = trainer(eval_dataset=Counting())
    run.evaluate()
    first, Counting.reads = Counting.reads, 0
    run.evaluate()
    assert (first - Counting.reads, Counting.reads) == (18, 16)


def test_a_stream_whose_rows_several_processes_would_repeat_is_refused(
    trainer: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with batches of five made ten rows of three: 10 stood under group_count."""
    stream = text_dataset(9).to_iterable_dataset()
    shards = {"accelerator_config": {"dispatch_batches": False}}
    alone = trainer(shards, eval_dataset=stream)
    assert alone.evaluate()["eval_group_count/0"] == 5, "one process reads each row once"
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 2))
    with pytest.raises(ValueError, match="dispatch_batches=False.*counted again"):
        alone.get_eval_dataloader()
    with pytest.raises(ValueError, match="dispatch_batches=False.*counted again"):
        trainer(shards, eval_dataset={"test": stream})


def test_overlapping_subgroups(trainer: Build) -> None:
    data = text_dataset(16).add_column("male", [0, 1] * 8).add_column("young", [True, True, False, True] * 4)
    run = trainer({"eval_group_column": ["male", "young"]}, train_dataset=data, eval_dataset=data)
    run.train()
    metrics = run.evaluate()
    assert (metrics["eval_group_count/male"], metrics["eval_group_count/young"]) == (8, 12)
    bad = data.remove_columns("male").add_column("male", [0, 2] * 8)
    with pytest.raises(ValueError, match=r"one 0/1 column each, but 'male' holds 2"):
        run.evaluate(bad)


def test_a_bad_group_value_at_evaluation(trainer: Build) -> None:
    data = text_dataset().remove_columns("group").add_column("group", [0, None] * 8)
    with pytest.raises(ValueError, match="'group', row 1: expected an integer"):
        trainer(eval_dataset=data).evaluate()


def test_evaluation_only_without_a_training_set(trainer: Build) -> None:
    run = trainer(train_dataset=None, eval_dataset=text_dataset())
    metrics = run.evaluate()
    assert metrics["eval_group_count/0"] == 8 and "eval_adjusted_accuracy" not in metrics


# ---- Selection ----------------------------------------------------------------------------------------------------------


def bests(**changes: Any) -> dict[str, Any]:
    return dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
                max_steps=4, **changes)  # fmt: skip


@pytest.mark.parametrize("name", ["worst_group_accuracy", "eval_worst_group_accuracy", "worst_group_loss"])
def test_best_checkpoint_by_a_group_metric(trainer: Build, name: str) -> None:
    run = trainer(bests(metric_for_best_model=name), eval_dataset=text_dataset(seed=1))
    run.train()
    key = name if name.startswith("eval_") else f"eval_{name}"
    history = [entry[key] for entry in run.state.log_history if key in entry]
    assert len(history) == 4
    assert run.state.best_metric == (min(history) if "loss" in name else max(history))
    assert run.state.best_model_checkpoint.endswith(f"checkpoint-{run.state.best_global_step}")
    assert run.evaluate()[key] == pytest.approx(run.state.best_metric)


def test_best_checkpoint_with_several_sets(trainer: Build) -> None:
    sets = {"a": text_dataset(seed=1), "b": text_dataset(seed=2)}
    run = trainer(bests(metric_for_best_model="eval_b_worst_group_accuracy"), eval_dataset=sets)
    run.train()
    metrics = run.evaluate()
    assert metrics["eval_b_worst_group_accuracy"] == pytest.approx(run.state.best_metric)
    assert {name.split("_")[1] for name in metrics if name.endswith("worst_group_accuracy")} == {"a", "b"}
    assert run.group_report("eval_a").overall["accuracy"] == metrics["eval_a_accuracy"]
    with pytest.raises(ValueError, match=r"No metrics start with 'eval_c'; there are those of \['eval_a', 'eval_b'\]"):
        run.group_report("eval_c")


def test_a_wrong_metric_name_lists_the_right_ones(trainer: Build) -> None:
    with pytest.raises(ValueError, match="Did you mean 'worst_group_accuracy'"):
        trainer(bests(metric_for_best_model="worst_accuracy"), eval_dataset=text_dataset())


def test_early_stopping_on_the_worst_group(trainer: Build) -> None:
    run = trainer(
        {**bests(metric_for_best_model="worst_group_accuracy"), "learning_rate": 0.0, "max_steps": 10},
        eval_dataset=text_dataset(),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    run.train()
    assert run.state.global_step == 3


# ---- What people see ----------------------------------------------------------------------------------------------------


def test_intervals_are_in_metrics_and_file_but_not_in_the_log(trainer: Build) -> None:
    run = trainer({"eval_strategy": "steps", "eval_steps": 1}, eval_dataset=text_dataset())
    run.train()
    metrics = run.evaluate()
    low, high = metrics["eval_group_accuracy_low/0"], metrics["eval_group_accuracy_high/0"]
    assert low <= metrics["eval_group_accuracy/0"] <= high
    assert not [name for entry in run.state.log_history for name in entry if "_low/" in name or "_high/" in name]
    assert "epoch" in metrics
    written = json.loads((Path(run.args.output_dir) / "metrics.json").read_text())
    assert written["eval_group_accuracy_low/0"] == low


def test_weights_and_losses_of_groups_are_logged(trainer: Build) -> None:
    run = trainer({"step_size": 0.5})
    run.train()
    steps = [entry for entry in run.state.log_history if "loss" in entry]
    assert all(abs(entry["group_weight/0"] + entry["group_weight/1"] - 1) < 1e-6 for entry in steps)
    assert all({"group_loss/0", "group_loss/1"} & set(entry) for entry in steps)


def test_many_groups_are_logged_as_extremes(trainer: Build) -> None:
    data = text_dataset(80, groups=40)
    run = trainer(train_dataset=data, eval_dataset=data)
    run.train()
    entry = next(entry for entry in run.state.log_history if "loss" in entry)
    assert entry["group_weight_max"] >= entry["group_weight_min"] > 0
    assert not [name for name in entry if name.startswith("group_weight/")]
    assert len(run.group_report().rows) == 40


def test_report_of_the_final_model(trainer: Build) -> None:
    run = trainer({"step_size": 0.5}, eval_dataset=text_dataset(seed=1))
    run.evaluate()
    run.train()
    report = run.group_report()
    fresh = run.evaluate()
    assert report.overall["accuracy"] == fresh["eval_accuracy"]
    assert [row.weight for row in report.rows] == run.group_weights.tolist()
    assert [row.train_count for row in report.rows] == [8, 8]
    assert "(worst)" in str(report)


def test_a_collapsed_model_is_named_once(trainer: Build) -> None:
    run = trainer({"learning_rate": 0.25}, model=biased((10.0, -10.0)), eval_dataset=text_dataset())
    with pytest.warns(
        GroupRobustWarning, match=r"single class, 0, was predicted for all 16.*step_size \(now 0.01\).*0.25"
    ):
        metrics = run.evaluate()
    labels = np.array(text_dataset()["labels"])
    assert metrics["eval_accuracy"] == pytest.approx((labels == 0).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error", GroupRobustWarning)
        run.evaluate()


def test_a_worst_group_of_zero_comes_with_the_warning(trainer: Build) -> None:
    data = text_dataset().remove_columns(["labels", "group"])
    data = data.add_column("labels", [0, 1] * 8).add_column("group", [0, 1] * 8)
    run = trainer(model=biased((10.0, -10.0)), train_dataset=data, eval_dataset=data)
    with pytest.warns(GroupRobustWarning, match="single class"):
        assert run.evaluate()["eval_worst_group_accuracy"] == 0.0


def test_the_start_of_a_run_is_logged(trainer: Build, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="hf_cgd"):
        trainer({"step_size": 0.125, "learning_rate": 0.25}).train()
    text = caplog.text
    assert "step_size=0.125" in text and "learning rate 0.25" in text
    assert "2 groups: 0 (8), 1 (8)" in text and "classifier.bias" in text
