"""Small files in the formats that the tasks read, and what is in them."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from PIL import Image

from hf_cgd.tasks import mnist


def nli_rows(hypotheses: list[str], labels: list[Any]) -> dict[str, list[Any]]:
    return {"premise": ["p"] * len(labels), "hypothesis": hypotheses, "label": labels, "genre": ["x"] * len(labels)}


def write_jsonl(path: Path, rows: dict[str, list[Any]]) -> Path:
    lines = [json.dumps(dict(zip(rows, values, strict=True))) for values in zip(*rows.values(), strict=True)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


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


def write_images(folder: Path, names: list[str], size: int = 8) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (size, size), (40 * number % 256, 0, 0)).save(folder / name)
