"""What small networks, evaluation and set-up cost, where the work beside the network is all that counts.

    OMP_NUM_THREADS=1 python benchmarks/small_networks.py step           milliseconds of one step
    OMP_NUM_THREADS=1 python benchmarks/small_networks.py evaluate       `evaluate()` in times of the stock one
    OMP_NUM_THREADS=1 python benchmarks/small_networks.py memory         peak memory of `evaluate()`, Linux only
    OMP_NUM_THREADS=1 python benchmarks/small_networks.py build          seconds to build a trainer
    OMP_NUM_THREADS=1 python benchmarks/small_networks.py collate        microseconds of one batch's collator

Process time on one thread, methods in turn; medians, with the lowest and highest.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import datasets
import numpy as np
import torch
import transformers as tf
from memory import forget_peak, resident
from torch import Tensor, nn

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

FEATURES, CLASSES, GROUPS, BATCH = 16, 2, 4, 32
OBJECTIVES = ("erm", "erm_uw", "group_dro", "cgd")
FOLDER = "out/benchmark"


class TwoLayers(nn.Module):
    """Two linear layers with a loss of its own, as the models of transformers have one."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.classifier = nn.Linear(32, classes)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.classifier(self.first(x).relu())
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(size: int, as_text: bool = False, crossed: bool = False) -> datasets.Dataset:
    """A data set of that many rows; the group is a number, a string, or two columns."""
    generator = np.random.default_rng(0)
    groups = generator.integers(GROUPS, size=size)
    columns: dict[str, Any] = {
        "x": generator.normal(size=(size, FEATURES)).astype(np.float32),
        "labels": generator.integers(CLASSES, size=size),
        "group": [f"group {number}" for number in groups] if as_text else groups,
    }
    if crossed:
        columns["place"] = [f"place {number}" for number in generator.integers(3, size=size)]
    return datasets.Dataset.from_dict(columns)


def trainer_of(name: str, data: Any, **options: Any) -> tf.Trainer:
    """The stock trainer, or ours with an objective of that name."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "output_dir": FOLDER, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": 64,
    }  # fmt: skip
    arguments: dict[str, Any] = {"model": TwoLayers(), "train_dataset": data, **options}
    columns = arguments.pop("columns", ["group"])
    if name == "stock":
        trainer = tf.Trainer(args=tf.TrainingArguments(**common, remove_unused_columns=True), **arguments)
    else:
        args = GroupRobustConfig(**common, objective=name, group_column=columns)
        trainer = GroupRobustTrainer(args=args, **arguments)
    trainer.remove_callback(tf.PrinterCallback)
    return trainer


def in_turn(methods: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Process times in seconds, each method once in every round, after a warm-up of each."""
    for method in methods.values():
        method()
    times: dict[str, list[float]] = {name: [] for name in methods}
    for place in range(rounds):
        order = list(methods.items())
        for name, method in order if place % 2 else reversed(order):
            start = time.process_time()
            method()
            times[name].append(time.process_time() - start)
    return times


def table(times: dict[str, list[float]], unit: str, factor: float) -> None:
    """Prints medians, and their differences and ratios to the first method."""
    base = statistics.median(next(iter(times.values())))
    print(f"{'method':24} {unit:>10} {'low':>8} {'high':>8} {'more':>8} {'ratio':>7}")
    for name, found in times.items():
        middle = statistics.median(found)
        shown = " ".join(f"{value * factor:8.3f}" for value in (min(found), max(found), middle - base))
        print(f"{name:24} {middle * factor:10.3f} {shown} {middle / base:7.3f}")


def step(rounds: int) -> None:
    """A step as the training loop takes it, `get_batch_samples` and `training_step`, 100 at a time."""
    data = rows(256)
    batch = {"x": torch.randn(BATCH, FEATURES), "labels": torch.randint(CLASSES, (BATCH,))}
    group_ids = (torch.arange(BATCH) % GROUPS).sort().values
    methods: dict[str, Callable[[], object]] = {}
    for name in ("stock", *OBJECTIVES):
        trainer = trainer_of(name, data)
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        inputs = batch if name == "stock" else {**batch, "group": group_ids}

        def steps(trainer: Any = trainer, inputs: Any = inputs) -> None:
            for _ in range(100):
                trainer.model.zero_grad()
                batches, count = trainer.get_batch_samples(iter([dict(inputs)]), 1, torch.device("cpu"))
                trainer.training_step(trainer.model, batches[0], count)

        methods[name] = steps
    table(in_turn(methods, rounds), "ms", 10)


def accuracy(prediction: Any) -> dict[str, float]:
    """A `compute_metrics` in one operation."""
    return {"own": float((prediction.predictions.argmax(axis=1) == prediction.label_ids).mean())}


def evaluate(rounds: int, size: int = 100_000) -> None:
    """`evaluate()`, of rows that are tensors and of rows that are lists."""
    for kind, data in {"tensors": rows(size).with_format("torch"), "lists": rows(size)}.items():
        methods = {
            name: trainer_of(name, None, eval_dataset=data, compute_metrics=accuracy).evaluate
            for name in ("stock", "erm", "cgd")
        }
        print(kind)
        table(in_turn(methods, rounds), "s", 1)


def memory(rounds: int, size: int = 100_000) -> None:
    """Growth of the resident set in one `evaluate()`, at its peak, MiB; a process for each figure."""
    for classes in (CLASSES, 100):
        found: dict[str, list[float]] = {name: [] for name in ("stock", "erm", "cgd")}
        for _ in range(rounds):
            for name, peaks in found.items():
                context = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(1, context) as process:
                    peaks.append(process.submit(peak_of_evaluation, name, size, classes).result())
        print(f"{classes} classes, scores of {size * classes * 4 / 2**20:.1f} MiB")
        table(found, "MiB", 1)


def peak_of_evaluation(name: str, size: int, classes: int) -> float:
    """Growth of this process's resident set in the second of two evaluations, MiB."""
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    data = rows(size).with_format("torch")
    trainer = trainer_of(name, None, eval_dataset=data, compute_metrics=accuracy, model=TwoLayers(classes))
    # Imports and caches are not counted.
    trainer.evaluate(data.select(range(640)))
    start = resident("VmRSS")
    forget_peak()
    trainer.evaluate()
    return (resident("VmHWM") - start) / 1024


def build(rounds: int, size: int = 500_000) -> None:
    """The constructor, on columns of each kind."""
    kinds: dict[str, tuple[Any, list[str]]] = {
        "numbers": (rows(size), ["group"]),
        "strings": (rows(size, as_text=True), ["group"]),
        "crossed": (rows(size, as_text=True, crossed=True), ["group", "place"]),
    }
    methods: dict[str, Callable[[], object]] = {"stock": lambda: trainer_of("stock", kinds["numbers"][0])}
    for name, (data, columns) in kinds.items():
        methods[name] = lambda data=data, columns=columns: trainer_of("cgd", data, columns=columns)  # type: ignore[misc]
    table(in_turn(methods, rounds), "s", 1)


def collate(rounds: int) -> None:
    """The collator of a training loader on one batch, 100 calls at a time."""
    data = rows(256)
    methods: dict[str, Callable[[], object]] = {}
    for name in ("stock", "erm", "cgd"):
        trainer = trainer_of(name, data)
        given = [data[place] for place in range(BATCH)]
        loader = trainer.get_train_dataloader()
        if name == "stock":
            given = [{key: value for key, value in row.items() if key != "group"} for row in given]
        make = loader.base_dataloader.collate_fn if hasattr(loader, "base_dataloader") else loader.collate_fn

        def batches(make: Any = make, given: Any = given) -> None:
            for _ in range(100):
                make([dict(row) for row in given])

        methods[name] = batches
    table(in_turn(methods, rounds), "ms", 10)


def main() -> None:
    """Reads the command line and measures."""
    parts = {"step": step, "evaluate": evaluate, "memory": memory, "build": build, "collate": collate}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(parts), choices=list(parts))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    for name in options.parts:
        print(f"{name}: {(parts[name].__doc__ or '').strip()} Process time, one thread, {options.rounds} rounds.")
        parts[name](options.rounds)


if __name__ == "__main__":
    main()
