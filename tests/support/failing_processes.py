"""Run by every process of tests/trainer/test_same_batches.py: runs that cannot go on, and what each process meets.

failing_processes.py OUTPUT_DIR
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from several_processes import arguments
from tiny import text_dataset, tiny_distilbert
from transformers import default_data_collator

from hf_cgd import GroupRobustTrainer
from hf_cgd.cli import run_program

ROWS, BAD = 72, 44
"""Rows of a data set, and the number of one that cannot be read: of the second process, in batches of six."""
OWN_SHARDS: dict[str, Any] = {"accelerator_config": {"dispatch_batches": False}}
SENTENCE = "row 44 is broken"


def rows_with(bad_group: bool) -> Dataset:
    """Rows of three groups; with one of a fourth that was not announced."""
    groups = [7 if bad_group and row == BAD else row % 3 for row in range(ROWS)]
    return text_dataset(ROWS).remove_columns("group").add_column("group", groups)


def rows_without_labels() -> Dataset:
    """Rows of which the second process has none with a label in the third step."""
    rows = rows_with(False)
    labels = [-100 if 30 <= row < 36 else label for row, label in enumerate(rows["labels"][:])]
    return rows.remove_columns("labels").add_column("labels", labels)


def stream_of_two_lengths() -> IterableDataset:
    """Two shards, of 48 rows and of 24."""

    def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            yield from rows_with(False).select(range(48) if shard == 0 else range(48, ROWS))

    return IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1]})


def stream_with(bad: float) -> IterableDataset:
    """Rows that hold a number each, which nobody has looked at before; that of one row is none of those expected."""
    numbers = [bad if row == BAD else 1.0 for row in range(ROWS)]
    return rows_with(False).add_column("number", numbers).to_iterable_dataset()


class BrokenRow:
    """A collator that cannot read one row."""

    def __init__(self) -> None:
        self.bad = text_dataset(ROWS)[BAD]["input_ids"]

    def __call__(self, rows: list[Any]) -> Any:
        """The batch, or an error."""
        if any(row["input_ids"] == self.bad for row in rows):
            raise OSError(SENTENCE)
        return default_data_collator(rows)


def run(folder: Path, data: Any, evaluation: Any = None, **options: Any) -> None:
    """Train on the data, or evaluate."""
    world, collator = int(os.environ["WORLD_SIZE"]), options.pop("collator", None)
    known = GroupRobustTrainer(
        tiny_distilbert(), arguments(str(folder), world, objective="erm"), train_dataset=rows_with(False)
    ).groups
    args = arguments(str(folder), world, **{"objective": "group_dro", "max_steps": 20, **options})
    trainer = GroupRobustTrainer(
        tiny_distilbert(), args, train_dataset=data, eval_dataset=evaluation, groups=known, data_collator=collator
    )
    if evaluation is None:
        trainer.train()
    else:
        trainer.evaluate()


class ChangedIds(GroupRobustTrainer):
    """Keeps copies of the ids as on a GPU; on the second process the ids change after the collator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host_ids.keeps_copies = True

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any) -> Any:
        """The batches, with the ids of other groups."""

        def changed(batch: Any) -> Any:
            batch[self.group_key] = (batch[self.group_key] + int(os.environ["RANK"])) % 3
            return batch

        return super().get_batch_samples(map(changed, epoch_iterator), *args)


def run_with_changed_ids(folder: Path) -> None:
    """Train, with an entry of the log after the second step, at which the ids are looked at."""
    args = arguments(str(folder), int(os.environ["WORLD_SIZE"]), objective="group_dro", max_steps=20, logging_steps=2)
    ChangedIds(tiny_distilbert(), args, train_dataset=rows_with(False)).train()


def runs(folder: Path) -> dict[str, Callable[[], None]]:
    """Each run by its name."""
    accumulated = {"micro_batches": 2, "weight_timing": "next"}
    return {
        "unknown group": lambda: run(folder, rows_with(True).to_iterable_dataset()),
        "unknown group, own shards": lambda: run(folder, rows_with(True).to_iterable_dataset(2), **OWN_SHARDS),
        "broken row": lambda: run(folder, rows_with(False), collator=BrokenRow()),
        "broken row, accumulated": lambda: run(folder, rows_with(False), collator=BrokenRow(), **accumulated),
        "broken row, evaluation": lambda: run(
            folder, rows_with(False), rows_with(False).to_iterable_dataset(), collator=BrokenRow()
        ),
        "no label": lambda: run(folder, rows_without_labels(), objective="cgd"),
        "bad weight, erm": lambda: run(folder, stream_with(0.0), objective="erm", example_weight_column="number"),
        "bad weight": lambda: run(folder, stream_with(0.0), example_weight_column="number", **accumulated),
        "bad reference": lambda: run(folder, stream_with(float("nan")), reference_losses="number"),
        "changed ids": lambda: run_with_changed_ids(folder),
        "uneven batches": lambda: run(
            folder, rows_with(False).select(range(51)), accelerator_config={"even_batches": False}
        ),
        "uneven shards": lambda: run(folder, stream_of_two_lengths(), **OWN_SHARDS),
        "uneven shards, accumulated": lambda: run(folder, stream_of_two_lengths(), **OWN_SHARDS, **accumulated),
        "uneven batches, evaluation": lambda: run(
            folder, rows_with(False), rows_with(False).select(range(13)), accelerator_config={"even_batches": False}
        ),
        "even batches, evaluation": lambda: run(
            folder, rows_with(False), rows_with(False).select(range(12)), accelerator_config={"even_batches": False}
        ),
        "gathered as objects": lambda: run(
            folder, rows_with(False), rows_with(False).select(range(12)), eval_use_gather_object=True
        ),
        "a stream of several epochs": lambda: run(folder, rows_with(False).to_iterable_dataset()),
        "own shards of several epochs": lambda: run(folder, rows_with(False).to_iterable_dataset(2), **OWN_SHARDS),
    }


def main(folder: Path) -> None:
    # A network of so few steps says the same of every row.
    warnings.filterwarnings("ignore", "A single class")
    found = {}
    for name, start in runs(folder).items():
        try:
            start()
            found[name] = "finished"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_program(main, Path(sys.argv[1]))
