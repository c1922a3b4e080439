"""Runs of recipes on data that is wrong, in folders that hold an earlier run, resumed, and without training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_files import write_images, write_table
from transformers import AutoModelForSequenceClassification

from hf_cgd import GroupRobustWarning

Recipe = Callable[..., Any]
Table = dict[str, list[Any]]

# Two steps teach nothing, and a warning says so.
pytestmark = pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")


def rows(size: int = 48) -> Table:
    return {
        "text": ["the man sleeps", "the cat wakes", "the man never wakes", "the cat at no time sleeps"] * (size // 4),
        "label": ["sad", "glad"] * (size // 2),
        "place": (["hall"] * 2 + ["street"] * 2) * (size // 4),
    }


@pytest.fixture
def text(recipe: Recipe, tmp_path: Path, text_model: Path) -> Callable[..., Any]:
    """The text recipe on a table; further words of the command line are added."""

    def run(table: Table, *words: str | Path | int) -> Any:
        data = write_table(tmp_path / "reviews.csv", table)
        return recipe(
            "text_classification", "--dataset", data, "--model", text_model, "--group_column", "label", "place", *words
        )

    return run


# ---- Data that is wrong ---------------------------------------------------------------------------------------------


def test_all_faults_of_a_table_at_once_with_the_lines_of_its_file(text: Callable[..., Any]) -> None:
    table = rows()
    table["label"][4], table["place"][7], table["text"][9], table["place"][11] = "sad ", None, None, "Street"
    with pytest.raises(SystemExit) as end:
        text(table)
    message = str(end.value)
    # Line 1 is the head, so row 4 stands in line 6.
    for part in (
        "'sad ' (reviews.csv, line 6) differ in spaces only",
        "1 of 48 rows have no value (reviews.csv, line 9)",
        "1 of 48 rows hold no text, such as None (reviews.csv, line 11)",
        "'Street' (reviews.csv, line 13) differ in capitals only",
        "2 of 6 groups have fewer than 2",
        "--data_check 'warn'",
    ):
        assert part in message, message
    assert "5 problems" in message


def test_a_faulty_table_can_be_trained_on_knowingly(text: Callable[..., Any]) -> None:
    table = rows()
    for row in (4, 8, 12):
        table["place"][row] = "Hall"
    with pytest.raises(SystemExit, match="differ in capitals only"):
        text(table)
    with pytest.warns(GroupRobustWarning, match="(?s)what to know of the data.*differ in capitals only"):
        trainer = text(table, "--data_check", "warn")
    assert "label:sad place:Hall" in trainer.groups.names
    assert "label:sad place:Hall" in text(table, "--data_check", "off", "--overwrite_output_dir", "true").groups.names


def test_hold_out_groups_too_small_to_choose_by(text: Callable[..., Any]) -> None:
    with pytest.warns(GroupRobustWarning) as caught:
        text(rows())
    (told,) = [str(warning.message) for warning in caught if "too small to choose by" in str(warning.message)]
    # A tenth of 12 is 1; of one example nothing is known.
    assert "4 of 4 groups are too small" in told and "label:glad place:hall (n = 1: 0.8 is known to 0.13-0.99)" in told


def test_a_table_of_images_whose_files_are_missing(recipe: Recipe, tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(20)]
    write_images(tmp_path, names[:18])
    table = {"image": names, "label": ["cat", "dog"] * 10, "place": ["in", "In"] + ["in", "out"] * 9}
    data = write_table(tmp_path / "d.csv", table)
    with pytest.raises(
        SystemExit, match=r"(?s)capitals only.*2 of 20 files are not there.*'18.png' \(d.csv, lines 20, 21\)"
    ):
        recipe("image_classification", "--dataset", data, "--group_column", "place", "--model", "resnet10t")


# ---- Folders that hold a run ----------------------------------------------------------------------------------------


def overall(folder: Path) -> dict[str, float]:
    return json.loads((folder / "group_report.json").read_text())["validation"]["overall"]


def test_a_finished_run_is_not_written_over(text: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    text(rows(), "--save_strategy", "steps", "--eval_strategy", "steps", "--save_steps", 1, "--eval_steps", 1)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(
        SystemExit, match="holds results of an earlier run .*--resume_from_checkpoint True, or start anew"
    ):
        text(rows())
    with pytest.raises(SystemExit, match="holds the group_report.json of an earlier run"):
        text(rows(), "--do_train", "false")
    with pytest.raises(SystemExit, match="expected one of them"):
        text(rows(), "--resume_from_checkpoint", "true", "--overwrite_output_dir", "true")
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (out / "mine.txt").write_text("notes")
    trainer = text(
        rows(), "--overwrite_output_dir", "true", "--save_strategy", "no", "--load_best_model_at_end", "false"
    )
    assert trainer.state.global_step == 2 and (out / "mine.txt").exists()
    assert not list(out.glob("checkpoint-*")), "an old checkpoint would be the one that is resumed"


def test_a_run_is_resumed_in_the_words_of_the_command_line(text: Callable[..., Any], tmp_path: Path) -> None:
    often = ["--save_strategy", "steps", "--eval_strategy", "steps", "--save_steps", 1, "--eval_steps", 1]
    with pytest.raises(SystemExit, match="--resume_from_checkpoint True: expected a checkpoint in .*found none"):
        text(rows(), "--resume_from_checkpoint", "true")
    text(rows(), *often)
    assert text(rows(), *often, "--resume_from_checkpoint", "false", "--overwrite_output_dir").state.global_step == 2
    resumed = text(rows(), *often, "--max_steps", 3, "--resume_from_checkpoint", "true")
    assert resumed.state.global_step == 3
    assert [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry][:3] == [1, 2, 3]


def test_a_folder_with_other_files_is_no_earlier_run(text: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.md").write_text("mine")
    assert text(rows()).state.global_step == 2


# ---- Without training -----------------------------------------------------------------------------------------------


def test_a_trained_model_is_evaluated_and_left_alone(
    text: Callable[..., Any], recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = text(rows())
    expected = overall(tmp_path / "out")
    words = ["--model", tmp_path / "out", "--output_dir", tmp_path / "evaluated", "--do_train", "false"]
    again = text(rows(), *words)
    assert overall(tmp_path / "evaluated") == pytest.approx(expected)
    assert again.state.global_step == 0 and again.group_weights is None
    assert "objective: none, evaluated only" in capsys.readouterr().out
    assert not (tmp_path / "evaluated/model.safetensors").exists()
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(saved[name], value.cpu()) for name, value in trained.model.state_dict().items())


def test_a_checkpoint_is_evaluated(text: Callable[..., Any], tmp_path: Path) -> None:
    often = [
        "--save_strategy",
        "steps",
        "--save_steps",
        1,
        "--eval_strategy",
        "no",
        "--load_best_model_at_end",
        "false",
    ]
    text(rows(), *often, "--learning_rate", "0.01")
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    words = ["--do_train", "false", "--resume_from_checkpoint", checkpoint, "--output_dir", tmp_path / "evaluated"]
    text(rows(), *words)
    assert overall(tmp_path / "evaluated") == pytest.approx(overall(tmp_path / "out"))


@pytest.mark.parametrize("name", ["text", "demo"])
def test_a_model_that_was_never_trained_is_not_evaluated(
    name: str, text: Callable[..., Any], recipe: Recipe, text_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        SystemExit, match="--do_train False evaluates a trained model, but these weights were loaded from nowhere"
    ):
        if name == "demo":
            recipe("multinli_cgd", "--demo", "--do_train", "false")
        else:
            three = rows() | {"label": ["sad", "glad", "odd", "glad"] * 12}
            text(three, "--do_train", "false")
