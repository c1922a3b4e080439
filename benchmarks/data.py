"""How fast the data of each benchmark task arrives, beside the training step of its backbone on the same machine.

    python benchmarks/data.py                              all tasks that are registered, some minutes on 2 cores
    python benchmarks/data.py --tasks waterbirds --rows 512 --workers 2

Inputs are made up: files of the real kinds and sizes (JPEG, PNG, .npz; texts of as many words) go through the code
that reads the real ones. "one worker" is examples per second of its own time on the processor; "loader" is examples
per second on the wall of a `DataLoader` with `--workers` processes (of the tokenisation with as many). "step" is
forward and backward of the preset's network, examples per second of the processor's time. A step waits for no data
where the workers together are faster than it; "share" is what part of a step's time they are busy. The last lines are
the time of the processor that the groups of 500,000 rows take.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from datasets import Dataset, DatasetDict, disable_progress_bars
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, default_collate

from hf_cgd.cli import image_classifier
from hf_cgd.cli.task_recipe import scale_of
from hf_cgd.cli.tiny_networks import tiny_text_classifier
from hf_cgd.data.columns import read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.image_reading import with_pixels
from hf_cgd.tasks import TASKS, Task, build_task

DIFFERENT = 32
"""Files that are written for a task; further rows read them again."""
GROUP_ROWS = 500_000


@dataclass(frozen=True)
class Picture:
    """Kind, height and width of a benchmark's files; `bands` for arrays."""

    ending: str
    height: int
    width: int
    bands: int = 3

    def write(self, path: Path, generator: np.random.Generator) -> None:
        """Something that compresses like a photograph: waves with noise."""
        y, x = np.mgrid[: self.height, : self.width]
        waves = [np.sin(x / (9 + band) + y / 23 + generator.random() * 6) for band in range(self.bands)]
        values = np.stack(waves) + 0.15 * generator.normal(size=(self.bands, self.height, self.width))
        if self.ending == ".npz":
            np.savez_compressed(path, x=values.astype(np.float32))
        else:
            pixels = ((values + 1) * 127).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
            Image.fromarray(pixels).save(path, **({"quality": 90} if self.ending == ".jpg" else {}))


PICTURES = {
    "waterbirds": Picture(".jpg", 375, 500),
    "celeba": Picture(".jpg", 218, 178),
    "povertymap": Picture(".npz", 224, 224, 8),
    "fmow": Picture(".png", 224, 224),
    "camelyon17": Picture(".png", 96, 96),
}
# Words of each text, about the means of the corpora.
WORDS = {"multinli": (20, 10), "civilcomments": (55,)}


def made_pictures(task: Task, folder: Path, rows: int) -> DatasetDict:
    generator, picture = np.random.default_rng(0), PICTURES[task.name]
    for number in range(DIFFERENT):
        picture.write(folder / f"{number}{picture.ending}", generator)
    paths = [str(folder / f"{row % DIFFERENT}{picture.ending}") for row in range(rows)]
    labels = [row % max(2, len(task.info.label_names)) for row in range(rows)]
    return DatasetDict(train=Dataset.from_dict({task.info.inputs[0]: paths, "label": labels}))


def made_texts(task: Task, rows: int) -> Dataset:
    generator = np.random.default_rng(0)
    words = np.asarray(["".join(chr(97 + c) for c in generator.integers(0, 26, 2 + n % 9)) for n in range(20_000)])
    columns = {
        column: [" ".join(generator.choice(words, size)) for _ in range(rows)]
        for column, size in zip(task.info.inputs, WORDS[task.name], strict=True)
    }
    return Dataset.from_dict(columns)


def processor_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Time of this process for one call, after a first one."""
    call()
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats


def step_seconds(model: nn.Module, inputs: Mapping[str, torch.Tensor], repeats: int) -> float:
    """Of one forward and backward pass."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs).logits.float().square().mean().backward()

    model.train()
    return processor_seconds(step, repeats)


def of_images(task: Task, rows: int, workers: int, batch: int, repeats: int) -> dict[str, float]:
    preset = task.info.presets[0]
    options = task.hyperparameters(preset, objective="cgd")
    model, processor = image_classifier(
        options["model"], task.info.label_names, pretrained=False, **task.info.image_format
    )
    mean, std = scale_of(processor)
    preparation = task.image_preparation(preset)
    with tempfile.TemporaryDirectory() as folder:
        splits = made_pictures(task, Path(folder), rows)
        train = with_pixels(
            splits,
            task.info.inputs[0],
            task.open_image,
            lambda training: preparation.steps(training, mean, std),
            ["label"],
        )["train"]
        own = processor_seconds(lambda: default_collate([train[row] for row in range(batch)]), max(2, 64 // batch))
        loader = DataLoader(train, batch_size=batch, num_workers=workers, persistent_workers=True)
        # The first pass starts the workers.
        for _ in loader:
            pass
        start = time.perf_counter()
        for _ in loader:
            pass
        wall = time.perf_counter() - start
        inputs = default_collate([train[row] for row in range(batch)])["pixel_values"]
    return {
        "own": batch / own,
        "loader": rows / wall,
        "step": batch / step_seconds(model, {"pixel_values": inputs}, repeats),
    }


def of_texts(task: Task, rows: int, workers: int, batch: int, repeats: int) -> dict[str, float]:
    texts = made_texts(task, 8 * rows)
    columns = [texts[column][:] for column in task.info.inputs]
    _, tokenizer = tiny_text_classifier(columns, task.info.label_names)
    length = task.hyperparameters(task.info.presets[0], objective="cgd").get("max_length", 128)

    def tokenise(some: dict[str, Any]) -> Any:
        return tokenizer(*(some[column] for column in task.info.inputs), truncation=True, max_length=length)

    own = processor_seconds(lambda: tokenise(texts[:1000]), 3) / min(1000, len(texts))
    start = time.perf_counter()
    texts.map(tokenise, batched=True, num_proc=workers, load_from_cache_file=False)
    wall = time.perf_counter() - start
    model = tf.DistilBertForSequenceClassification(tf.DistilBertConfig(num_labels=len(task.info.label_names)))
    inputs = {"input_ids": torch.randint(1, 1000, (batch, length)), "attention_mask": torch.ones(batch, length)}
    return {"own": 1 / own, "loader": len(texts) / wall, "step": batch / step_seconds(model, inputs, repeats)}


def group_seconds() -> dict[str, float]:
    """From the columns of a dataset to its groups and the group of each row."""
    generator = np.random.default_rng(0)
    numbers = generator.integers(0, 5, GROUP_ROWS)
    names = np.asarray(["cameroon", "ghana", "kenya", "lesotho", "malawi"])[numbers]
    data = Dataset.from_dict({"hospital": numbers, "country": names, "label": generator.integers(0, 62, GROUP_ROWS)})
    found = {}
    for columns in (["hospital"], ["country"], ["label", "hospital"]):
        start = time.process_time()
        read = read_columns(data, columns)
        GroupInfo.from_columns(read).encode_columns(read)
        found[" x ".join(columns)] = time.process_time() - start
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name in TASKS if name in PICTURES or name in WORDS]
    parser.add_argument("--tasks", nargs="+", choices=known, default=known)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="Of torch, in the step and in each worker.")
    parser.add_argument("--json", type=Path, help="Write the figures there, too.")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    disable_progress_bars()
    found: dict[str, Any] = {}
    print(f"{'task':15} {'one worker':>11} {'loader':>9} {'step':>9} {'share':>7}   examples a second")
    for name in asked.tasks:
        measure = of_images if name in PICTURES else of_texts
        rates = measure(build_task(name), asked.rows, asked.workers, asked.batch, asked.repeats)
        share = rates["step"] / (asked.workers * rates["own"])
        found[name] = {**rates, "share": share}
        print(f"{name:15} {rates['own']:11.0f} {rates['loader']:9.0f} {rates['step']:9.1f} {share:7.1%}", flush=True)
    found["groups"] = group_seconds()
    for columns, seconds in found["groups"].items():
        print(f"groups of {GROUP_ROWS:,} rows by {columns}: {seconds:.2f} s")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
