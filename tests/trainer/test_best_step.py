"""Which step is kept where some of them give every row the same class, and what is said of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import text_rows, tiny_distilbert
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_cgd import GroupRobustConfig, GroupRobustTrainer, GroupRobustWarning
from hf_cgd.cards import load_run
from hf_cgd.cards.words import limits
from hf_cgd.metrics.group_metrics import collapse_beside

MIXED, COLLAPSED = 100.0, 0.0


class Turns(TrainerCallback):
    """Sets the head after each step: its own weights times a number; with 0 the first class is all it answers."""

    def __init__(self, model: torch.nn.Module, factors: list[float]) -> None:
        self.own, self.factors = model.classifier.weight.detach().clone(), factors

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        factor = self.factors[state.global_step - 1]
        with torch.no_grad():
            model.classifier.weight.copy_(self.own * factor)
            model.classifier.bias.copy_(torch.tensor([0.0, 0.0] if factor else [1.0, 0.0]))


def rows_answered_wrongly(model: torch.nn.Module) -> Dataset:
    """16 rows: 3 of 4 are answered wrongly in both groups; half of the labels of each are the first class."""
    rows = text_rows(64, seed=1)
    with torch.no_grad():
        inputs = {name: torch.tensor(rows[name]) for name in ("input_ids", "attention_mask")}
        scores = model.eval()(**inputs).logits
    answers = (scores - model.classifier.bias).argmax(dim=1)
    places = [row for answer in (0, 1) for row in torch.nonzero(answers == answer).flatten()[:8].tolist()]
    assert len(places) == 16
    labels = [1 - int(answers[row]) if number % 4 else int(answers[row]) for number, row in enumerate(places)]
    return Dataset.from_dict(
        {
            **{name: [rows[name][row] for row in places] for name in ("input_ids", "attention_mask")},
            "labels": labels,
            "group": [number // 4 % 2 for number in range(16)],
        }
    )


def trained(
    folder: Path,
    factors: list[float],
    *callbacks: TrainerCallback,
    kind: type[GroupRobustTrainer] = GroupRobustTrainer,
) -> GroupRobustTrainer:
    model = tiny_distilbert()
    data = rows_answered_wrongly(model)
    config = GroupRobustConfig(
        str(folder), objective="erm", group_column="group", learning_rate=0.0, max_steps=len(factors),
        per_device_train_batch_size=4, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="worst_group_accuracy", report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = kind(
        model=model, args=config, train_dataset=data, eval_dataset=data, callbacks=[Turns(model, factors), *callbacks]
    )
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore:A single class")
def test_a_collapse_is_no_best_so_far_for_early_stopping(tmp_path: Path) -> None:
    """.5 by one class, then .25 by two, twice: the patience of one evaluation ends at the third and not the second."""
    run = trained(tmp_path, [COLLAPSED, MIXED, MIXED, MIXED, MIXED], EarlyStoppingCallback(1))
    values = [log["eval_worst_group_accuracy"] for log in run.state.log_history if "eval_accuracy" in log]
    assert values == [0.5, 0.25, 0.25] and run.state.global_step == 3
    assert run.state.best_global_step == 2 and run.state.best_metric == 0.25
    # A collapse after it is not the best one either, and nothing is said of a step that is kept for what it knows.
    run = trained(tmp_path / "after", [MIXED, COLLAPSED])
    assert run.state.best_global_step == 1 and "same class" not in " ".join(limits(run.run_record()))


class EvaluatesItself(GroupRobustTrainer):
    """Reports what a collapse and two later steps would give, without the loop of the trainer."""

    values = ((0.5, 1.0), (0.25, 0.0), (0.125, 0.0))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        value, one_class = self.values[self.state.global_step - 1]
        metrics = {"eval_worst_group_accuracy": value, collapse_beside("eval_worst_group_accuracy"): one_class}
        self.log(metrics)
        return metrics


def test_a_collapse_is_no_best_so_far_for_a_subclass_that_evaluates_itself(tmp_path: Path) -> None:
    run = trained(tmp_path, [MIXED, MIXED, MIXED], kind=EvaluatesItself)
    assert run.state.best_global_step == 2 and run.state.best_metric == 0.25


@pytest.mark.filterwarnings("ignore:A single class, ")
def test_a_kept_step_that_gives_one_class_is_said_to(tmp_path: Path) -> None:
    with pytest.warns(
        GroupRobustWarning, match=r"kept, that of step 1, gives to every .* worst_group_accuracy \(0.500\)"
    ):
        run = trained(tmp_path, [COLLAPSED, COLLAPSED])
    assert any("At that step it gave every evaluated row the same class" in one for one in limits(run.run_record()))
    # Without an evaluation of the kept model, and read back.
    run.create_model_card()
    assert any("At that step it gave every" in one for one in limits(load_run(tmp_path)))
    assert "At that step it gave every evaluated row the same class" in (tmp_path / "README.md").read_text(
        encoding="utf-8"
    )
