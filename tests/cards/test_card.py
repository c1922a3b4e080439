"""The card: front matter that the Hub accepts, tables that hold, and the run's own numbers."""

import inspect
import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
import yaml
from hub_server import card_errors
from huggingface_hub import ModelCard
from packaging.version import Version
from tiny import parameters_of, predicts_one_class, tiny_distilbert, with_adapters_at_work, with_lora
from torch import nn
from transformers import Trainer

import hf_cgd
from hf_cgd import CGD, GroupInfo, GroupReport, GroupRobustConfig, GroupRobustTrainer
from hf_cgd.cards import DataFacts, ModelFacts, RunRecord, html_report, load_run, write_card
from hf_cgd.cards.formulas import explained
from hf_cgd.cards.metadata import card_data
from hf_cgd.cards.model_card import model_card
from hf_cgd.cards.words import gives_one_class, headline, limits
from hf_cgd.metrics import GroupRow, wilson_interval
from hf_cgd.objectives import OBJECTIVES
from hf_cgd.trainer.history import HISTORY_FILE
from hf_cgd.trainer.run_facts import model_facts

from .conftest import NAMES, build_trainer, named_groups

pytestmark = predicts_one_class


def card_of(trainer: GroupRobustTrainer) -> ModelCard:
    return ModelCard.load(Path(trainer.args.output_dir) / "README.md")


def tables_of(text: str) -> list[list[list[str]]]:
    """Tables of a card as rows of cells; a pipe that is escaped ends no cell."""
    tables: list[list[list[str]]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        before = line
    return tables


def test_front_matter_is_complete_and_has_no_nulls(trained: GroupRobustTrainer) -> None:
    card = card_of(trained)
    assert card_errors(str(card)) == []
    front = yaml.safe_load(str(card).split("---\n")[1])
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "text-classification"
    assert {"group-robustness", "hf_cgd", "cgd", "generated_from_trainer"} <= set(front["tags"])
    values = {one.metric_type: one.metric_value for one in card.data.eval_results}
    for name in ("accuracy", "worst_group_accuracy", "adjusted_accuracy", "mean_group_accuracy"):
        assert values[name] == trained.all_metrics[f"eval_{name}"]
        assert type(values[name]) is float
    assert card.data.eval_results[0].dataset_split == "validation"


def test_tables_keep_their_columns_and_hold_the_numbers(trained: GroupRobustTrainer) -> None:
    tables = tables_of(card_of(trained).text)
    assert all(len({len(row) for row in table}) == 1 for table in tables)
    head, _, *rows = tables[0]
    report = trained.group_report()
    assert len(rows) == len(NAMES)
    for cells, row in zip(rows, report.rows, strict=True):
        found = dict(zip(head, cells, strict=True))
        assert found["training examples"] == "8" == found["evaluated"]
        assert float(found["accuracy"]) == pytest.approx(row.accuracy, abs=5e-4)
        assert found["95 % interval"] == f"{row.accuracy_low:.3f}-{row.accuracy_high:.3f}"
        assert float(found["weight"]) == pytest.approx(row.weight, abs=5e-4)
    settings = {row[0]: row[1] for table in tables if table[0][0] == "setting" for row in table}
    assert settings["`step_size`"] == "`0.5`" and settings["`adjustment`"] == "`0.0`"


def test_nothing_in_a_name_is_markup(trained: GroupRobustTrainer) -> None:
    text = card_of(trained).text
    assert "<script>" not in text and "$5$" not in text and "[x](y)" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; next" in text
    # Formulas are there, in pairs of dollars.
    assert "\\cos(g_i, g_j)" in text and text.count("$$") == 4


def test_a_card_holds_no_local_path_and_says_how_to_load(trained: GroupRobustTrainer) -> None:
    text = str(card_of(trained))
    assert str(Path(trained.args.output_dir).parent) not in text
    assert "AutoModelForSequenceClassification.from_pretrained(" in text and "@inproceedings{piratla2022focus" in text
    versions = {"torch": torch.__version__, "hf\\_cgd": ""}
    assert f"- torch {versions['torch'].split('+')[0]}" in text
    for picture in re.findall(r"!\[.*\]\((.*)\)", text):
        assert (Path(trained.args.output_dir) / picture).stat().st_size > 1000
    assert len(re.findall(r"!\[", text)) == 3


def test_before_training_and_without_evaluation(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path / "out")
    trainer.create_model_card(dataset=None, tags="x")
    card = card_of(trainer)
    assert card_errors(str(card)) == [] and card.data.eval_results is None
    assert "None" not in str(card).replace("NoneType", "")
    assert "No group of this model has been evaluated yet" in card.text
    assert [row[1] for row in tables_of(card.text)[0][2:]] == ["8"] * 4, "training counts"


def test_a_run_without_groups(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path / "out", {"objective": "erm", "group_column": None, "step_size": None})
    trainer.train()
    trainer.evaluate()
    trainer.create_model_card()
    card = card_of(trainer)
    assert card_errors(str(card)) == [] and "erm" in card.data.tags
    assert all(len({len(row) for row in table}) == 1 for table in tables_of(card.text))
    assert html_report(trainer.run_record(), tmp_path / "page.html").stat().st_size > 1000


def test_numbers_that_are_not_finite_are_left_out_or_said_so() -> None:
    nan = float("nan")
    report = GroupReport(
        (GroupRow("a", accuracy=nan, count=3),), {"accuracy": nan, "worst_group_accuracy": 0.5}, "cgd"
    )
    record = RunRecord("m", CGD().identity(), reports={"test": report}, model=ModelFacts(task="text-classification"))
    data = card_data(record)
    assert [one.metric_type for one in data.eval_results] == ["worst_group_accuracy"]
    text = model_card(record, data)
    assert card_errors(text) == [] and "n/a" in text and not re.search(r"\bnan\b", text.lower())


def test_it_takes_all_parameters_of_the_parent(tmp_path: Path) -> None:
    own = inspect.signature(GroupRobustTrainer.create_model_card).parameters
    parent = inspect.signature(Trainer.create_model_card).parameters
    assert {name: one.default for name, one in own.items()} == {name: one.default for name, one in parent.items()}
    push = inspect.signature(GroupRobustTrainer.push_to_hub).parameters
    # Older Trainers have no `private`.
    assert [name for name in push if name != "private"] == [
        name for name in inspect.signature(Trainer.push_to_hub).parameters if name != "private"
    ]
    trainer = build_trainer(tmp_path / "out")
    trainer.evaluate()
    given: dict[str, Any] = {
        "language": ["en", "de"], "license": "mit", "tags": ["x", "y"], "model_name": 'My "model": $1',
        "finetuned_from": "user/base", "tasks": ["zero-shot-classification"], "dataset_tags": ["user/data"],
        "dataset": ["The data"], "dataset_args": ["split-a"],
    }  # fmt: skip
    trainer.create_model_card(**given)
    card = card_of(trainer)
    assert card_errors(str(card)) == []
    data = card.data
    assert (data.language, data.license, data.base_model) == (["en", "de"], "mit", "user/base")
    assert (data.datasets, data.model_name) == (["user/data"], 'My "model": $1')
    result = data.eval_results[0]
    assert (result.task_type, result.dataset_type, result.dataset_name) == (
        "zero-shot-classification", "user/data", "The data",
    )  # fmt: skip
    assert result.dataset_args == {"name": "split-a"}
    trainer.create_model_card(tags="z")
    assert {"x", "y", "z"} <= set(card_of(trainer).data.tags), "tags that are there stay, as in the Trainer"


def test_a_base_model_that_is_a_folder_of_this_machine_is_not_named(tmp_path: Path) -> None:
    tiny_distilbert().save_pretrained(tmp_path / "base")
    model = type(tiny_distilbert()).from_pretrained(tmp_path / "base")
    trainer = build_trainer(tmp_path / "out", model=model)
    trainer.create_model_card()
    assert card_of(trainer).data.base_model is None
    trainer.model.config._name_or_path = "user/base"
    assert trainer.run_record().model.base_model == "user/base"


# ---- Records ----------------------------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was(trained: GroupRobustTrainer) -> None:
    record, back = trained.run_record(), load_run(trained.args.output_dir)
    assert back.reports == record.reports and back.groups == record.groups
    assert back.settings == record.settings and back.objective == record.objective
    assert back.to_dict() == record.to_dict()
    assert hf_cgd.load_report(trained.args.output_dir) == trained.group_report()
    steps = [entry["step"] for entry in back.history if any(name.startswith("group_weight/") for name in entry)]
    assert steps == [1, 2, 3, 4], "weights of every step, although the run logs every 500"


def test_weights_of_another_run_in_the_folder_are_not_taken_for_this_ones(
    trained: GroupRobustTrainer, tmp_path: Path
) -> None:
    history = Path(trained.args.output_dir) / HISTORY_FILE
    (tmp_path / HISTORY_FILE).write_bytes(history.read_bytes())
    erm = build_trainer(tmp_path, {"objective": "erm", "step_size": None})
    erm.train()
    assert not [name for entry in erm.run_record().history for name in entry if name.startswith("group_weight/")]


def test_the_settings_start_an_equal_run(tmp_path: Path) -> None:
    odd = {"warmup_steps": 1, "lr_scheduler_type": "cosine", "optim": "sgd", "seed": 3, "max_grad_norm": 0.5}
    first = build_trainer(tmp_path / "one", {**odd, "adjustment": 1.0, "objective": "group_dro", "step_size": 0.3})
    first.train()
    first.create_model_card()
    text = (tmp_path / "one" / "group_settings.yaml").read_text(encoding="utf-8")
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    for content in (yaml.safe_load(text), json.loads(json.dumps(yaml.safe_load(text)))):
        config = GroupRobustConfig(str(tmp_path / "two"), **quiet, **content)
        second = GroupRobustTrainer(
            model=tiny_distilbert(), args=config, train_dataset=named_groups(), eval_dataset=named_groups(seed=1)
        )
        second.train()
        assert torch.equal(parameters_of(first.model), parameters_of(second.model))
        assert torch.equal(first.group_weights, second.group_weights)


def test_an_objective_given_as_an_object_is_in_the_settings(tmp_path: Path) -> None:
    config = GroupRobustConfig(str(tmp_path), use_cpu=True, report_to=[])
    trainer = GroupRobustTrainer(
        model=tiny_distilbert(), args=config, train_dataset=named_groups(), objective=CGD(step_size=0.125),
        group_column="group",
    )  # fmt: skip
    settings = trainer.run_record().settings
    assert (settings["objective"], settings["step_size"], settings["group_column"]) == ("cgd", 0.125, ["group"])


def test_a_folder_of_an_older_version_has_reports_only(tmp_path: Path) -> None:
    report = {"objective": "cgd", "overall": {"accuracy": 0.5}, "groups": [{"name": "a", "accuracy": 0.5}]}
    (tmp_path / "group_report.json").write_text(json.dumps({"validation": report, "test": report}))
    record = load_run(tmp_path)
    assert record.objective_name == "cgd" and set(record.reports) == {"validation", "test"}
    assert write_card(record, tmp_path / "card", draw=False)[0].exists()
    with pytest.raises(ValueError, match="has no report of 'train'; it has"):
        hf_cgd.load_report(tmp_path, "train")


@pytest.mark.parametrize(
    ("content", "words"), [("{", "is not JSON"), ('{"a": 1}', "Expected a report"), (None, "holds no")]
)
def test_what_is_no_report_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "group_report.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        hf_cgd.load_report(tmp_path)


def test_a_place_that_is_neither_folder_nor_repository_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="^outputs-of-nothing: expected the folder of a run"):
        hf_cgd.load_report("outputs-of-nothing")


# ---- Other models -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    Version(version("timm")) < Version("1.0.31"), reason="of a folder, older versions take another file for weights"
)
def test_a_timm_network_is_loaded_by_timm(tmp_path: Path) -> None:
    import timm
    from tiny import image_dataset

    model = timm.create_model("test_resnet", pretrained=False, num_classes=2)
    trainer = build_trainer(
        tmp_path / "out", model=model, train_dataset=image_dataset(8), eval_dataset=image_dataset(8),
    )  # fmt: skip
    trainer.save_model()
    trainer.create_model_card()
    card = card_of(trainer)
    assert card.data.library_name == "timm" and "timm.create_model" in card.text
    loaded = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    assert torch.equal(parameters_of(loaded), parameters_of(model))


def test_adapters_and_networks_of_ones_own(tmp_path: Path) -> None:
    adapted = with_lora(tiny_distilbert())
    adapted.get_base_model().config._name_or_path = "user/base"
    trainer = build_trainer(tmp_path / "lora", model=adapted)
    trainer.save_model()
    trainer.create_model_card()
    data = card_of(trainer).data
    assert (data.library_name, data.base_model) == ("peft", "user/base")

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Embedding(64, 4), nn.Linear(4, 2))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.layers(input_ids).mean(dim=1)

    own = build_trainer(tmp_path / "own", {"objective": "group_dro"}, model=Own())
    own.evaluate()
    own.create_model_card()
    card = card_of(own)
    assert card_errors(str(card)) == [] and card.data.eval_results is None, (
        "no task is known, so no result is complete"
    )
    own.create_model_card(tasks="text-classification")
    assert card_of(own).data.eval_results


# ---- Words ------------------------------------------------------------------------------------------------------------


def test_every_objective_is_explained() -> None:
    for name, kind in OBJECTIVES.items():
        told = explained(kind().identity())
        assert told.loss and told.words.endswith("."), name
        assert (told.weights is None) == (not kind.has_weights), name
    assert "langle" in str(explained(CGD(scaling="gradient").identity()).weights)


@pytest.mark.parametrize("objective", ["cgd", "erm"])
def test_a_model_of_an_earlier_step_stands_beside_the_weights_of_then(tmp_path: Path, objective: str) -> None:
    """The first evaluation is the best one; weights of that step are in the log, those of the last step others."""
    knobs = {"step_size": 0.5} if objective == "cgd" else {"step_size": None}
    options = dict(objective=objective, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
                   logging_steps=1, metric_for_best_model="sank", load_best_model_at_end=True, **knobs)  # fmt: skip
    numbers = iter(range(9, 0, -1))
    options |= {"greater_is_better": True}
    trainer = build_trainer(tmp_path, options, compute_metrics=lambda _: {"sank": float(next(numbers))})
    trainer.train()
    report = trainer.group_report()
    logged = {log["step"]: log for log in trainer.state.log_history if f"group_weight/{NAMES[0]}" in log}
    trainer.create_model_card()
    record, text = load_run(tmp_path), card_of(trainer).text
    assert (record.kept_step, record.steps) == (1, 4)
    assert "The model, and its group weights, are those of step 1 of 4, not of the last." in text
    if objective == "erm":
        assert report.weights_step is None and record.weights == {}
        return
    then = {name: logged[1][f"group_weight/{name}"] for name in NAMES}
    assert then != {name: logged[4][f"group_weight/{name}"] for name in NAMES}
    assert {row.name: row.weight for row in report.rows} == record.weights == then and report.weights_step == 1
    assert "(weights after step 1)" in str(report) and "Weights are those after optimizer step 1." in text
    assert trainer.group_weights is not None and trainer.group_weights.tolist() != list(then.values())
    # A run that keeps its last model has no such step.
    trainer.args.load_best_model_at_end = False
    numbers = iter(range(9, 0, -1))
    trainer.train()
    assert trainer.group_report().weights_step == 4 and trainer.run_record().kept_step is None


def test_limits_in_words() -> None:
    rows = (
        GroupRow("a", count=50, accuracy=0.8, accuracy_low=0.67, accuracy_high=0.89),
        GroupRow("b", count=5000, accuracy=0.85, accuracy_low=0.84, accuracy_high=0.86),
        GroupRow("c"),
    )
    report = GroupReport(rows, {"accuracy": 0.85}, "cgd")
    told = " ".join(limits(RunRecord("m", reports={"validation": report}, training={"load_best_model_at_end": True})))
    assert 'fewer than 100 examples were evaluated of "a";' in told and 'no examples were evaluated of "c".' in told
    assert "overlap: the gap may be chance" in told and "chosen among several by its numbers" in told
    for step, told_of in ((3, True), (4, False)):
        assert any("not of the last" in one for one in limits(RunRecord("m", kept_step=step, steps=4))) == told_of
    alike = replace(report, rows=(rows[1], replace(rows[1], name="d")))
    assert headline(alike) == "All groups that were evaluated have the same accuracy, 0.850."
    assert limits(RunRecord("m", reports={"validation": alike})) == limits(RunRecord("m", reports={"x": alike}))[-1:]
    apart = replace(report, rows=(replace(rows[0], count=1000, accuracy_low=0.774, accuracy_high=0.824), rows[1]))
    assert limits(RunRecord("m", reports={"validation": apart})) == limits(RunRecord("m", reports={"x": apart}))[-1:]


def rows_with_intervals(*rights: tuple[int, int]) -> tuple[GroupRow, ...]:
    made = []
    for number, (right, count) in enumerate(rights):
        low, high = wilson_interval(right, count)
        made.append(GroupRow(f"g{number}", count=count, accuracy=right / count, accuracy_low=low, accuracy_high=high))
    return tuple(made)


def told_of(*rows: GroupRow, **overall: float) -> str:
    return " ".join(limits(RunRecord("m", reports={"test": GroupReport(rows, overall, "cgd")})))


def test_the_worst_of_several_groups_is_not_judged_by_an_interval_of_one() -> None:
    two = told_of(*rows_with_intervals((300, 400), (360, 400)))
    assert "overlap" not in two and "by chance alone" not in two
    # Of 20 groups these extremes are no rarity, although their 95 % intervals are apart.
    many = rows_with_intervals((300, 400), *[(325, 400)] * 18, (340, 400))
    assert many[0].accuracy_high < many[-1].accuracy_low
    told = told_of(*many)
    assert "overlap: the gap may be chance" in told and "the worst of 20 groups" in told
    low, high = wilson_interval(300, 400, 1 - 0.05 / 20)
    assert f"makes up for the choice: {low:.3f} to {high:.3f}." in told and low < many[0].accuracy_low


def test_how_often_the_interval_of_the_worst_group_holds_its_accuracy() -> None:
    """Of 20 groups of accuracy .8 that of 95 % does in half of the samples, the one that cards name in nearly all."""
    draw, held = np.random.default_rng(0), []
    for _ in range(200):
        rows = rows_with_intervals(*[(int(right), 200) for right in draw.binomial(200, 0.8, 20)])
        bounds = re.search(r"for the choice: (\S+) to (\S+)\.", told_of(*rows))
        assert bounds is not None
        worst = min(rows, key=lambda row: row.accuracy)
        held.append([low <= 0.8 <= high for low, high in (map(float, bounds.groups()), worst.interval("accuracy"))])
    wide, usual = np.mean(held, axis=0)
    assert wide > 0.93 and usual < 0.7


def test_numbers_without_intervals_are_not_said_to_have_some() -> None:
    told = told_of(GroupRow("a", count=9, pearson=0.2), GroupRow("b", count=900, pearson=0.9))
    assert "there are no intervals of these" in told and "without intervals of the pearson" in told
    three = told_of(
        *(GroupRow(name, count=900, pearson=value) for name, value in (("a", 0.2), ("b", 0.3), ("c", 0.9)))
    )
    assert "by chance alone. " in three and "its interval" not in three
    assert "is not finite" not in told and "mean loss is not finite" in told_of(GroupRow("a"), loss=float("nan"))


def test_a_group_may_be_called_like_a_metric() -> None:
    history = [{"step": 3, "eval_group_accuracy/one_class_predicted": 0.8}]
    assert not gives_one_class(history, 3) and gives_one_class([{"step": 3, "eval_one_class_predicted": 1.0}], 3)


def test_a_comma_in_a_name_does_not_end_it() -> None:
    rows = [GroupRow(name, count=5, accuracy=value) for name, value in (("Bern, old", 0.5), ("Oslo", 0.5), ("x", 1.0))]
    report = GroupReport(tuple(rows), {}, "cgd")
    assert 'The worst group is "Bern, old" (and 1 more' in headline(report)
    record = RunRecord("m", reports={"test": report}, model=ModelFacts(labels=("good, kind", "bad")))
    assert 'were evaluated of "Bern, old", "Oslo", "x";' in " ".join(limits(record))
    assert 'in the order of the outputs: "good, kind", "bad".' in model_card(record, card_data(record))


def test_the_set_that_a_model_was_chosen_on_is_said_to_flatter() -> None:
    report = GroupReport((GroupRow("a", count=500, accuracy=0.8),), {"accuracy": 0.8}, "cgd")
    sets = {"a": report, "a_b": report, "test": report}

    def told(reports: dict[str, GroupReport], wanted: str | None) -> str:
        training = {"load_best_model_at_end": True, "metric_for_best_model": wanted}
        return " ".join(limits(RunRecord("m", reports=reports, training=training)))

    assert "by its numbers on the a_b set" in told(sets, "eval_a_b_worst_group_accuracy")
    assert "by its numbers on the a set" in told(sets, "a_worst_group_accuracy")
    assert "by its numbers on the validation set" in told({"validation": report, "test": report}, "accuracy")
    assert "chosen among" not in told({"test": report}, "worst_group_accuracy")


@pytest.mark.parametrize(("every", "compared"), [(4, 1), (2, 2), (1, 4)])
def test_a_model_was_chosen_among_as_many_as_were_evaluated(tmp_path: Path, every: int, compared: int) -> None:
    """Four steps, evaluated after some of them; the evaluation of the model that is kept is no further choice."""
    options = dict(eval_strategy="steps", eval_steps=every, save_strategy="steps", save_steps=every,
                   metric_for_best_model="worst_group_accuracy", load_best_model_at_end=True)  # fmt: skip
    trainer = build_trainer(tmp_path, options)
    trainer.train()
    assert trainer.state.global_step == 4
    trainer.evaluate()
    trainer.create_model_card()
    record, text = load_run(tmp_path), card_of(trainer).text
    assert record.compared == compared
    assert ("chosen among" in text) == (compared > 1)
    assert f"chosen among {compared} by its numbers on the validation set" in text or compared == 1
    # Nobody knows of a run whose record is older.
    assert "chosen among several by" in " ".join(limits(replace(record, compared=None)))


def test_groups_without_a_finite_value_leave_the_worst_open() -> None:
    rows = (GroupRow("a", count=500, pearson=0.8), GroupRow("b", count=500), GroupRow("c"))
    report = GroupReport(rows, {"pearson": 0.7}, "erm")
    assert headline(report) == 'The worst group is not known: no finite pearson of "b".'
    known = replace(report, overall={"pearson": 0.7, "worst_group_pearson": 0.8})
    assert headline(known).startswith('The worst group is "a": pearson 0.800')


def test_two_sets_of_one_name_are_told_apart(trained: GroupRobustTrainer) -> None:
    data = trained.eval_dataset
    for size, prefix in ((8, "eval_test"), (16, "test")):
        trained.predict(data.select(range(size)), metric_key_prefix=prefix)
    reports = trained.run_record().reports
    assert [sum(row.count or 0 for row in reports[name].rows) for name in ("eval_test", "test")] == [8, 16]
    trained.group_evaluation._forget(["eval_test", "test"])


def test_of_perplexities_the_worst_is_the_highest() -> None:
    rows = [
        GroupRow(name, count=500, others={"perplexity": value}, intervals={"perplexity": (value - 1, value + 1)})
        for name, value in (("a", 20.0), ("b", 9.0), ("c", 14.0))
    ]
    report = GroupReport((*rows, GroupRow("d", count=500)), {"perplexity": 14.0}, "erm")
    assert [row.name for row in report.ranked] == ["a", "c", "b", "d"]
    assert "overlap" not in " ".join(limits(RunRecord("m", reports={"test": report})))
    near = replace(report, rows=(rows[0], replace(rows[1], intervals={"perplexity": (8.0, 19.5)})))
    assert "overlap: the gap may be chance" in " ".join(limits(RunRecord("m", reports={"test": near})))


def test_only_evaluated_models_have_cards_too(tmp_path: Path) -> None:
    rows = (GroupRow("a", count=200, accuracy=0.8), GroupRow("b", count=200, accuracy=0.6))
    report = GroupReport(rows, {"accuracy": 0.7, "worst_group_accuracy": 0.6}, "")
    record = RunRecord(
        "model", None, groups=GroupInfo(("a", "b")), reports={"test": report},
        model=ModelFacts("SomeModel", "transformers", "image-classification", "user/model"),
        data=DataFacts(["user/data"], "Data", "plain", {"test": "test[:400]"}),
    )  # fmt: skip
    card, *_ = write_card(record, tmp_path, draw=False)
    text = card.read_text(encoding="utf-8")
    assert card_errors(text) == [] and "how it was trained is not known here" in text and "## Objective" not in text
    result = ModelCard(text).data.eval_results[0]
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("user/data", "plain", "test[:400]")


class OwnClassifier(tf.DistilBertForSequenceClassification):
    """A class that no Auto class knows."""


def with_adapter(folder: Path) -> nn.Module:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)).save_pretrained(folder / "base")
    base = tf.GPT2LMHeadModel.from_pretrained(folder / "base")
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    return with_adapters_at_work(get_peft_model(base, config), std=0.1)


BERT = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
GPT2 = dict(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2)
LOADED: dict[str, tuple[str, Any]] = {
    "tokens": ("AutoModelForTokenClassification", lambda: tf.BertForTokenClassification(tf.BertConfig(**BERT))),
    "answers": ("AutoModelForQuestionAnswering", lambda: tf.BertForQuestionAnswering(tf.BertConfig(**BERT))),
    "words": ("AutoModelForCausalLM", lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2))),
    "hidden words": ("BertForMaskedLM", lambda: tf.BertForMaskedLM(tf.BertConfig(**BERT))),
    "choices": ("BertForMultipleChoice", lambda: tf.BertForMultipleChoice(tf.BertConfig(**BERT))),
    "own": ("OwnClassifier", lambda: OwnClassifier(tiny_distilbert().config)),
    "adapter": ("AutoPeftModelForCausalLM", None),
}


@pytest.mark.parametrize("name", LOADED)
def test_what_a_card_says_loads_the_model_with_its_head(tmp_path: Path, name: str) -> None:
    loader, build = LOADED[name]
    model = with_adapter(tmp_path) if build is None else build()
    model.save_pretrained(tmp_path)
    record = RunRecord("m", model=model_facts(model))
    text = model_card(record, card_data(record), repo_id=str(tmp_path))
    code = text.split("```python\n")[1].split("```")[0]
    lines = [line for line in code.splitlines() if not line.startswith("inputs = ")]
    assert f"model = {loader}.from_pretrained(" in code and record.model.task is not None
    found: dict[str, Any] = {}
    exec("\n".join(lines), found)
    assert torch.equal(parameters_of(found["model"]), parameters_of(model))
