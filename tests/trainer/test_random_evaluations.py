"""Answers drawn by chance: what evaluations and their tables say is what numpy makes of the raw scores."""

import json
import math
import random
import re
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_cgd import GroupRobustConfig, GroupRobustTrainer, load_report
from hf_cgd.metrics.values import as_json

NAMES = ["a", "b|c", "new\nline", "<script>", "😀", "x" * 80, "1", "01", "True", "a:b", "x_runtime", "a/b", "$y$",
         "one_class_predicted", "y_low", "مرحبا"]  # fmt: skip
KINDS = {"classes": "single_label_classification", "labels": "multi_label_classification", "values": "regression"}
Rows = tuple[np.ndarray, np.ndarray, list[list[str]], Dataset]


class Given(nn.Module):
    """Answers what the rows hold."""

    def __init__(self, kind: str, outputs: int, precision: torch.dtype) -> None:
        super().__init__()
        self.config = PretrainedConfig(num_labels=outputs, problem_type=KINDS[kind])
        self.bias, self.precision = nn.Parameter(torch.zeros(1)), precision

    def forward(self, scores: Tensor) -> dict[str, Tensor]:
        return {"logits": (scores + self.bias).to(self.precision)}


def rows_of(draw: random.Random, kind: str, outputs: int, form: str, size: int, spoilt: float | None) -> Rows:
    """Scores, targets, the groups of each row, and the data set of these."""
    numbers = np.random.default_rng(draw.randrange(10**6))
    scores = (numbers.normal(size=(size, outputs)) * draw.choice([1, 5, 50])).astype(np.float32)
    if kind == "classes":
        targets = draw.choice([numbers.integers(0, outputs, size), scores.argmax(1), np.zeros(size, dtype=int)])
        targets = np.where(numbers.random(size) < draw.choice([0, 0.3]), -100, targets)
    elif kind == "labels":
        targets = draw.choice([numbers.integers(0, 2, (size, outputs)), scores > 0]).astype(np.float32)
    else:
        targets = (numbers.normal(size=(size, outputs)) + scores).astype(np.float32)
        scores = np.ones_like(scores) if draw.random() < 0.2 else scores
        targets = targets[:, 0] if outputs == 1 else targets
    if spoilt is not None:
        scores[numbers.random(scores.shape) < 0.1] = spoilt
    names = [NAMES[place] for place in numbers.integers(0, draw.choice([1, 3, len(NAMES)]), size)]
    columns: dict[str, Any] = {"scores": scores.tolist(), "labels": targets.tolist(), "name": names}
    groups = [[name] for name in names]
    if form == "crossed":
        columns["side"] = numbers.integers(0, 2, size).tolist()
        groups = [[f"name:{name} side:{side}"] for name, side in zip(names, columns["side"], strict=True)]
    if form == "overlapping":
        columns |= {"s": numbers.integers(0, 2, size).tolist(), "t": numbers.integers(0, 2, size).tolist()}
        groups = [[one for one in "st" if columns[one][row]] for row in range(size)]
    return scores, targets, groups, Dataset.from_dict(columns)


def wilson(right: float, total: int) -> tuple[float, float]:
    z, share = 1.959963984540054, right / total
    middle = share + z**2 / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return (middle - half) / (1 + z**2 / total), (middle + half) / (1 + z**2 / total)


def pearson(given: np.ndarray, true: np.ndarray) -> float:
    given, true = (values.reshape(len(values), -1).astype(float) for values in (given, true))
    if len(given) < 2 or not np.isfinite(given).all() or (np.ptp(given, 0) == 0).any() or (np.ptp(true, 0) == 0).any():
        return math.nan
    return float(np.mean([np.corrcoef(x, y)[0, 1] for x, y in zip(given.T, true.T, strict=True)]))


@np.errstate(all="ignore")
def expected(
    kind: str, scores: np.ndarray, targets: np.ndarray, groups: list[list[str]], trained: dict[str, int] | None
) -> dict[str, float]:
    """All metrics, from the definitions."""
    labelled = targets != -100 if kind == "classes" else np.ones(len(targets), dtype=bool)
    if kind == "classes":
        answers = np.where(np.isnan(scores).any(1), -1, scores.argmax(1))
        highest = scores.max(1, keepdims=True)
        own = scores[np.arange(len(scores)), np.where(labelled, targets, 0)]
        losses = np.log(np.exp(scores - highest).sum(1)) + highest[:, 0] - own
        right = answers == targets
    elif kind == "labels":
        answers = np.where(np.isnan(scores), -1, scores > 0)
        losses = (np.maximum(scores, 0) - scores * targets + np.log1p(np.exp(-np.abs(scores)))).mean(1)
        right = (answers == targets).all(1)
    else:
        answers = scores[:, 0] if targets.ndim == 1 else scores
        losses = ((answers - targets) ** 2).reshape(len(targets), -1).mean(1)
    members = {
        name: [row for row, own in enumerate(groups) if name in own and labelled[row]] for name in chain(*groups)
    }
    members = {name: rows for name, rows in members.items() if rows}
    found = {"loss": losses[labelled].mean() if labelled.any() else math.nan}
    if kind == "values":
        found |= {"mse": ((answers - targets) ** 2).mean(), "pearson": pearson(answers, targets)}
        of_groups = {name: pearson(answers[rows], targets[rows]) for name, rows in members.items()}
        found |= {f"group_pearson/{name}": value for name, value in of_groups.items()}
        failed = [
            name for name, rows in members.items()
            if math.isnan(of_groups[name]) and len(rows) > 1 and (np.ptp(targets[rows], axis=0) > 0).all()
        ]  # fmt: skip
        defined = [value for value in of_groups.values() if not math.isnan(value)]
        if defined and not failed and np.isfinite(answers).all():
            found["worst_group_pearson"] = min(defined)
    else:
        found["accuracy"] = right[labelled].mean() if labelled.any() else math.nan
        shares = {name: float(np.mean(right[rows])) for name, rows in members.items()}
        if members:
            found |= {"worst_group_accuracy": min(shares.values()), "mean_group_accuracy": np.mean([*shares.values()])}
        if members and labelled.sum() > 1:
            given, true = (len({str(value) for value in part[labelled]}) for part in (answers, targets))
            found["one_class_predicted"] = float(given == 1 < true)
        if trained and set(trained) <= set(shares):
            found["adjusted_accuracy"] = sum(shares[n] * count for n, count in trained.items()) / sum(trained.values())
        for name, rows in members.items():
            low, high = wilson(right[rows].sum(), len(rows))
            found |= {f"group_accuracy/{name}": shares[name], f"group_accuracy_low/{name}": low,
                      f"group_accuracy_high/{name}": high}  # fmt: skip
    means = {name: losses[rows].mean() for name, rows in members.items()}
    found |= {f"group_loss/{name}": mean for name, mean in means.items()}
    found |= {f"group_count/{name}": float(len(rows)) for name, rows in members.items()}
    if means:
        found["worst_group_loss"] = np.max([*means.values()])
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def is_true(text: str, value: float | None) -> bool:
    """Whether a cell says what the number is, a perfect one of perfect ones alone."""
    if value is None or text in ("", "n/a"):
        return value is None and text in ("", "n/a")
    bound = float(text.strip("<>"))
    if text[0] in "<>":
        return 0 < value < bound if text[0] == "<" else bound < value < 1 + 1e-9
    return abs(bound - value) <= 0.00051 + 1e-5 * abs(value) and (
        bound not in (0, 1) or abs(value) >= 1 or value < 1e-8
    )


@pytest.mark.parametrize("seed", range(24))
def test_evaluations_and_tables_are_those_of_the_raw_scores(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    kind, form = draw.choice([*KINDS]), draw.choice(["plain", "crossed", "overlapping"])
    outputs = draw.choice([1, 2] if kind == "values" else [2, 4])
    precision = draw.choice([torch.float32, torch.float16, torch.bfloat16])
    spoilt = draw.choice([None, None, math.nan, math.inf, -math.inf])
    sets = {name: rows_of(draw, kind, outputs, form, draw.choice([2, 7, 40]), spoilt) for name in ("b", "b_low")}
    _, targets, trained, train = rows_of(draw, kind, outputs, form, 60, None)
    kept = [row for row in range(60) if kind != "classes" or targets[row] != -100]
    counts = None if form == "overlapping" else {name: 0 for row in kept for name in trained[row]}
    for row in kept if counts is not None else ():
        counts[trained[row][0]] += 1
    options: dict[str, Any] = {
        "objective": "erm", "use_cpu": True, "report_to": [],
        "group_column": ["name", "side"] if form == "crossed" else "name",
        "eval_group_column": ["s", "t"] if form == "overlapping" else None,
        "per_device_eval_batch_size": draw.choice([1, 3, 64]), "eval_accumulation_steps": draw.choice([None, 1]),
    }  # fmt: skip
    with warnings.catch_warnings():
        # Of groups that look alike, are small or missing, and of what is not finite.
        warnings.simplefilter("ignore")
        trainer = GroupRobustTrainer(
            model=Given(kind, outputs, precision), args=GroupRobustConfig(str(tmp_path), **options),
            train_dataset=train.select(kept), eval_dataset={name: parts[3] for name, parts in sets.items()},
        )  # fmt: skip
        metrics = trainer.evaluate()
        trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    for name, (scores, targets, groups, _) in sets.items():
        seen = torch.tensor(scores).to(precision).double().numpy()
        truth = expected(kind, seen, targets, groups, counts)
        prefix, other = f"eval_{name}_", "eval_b_low_" if name == "b" else "none"
        given = {
            key.removeprefix(prefix): value for key, value in metrics.items()
            if key.startswith(prefix) and not key.startswith(other) and not key.endswith(("_per_second", "_time"))
            and key != f"{prefix}runtime" and math.isfinite(value)
        }  # fmt: skip
        assert given == pytest.approx(truth, rel=3e-4 if kind == "values" else 3e-5, abs=1e-6)
        report = trainer.group_report(f"eval_{name}")
        metric = "pearson" if kind == "values" else "accuracy"
        found = {row.name: truth.get(f"group_{metric}/{row.name}") for row in report.rows}
        known = [value for value in found.values() if value is not None]
        tells = f"worst_group_{metric}" in truth and np.ptp(known) > 1e-9
        head, *body = report.cells()
        for row, texts in zip(report.rows, body, strict=True):
            cells = dict(zip(head, texts, strict=True))
            for column in (metric, "loss"):
                assert is_true(cells.get(column, ""), truth.get(f"group_{column}/{row.name}")), (column, cells)
            count = truth.get(f"group_count/{row.name}")
            assert cells.get("eval", "") == ("" if count is None else f"{count:.0f}")
            is_worst = tells and found[row.name] is not None and found[row.name] <= min(known) + 1e-9
            assert cells["group"].endswith(" (worst)") == is_worst
            if cells.get("95 % interval"):
                bounds = cells["95 % interval"].split("-")
                for bound, text in zip(("low", "high"), bounds, strict=True):
                    assert is_true(text, truth[f"group_accuracy_{bound}/{row.name}"])
        back = load_report(tmp_path, name)
        assert str(back) == str(report) and as_json(back.to_dict()) == as_json(report.to_dict())
        part = re.split(r"^## How the groups fare: ", card, flags=re.MULTILINE)[1 + list(sets).index(name)]
        for title, key in (("Worst group", "worst_group_accuracy"), (r"Mean loss[^|]*", "loss")):
            (text,) = re.findall(rf"^\| {title} +\| +(\S+) +\|$", part, flags=re.MULTILINE) or [""]
            assert is_true(text.replace("&lt;", "<").replace("&gt;", ">"), truth.get(key))
    files = json.loads((tmp_path / "metrics.json").read_text())
    assert files["eval_b_loss"] == as_json(metrics["eval_b_loss"])
