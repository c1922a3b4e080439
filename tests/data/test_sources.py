"""A user's own files: tables, folders, images, and every message about what is missing."""

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Value
from made_files import ROWS, write_images, write_table

from hf_cgd.data import sources


@pytest.mark.parametrize("name", ["d.csv", "d.tsv", "d.jsonl", "d.parquet"])
def test_tables(tmp_path: Path, name: str) -> None:
    splits = sources.load_splits(str(write_table(tmp_path / name)))
    assert list(splits) == ["train"] and splits["train"].to_dict() == ROWS


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_table(tmp_path / "d.csv")
    sources.read_table(path)
    write_table(path, {"text": ["new"]})
    assert sources.read_table(path).to_dict() == {"text": ["new"]}


def test_a_second_table_of_a_split_is_said_not_to_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train.csv", "dev.csv", "validation.csv"):
        write_table(tmp_path / name)
    with caplog.at_level("INFO", "hf_cgd"):
        assert list(sources.load_splits(str(tmp_path))) == ["train", "validation"]
    assert "not read: dev. The splits are train, validation." in caplog.text


def test_folder_of_tables_by_stem(tmp_path: Path) -> None:
    for name in ("train.csv", "dev.jsonl", "test.parquet", "notes.csv"):
        write_table(tmp_path / name)
    assert list(sources.load_splits(str(tmp_path))) == ["train", "validation", "test"]
    write_table(tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match=r"one table named 'train', found train.csv and train.jsonl"):
        sources.load_splits(str(tmp_path))


def test_image_folder_with_metadata(tmp_path: Path) -> None:
    names = ["a.png", "b.png", "c.png"]
    write_images(tmp_path / "train", names)
    table = {"file_name": names, "label": ["cat", "dog", "cat"], "place": ["in", "out", "out"]}
    write_table(tmp_path / "train" / "metadata.csv", table)
    splits = sources.load_splits(str(tmp_path))
    assert sorted(splits["train"].column_names) == ["image", "label", "place"]
    assert sources.with_images(splits, "image", tmp_path)["train"][1]["image"].getpixel((0, 0)) == (40, 0, 0)


def test_cells_of_an_image_folder_are_read_as_they_were_written(tmp_path: Path) -> None:
    """The library reads metadata.csv by pandas, which takes "NA" and "None" for missing and 007 for 7."""
    written = {"train": ["NA", "None", "sea", None], "test": ["sea", "NA"]}
    for split, places in written.items():
        names = [f"{number}.png" for number in range(len(places))]
        write_images(tmp_path / split, names)
        table = {"file_name": names, "place": places, "site": ["007", "7", "8", "9"][: len(names)]}
        write_table(tmp_path / split / "metadata.csv", {name: cells[::-1] for name, cells in table.items()})
    splits = sources.load_splits(str(tmp_path))
    for split, places in written.items():
        rows = {row["image"].getpixel((0, 0))[0] // 40: (row["place"], row["site"]) for row in splits[split]}
        assert rows == {number: (place, ["007", "7", "8", "9"][number]) for number, place in enumerate(places)}
    write_table(tmp_path / "test" / "metadata.csv", {"file_name": ["0.png"] * 2, "place": ["a", "b"]})
    with pytest.raises(ValueError, match=r"metadata.csv: expected one row for each image, got two for '0.png'"):
        sources.load_splits(str(tmp_path))


def test_images_named_in_a_table(tmp_path: Path) -> None:
    write_images(tmp_path / "img", ["a.png", "b.png"])
    path = write_table(tmp_path / "d.csv", {"file": ["img/a.png", "img/b.png"], "y": [0, 1]})
    splits = sources.with_images(sources.load_splits(str(path)), "file", path)
    assert splits["train"][1]["file"].getpixel((0, 0)) == (40, 0, 0)
    with pytest.raises(ValueError, match="expected images or paths of image files, got"):
        sources.with_images(splits, "y", path)
    write_table(path, {"file": ["img/a.png", "img/z.png"]})
    with pytest.raises(FileNotFoundError, match=r"1 of 2 are missing, such as .*z.png"):
        sources.with_images(sources.load_splits(str(path)), "file", path)


def test_rows_and_images_that_do_not_go_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_table(tmp_path / "d.csv", {"file": ["a.png", None, "c.png"], "y": [0, 1, 0]})
    with pytest.raises(ValueError, match=r"'file' of the train split: 1 of 3 rows: 1 name no image"):
        sources.with_images(sources.load_splits(str(path)), "file", path)
    folder = tmp_path / "images"
    write_images(folder, ["a.png", "b.png", "more/c.png"])
    write_table(folder / "metadata.csv", {"file_name": ["a.png"], "label": ["cat"]})
    with caplog.at_level("INFO", "hf_cgd"):
        assert len(sources.load_splits(str(folder))["train"]) == 1
    assert "2 of 3 images have no row in a metadata.csv and are left out: b.png, more/c.png" in caplog.text
    for name, words in (
        (str(folder / "a.png"), "1 of 2 rows have a path that is not relative to its folder: '/"),
        ("d.png", "1 of 2 rows have no image: 'd.png'"),
        (None, "1 of 2 rows have no image: ''"),
    ):
        write_table(folder / "metadata.csv", {"file_name": [name, "b.png"], "label": ["cat", "dog"]})
        with pytest.raises(ValueError, match=f"metadata.csv: expected in 'file_name' the path of an image.*{words}"):
            sources.load_splits(str(folder))


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^dataset: expected a CSV"):
        sources.load_labelled(None, None, {"label_column": "label"}, None)
    with pytest.raises(FileNotFoundError, match="there is no 'nowhere.csv'"):
        sources.load_splits("nowhere.csv")
    with pytest.raises(ConnectionError, match=r"Expected to load 'no/where'.*\n.*\nCheck the id, or pass the path"):
        sources.load_splits("no/where")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"train, validation and test tables .* found \['notes.txt'\]"):
        sources.load_splits(str(tmp_path))
    with pytest.raises(ValueError, match=r"expected a file that ends in \.csv"):
        sources.read_table(tmp_path / "notes.txt")
    write_table(tmp_path / "test.csv")
    with pytest.raises(FileNotFoundError, match=r"a split named 'train', found \['test'\]"):
        sources.load_splits(str(tmp_path))


def test_missing_columns(tmp_path: Path) -> None:
    path = str(write_table(tmp_path / "d.csv"))
    message = r"label_column: expected a column 'label' in the train split, which has \['text', 'mood', 'place'\]"
    with pytest.raises(ValueError, match=message):
        sources.load_labelled(path, None, {"text_column": "text", "label_column": "label"}, None)
    with pytest.raises(ValueError, match="group_column: expected a column 'site'"):
        sources.load_labelled(path, None, {"label_column": "mood"}, ["mood", "site"])


@pytest.mark.parametrize(
    ("values", "names", "codes"),
    [
        (["b", "a", "b"], ["a", "b"], [1, 0, 1]),
        ([0, 1, 1], ["0", "1"], [0, 1, 1]),
        ([10, 2, 2], ["2", "10"], [1, 0, 0]),
        ([True, False, True], ["False", "True"], [1, 0, 1]),
    ],
)
def test_class_labels(values: list[Any], names: list[str], codes: list[int]) -> None:
    splits = sources.with_class_labels(DatasetDict(train=Dataset.from_dict({"y": values, "text": ["t"] * 3})), "y")
    assert splits["train"].features["label"] == splits["train"].features["y"] == ClassLabel(names=names)
    assert splits["train"]["label"][:] == splits["train"]["y"][:] == codes


def test_class_labels_keep_what_the_dataset_says() -> None:
    features = datasets.Features(label=ClassLabel(names=["z", "a", "unused"]), n=Value("int64"))
    train = Dataset.from_dict({"label": [0, 1], "n": [1, 2]}, features=features)
    unlabelled = Dataset.from_dict({"label": [-1, -1], "n": [1, 2]}, features=features)
    splits = sources.with_class_labels(DatasetDict(train=train, test=unlabelled), "label")
    assert list(splits) == ["train"]
    assert splits["train"].features["label"].names == ["z", "a", "unused"] and splits["train"]["label"][:] == [0, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"y": [0.5, 1.0]}, "train row 0: expected a class .* got 0.5"),
        ({"y": ["a", None]}, "train row 1: expected a class .* got None"),
        ({"y": ["a", "a"]}, r"at least two classes, got only \['a'\]"),
        ({"y": [0, 1], "label": [1, 0]}, "a column 'label' too"),
    ],
)
def test_labels_that_are_no_classes(rows: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sources.with_class_labels(DatasetDict(train=Dataset.from_dict(rows)), "y")


def test_text_must_be_text() -> None:
    splits = DatasetDict(train=Dataset.from_dict({"text": ["a", None]}))
    with pytest.raises(ValueError, match="'text', train row 1: expected a text, got None"):
        sources.require_text(splits, ["text", None])


def test_carved_validation_is_a_tenth_of_each_group(caplog: pytest.LogCaptureFixture) -> None:
    rows = {"id": range(152), "g": ["big"] * 100 + ["small"] * 40 + ["tiny"] * 10 + ["pair"] * 2}
    splits = DatasetDict(train=Dataset.from_dict({**rows, "id": list(rows["id"])}))
    with caplog.at_level("INFO"):
        carved = sources.with_validation(splits, ["g"], seed=5)
    assert Counter(carved["validation"]["g"][:]) == {"big": 10, "small": 4, "tiny": 1}
    assert Counter(carved["train"]["g"][:]) == {"big": 90, "small": 36, "tiny": 9, "pair": 2}
    assert sorted([*carved["train"]["id"], *carved["validation"]["id"]]) == list(range(152))
    assert "15 of the 152 training examples (10 % of every group of g, seed 5)" in caplog.text
    assert sources.with_validation(carved, ["g"]) is carved
    again, other = (sources.with_validation(splits, ["g"], seed=seed)["validation"]["id"][:] for seed in (5, 6))
    assert carved["validation"]["id"][:] == again != other
