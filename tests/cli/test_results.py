"""What a run leaves beside its model: answers for each row that are those of its report."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_cgd import GroupReport, GroupRobustConfig, GroupRobustTrainer
from hf_cgd.cards import RunRecord, write_card
from hf_cgd.cli.comparison import write_comparison
from hf_cgd.cli.results import write_predictions
from hf_cgd.metrics import GroupRow


class Given(nn.Module):
    """Answers what the rows hold."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig(num_labels=3, problem_type="single_label_classification")
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, scores: Tensor) -> dict[str, Tensor]:
        return {"logits": scores + self.bias}


@pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")
def test_a_row_is_right_in_the_file_where_it_is_in_the_report(tmp_path: Path) -> None:
    """A score of -inf rules a class out; one that is NaN is no answer."""
    scores = [[-math.inf, 2.0, 1.0], [math.nan, 2.0, 1.0], [3.0, -math.inf, -math.inf], [0.0, 1.0, math.inf]]
    rows = Dataset.from_dict({"scores": scores, "labels": [1, 1, 0, 1], "group": ["a", "a", "b", "b"]})
    config = GroupRobustConfig(str(tmp_path), objective="erm", group_column="group", use_cpu=True, report_to=[])
    trainer = GroupRobustTrainer(model=Given(), args=config, eval_dataset=rows)
    output = trainer.predict(rows)
    answers = pd.read_csv(write_predictions(trainer, rows, "test", output), keep_default_na=False)
    assert list(answers["prediction"].astype(str)) == ["1", "", "0", "2"]
    assert list(answers["correct"]) == [True, False, True, False]
    report = {row.name: row.accuracy for row in trainer.group_report("test").rows}
    assert answers.groupby("group")["correct"].mean().to_dict() == report == {"a": 0.5, "b": 0.5}


def test_gaps_that_are_compared_are_of_one_metric(tmp_path: Path) -> None:
    """A run whose groups have no correlation has no gap, and not that of another number."""
    told = {"one": (0.5, 0.75), "two": (None, None)}
    for name, values in told.items():
        rows = tuple(
            GroupRow(group, count=9, pearson=value, others={"risk": place / 4})
            for place, (group, value) in enumerate(zip("ab", values, strict=True))
        )
        record = RunRecord(name, {"name": "erm", "knobs": {}}, reports={"test": GroupReport(rows, {}, "erm")})
        write_card(record, tmp_path / name, draw=False)
    text = write_comparison([tmp_path / name for name in told], tmp_path, pictures=False)
    (line,) = (line for line in text.splitlines() if line.startswith("gap between groups"))
    assert line.split()[3:] == ["0.250"]
