"""What a step of CGD costs beside the stock Trainer's when several processes train together (DDP over gloo on CPUs).

    python benchmarks/ddp_step.py                                    two processes, DistilBERT-base, 16 x 64 each
    python benchmarks/ddp_step.py --processes 4 --model minilm --pairs 5 --groups 4 64

A step is forward, backward with DDP's reduction, and all that the objective exchanges; no optimizer. Each method and
the stock Trainer take turns within one run of the processes, pair by pair, and the ratio of a pair is that of the
slower process. "noise" is the stock step against itself. "sent" is what one process gives to the collectives of hf_cgd
in a step (DDP's own reduction of all gradients not included), as counted and as the formula of docs/scaling.md says.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf
from torch import nn

import hf_cgd.distributed.communication
from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.cli import run_program
from hf_cgd.robust_loss.estimators import GramEstimator

MODELS: dict[str, Callable[[], nn.Module]] = {
    "distilbert": lambda: tf.DistilBertForSequenceClassification(tf.DistilBertConfig()),
    "minilm": lambda: tf.BertForSequenceClassification(
        tf.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    ),
}
METHODS: dict[str, dict[str, Any]] = {
    "noise": {},
    "erm": {"objective": "erm"},
    "group_dro": {"objective": "group_dro"},
    "cgd": {"objective": "cgd", "gradient_engine": "single_pass"},
    "cgd sketch": {"objective": "cgd", "gradient_engine": "sketch"},
}
SEED = 0


class Counted:
    """Stands in for `torch.distributed` in hf_cgd and adds up the bytes that the collectives are given."""

    def __init__(self) -> None:
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.sent += tensor.nbytes
        dist.all_reduce(tensor)

    def all_to_all_single(self, output: torch.Tensor, given: torch.Tensor) -> None:
        self.sent += given.nbytes
        dist.all_to_all_single(output, given)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor) -> None:
        self.sent += given.nbytes
        dist.reduce_scatter_single(output, given)


def training_step(model: nn.Module, options: argparse.Namespace, groups: int, knobs: dict[str, Any]) -> Any:
    """A function that runs one training step of a method, or of the stock Trainer for no `knobs`, and its trainer."""
    rows = [{"labels": 0, "input_ids": [0], "group": group} for group in range(groups)]
    common: dict[str, Any] = {"output_dir": "out/benchmark", "use_cpu": True, "report_to": "none"}
    trainer: tf.Trainer
    if knobs:
        args = GroupRobustConfig(group_column=["group"], min_group_size=1, **common, **knobs)
        trainer = GroupRobustTrainer(model=model, args=args, train_dataset=rows)
    else:
        trainer = tf.Trainer(model, tf.TrainingArguments(**common))
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    wrapped = trainer.accelerator.prepare(model)
    generator = torch.Generator().manual_seed(SEED + trainer.args.process_index)
    shape = (options.batch, options.tokens)
    batch = {
        "input_ids": torch.randint(1000, 20000, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.randint(0, 2, (options.batch,), generator=generator),
    }
    if knobs:
        batch["group"] = (torch.arange(options.batch) + trainer.args.process_index * options.batch) % groups

    def step() -> None:
        model.zero_grad()
        trainer.training_step(wrapped, dict(batch))

    return step, trainer


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run by every process."""
    tf.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    counted = Counted()
    hf_cgd.distributed.communication.dist = counted  # type: ignore[assignment]
    results: dict[str, Any] = {}
    for groups in options.groups:
        torch.manual_seed(SEED)
        model = MODELS[options.model]().train()
        stock, _ = training_step(model, options, groups, {})
        for name in options.methods:
            step, trainer = training_step(model, options, groups, METHODS[name])
            seconds: dict[str, list[float]] = {"stock": [], name: []}
            for _ in range(2):
                stock()
                step()
            before = counted.sent
            step()
            sent = counted.sent - before
            for place in range(options.pairs):
                turn = [("stock", stock), (name, step)]
                for key, run in turn if place % 2 else reversed(turn):
                    dist.barrier()
                    start = time.perf_counter()
                    run()
                    seconds[key].append(slowest(time.perf_counter() - start))
            pairs = [ours / theirs for ours, theirs in zip(seconds[name], seconds["stock"], strict=True)]
            results[f"{name} K={groups}"] = {
                "median": statistics.median(pairs), "low": min(pairs), "high": max(pairs),
                "stock_seconds": statistics.median(seconds["stock"]), "seconds": statistics.median(seconds[name]),
                "sent": sent, "formula": formula(trainer, groups, options),
            }  # fmt: skip
    return results


def slowest(seconds: float) -> float:
    times = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.item()


def formula(trainer: tf.Trainer, groups: int, options: argparse.Namespace) -> int:
    """Bytes of a step: counts, losses and inner products in float64, rows of gradients (or sketches) in float32."""
    processes = dist.get_world_size()
    if not isinstance(trainer, GroupRobustTrainer):
        return 0
    robust_loss = trainer.robust_loss
    assert robust_loss is not None
    if not robust_loss.objective.has_weights:
        return 8 * groups
    present = min(groups, options.batch * processes)
    if not robust_loss.objective.needs_gradients:
        return 8 * 2 * groups
    estimator = robust_loss._estimator
    assert isinstance(estimator, GramEstimator)
    width = -(-estimator.pooled_rows.row_size // processes)
    return 8 * (2 * groups + present**2) + 4 * present * processes * width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="distilbert", choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--groups", nargs="+", type=int, default=[4])
    parser.add_argument("--batch", type=int, default=16, help="rows per process")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--output", default="out/benchmark/ddp_step.json")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.processes)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
        sys.exit(subprocess.run([sys.executable, *launcher, *sys.argv], env=environment).returncode)
    results = measure(options)
    if dist.get_rank() == 0:
        print(f"{options.processes} processes, {options.model}, {options.batch} x {options.tokens} each")
        titles = f"{'method':22} {'median':>7} {'low':>6} {'high':>6} {'stock s':>7} {'s':>7}"
        print(f"{titles} {'sent MiB':>9} {'formula':>9}")
        for name, entry in results.items():
            numbers = f"{entry['median']:7.3f} {entry['low']:6.3f} {entry['high']:6.3f}"
            times = f"{entry['stock_seconds']:7.3f} {entry['seconds']:7.3f}"
            print(f"{name:22} {numbers} {times} {entry['sent'] / 2**20:9.3f} {entry['formula'] / 2**20:9.3f}")
        path = Path(options.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"options": vars(options), "results": results}, indent=2))


if __name__ == "__main__":
    run_program(main)
