"""The `evaluate` module: loaded from its folder, offline, with the trainer's numbers."""

from pathlib import Path
from typing import Any

import datasets
import evaluate
import numpy as np
import pytest
import yaml
from tiny import predicts_one_class

from hf_cgd import GroupRobustTrainer
from hf_cgd.metrics.evaluate_module import FOLDER, GroupAccuracy


@pytest.fixture
def metric(tmp_path: Path) -> evaluate.EvaluationModule:
    """One for each test: what is refused leaves the batches before it in the module."""
    return evaluate.load(FOLDER, cache_dir=str(tmp_path / "evaluate"))


class Errors(evaluate.Metric):
    """Another module to be combined with: the share of wrong answers."""

    def _info(self) -> evaluate.MetricInfo:
        kinds = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(kinds)
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"errors": float(np.mean(np.asarray(predictions) != np.asarray(references)))}


@predicts_one_class
def test_the_numbers_are_the_trainers(metric: Any, trainer: Any) -> None:
    from tiny import text_dataset

    run: GroupRobustTrainer = trainer(eval_dataset=text_dataset(24, seed=5))
    expected = run.evaluate()
    output = run.predict(run.eval_dataset)
    found = metric.compute(
        predictions=output.predictions.argmax(axis=1), references=output.label_ids,
        groups=[int(group) for group in run.eval_dataset["group"]],
    )  # fmt: skip
    for name, value in found.items():
        assert expected[f"eval_{name}"] == pytest.approx(value), name


@pytest.mark.parametrize("classes", [lambda value: value, "class {}".format])
@pytest.mark.parametrize("groups", [["a", "a", "b"], [3, 3, 0], ["007", "007", "7"]])
def test_classes_and_groups_are_text_or_numbers_in_batches_or_at_once(metric: Any, classes: Any, groups: Any) -> None:
    given, truth = [classes(value) for value in (0, 1, 1)], [classes(value) for value in (0, 1, 0)]
    metric.add_batch(predictions=given[:2], references=truth[:2], groups=groups[:2])
    metric.add(predictions=given[2], references=truth[2], groups=groups[2])
    found = metric.compute()
    assert found == metric.compute(predictions=given, references=truth, groups=groups)
    assert (found[f"group_accuracy/{groups[0]}"], found[f"group_accuracy/{groups[2]}"]) == (1.0, 0.0)
    assert found["accuracy"] == pytest.approx(2 / 3) and found["worst_group_accuracy"] == 0.0


def test_it_is_combined_with_others(metric: Any) -> None:
    together = evaluate.combine([metric, Errors()])
    for group in ("a", "b"):
        together.add_batch(predictions=[0, 1], references=[0, 0], groups=[group] * 2)
    found = together.compute()
    assert found["errors"] == 0.5 == found["worst_group_accuracy"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": None}, "groups"),
        ({"predictions": [[0.1, 0.9], [0.8, 0.2]]}, "looks like logits or probabilities"),
        ({"predictions": ["no", "yes"]}, "text and numbers are never equal"),
        ({"groups": ["a", None]}, "got None"),
        ({"groups": ["a"]}, "[Mm]ismatch in the number of"),
        ({"groups": [1.5, 1.2]}, "got the float 1.5"),
        ({"predictions": [0, None]}, "predictions is missing"),
    ],
)
def test_errors_in_words(metric: Any, changes: dict[str, Any], words: str) -> None:
    given = {"predictions": [0, 1], "references": [0, 1], "groups": ["a", "b"], **changes}
    with pytest.raises(ValueError, match=words):
        metric.compute(**{name: value for name, value in given.items() if value is not None})


@pytest.mark.parametrize(
    ("given", "words"),
    [((0.7, 1, "a"), "decimal numbers"), ((1, "1", "a"), "text and numbers"), ((1, 1, 1.5), "float"), ((1, 1, None), "None")],
)  # fmt: skip
def test_single_examples_are_checked_as_batches_are(metric: Any, given: Any, words: str) -> None:
    """Tables of whole numbers cut .7 to 0, and groups 1.5 and 1.2 to one."""
    with pytest.raises(ValueError, match=words):
        metric.add(predictions=given[0], references=given[1], groups=given[2])


def test_bools_have_the_names_that_the_trainer_gives_them(metric: Any) -> None:
    found = metric.compute(predictions=[1, 0], references=[1, 1], groups=[True, False])
    assert (found["group_accuracy/True"], found["group_accuracy/False"]) == (1.0, 0.0)


def test_the_folder_is_a_whole_module() -> None:
    folder = Path(FOLDER)
    assert (folder / f"{folder.name}.py").exists() and (folder / "app.py").exists()
    front = yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert front["sdk"] == "gradio" and front["app_file"] == "app.py" and {"evaluate", "metric"} <= set(front["tags"])
    assert "hf-cgd" in (folder / "requirements.txt").read_text().split()
    assert evaluate.load(FOLDER).name == folder.name == GroupAccuracy().name
