"""Evaluation of models of tokens: per-group numbers against the model's own, without scores being kept."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_tokens import COMMON, LONGEST, VOCABULARY, batch_of, tiny_model, token_dataset, token_rows
from transformers import BertForQuestionAnswering, default_data_collator

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.cards.pictures import figures_of


def trainer_of(output: Path, name: str, **kwargs: Any) -> GroupRobustTrainer:
    options = {"group_column": "group", "per_device_eval_batch_size": 5, **COMMON, **kwargs.pop("options", {})}
    args = GroupRobustConfig(str(output), **options)
    return GroupRobustTrainer(
        model=tiny_model(name),
        args=args,
        train_dataset=token_dataset(name),
        eval_dataset=token_dataset(name),
        **kwargs,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("name", ["gpt2", "masked", "t5"])
def test_perplexities_are_those_of_the_models_own_losses(tmp_path: Path, name: str, smoothing: float) -> None:
    trainer = trainer_of(tmp_path, name, options={"objective": "cgd", "label_smoothing_factor": smoothing})
    metrics = trainer.evaluate()
    model, rows = tiny_model(name).eval(), token_rows(name)
    for group in "abc":
        batch = batch_of([row for row in rows if row["group"] == group])
        with torch.no_grad():
            outputs = model(**batch)
        assert metrics[f"eval_group_perplexity/{group}"] == pytest.approx(math.exp(outputs.loss), rel=1e-4)
        shift = int(name == "gpt2")
        targets = batch["labels"][:, shift:]
        answers = outputs.logits.argmax(dim=-1)[:, : LONGEST - shift]
        counted = targets != -100
        accuracy = (answers == targets)[counted].float().mean().item()
        assert metrics[f"eval_group_token_accuracy/{group}"] == pytest.approx(accuracy)
    report = trainer.group_report()
    assert report.metric == "perplexity" and report.worst is not None
    assert report.overall["worst_group_perplexity"] == report.worst.value("perplexity")


def test_the_card_of_a_language_model_shows_perplexities_over_the_steps(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "gpt2", options={"eval_strategy": "steps", "eval_steps": 2, "max_steps": 6})
    trainer.train()
    trainer.evaluate()
    trainer.create_model_card()
    assert (tmp_path / "pictures/group_perplexities_validation.png").is_file()
    assert "(pictures/group_perplexities_validation.png)" in (tmp_path / "README.md").read_text(encoding="utf-8")
    (axes,) = figures_of(trainer.run_record())["group_perplexities_validation"].axes
    drawn = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry][:3]
    for group in "abc":
        expected = [[entry["step"], entry[f"eval_group_perplexity/{group}"]] for entry in logged]
        np.testing.assert_allclose(drawn[group], expected)


def test_no_scores_are_kept_unless_somebody_asks_for_them(tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def note(prediction: Any) -> dict[str, float]:
        seen.append(np.asarray(prediction.predictions).shape)
        return {}

    answers = trainer_of(tmp_path / "1", "gpt2").predict(token_dataset("gpt2"))
    assert answers.predictions.shape == (12, LONGEST) and answers.label_ids.shape == (12, LONGEST)
    trainer_of(tmp_path / "2", "gpt2", compute_metrics=note).evaluate()
    assert seen == [(12, LONGEST, VOCABULARY)]


def test_answers_have_spans_and_labels_in_the_form_of_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "answers")
    output = trainer.predict(token_dataset("answers"))
    assert isinstance(output.label_ids, tuple) and [len(part) for part in output.label_ids] == [12, 12]
    starts = [row["start_positions"] for row in token_rows("answers")]
    assert output.label_ids[0].tolist() == starts
    assert {"test_span_f1", "test_worst_group_span_exact_match"} <= set(output.metrics)
    assert "test_perplexity" not in output.metrics


class Places(BertForQuestionAnswering):
    """Takes more columns for labels; no name that tells transformers what it answers."""

    def forward(
        self, input_ids: Any, attention_mask: Any, start_positions: Any = None, end_positions: Any = None,
        cls_index: Any = None, is_impossible: Any = None,
    ) -> Any:  # fmt: skip
        return super().forward(input_ids, attention_mask, start_positions=start_positions, end_positions=end_positions)


class ForwardsOnly(GroupRobustTrainer):
    """Steps of its own, which leave the losses of examples to us, and labels in the order of `label_names`."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            found = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return None, (found.start_logits, found.end_logits), tuple(inputs[name] for name in self.label_names)


@pytest.mark.parametrize("kind", [GroupRobustTrainer, ForwardsOnly])
@pytest.mark.parametrize(
    "names",
    [
        None,
        ["start_positions", "end_positions"],
        ["end_positions", "start_positions"],
        ["is_impossible", "start_positions", "cls_index", "end_positions"],
    ],
)
def test_places_are_found_among_the_labels_by_their_names(tmp_path: Path, names: list[str] | None, kind: type) -> None:
    rows = [{**row, "cls_index": 0, "is_impossible": 1.0} for row in token_rows("answers")]
    torch.manual_seed(0)
    model = Places(tiny_model("answers").config)
    args = GroupRobustConfig(
        str(tmp_path), group_column="group", per_device_eval_batch_size=5, **{**COMMON, "label_names": names}
    )
    trainer = kind(
        model=model, args=args, train_dataset=Dataset.from_list(rows), data_collator=default_data_collator,
        eval_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    metrics = trainer.evaluate()
    for group in "abc":
        of_group = batch_of([row for row in token_rows("answers") if row["group"] == group])
        with torch.no_grad():
            assert metrics[f"eval_group_loss/{group}"] == pytest.approx(model(**of_group).loss.item(), rel=1e-5)


def test_own_metrics_see_each_label_beside_what_predicts_it(tmp_path: Path) -> None:
    def agreement(predictions: np.ndarray, labels: np.ndarray) -> float:
        counted = labels != -100
        return float((predictions == labels)[counted].mean())

    metrics = trainer_of(tmp_path, "gpt2", group_metrics={"agreement": agreement}).evaluate()
    assert metrics["eval_group_agreement/a"] == pytest.approx(metrics["eval_group_token_accuracy/a"])


def test_the_best_model_is_the_one_of_lowest_perplexity(tmp_path: Path) -> None:
    best = {
        "metric_for_best_model": "worst_group_perplexity",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 1,
    }
    assert trainer_of(tmp_path, "gpt2", options=best).args.greater_is_better is False
    with pytest.raises(ValueError, match="worst_group_accuracy' is none of the metrics"):
        trainer_of(tmp_path, "gpt2", options={**best, "metric_for_best_model": "worst_group_accuracy"})
