"""The benchmarks' data: hand counts, hand sentences, small files that the tests write themselves."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Value
from PIL import Image

from hf_cgd.data import sources
from hf_cgd.tasks import colored_mnist, mnist, multinli, multinli_demo

# ---- MultiNLI -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "negated"),
    [
        ("No.", True), ("NOBODY came", True), ("There was no-one there.", True), ("Nothing's left", True),
        ("He said: 'never'", True), ("I do not know", False), ("I don't", False),
        ("nowhere to go", False), ("He knows, notes nothingness and knobs", False), ("", False),
    ],
)  # fmt: skip
def test_negation_rule(sentence: str, negated: bool) -> None:
    assert multinli.has_negation(sentence) is negated


def nli_rows(hypotheses: list[str], labels: list[Any]) -> dict[str, list[Any]]:
    return {"premise": ["p"] * len(labels), "hypothesis": hypotheses, "label": labels, "genre": ["x"] * len(labels)}


def write_jsonl(path: Path, rows: dict[str, list[Any]]) -> Path:
    lines = [json.dumps(dict(zip(rows, values, strict=True))) for values in zip(*rows.values(), strict=True)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_multinli_of_local_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", nli_rows(["It never rains", "It rains", "Odd", "No"], [2, 0, -1, 1]))
    Dataset.from_dict(nli_rows(["nothing", "something"], [0, -1])).to_parquet(tmp_path / "validation_matched.parquet")
    names = ["entailment", "-", "contradiction"]
    write_jsonl(tmp_path / "validation_mismatched.jsonl", nli_rows(["a", "b", "c"], names))
    splits = multinli.splits_of(multinli.load(tmp_path))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 3, "validation": 1, "test": 2}
    assert splits["train"]["label"][:] == [2, 0, 1]
    assert splits["train"]["negation"][:] == [1, 0, 1]
    assert splits["test"]["label"][:] == [0, 2]
    assert splits["train"].features["label"].names == list(multinli.LABELS)
    assert splits["train"].features["negation"].names == ["no", "yes"]


def test_resplit_is_a_partition_in_the_published_shares() -> None:
    parts = {
        name: Dataset.from_dict(nli_rows([f"{name} {i}" for i in range(size)], [i % 3 for i in range(size)]))
        for name, size in (("train", 60), ("validation_matched", 20), ("validation_mismatched", 20))
    }
    splits = multinli.splits_of(parts, resplit=True, seed=3)
    assert [len(splits[name]) for name in ("train", "validation", "test")] == [50, 20, 30]
    everything = [sentence for rows in splits.values() for sentence in rows["hypothesis"]]
    assert sorted(everything) == sorted(f"{name} {i}" for name, part in parts.items() for i in range(len(part)))
    again, other = (multinli.splits_of(parts, resplit=True, seed=seed)["train"]["hypothesis"][:] for seed in (3, 4))
    assert splits["train"]["hypothesis"][:] == again != other


def test_multinli_says_what_it_misses(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="^data_dir: expected a folder"):
        multinli.load(tmp_path / "nowhere")
    write_jsonl(tmp_path / "train.jsonl", nli_rows(["a"], [0]))
    with pytest.raises(FileNotFoundError, match=r"named validation_matched, found \['train.jsonl'\]"):
        multinli.load(tmp_path)
    write_jsonl(tmp_path / "validation_matched.jsonl", {"premise": ["a"], "label": [1]})
    with pytest.raises(ValueError, match="'hypothesis' in the validation_matched split, which has"):
        multinli.load(tmp_path)
    with pytest.raises(ValueError, match="row 1: expected 0, 1, 2 or entailment"):
        multinli.splits_of({"train": Dataset.from_dict(nli_rows(["a", "b"], [0, 7]))})


def test_multinli_offline_is_three_lines_that_say_what_to_pass() -> None:
    with pytest.raises(ConnectionError) as error:
        multinli.load()
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert "nyu-mll/multi_nli" in lines[0] and "connection" in lines[0]
    assert "HF_HUB_OFFLINE is set" in lines[1]
    assert "Pass data_dir= with" in lines[2] and "source=demo" in lines[2]


def test_demo_negation_goes_with_contradiction_in_training_only() -> None:
    parts = multinli_demo.demo(seed=1)
    assert parts["train"].to_dict() == multinli_demo.demo(seed=1)["train"].to_dict()
    splits = multinli.splits_of(parts)
    shares = {}
    for split, rows in splits.items():
        labels, negation = np.asarray(rows["label"][:]), np.asarray(rows["negation"][:])
        shares[split] = [float(negation[labels == code].mean()) for code in range(3)]
    assert shares["train"] == pytest.approx([0.02, 0.02, 0.8], abs=0.05)
    assert shares["test"] == pytest.approx([0.5, 0.5, 0.5], abs=0.12)


def test_demo_labels_follow_from_the_words() -> None:
    """Read back by another rule: what the premise says, what the hypothesis says, and whether that is denied."""
    opposites = multinli_demo.OPPOSITES | {value: key for key, value in multinli_demo.OPPOSITES.items()}
    tokenizer = multinli_demo.demo_tokenizer()
    for row in multinli_demo.demo(seed=0, sizes={"train": 400})["train"]:
        said = next(word for word in row["premise"].split() if word in opposites)
        claimed = next(word for word in row["hypothesis"].split() if word in opposites)
        if " with a " in row["hypothesis"]:
            expected = "neutral"
        else:
            expected = (
                "contradiction" if (claimed == said) == multinli.has_negation(row["hypothesis"]) else "entailment"
            )
        assert multinli.LABELS[row["label"]] == expected, row
        encoded = tokenizer.encode(row["premise"], row["hypothesis"])
        assert "[UNK]" not in encoded.tokens and encoded.tokens.count("[SEP]") == 2


# ---- Colored-MNIST --------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray, magic: bytes | None = None) -> Path:
    head = magic or bytes([0, 0, 8, array.ndim])
    content = head + np.asarray(array.shape, dtype=">u4").tobytes() + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def made_mnist(train: int = 60, test: int = 20) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Image i is filled with i + 1 in its upper half, so that each can be told from the others; digits go round."""
    found = {}
    for name, size in (("train", train), ("test", test)):
        images = np.zeros((size, 28, 28), dtype=np.uint8)
        images[:, :14] = np.arange(1, size + 1)[:, None, None]
        found[name] = (images, np.arange(size, dtype=np.uint8) % 10)
    return found


def write_mnist(folder: Path, ending: str = "", **sizes: int) -> Path:
    for name, (images, digits) in made_mnist(**sizes).items():
        stem = mnist.IDX_FILES[name]
        write_idx(folder / f"{stem}-images-idx3-ubyte{ending}", images)
        write_idx(folder / f"{stem}-labels-idx1-ubyte{ending}", digits)
    return folder


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files(tmp_path: Path, ending: str) -> None:
    data = mnist.load(write_mnist(tmp_path, ending))
    for name, (images, digits) in made_mnist().items():
        assert np.array_equal(data[name][0], images) and np.array_equal(data[name][1], digits)


def test_idx_errors(tmp_path: Path) -> None:
    array = np.zeros((2, 28, 28))
    wrong = write_idx(tmp_path / "a", array, magic=b"\x00\x00\x0d\x03")
    with pytest.raises(ValueError, match="starts with 00000803 .* got 00000d03"):
        mnist.read_idx(wrong, 3)
    with pytest.raises(ValueError, match="starts with 00000801"):
        mnist.read_idx(write_idx(tmp_path / "b", array), 1)
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(ValueError, match="got an empty file"):
        mnist.read_idx(tmp_path / "c", 1)
    (tmp_path / "d").write_bytes(write_idx(tmp_path / "b", array).read_bytes()[:-3])
    with pytest.raises(ValueError, match="expected 2 x 28 x 28 bytes after the header, got 1565"):
        mnist.read_idx(tmp_path / "d", 3)
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte or train-images-idx3-ubyte.gz"):
        mnist.load(tmp_path)
    folder = write_mnist(tmp_path)
    write_idx(folder / "t10k-labels-idx1-ubyte", np.zeros(3))
    with pytest.raises(ValueError, match=r"images \(20, 28, 28\) and labels \(3,\) in the test files"):
        mnist.load(folder)


def pixels(dataset: Dataset) -> torch.Tensor:
    return torch.stack([row["pixel_values"] for row in dataset])


def image_numbers(dataset: Dataset) -> list[int]:
    """Which of the images of `made_mnist` each row shows."""
    return (pixels(dataset).amax(dim=(1, 2, 3)) * 255).round().int().sub(1).tolist()


def test_colored_mnist_counts_and_colors() -> None:
    splits = colored_mnist.splits_of(made_mnist(), ratio=4, validation_size=10, seed=0)
    counts = {name: Counter(rows["group"][:]) for name, rows in splits.items()}
    assert counts["train"] == {"majority": 40, "minority": 10}
    assert counts["validation"] == {"majority": 5, "minority": 5}
    assert counts["test"] == {"majority": 10, "minority": 10}
    assert sorted(image_numbers(splits["train"])) == list(range(50))
    assert sorted(image_numbers(splits["validation"])) == list(range(50, 60))
    assert sorted(image_numbers(splits["test"])) == list(range(20))
    for rows in splits.values():
        images = pixels(rows)
        assert images.dtype == torch.float32 and images.shape[1:] == (3, 28, 28) and images.max() <= 1
        for number, row, image in zip(image_numbers(rows), rows, images, strict=True):
            label = int(number % 10 < 5)
            assert row["label"] == label
            red = (label == 0) == (row["group"] == "majority")
            channel = 0 if red else 2
            assert image[channel, :14].unique().tolist() == pytest.approx([(number + 1) / 255])
            assert image.sum() == image[channel, :14].sum()


def test_legacy_coloring_recolors_the_same_first_images() -> None:
    splits = colored_mnist.splits_of(made_mnist(), ratio=6, validation_size=10, legacy=True)
    train = splits["train"]
    assert image_numbers(train) == [*range(42), *range(7)]  # 50 * 6/7 and 50 / 7, rounded down
    assert image_numbers(splits["validation"]) == [*range(50, 55)] * 2
    assert image_numbers(splits["test"]) == [*range(10)] * 2
    image = pixels(train)[0]
    assert train[0]["group"] == "majority" and train[0]["label"] == 1 and train[0]["color"] == "magenta"
    assert image[1].max() == 0 and image[0, :, :14].min() > 0 and image[2, :, 14:].max() == 0


def test_published_sizes() -> None:
    assert colored_mnist.group_counts(50_000, 1000) == (49_950, 50)
    assert colored_mnist.group_counts(50_000, 1000, legacy=True) == (49_950, 49)
    assert (
        colored_mnist.group_counts(10_000, 1) == colored_mnist.group_counts(10_000, 1, legacy=True) == (5_000, 5_000)
    )


def test_train_size_keeps_the_ratio() -> None:
    splits = colored_mnist.splits_of(made_mnist(), ratio=4, validation_size=10, train_size=20, seed=1)
    assert Counter(splits["train"]["group"][:]) == {"majority": 16, "minority": 4}
    numbers = image_numbers(splits["train"])
    assert len(set(numbers)) == 20 and max(numbers) < 50
    again = colored_mnist.splits_of(made_mnist(), ratio=4, validation_size=10, train_size=20, seed=1)
    assert image_numbers(again["train"]) == numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 49}, r"50 training images at 49 to 1 leave 1 .* expected 2 or more. Use a train_size of 100"),
        ({"ratio": 0.5}, "ratio is majority to minority, so at least 1, got 0.5"),
        ({"train_size": 51}, "between 1 and 50"),
        ({"train_size": 0}, "between 1 and 50"),
        ({"validation_size": 60}, "between 0 and the 60 training images, got 60"),
    ],
)
def test_colored_mnist_sizes_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        colored_mnist.splits_of(made_mnist(), **{"validation_size": 10, "ratio": 4, **options})


# ---- A user's own files ---------------------------------------------------------------------------------------------

ROWS = {"text": ["a", "b", "c", "d"], "mood": ["sad", "glad", "sad", "glad"], "place": ["x", "x", "y", "y"]}


def write_table(path: Path, rows: dict[str, list[Any]] | None = None) -> Path:
    dataset = Dataset.from_dict(rows or ROWS)
    if path.suffix == ".parquet":
        dataset.to_parquet(path)
    elif path.suffix == ".jsonl":
        dataset.to_json(path)
    else:
        dataset.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",")
    return path


@pytest.mark.parametrize("name", ["d.csv", "d.tsv", "d.jsonl", "d.parquet"])
def test_tables(tmp_path: Path, name: str) -> None:
    splits = sources.load_splits(str(write_table(tmp_path / name)))
    assert list(splits) == ["train"] and splits["train"].to_dict() == ROWS


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_table(tmp_path / "d.csv")
    sources.read_table(path)
    write_table(path, {"text": ["new"]})
    assert sources.read_table(path).to_dict() == {"text": ["new"]}


def test_folder_of_tables_by_stem(tmp_path: Path) -> None:
    for name in ("train.csv", "dev.jsonl", "test.parquet", "notes.csv"):
        write_table(tmp_path / name)
    assert list(sources.load_splits(str(tmp_path))) == ["train", "validation", "test"]
    write_table(tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match=r"one table named 'train', found train.csv and train.jsonl"):
        sources.load_splits(str(tmp_path))


def write_images(folder: Path, names: list[str], size: int = 8) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (size, size), (40 * number % 256, 0, 0)).save(folder / name)


def test_image_folder_with_metadata(tmp_path: Path) -> None:
    names = ["a.png", "b.png", "c.png"]
    write_images(tmp_path / "train", names)
    table = {"file_name": names, "label": ["cat", "dog", "cat"], "place": ["in", "out", "out"]}
    write_table(tmp_path / "train" / "metadata.csv", table)
    splits = sources.load_splits(str(tmp_path))
    assert sorted(splits["train"].column_names) == ["image", "label", "place"]
    assert sources.with_images(splits, "image", tmp_path)["train"][1]["image"].getpixel((0, 0)) == (40, 0, 0)


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
    message = r"--label_column: expected a column 'label' in the train split, which has \['text', 'mood', 'place'\]"
    with pytest.raises(ValueError, match=message):
        sources.load_labelled(path, None, {"text_column": "text", "label_column": "label"}, None)
    with pytest.raises(ValueError, match="--group_column: expected a column 'site'"):
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
