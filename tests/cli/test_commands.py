"""`hf-cgd` from its words to its exit code: help, mistakes, JSON that pipes, and what each command leaves."""

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from made_files import write_images, write_table
from PIL import Image
from programs import run as run_program
from scipy.stats import chi2_contingency
from timm.models import save_for_hf
from tiny import tiny_distilbert
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import hf_cgd
from hf_cgd import GroupRobustTrainer
from hf_cgd.__main__ import COMMANDS, main
from hf_cgd.cards import load_run
from hf_cgd.cli import coloured_digits
from hf_cgd.cli.command_line import RecipeConfig, read_command_line
from hf_cgd.cli.own_data import RECIPES
from hf_cgd.cli.own_data_options import GROUP_OPTIONS, KINDS, TRAINING_OPTIONS
from hf_cgd.objectives import CGD
from hf_cgd.tasks import TASKS

# Two steps teach nothing, and a warning says so.
pytestmark = pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")

Run = Callable[..., tuple[int, str, str]]
QUICK = ["--use_cpu", "--max_steps", 2, "--disable_tqdm", "true", "--save_strategy", "no", "--load_best_model_at_end", "false"]  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command: exit code, standard output, errors."""

    def call(*words: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, error = capsys.readouterr()
        return code, out, error

    return call


def rows(size: int = 40) -> dict[str, list[Any]]:
    """Sad texts stand in the street mostly, glad ones in the hall."""
    places = ["hall", "street", "hall", "street", "street", "hall", "hall", "street"]
    return {
        "text": ["the cat wakes", "the man never sleeps"] * (size // 2),
        "label": ["glad", "sad"] * (size // 2),
        "place": [places[row % 8] for row in range(size)],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 40 texts, and "model": a tiny network of two classes, "glad" and "sad"."""
    place = tmp_path_factory.mktemp("commands")
    write_table(place / "d.csv", rows())
    words = ["[PAD]", "[UNK]", *sorted({word for text in rows()["text"] for word in text.split()})]
    wordwise = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    wordwise.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=wordwise, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(place / "model")
    tiny_distilbert(id2label={0: "glad", 1: "sad"}, label2id={"glad": 0, "sad": 1}).save_pretrained(place / "model")
    return place


# ---- Help and mistakes ----------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    """A clock would measure the machine."""
    code = """
import sys
from hf_cgd.__main__ import main
for words in (["--help"], ["train", "text", "--help"], ["train", "image", "-h"], *([name, "--help"] for name in COMMANDS)):
    assert main(words) == 0, words
heavy = [name for name in ("torch", "transformers", "datasets", "numpy", "pandas", "yaml") if name in sys.modules]
assert heavy == [], heavy
""".replace("COMMANDS", repr([name for name in COMMANDS if name != "experiments"]))
    printed, _ = run_program("-c", code)
    assert all(f"  {name} " in printed for name in COMMANDS) and "examples:" in printed


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_help_names_options_that_there_are(kind: str, run: Run) -> None:
    known = {one.name for one in fields(RecipeConfig)}
    assert {*GROUP_OPTIONS, *TRAINING_OPTIONS} <= known
    code, out, _ = run("train", kind, "--help")
    assert code == 0 and all(f"--{one.name} " in out for one in fields(KINDS[kind]))
    assert len(out.splitlines()) < 75
    code, everything, _ = run("train", kind, "--help-all")
    assert code == 0 and all(f"--{name} " in everything for name in known if not name.startswith("_"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_help_states_the_defaults_that_hold(kind: str) -> None:
    recipe = RECIPES[kind]
    _, values = read_command_line(recipe.options, recipe.defaults, [])
    checked = []
    for name, line in (GROUP_OPTIONS | TRAINING_OPTIONS).items():
        stated = re.search(rf"([\w.-]*\w) for {kind}s|(\w+) \(default\)|\(default (\w[\w.-]*)\)", line)
        if stated is not None:
            value = values[name] if values[name] is not None else CGD().knobs()[name]
            text = next(filter(None, stated.groups()))
            assert text.lower() == str(value).lower() or float(text) == float(value), name
            checked.append(name)
    assert {"objective", "step_size", "learning_rate", "num_train_epochs", "seed", "save_strategy"} <= set(checked)


def test_names_of_the_package_come_when_they_are_asked_for() -> None:
    assert all(getattr(hf_cgd, name) is not None for name in hf_cgd.__all__)
    assert hf_cgd.plots.save_figure is not None
    assert {"GroupRobustTrainer", "load_report", "__version__"} <= set(dir(hf_cgd))
    with pytest.raises(AttributeError, match="has no attribute 'GroupRobustTrainr'"):
        _ = hf_cgd.GroupRobustTrainr  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "no command 'trian'. Did you mean train?"),
        ([], ""),
        (["train", "texts"], "expected text or image, got 'texts'. Did you mean text?"),
        (["train", "text", "--lerning_rate", "1"], "no option --lerning_rate. Did you mean --learning_rate?"),
        (["train", "text", "a.yaml"], "a.yaml: expected a file of options"),
        (["train", "text", "typo.yaml"], "no such option: lerning_rate. Did you mean learning_rate?"),
        (["train", "text", "broken.yaml"], "broken.yaml, line 2: this is not YAML"),
        (["train", "text", "--objective", "erm", "--step_size", "1"], "has no option 'step_size'"),
        (["train", "text", "--compare", "erm", "cdg"], "cdg"),
        (["train", "text", "--compare", "erm"], "two or more different objectives"),
        (["groups", "d.csv", "--group_colum", "place"], "no option --group_colum. Did you mean --group_column?"),
        (["groups", "d.csv", "--group_column", "palce"], "--group_column: expected a column 'palce'"),
        (["groups", "semicolon.csv"], "semicolon.csv: expected columns separated by ','"),
        (["groups", "latin.csv"], "latin.csv: expected UTF-8, got other bytes"),
        (["groups", "nowhere.csv"], "there is no 'nowhere.csv'"),
        (["evaluate", "model", "d.csv"], "which column(s) tell the group?"),
        (["evaluate", "nowhere", "d.csv", "--group_column", "place"], "MODEL: expected a local folder"),
        (["evaluate", "model", "other.csv", "--group_column", "place"], "the data has ['happy'] besides"),
        (["report", "nowhere"], "nowhere"),
        (["demo", "--json"], "there is no option --json"),
        (["demo", "--seeds", "0"], "--seeds: expected at least 1"),
    ],
)  # fmt: skip
def test_a_mistake_ends_in_words(
    words: list[str], message: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "typo.yaml").write_text("lerning_rate: 1")
    (folder / "broken.yaml").write_text("a: 1\nb: [")
    (folder / "semicolon.csv").write_text("text;label;place\na;b;c\n")
    (folder / "latin.csv").write_bytes("text,label,place\ncafé,a,b\n".encode("latin-1"))
    write_table(folder / "other.csv", rows() | {"label": ["happy", "sad"] * 20})
    code, out, error = run(*words)
    assert code == 2 and message in error, error
    # A progress bar goes over its own line as often as there is time to.
    assert "Traceback" not in error and len(error.strip().split("\n")) <= 4, error
    assert out == "" or not words


def test_a_traceback_where_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Set before, so that it is put back afterwards.
    monkeypatch.setenv("HF_CGD_TRACEBACK", "0")
    with pytest.raises(FileNotFoundError):
        main(["groups", str(folder / "nowhere.csv"), "--traceback"])


def test_broken_images_are_named_before_training(run: Run, tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(12)]
    write_images(tmp_path, names)
    (tmp_path / "7.png").write_bytes(b"no image")
    write_table(tmp_path / "d.csv", {"image": names, "label": ["cat", "dog"] * 6, "place": ["in"] * 6 + ["out"] * 6})
    words = [
        "--group_column",
        "place",
        "--model",
        "resnet10t",
        "--pretrained",
        "false",
        "--output_dir",
        tmp_path / "out",
    ]
    code, _, error = run("train", "image", "--dataset", tmp_path / "d.csv", *words)
    last = error.splitlines()[-1]
    assert code == 2 and "1 of 12 files are no images" in last and "7.png" in last, error
    # One that ends too early is found when it is read.
    write_images(tmp_path, names, size=64)
    (tmp_path / "7.png").write_bytes((tmp_path / "8.png").read_bytes()[:-60])
    code, _, error = run("train", "image", "--dataset", tmp_path / "d.csv", *words, *QUICK)
    last = error.splitlines()[-1]
    assert code == 2 and "7.png: expected an image, but it cannot be decoded" in last, error


# ---- What commands do -----------------------------------------------------------------------------------------------


def test_objectives_are_compared_in_one_command(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--dataset", folder / "d.csv", "--model", folder / "model", "--group_column", "label", "place", *QUICK]
    compare = ["--compare", "erm", "group_dro", "--step_size", "0.1", "--predictions"]
    # Two steps of the four of an epoch.
    words += ["--per_device_train_batch_size", 8]
    code, out, error = run("train", "text", *words, *compare, "--output_dir", tmp_path / "out", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert list(found["runs"]) == ["erm", "group_dro"]
    assert found["files"] == {
        "pictures": ["comparison.png"],
        "groups of each run": ["erm/group_report.json", "group_dro/group_report.json"],
        "table": ["comparison.md"],
        "page to hand on": ["comparison.html"],
    }  # fmt: skip
    # Of the runs' own files: the step size is that of the one that has one, and answers and accuracies agree.
    for name, run_of in found["runs"].items():
        place = tmp_path / "out" / name
        settings = (place / "group_settings.yaml").read_text(encoding="utf-8")
        assert ("step_size: 0.1" in settings) == (name == "group_dro")
        for files in run_of["files"].values():
            assert all((place / file).is_file() for file in files)
        assert {"model", "card", "pictures", "groups", "predictions", "settings"} <= set(run_of["files"])
        answers = pd.read_csv(place / "predictions_validation.csv")
        report = run_of["reports"]["validation"]
        assert answers["correct"].mean() == pytest.approx(report["overall"]["accuracy"])
        assert list(answers["correct"]) == list(answers["prediction"] == answers["label"])
        by_group = answers.groupby(["label", "place"])["correct"].mean()
        for group in report["groups"]:
            label, where = (part.partition(":")[2] for part in group["name"].split(" "))
            assert by_group[label, where] == pytest.approx(group["accuracy"])
    # Where it all is stands at the end of what is printed.
    last = error[error.index(f"In {tmp_path / 'out'}:") :]
    assert all(file in last for files in found["files"].values() for file in files)

    # Again, where nothing is left to do: the plain Trainer would take a step more.
    trained: list[Any] = []
    monkeypatch.setattr(GroupRobustTrainer, "train", lambda self, **_: trained.append(self))
    paths = [path for name in found["runs"] for path in (tmp_path / "out" / name).rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
    again = [*words, *compare, "--output_dir", tmp_path / "out", "--json", "--resume_from_checkpoint", "true"]
    with caplog.at_level(logging.INFO, "hf_cgd"):
        code, out, error = run("train", "text", *again)
    assert code == 0 and json.loads(out) == found and not trained, error
    assert caplog.text.count("It was finished before: nothing is trained") == 2
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths} == before
    # More steps are wanted, or one of them has no report: then it is not finished, and there is no checkpoint.
    code, _, error = run("train", "text", *again, "--max_steps", 3)
    assert code == 2 and "expected a checkpoint in --output_dir" in " ".join(error.split())
    (tmp_path / "out/group_dro/group_report.json").write_text("{}")
    code, _, error = run("train", "text", *again)
    assert code == 2 and "expected a checkpoint in --output_dir" in " ".join(error.split())


def test_images_are_augmented_in_training_alone_and_columns_beside_them_are_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network of timm from a folder of its own; a column of weights and one of reference losses."""
    torch.manual_seed(0)
    save_for_hf(timm.create_model("test_resnet", num_classes=3), tmp_path / "timm")
    steps = np.linspace(0, 255, 20).astype(np.uint8)
    names = [f"{number}.png" for number in range(16)]
    for name in names:
        Image.fromarray(np.broadcast_to(steps, (20, 20))).save(tmp_path / name)
    columns = {"image": names, "label": ["cat", "dog"] * 8, "place": ["in", "in", "out", "out"] * 4}
    write_table(tmp_path / "d.csv", {**columns, "trust": [0.5, 1.5] * 8, "known": [0.1] * 16})
    seen: dict[str, Any] = {}

    def looks(self: GroupRobustTrainer, **_: Any) -> None:
        seen.update(train=[self.train_dataset[0] for _ in range(4)], other=[self.eval_dataset[0] for _ in range(4)])
        train(self)

    train = GroupRobustTrainer.train
    monkeypatch.setattr(GroupRobustTrainer, "train", looks)
    words = ["--dataset", tmp_path / "d.csv", "--model", f"local-dir:{tmp_path / 'timm'}", "--image_size", 32,
             "--augmentation", "crop_flip", "--group_column", "place", "--objective", "group_dro", "--no_pictures",
             "--example_weight_column", "trust", "--reference_losses", "known", "--data_check", "warn"]  # fmt: skip
    code, _, error = run("train", "image", *words, *QUICK, "--output_dir", tmp_path / "out")
    assert code == 0, error
    for kind, different in (("train", True), ("other", False)):
        first, *others = (row["pixel_values"] for row in seen[kind])
        assert first.shape == (3, 32, 32) and any(not torch.equal(first, other) for other in others) == different


def test_a_comparison_that_was_stopped_goes_on_where_it_was(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first run had ended, the second stood in its second epoch, the third had not begun."""
    words = ["train", "text", "--dataset", folder / "d.csv", "--model", folder / "model", "--group_column", "place",
             "--use_cpu", "--num_train_epochs", 2, "--disable_tqdm", "true", "--save_total_limit", 2,
             "--per_device_train_batch_size", 16, "--no_pictures",
             "--predictions", "--compare", "erm", "group_dro", "cgd", "--output_dir"]  # fmt: skip
    step, steps = GroupRobustTrainer.training_step, []

    def stops(self: GroupRobustTrainer, *args: Any, **kwargs: Any) -> Any:
        steps.append(self.group_objective.name)
        if steps.count("group_dro") > steps.count("erm") // 2:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    assert run(*words, tmp_path / "whole")[0] == 0
    with monkeypatch.context() as patched:
        patched.setattr(GroupRobustTrainer, "training_step", stops)
        assert run(*words, tmp_path / "parts")[0] == 130
    epoch = steps.count("erm") // 2
    assert epoch > 1 and steps == ["erm"] * 2 * epoch + ["group_dro"] * (epoch + 1)
    steps.clear()
    goes_on = [*words, tmp_path / "parts", "--resume_from_checkpoint"]
    code, _, error = run(*goes_on, tmp_path / "parts/erm/checkpoint-1")
    assert code == 2 and "names one checkpoint. Set --resume_from_checkpoint True" in " ".join(error.split())

    def counts(self: GroupRobustTrainer, *args: Any, **kwargs: Any) -> Any:
        steps.append(self.group_objective.name)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(GroupRobustTrainer, "training_step", counts)
    with caplog.at_level(logging.INFO, "hf_cgd"):
        code, _, error = run(*goes_on, "true")
    assert code == 0, error
    assert steps == ["group_dro"] * epoch + ["cgd"] * 2 * epoch
    assert caplog.text.count("It was finished before") == 1
    files = ["comparison.md", *(f"{name}/predictions_validation.csv" for name in ("erm", "group_dro", "cgd"))]
    files += [f"{name}/group_report.json" for name in ("erm", "group_dro", "cgd")]
    for file in files:
        assert (tmp_path / "parts" / file).read_text(encoding="utf-8") == (tmp_path / "whole" / file).read_text(
            encoding="utf-8"
        ), file

    # Finished runs that are asked for more: it is written, and nothing else is changed.
    steps.clear()
    parts, answers = tmp_path / "parts", "erm/predictions_validation.csv"
    (parts / answers).unlink()
    kept = ["erm/metrics.json", "erm/group_report.json", "erm/group_run.json", "cgd/predictions_validation.csv"]
    before = {name: (parts / name).read_bytes() for name in kept}
    with_pictures = [word for word in goes_on if word != "--no_pictures"]
    code, _, error = run(*with_pictures, "true")
    assert code == 0 and not steps, error
    assert (parts / answers).read_text(encoding="utf-8") == (tmp_path / "whole" / answers).read_text(encoding="utf-8")
    assert (parts / "cgd/pictures/group_weights.png").is_file()
    assert "pictures/group_weights.png" in (parts / "cgd/README.md").read_text(encoding="utf-8")
    assert {name: (parts / name).read_bytes() for name in kept} == before
    # Other weights than those of the report, or none: there are no answers to be had.
    (parts / answers).unlink()
    report = parts / "erm/group_report.json"
    report.write_text(re.sub(r'"accuracy": [\d.]+', '"accuracy": 7.0', report.read_text(encoding="utf-8")))
    code, _, error = run(*goes_on, "true")
    assert code == 2 and "the model or the data is another by now" in " ".join(error.split())
    (parts / "erm/model.safetensors").unlink()
    code, _, error = run(*goes_on, "true")
    assert code == 2 and "its model is not there any more" in " ".join(error.split())
    assert not (parts / answers).exists()


def test_a_run_ends_with_where_things_are(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ["--dataset", folder / "d.csv", "--model", folder / "model", "--group_column", "place", *QUICK]
    (tmp_path / "run.yaml").write_text("objective: group_dro\npictures: false\n")
    code, out, _ = run("train", "text", tmp_path / "run.yaml", *words, "--output_dir", tmp_path / "out")
    lines = out[out.index(f"In {tmp_path / 'out'}:") :].splitlines()
    assert code == 0 and [line.split("  ")[1] for line in lines[1:-1]] == [
        "model", "card", "groups", "weights over time", "settings",
    ]  # fmt: skip
    assert all((tmp_path / "out" / line.split()[-1]).is_file() for line in lines[1:-1])
    assert lines[-1] == f"One page to hand on: hf-cgd report {tmp_path / 'out'} --output report.html"
    code, out, _ = run("report", tmp_path / "out", "--output", tmp_path / "page.html", "--json")
    assert code == 0 and json.loads(out) == {"page": str(tmp_path / "page.html")}
    assert "group_dro" in (tmp_path / "page.html").read_text(encoding="utf-8") and "street" in (
        tmp_path / "page.html"
    ).read_text(encoding="utf-8")


def test_a_model_that_is_there_is_evaluated(run: Run, folder: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (folder / "model").iterdir()}
    words = ["--group_column", "place", "--use_cpu", "--predictions", "--no_pictures", "--json"]
    code, out, error = run("evaluate", folder / "model", folder / "d.csv", *words, "--output_dir", tmp_path / "one")
    assert code == 0, error
    found = json.loads(out)
    assert found["files"].keys() == {"card", "groups", "predictions"}
    answers = pd.read_csv(tmp_path / "one/predictions_test.csv")
    assert list(answers["text"]) == rows()["text"] and list(answers["label"]) == rows()["label"]
    for group in found["reports"]["test"]["groups"]:
        own = answers[answers["place"] == group["name"]]
        assert (len(own), own["correct"].mean()) == (group["count"], pytest.approx(group["accuracy"]))
    # A report is written over only when that is asked for, and then the card with it.
    again = ["evaluate", folder / "model", folder / "d.csv", *words, "--output_dir", tmp_path / "one"]
    code, _, error = run(*again)
    assert code == 2 and error.endswith("or set --overwrite_output_dir.\n"), error
    (tmp_path / "one/README.md").write_text("old")
    assert run(*again, "--overwrite_output_dir")[0] == 0
    assert "street" in (tmp_path / "one/README.md").read_text(encoding="utf-8")
    # Other words for the classes: the numbers are the same.
    write_table(tmp_path / "other.csv", rows() | {"label": ["froh", "traurig"] * 20})
    other = [*words, "--labels", "froh", "traurig", "--output_dir", tmp_path / "two"]
    code, out, error = run("evaluate", folder / "model", tmp_path / "other.csv", *other)
    assert code == 0 and json.loads(out)["reports"] == found["reports"], error
    assert before == {path: path.read_bytes() for path in (folder / "model").iterdir()}


def test_validation_rows_of_another_draw_are_warned_of(run: Run, folder: Path, tmp_path: Path) -> None:
    def warned(*words: Any) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            code, _, error = run(*words, "--use_cpu")
        assert code == 0, error
        return " ".join(str(one.message) for one in caught)

    out, data = tmp_path / "out", folder / "d.csv"
    words = ["train", "text", "--dataset", data, "--pictures", "false", "--group_column", "label", "place"]
    warned(*words, *QUICK[1:], "--model", folder / "model", "--output_dir", out)
    assert load_run(out).data.name == "d.csv"
    # Validation rows are drawn by groups and seed.
    again = [*words, "--do_train", "false", "--model", out, "--output_dir"]
    assert "are drawn" not in warned(*again, tmp_path / "same")
    assert "other validation rows are drawn" in warned(*again, tmp_path / "seed", "--seed", 5)
    assert "other validation rows are drawn" in warned(*again[:-6], *again[-5:], tmp_path / "groups")


def test_a_model_that_numbers_its_classes_otherwise_is_evaluated_by_their_names(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    """Of the data the classes are "glad" and "sad"; a model with the same outputs the other way round was misjudged."""
    shutil.copytree(folder / "model", tmp_path / "model")
    model = tiny_distilbert(id2label={0: "sad", 1: "glad"}, label2id={"sad": 0, "glad": 1}, seed=3)
    with torch.no_grad():
        model.classifier.weight.mul_(100)
    model.save_pretrained(tmp_path / "model")
    options = ["--group_column", "label", "place", "--use_cpu", "--output_dir"]
    words = ["train", "text", "--dataset", folder / "d.csv", "--model", tmp_path / "model", "--predictions", "--json"]
    code, out, error = run(*words, "--do_train", "false", "--pictures", "false", *options, tmp_path / "out")
    assert code == 0, error
    answers = pd.read_csv(tmp_path / "out/predictions_validation.csv")
    groups = {group["name"]: group["accuracy"] for group in json.loads(out)["reports"]["validation"]["groups"]}
    answers[["text", "label", "place"]].to_csv(tmp_path / "v.csv", index=False)
    words = ["evaluate", tmp_path / "model", tmp_path / "v.csv", "--predictions", "--no_pictures", "--json"]
    code, out, error = run(*words, *options, tmp_path / "again")
    assert code == 0, error
    again = pd.read_csv(tmp_path / "again/predictions_test.csv")
    assert again["prediction"].tolist() == answers["prediction"].tolist()
    expected = {group["name"]: group["accuracy"] for group in json.loads(out)["reports"]["test"]["groups"]}
    assert groups == expected and set(groups.values()) == {0.0, 1.0}
    # A training goes on with the head that is there, not with its opposite.
    words = ["train", "text", "--dataset", folder / "d.csv", "--model", tmp_path / "model", "--pictures", "false"]
    assert run(*words, *QUICK[1:], *options, tmp_path / "trained")[0] == 0
    assert json.loads((tmp_path / "trained/config.json").read_text(encoding="utf-8"))["id2label"] == {
        "0": "sad",
        "1": "glad",
    }
    # Other names cannot be matched.
    write_table(tmp_path / "other.csv", rows() | {"label": ["good", "bad"] * 20})
    words = [
        "train",
        "text",
        "--dataset",
        tmp_path / "other.csv",
        "--model",
        tmp_path / "model",
        "--do_train",
        "false",
    ]
    code, _, error = run(*words, *options, tmp_path / "other")
    assert code == 2 and "whose classes are ['sad', 'glad']; those of the data are ['bad', 'good']" in error


def test_an_image_model_of_timm_is_evaluated(run: Run, tmp_path: Path) -> None:
    import timm
    import torch
    from safetensors.torch import save_file
    from timm.models import _hub

    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=2)
    (tmp_path / "model").mkdir()
    save_file(model.state_dict(), tmp_path / "model/model.safetensors")
    _hub.save_config_for_hf(model, str(tmp_path / "model/config.json"), model_config={"label_names": ["cat", "dog"]})
    names = [f"{number}.png" for number in range(12)]
    write_images(tmp_path, names)
    write_table(tmp_path / "d.csv", {"file": names, "sort": ["dog", "cat"] * 6, "place": ["in"] * 6 + ["out"] * 6})
    words = [
        "--image_column",
        "file",
        "--label_column",
        "sort",
        "--group_column",
        "place",
        "--use_cpu",
        "--no_pictures",
    ]
    code, out, error = run(
        "evaluate", tmp_path / "model", tmp_path / "d.csv", *words, "--output_dir", tmp_path / "out", "--json"
    )
    assert code == 0, error
    groups = json.loads(out)["reports"]["test"]["groups"]
    assert [(group["name"], group["count"]) for group in groups] == [("in", 6), ("out", 6)]


def test_groups_are_looked_at(run: Run, tmp_path: Path) -> None:
    # 90 sad and 10 glad in the street, the other way round in the hall; "x" tells nothing, "id" is none.
    table = {
        "text": [f"text {row}" for row in range(200)],
        "label": (["sad"] * 90 + ["glad"] * 10) + (["sad"] * 10 + ["glad"] * 90),
        "place": ["street"] * 100 + ["hall"] * 100,
        "x": ["a", "b"] * 100,
        "id": list(range(200)),
    }
    data = write_table(tmp_path / "d.csv", table)
    code, out, _ = run("groups", data, "--json")
    found = json.loads(out)
    assert code == 0 and [one["column"] for one in found["correlations"]] == ["place", "x"]
    # V of a table of two by two is the correlation of its indicators: (90 x 90 - 10 x 10) / (100 x 100).
    assert found["correlations"][0]["cramers_v"] == pytest.approx(0.8)
    expected = chi2_contingency([[90, 10], [10, 90]], correction=False).pvalue
    assert found["correlations"][0]["p"] == pytest.approx(expected)
    assert found["advice"] == ["Look closer at a column: --group_column place"]
    code, out, _ = run("groups", data, "--group_column", "label", "place", "--json")
    found = json.loads(out)
    assert {group["name"]: group["count"] for group in found["groups"]} == {
        "label:sad place:street": 90, "label:glad place:street": 10,
        "label:sad place:hall": 10, "label:glad place:hall": 90,
    }  # fmt: skip
    # Wilson's interval of 8 in 10.
    assert (found["groups"][0]["low"], found["groups"][0]["high"]) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert found["correlations"][0]["table"] == {"hall": {"glad": 90, "sad": 10}, "street": {"glad": 10, "sad": 90}}
    assert "--group_column label place" in found["advice"][0] and "2 of 4 groups are too small" in found["advice"][1]
    _, out, _ = run("groups", data, "--group_column", "label", "place")
    assert "label:sad place:hall" in out and "(too wide)" in out and "0.80" in out and "strong" in out


def test_groups_that_a_training_would_refuse_are_told(run: Run, tmp_path: Path) -> None:
    table = {"label": ["glad", "sad"] * 40, "place": ["hall", "Hall ", "hall", "nan"] * 20, "age": [0.5, 1.5] * 40}
    data = write_table(tmp_path / "d.csv", table)
    code, out, _ = run("groups", data, "--group_column", "place", "age", "--json")
    problems = json.loads(out)["problems"]
    assert code == 0 and json.loads(out)["advice"][:3] == problems and len(problems) == 3
    assert "'hall' (40 rows), 'Hall ' (d.csv, lines 3, 7, 11" in problems[0] and "differ in spaces" in problems[0]
    assert "20 of 80 rows say 'nan'" in problems[1] and problems[2].startswith("group_column 'age': 80 of 80 values")


def test_the_demo_runs_without_a_recipe(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coloured_digits, "METHODS", {"CGD": coloured_digits.METHODS["CGD, consensus"]})
    monkeypatch.setattr(coloured_digits, "STEPS", 40)
    code, out, _ = run("demo", "--seeds", "1", "--output", tmp_path / "demo.png")
    table = dict(line.rsplit(maxsplit=1) for line in out.splitlines() if re.search(r"\d\.\d{3}$", line))
    by_group = [float(table[f"  {name}"]) for name in coloured_digits.COUNTS]
    assert code == 0 and float(table["worst group"]) == min(by_group)
    weights = [float(table[f"final weight of {name}"]) for name in coloured_digits.COUNTS]
    assert sum(weights) == pytest.approx(1, abs=0.005) and (tmp_path / "demo.png").stat().st_size > 10_000


def test_tasks_are_listed(run: Run) -> None:
    code, out, _ = run("tasks", "--json")
    assert code == 0 and [task["name"] for task in json.loads(out)] == list(TASKS)


def test_experiments_are_handed_on(run: Run) -> None:
    code, out, _ = run("experiments", "--help")
    assert code == 0 and "grid" in out
    assert run("experiments", "no_grid")[0] == 2
