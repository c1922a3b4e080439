"""Each recipe from its command line to its report, on made data, offline, for two or three steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from made_files import nli_rows, write_images, write_jsonl, write_mnist, write_table
from paths import RECIPES
from PIL import Image
from programs import run
from recipe_parts import recipe_parts
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTImageProcessor,
)

from hf_cgd.cli import image_classifier, parse_command_line, text_classifier
from hf_cgd.tasks import TASKS, multinli

TASK_RECIPES = [f"{name}_cgd" for name in TASKS if name != "mnist_settings"]
NAMES = [*TASK_RECIPES, "mnist_settings", "text_classification", "image_classification"]

# Two steps teach nothing, and a warning says so.
pytestmark = pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")

Recipe = Callable[..., Any]


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "group_report.json").read_text(encoding="utf-8"))


# ---- The command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_options_and_the_recipe_s_defaults(name: str, recipe: Recipe, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        recipe(name, "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    assert (
        "--objective OBJECTIVE What is minimised" in shown
        and "erm, erm_uw, group_dro, cgd" in shown
        and "--step_size" in shown
        and "--model" in shown
    )
    metric = TASKS[name.removesuffix("_cgd")]().info.metric if name in TASK_RECIPES else "worst_group_accuracy"
    assert f"(default: {metric})" in shown


@pytest.mark.parametrize("name", NAMES)
def test_recipes_are_short(name: str) -> None:
    assert len((RECIPES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize("path", sorted((RECIPES / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_example_configs_hold_known_options(path: Path) -> None:
    name = next(name for name in NAMES if path.stem.removesuffix("_paper") in name)
    options, defaults, _ = recipe_parts(RECIPES / f"{name}.py")
    own, config = parse_command_line(options, defaults, [str(path), "--use_cpu"])
    for option, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        assert str(getattr(config, option, getattr(own, option, None))) in (str(value), str(_number(value))), option


def _number(value: Any) -> Any:
    # YAML reads 5e-5 as a string, the command line as a number.
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def test_script_without_data_ends_with_three_lines(tmp_path: Path) -> None:
    """As a program: no traceback, exit code 1."""
    _, error = run(RECIPES / "multinli_cgd.py", "--output_dir", tmp_path, "--use_cpu", cwd=tmp_path, code=1)
    lines = error.strip().splitlines()
    assert lines[-3].startswith("Expected to load 'nyu-mll/multi_nli'") and "--data_dir" in lines[-1], error
    assert "--demo" in lines[-1] and "source" not in lines[-1]
    assert "Traceback" not in error


# ---- MultiNLI -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["erm", "cgd"])
def test_multinli_demo(objective: str, recipe: Recipe, tmp_path: Path, capsys: Any) -> None:
    trainer = recipe("multinli_cgd", "--demo", "--objective", objective)
    assert trainer.state.global_step == 2
    groups = [f"label:{label} negation:{negation}" for label in multinli.LABELS for negation in ("no", "yes")]
    report = report_of(tmp_path)
    for split in ("validation", "test"):
        assert [row["name"] for row in report[split]["groups"]] == groups
    assert f"objective: {objective}" in capsys.readouterr().out
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert saved.config.id2label == dict(enumerate(multinli.LABELS))


def test_multinli_local_files_and_yaml(recipe: Recipe, tmp_path: Path, text_model: Path) -> None:
    hypotheses = ["the man never sleeps", "the man sleeps"] * 12
    for name in multinli.FILES:
        write_jsonl(tmp_path / f"{name}.jsonl", nli_rows(hypotheses, [0, 0, 1, 1, 2, 2] * 4))
    config = {
        "data_dir": str(tmp_path),
        "model": str(text_model),
        "objective": "group_dro",
        "preset": "paper",
        "split": "genres",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, "group_column": "negation", "eval_strategy": "no"}))
    trainer = recipe("multinli_cgd", tmp_path / "run.yaml", "--load_best_model_at_end", "false")
    assert trainer.groups.names == ("no", "yes") and trainer.groups.counts == (12, 12)
    assert type(trainer.optimizer.optimizer).__name__ == "SGD"
    assert ", trained on multinli with hf_cgd" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


# ---- Colored-MNIST --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ([], ["majority", "minority"]),
        (["--group_column", "label", "group"], [f"label:{d} group:{g}" for d in ("5-9", "0-4") for g in ("majority", "minority")]),
        (["--legacy", "--objective", "group_dro"], ["majority", "minority"]),
    ],
)  # fmt: skip
def test_colored_mnist(options: list[str], groups: list[str], recipe: Recipe, tmp_path: Path) -> None:
    folder = write_mnist(tmp_path, ".gz", train=80, test=20)
    size = ["--data_dir", folder, "--ratio", 3, "--train_size", 60, "--validation_size", 20, "--model", "resnet10t"]
    trainer = recipe("colored_mnist_cgd", *size, "--per_device_train_batch_size", 16, *options)
    assert trainer.state.global_step == 2 and trainer.args.optim_args == "momentum=0.9"
    assert sum(trainer.groups.counts) == 60
    assert [row["name"] for row in report_of(tmp_path)["test"]["groups"]] == groups


def test_colored_mnist_of_too_few_images(recipe: Recipe, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    with pytest.raises(SystemExit, match="50 training images at 1000 to 1 leave 0 in the minority group"):
        recipe("colored_mnist_cgd", "--data_dir", tmp_path, "--validation_size", 10)


# ---- A user's own data ----------------------------------------------------------------------------------------------


def text_rows(label: str = "mood") -> dict[str, list[Any]]:
    return {
        "sentence": ["the man sleeps", "the cat wakes", "the man never wakes", "the cat at no time sleeps"] * 15,
        label: ["sad", "glad"] * 30,
        "place": (["hall"] * 2 + ["street"] * 2) * 15,
    }


def test_text_classification_of_one_csv(recipe: Recipe, tmp_path: Path, text_model: Path, caplog: Any) -> None:
    data = write_table(tmp_path / "d.csv", text_rows())
    columns = ["--text_column", "sentence", "--label_column", "mood", "--group_column", "mood", "place"]
    with caplog.at_level("INFO"):
        trainer = recipe("text_classification", "--dataset", data, "--model", text_model, *columns)
    assert "8 of the 60 training examples" in caplog.text
    assert trainer.groups.names == tuple(f"mood:{m} place:{p}" for m in ("glad", "sad") for p in ("hall", "street"))
    assert trainer.groups.counts == (13,) * 4 and len(trainer.eval_dataset) == 8
    assert list(report_of(tmp_path)) == ["validation"]
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert saved.config.id2label == {0: "glad", 1: "sad"}
    assert text_classifier(str(tmp_path / "out"), ["glad", "sad"])[1].pad_token == "[PAD]"


def test_text_classification_of_a_folder_with_pairs(recipe: Recipe, tmp_path: Path, text_model: Path) -> None:
    for name in ("train.jsonl", "valid.parquet", "test.csv"):
        write_table(tmp_path / "data" / name, text_rows("label")) if (tmp_path / "data").mkdir(
            exist_ok=True
        ) is None else 0
    trainer = recipe(
        "text_classification", "--dataset", tmp_path / "data", "--model", text_model, "--text_column", "sentence",
        "--text_pair_column", "place", "--group_column", "place", "--objective", "group_dro", "--step_size", 0.1,
    )  # fmt: skip
    assert trainer.groups.names == ("hall", "street") and trainer.groups.counts == (30, 30)
    assert list(report_of(tmp_path)) == ["validation", "test"]
    pair = trainer.processing_class("the man sleeps", "hall")["input_ids"]
    assert trainer.train_dataset[0]["input_ids"] == pair and pair.count(3) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--dataset: expected a CSV"),
        (["--dataset", "nowhere.csv"], "there is no 'nowhere.csv'"),
        (["--dataset", "DATA"], "--text_column: expected a column 'text' in the train split"),
        (["--dataset", "DATA", "--text_column", "sentence", "--group_column", "site"], "--group_column: expected"),
        (
            ["--dataset", "DATA", "--text_column", "sentence", "--model", "no/where"],
            "(?s)--model: expected 'no/where' to be a local folder.*It failed:.*Pass the path of a local folder",
        ),
    ],
)
def test_text_classification_says_what_is_missing(
    options: list[str], message: str, recipe: Recipe, tmp_path: Path
) -> None:
    data = write_table(tmp_path / "d.csv", text_rows("label"))
    with pytest.raises(SystemExit, match=message):
        recipe("text_classification", *(str(data) if option == "DATA" else option for option in options))


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """40 images of 16 pixels in train, 8 in test, labels as strings."""
    for split, size in (("train", 40), ("test", 8)):
        names = [f"{number}.png" for number in range(size)]
        write_images(tmp_path / "images" / split, names, size=16)
        rows = {"file_name": names, "label": ["cat", "dog"] * (size // 2), "place": ["in"] * (size // 2) + ["out"] * (size // 2)}  # fmt: skip
        write_table(tmp_path / "images" / split / "metadata.csv", rows)
    return tmp_path / "images"


def test_image_classification_with_timm(recipe: Recipe, image_folder: Path, tmp_path: Path) -> None:
    trainer = recipe(
        "image_classification", "--dataset", image_folder, "--group_column", "label", "place",
        "--model", "timm/resnet10t", "--pretrained", "false", "--image_size", 32,
    )  # fmt: skip
    assert trainer.groups.names == tuple(f"label:{a} place:{b}" for a in ("cat", "dog") for b in ("in", "out"))
    assert trainer.groups.counts == (9, 9, 9, 9)
    assert list(report_of(tmp_path)) == ["validation", "test"]
    saved = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert saved.config.id2label == {0: "cat", 1: "dog"}
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    image = Image.new("RGB", (16, 16))
    assert processor(image, return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)
    again, _ = image_classifier(str(tmp_path / "out"), ["cat", "dog"])
    assert torch.equal(again.timm_model.fc.weight, trainer.model.timm_model.fc.weight.cpu())


def test_image_classification_with_transformers_and_a_table(recipe: Recipe, tmp_path: Path) -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=5)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    names = [f"img/{number}.png" for number in range(20)]
    write_images(tmp_path, names)
    rows = {"file": names, "sick": [False, True] * 10, "hospital": [0] * 10 + [1] * 10}
    data = write_table(tmp_path / "d.csv", rows)
    trainer = recipe(
        "image_classification", "--dataset", data, "--image_column", "file", "--label_column", "sick",
        "--group_column", "hospital", "--model", tmp_path / "model", "--objective", "group_dro",
    )  # fmt: skip
    assert trainer.groups.names == ("0", "1") and trainer.model.config.num_labels == 2
    with pytest.raises(SystemExit, match="remove input_size, or name a timm architecture"):
        recipe("image_classification", "--dataset", data, "--image_column", "file", "--label_column", "sick",
               "--model", tmp_path / "model", "--image_size", 64)  # fmt: skip
    untrained, _ = image_classifier(str(tmp_path / "model"), ["a", "b", "c"], pretrained=False)
    assert untrained.config.num_labels == 3
