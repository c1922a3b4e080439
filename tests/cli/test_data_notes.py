"""What is found out about data reaches its reader: cut texts, training rows among evaluated ones, classes without rows."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from made_files import write_images, write_table
from tiny import tiny_distilbert
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hf_cgd import GroupRobustWarning
from hf_cgd.__main__ import main
from hf_cgd.cards import load_run
from hf_cgd.cli.data_notes import DataNotes
from hf_cgd.cli.model_inputs import tokenized
from hf_cgd.data.group_shares import GroupShares
from hf_cgd.data.row_digests import FILE, RowDigests

Told = Callable[..., tuple[dict[str, Any], str]]
WORDS = [f"w{number}" for number in range(50)]
QUICK = ["--use_cpu", "--max_steps", 1, "--disable_tqdm", "true", "--save_strategy", "no", "--load_best_model_at_end", "false", "--pictures", "false"]  # fmt: skip


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word, and one before and behind each text."""
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    wordwise = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    wordwise.pre_tokenizer = Whitespace()
    wordwise.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=wordwise, pad_token="[PAD]", unk_token="[UNK]")


def rows(size: int = 60, first: int = 0) -> dict[str, list[Any]]:
    """Texts that are all different, 3 words in the hall and 7 in the street."""
    places = ["hall", "hall", "street"] * (size // 3)
    numbers = range(first, first + size)
    texts = [
        f"w{number % 50} w{number // 50 + 10} w1" + " w2 w3 w4 w5" * (place == "street")
        for number, place in zip(numbers, places, strict=True)
    ]
    return {"text": texts, "label": ["glad", "sad"] * (size // 2), "place": places}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    word_tokenizer().save_pretrained(place)
    tiny_distilbert(id2label={0: "glad", 1: "sad"}, label2id={"glad": 0, "sad": 1}).save_pretrained(place)
    return place


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """The result of a command, and its warnings in one text."""

    def call(*words: Any) -> tuple[dict[str, Any], str]:
        capsys.readouterr()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            code = main([str(word) for word in (*words, "--json")])
        out, error = capsys.readouterr()
        assert code == 0, error
        return json.loads(out), " ".join(str(one.message) for one in caught)

    return call


@pytest.mark.parametrize("kind", ["fast", "in Python"])
@pytest.mark.parametrize("columns", [["a"], ["a", "b"]])
def test_cut_texts_are_those_that_have_more_tokens(kind: str, columns: list[str]) -> None:
    """The reference makes tokens of the whole texts. Some of them have as many as there may be."""
    tokenizer: Any = word_tokenizer() if kind == "fast" else ByT5Tokenizer()
    long = {"a": [" ".join(WORDS[:size]) for size in range(12)], "b": [" ".join(WORDS[: n % 5]) for n in range(12)]}

    def tokens(row: int, **options: Any) -> list[int]:
        return tokenizer(*([long[column][row]] for column in columns), **options)["input_ids"][0]

    whole = [tokens(row) for row in range(12)]
    limit = sorted(map(len, whole))[6]
    splits, cut = tokenized(DatasetDict(test=Dataset.from_dict(long)), columns, tokenizer, limit)
    assert cut["test"].tolist() == [len(ids) > limit for ids in whole] and 0 < cut["test"].sum() < 12
    assert splits["test"]["input_ids"][:] == [tokens(row, truncation=True, max_length=limit) for row in range(12)]
    assert set(splits["test"].column_names) == {"a", "b", *tokenizer("w1")}
    with pytest.raises(ValueError, match="max_length=0: expected at least one token"):
        tokenized(splits, columns, tokenizer, 0)


def test_shares_by_group() -> None:
    data = Dataset.from_dict({"g": ["x", "x", "y", "z", "y"], "h": [None, 1, 1, 1, 1]})
    hit = np.array([True, False, True, False, True])
    shares = GroupShares.of(hit, data, ["g"])
    assert str(shares) == '3 of 5 (60.0%); "y" 100.0% of 2, "x" 50.0% of 2, no row of 1 other(s)'
    assert shares.greatest == 1.0
    # Where a row has no group, and where the column is missing, the sum is told.
    assert str(GroupShares.of(hit, data, ["h"])) == str(GroupShares.of(hit, data, ["k"])) == "3 of 5 (60.0%)"
    looked_up = np.array([True, True, True, False, False])
    part = GroupShares.of(hit & looked_up, data, ["g"], looked_up)
    assert str(part) == '2 of 3 (66.7%); "y" 100.0% of 1, "x" 50.0% of 2'


def test_few_rows_are_told_quietly(caplog: pytest.LogCaptureFixture) -> None:
    data = Dataset.from_dict({"g": ["x", "y"] * 200})
    notes = DataNotes(training_rows=RowDigests.of(np.arange(1, dtype=np.uint64)))
    with caplog.at_level("INFO", "hf_cgd"):
        notes.add_training_rows("test", np.arange(400, dtype=np.uint64), data, ["g"])
    assert "1 of 400 (0.2%)" in caplog.text and notes.cautions[0] in caplog.text
    notes.training_rows = RowDigests.of(np.array([0, 2], dtype=np.uint64))
    with pytest.warns(GroupRobustWarning, match=r'2 of 400 \(0.5%\); "x" 1.0% of 200'):
        notes.add_training_rows("test", np.arange(400, dtype=np.uint64), data, ["g"])
    silent = DataNotes(training_rows=notes.training_rows, speaks=False)
    silent.add_training_rows("test", np.zeros(400, dtype=np.uint64), data, ["g"])
    assert len(silent.cautions) == 1


def test_cut_texts_are_told_by_group_and_evaluations_cut_where_training_did(
    told: Told, model: Path, tmp_path: Path
) -> None:
    data, out = write_table(tmp_path / "d.csv", rows()), tmp_path / "out"
    words = ["train", "text", "--dataset", data, "--model", model, "--group_column", "place", *QUICK]
    found, said = told(*words, "--max_length", 6, "--output_dir", out)
    # Five and nine tokens; a tenth of each group validates.
    assert 'train: 18 of 54 (33.3%); "street" 100.0% of 18, no row of 1 other(s)' in said
    assert 'validation: 2 of 6 (33.3%); "street" 100.0% of 2' in said and said.count("tokens were cut") == 1
    (caution,) = found["cautions"]
    assert caution in said and caution in (out / "README.md").read_text(encoding="utf-8").replace("\\", "")
    assert load_run(out).data.preparation == {"text_columns": ["text"], "max_length": 6}
    new = write_table(tmp_path / "new.csv", rows(first=60))
    one, said = told("evaluate", out, new, "--group_column", "place", "--no_pictures", "--output_dir", tmp_path / "a")
    assert "Texts of more than 6 tokens were cut" in said and 'test: 20 of 60 (33.3%); "street" 100.0% of 20' in said
    assert len(one["cautions"]) == 1 and one["cautions"][0] in said
    words = ["evaluate", out, new, "--group_column", "place", "--no_pictures", "--max_length", 20]
    two, said = told(*words, "--output_dir", tmp_path / "b")
    assert "were cut" not in said and two["cautions"] == []
    _, said = told(*words, "--text_pair_column", "place", "--output_dir", tmp_path / "c")
    assert "trained on text, and is given text, place here" in said
    # An evaluation by the recipe cuts where it is told to, 128 by default.
    words = ["train", "text", "--dataset", data, "--model", out, "--group_column", "place", "--do_train", "false"]
    words += ["--use_cpu", "--pictures", "false", "--output_dir"]
    _, said = told(*words, tmp_path / "d")
    assert "texts of at most 6 tokens, and is given up to 128 here" in said
    _, said = told(*words, tmp_path / "e", "--max_length", 6)
    assert "texts of at most" not in said


def test_training_rows_are_known_again(told: Told, model: Path, tmp_path: Path) -> None:
    """Of 60 rows 54 train. The table is renamed, its rows are in another order, some are new."""
    data, out = write_table(tmp_path / "d.csv", rows()), tmp_path / "out"
    words = ["train", "text", "--dataset", data, "--model", model, "--group_column", "place", *QUICK]
    _, said = told(*words, "--output_dir", out)
    assert "trained on inputs" not in said
    options = ["--group_column", "place", "--no_pictures", "--output_dir"]
    found, said = told("evaluate", out, data, *options, tmp_path / "same")
    assert 'test: 54 of 60 (90.0%); "hall" 90.0% of 40, "street" 90.0% of 20' in said
    assert found["cautions"] == load_run(tmp_path / "same").data.cautions != []
    kept = Dataset.from_dict(rows()).shuffle(seed=1).select(range(30))
    trained = set(rows()["text"]) - set(held_out_texts(data))
    mixed = {name: [*kept[name][:], *rows(first=60)[name]] for name in rows()}
    expected = sum(text in trained for text in mixed["text"])
    _, said = told("evaluate", out, write_table(tmp_path / "renamed.jsonl", mixed), *options, tmp_path / "mixed")
    assert f"test: {expected} of 90 ({expected / 90:.1%})" in said
    # Other rows in a file of the same name are not suspected; without digests the name is all there is.
    (tmp_path / "other").mkdir()
    new = write_table(tmp_path / "other" / "d.csv", rows(first=60))
    _, said = told("evaluate", out, new, *options, tmp_path / "new")
    assert "trained on" not in said
    shutil.copytree(out, tmp_path / "old")
    (tmp_path / "old" / FILE).unlink()
    _, said = told("evaluate", tmp_path / "old", new, *options, tmp_path / "by_name")
    assert "The model was trained on d.csv. If these are the same rows" in said


def held_out_texts(data: Path, seed: int = 42) -> list[str]:
    """The texts that training holds out."""
    from hf_cgd.data.sources import load_labelled

    return load_labelled(str(data), None, {"label_column": "label"}, ["place"], seed)["validation"]["text"][:]


def test_rows_in_two_splits_and_validation_rows_of_another_draw_are_told(
    told: Told, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    both = {name: [*rows(first=60)[name][:15], *rows()[name][:15]] for name in rows()}
    write_table(folder / "train.csv", rows())
    write_table(folder / "test.csv", both)
    words = ["train", "text", "--model", model, "--group_column", "place", *QUICK, "--dataset"]
    held_out = set(held_out_texts(folder / "train.csv"))
    expected = sum(text not in held_out for text in rows()["text"][:15])
    _, said = told(*words, folder, "--output_dir", tmp_path / "out")
    assert f"in the test set as well, so its numbers there flatter it. test: {expected} of 30" in said
    # Held out by another seed, most validation rows are training rows of the model.
    again = [*words[:-1], "--do_train", "false", "--dataset", folder, "--model", tmp_path / "out", "--seed", 5]
    drawn = held_out_texts(folder / "train.csv", 5)
    seen = sum(text not in held_out for text in drawn)
    _, said = told(*again, "--output_dir", tmp_path / "again")
    assert seen > 0 and f"validation: {seen} of 6" in said


@pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")
def test_images_that_were_trained_on_are_known_again(told: Told, tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(24)]
    write_images(tmp_path, names)
    columns = {"image": names, "label": ["cat", "dog"] * 12, "place": ["in", "in", "out"] * 8}
    data, out = write_table(tmp_path / "d.csv", columns), tmp_path / "out"
    words = ["--group_column", "place", "--model", "test_resnet", "--pretrained", "false", "--image_size", 32]
    told("train", "image", "--dataset", data, *words, *QUICK, "--output_dir", out)
    known = RowDigests.load(out)
    assert known is not None and len(known.digests) == len({(tmp_path / name).read_bytes() for name in names}) - 3
    for name in names:
        shutil.copy(tmp_path / name, tmp_path / f"copy of {name}")
    other = write_table(tmp_path / "e.csv", columns | {"image": [f"copy of {name}" for name in names]})
    options = ["--group_column", "place", "--no_pictures", "--output_dir", tmp_path / "new"]
    found, _ = told("evaluate", out, other, *options)
    assert "test: 21 of 24 (87.5%)" in found["cautions"][0]


def test_classes_without_rows_and_labels_in_the_way(
    told: Told, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--group_column", "place", "--no_pictures", "--use_cpu", "--output_dir"]
    data = write_table(tmp_path / "d.csv", rows() | {"label": ["sad"] * 60})
    found, said = told("evaluate", model, data, *options, tmp_path / "one")
    assert 'no row is of the class "glad"' in said and len(found["cautions"]) == 1
    data = write_table(tmp_path / "f.csv", rows())
    _, said = told("evaluate", model, data, "--labels", "sad", "glad", *options, tmp_path / "three")
    assert "the same names in another order than ['sad', 'glad']" in said
    # The group column 'label' would be taken for the classes: before, its groups were "glad" and "sad".
    table = {"text": rows()["text"], "mood": rows()["label"], "label": ["day", "night"] * 30}
    words = ["evaluate", model, write_table(tmp_path / "e.csv", table), "--label_column", "mood", "--no_pictures"]
    assert main([str(word) for word in (*words, "--group_column", "label", "--output_dir", tmp_path / "two")]) == 2
    assert "--group_column: the column 'label' of the data would give way" in capsys.readouterr().err
