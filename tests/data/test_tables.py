"""CSV files keep what was written; images keep their values."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from PIL import Image

from hf_cgd.data.images import as_rgb
from hf_cgd.data.sources import with_class_labels
from hf_cgd.data.tables import read_table
from hf_cgd.monitors import GroupRobustWarning


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["NA", "None", "null", "nan"], ["NA", "None", "null", "nan"]),
        (["EU", "", "NA"], ["EU", None, "NA"]),
        (["007", "7", "011"], ["007", "7", "011"]),
        (["7", "", "-11", "0"], [7, None, -11, 0]),
        (["0.5", "1e3", "2"], [0.5, 1000.0, 2.0]),
        (["1", "nan"], ["1", "nan"]),
        (["True", "FALSE"], [True, False]),
        (["yes", "True"], ["yes", "True"]),
        (["12345678901234567890", "1"], [12345678901234567890.0, 1.0]),
        (["1,5", "a\nb"], ["1,5", "a\nb"]),
    ],
)
@pytest.mark.parametrize("separator", [",", "\t"])
def test_cells(tmp_path: Path, cells: list[str], values: list[Any], separator: str) -> None:
    path = tmp_path / ("d.csv" if separator == "," else "d.tsv")
    rows = [f'"{cell}"{separator}x' for cell in cells]
    path.write_text("\n".join([f"v{separator}w", *rows]), encoding="utf-8")
    table = read_table(path)
    assert table["v"][:] == values and table["w"][:] == ["x"] * len(cells)


def test_a_row_with_too_many_cells(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("text,label\nhello, world,1\nbye, world,0\n")
    with pytest.raises(ValueError, match=r"expected 2 cells per row.*Put texts with commas in quotes"):
        read_table(path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """The reader of CSV would take the first for what is asked for; those of the other formats end in a traceback."""
    (tmp_path / "d.csv").write_text("text,label,label\na,0,1\nb,1,0\n")
    with pytest.raises(ValueError, match=r"got 'label' more than once in \['text', 'label', 'label'\]"):
        read_table(tmp_path / "d.csv")
    # The column of row numbers that pandas writes has no name.
    (tmp_path / "e.csv").write_text(",text,\n0,a,x\n1,b,z\n")
    assert read_table(tmp_path / "e.csv")["text"][:] == ["a", "b"]
    (tmp_path / "d.jsonl").write_text('{"label": 0, "label": 1}\n')
    table = pa.Table.from_arrays([pa.array([0, 1]), pa.array([1, 0])], names=["label", "label"])
    pq.write_table(table, tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.parquet"):
        with pytest.raises(ValueError, match=rf"{name}: expected a table .* cannot be read: .*label"):
            read_table(tmp_path / name)


@pytest.mark.parametrize("separator", [",", "\t"])
def test_rows_that_a_quotation_mark_swallows_are_told(tmp_path: Path, separator: str) -> None:
    path = tmp_path / ("d.csv" if separator == "," else "d.tsv")
    rows = [["good film", "1", "hall"], ["bad film", "0", "street"]] * 10
    rows[4] = ['"Never" a film', "1", "hall"]
    lines = [separator.join(row) for row in [["text", "label", "place"], *rows]]
    path.write_text("\n".join(lines))
    assert len(read_table(path)) == 20
    # As it stands in texts that nobody has quoted: the mark at the start of one ends at the next one.
    lines[5], lines[9] = (
        lines[row].replace('"Never" a', '"Never a').replace("good film", 'a "film"') for row in (5, 9)
    )
    path.write_text("\n".join(lines))
    with pytest.warns(
        GroupRobustWarning, match=r"3 lines that look like rows .* the first ones in row 4: a quotation"
    ):
        assert len(read_table(path)) == 16
    # A text of several lines that is one.
    lines[5] = separator.join(['"first line\nsecond, line\n\nlast"', "1", "hall"])
    lines[9] = lines[1]
    path.write_text("\n".join(lines))
    assert len(read_table(path)) == 20


@pytest.mark.parametrize(
    ("train", "test", "names"),
    [
        ([0, 1, 1], ["0", "1", "unknown"], ["0", "1", "unknown"]),
        (["10", "9", "9"], [9, 10, 9], ["9", "10"]),
        ([True, False, True], ["True", "False", "True"], ["False", "True"]),
        (["007", "7", "7"], [7, 7, 7], ["7", "007"]),
    ],
)
def test_a_class_is_its_name_in_every_file(train: list[Any], test: list[Any], names: list[str]) -> None:
    splits = with_class_labels(
        DatasetDict(train=Dataset.from_dict({"y": train, "t": train}), test=Dataset.from_dict({"y": test, "t": test})),
        "y",
    )
    for split, given in (("train", train), ("test", test)):
        feature = splits[split].features["label"]
        assert feature.names == names and feature.int2str(splits[split]["y"][:]) == [str(v) for v in given]


GREY = np.array([[0, 64], [128, 255]], dtype=np.uint8)


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "LA", "PA", "RGBA", "CMYK", "YCbCr", "La", "RGBa"])
def test_greys_stay_what_they_are_in_any_mode(mode: str) -> None:
    image = Image.fromarray(GREY)
    image = image.convert("LA").convert("La") if mode == "La" else image.convert("RGBA").convert("RGBa") \
        if mode == "RGBa" else image.convert("LA").convert("PA") if mode == "PA" else image.convert(mode)  # fmt: skip
    seen = np.asarray(as_rgb(image))
    assert seen.shape == (2, 2, 3) and np.abs(seen.astype(int) - GREY[:, :, None]).max() <= 1


@pytest.mark.parametrize("mode", ["I;16", "I"])
def test_sixteen_bits_are_scaled(mode: str, tmp_path: Path) -> None:
    deep = (GREY.astype(np.uint16) * 257) + 3 * (GREY < 255)
    image = Image.fromarray(deep.astype(np.uint16)) if mode == "I;16" else Image.fromarray(deep.astype(np.int32))
    assert image.mode == mode
    # Pillow 13 writes no PNG of mode I, and opens those of 16 bits as I;16.
    files = [tmp_path / "a.tif", *([tmp_path / "a.png"] if mode == "I;16" else [])]
    for file in files:
        image.save(file)
    for seen in (image, *map(Image.open, files)):
        assert np.asarray(as_rgb(seen))[:, :, 0].tolist() == GREY.tolist()


def test_values_without_a_range_are_refused() -> None:
    with pytest.raises(ValueError, match="8 or 16 bits"):
        as_rgb(Image.fromarray(np.array([[70000]], dtype=np.int32)))
    with pytest.raises(ValueError, match="fractions"):
        as_rgb(Image.fromarray(np.array([[0.5]], dtype=np.float32)))
