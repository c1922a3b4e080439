"""Run by every process of tests/trainer/test_distributed.py: trains and evaluates many cases, and writes what came out.

    several_processes.py OUTPUT_DIR DIR_OF_THE_RESUMED_RUN [CASE ...]

`run_case` runs in a single process as well: the twin that several processes have to equal.
"""

import gc
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from tiny import NotedRows, parameters_of, text_dataset, tiny_distilbert
from tiny_tokens import tiny_model, token_dataset
from transformers import TrainerCallback

import hf_cgd.distributed.communication
from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.cli import run_program

GLOBAL_BATCH = 12
UNEVEN: dict[str, Any] = {"rows": 57, "accelerator_config": {"even_batches": False}}
"""The last of five batches has 9 rows: 6 and 3 on two processes, 4, 4 and 1 on three."""
CGD: dict[str, Any] = {"objective": "cgd", "step_size": 0.5}
CONSTANTS = {"0": 0.5, "1": 0.6, "2": 0.7, "3": 0.68}
WEIGHED: dict[str, Any] = {"class_weights": [0.5, 3.0], "example_weight_column": "importance"}
CASES: dict[str, dict[str, Any]] = {
    "erm": {"objective": "erm"},
    "erm_uw": {"objective": "erm_uw", "adjustment": 2.0},
    "group_dro": {"objective": "group_dro", "step_size": 0.5},
    "cgd": CGD,
    "pgi": {"objective": "pgi", "penalty_weight": 2.0},
    "irm": {"objective": "irm", "penalty_weight": 5.0, "penalty_anneal_steps": 2},
    "coral": {"objective": "coral", "penalty_weight": 2.0},
    "erm uneven": {"objective": "erm", **UNEVEN},
    "erm_uw uneven": {"objective": "erm_uw", "average_tokens_across_devices": False, **UNEVEN},
    "group_dro uneven": {"objective": "group_dro", "step_size": 0.5, **UNEVEN},
    "cgd per_group": {**CGD, **UNEVEN, "gradient_engine": "per_group", "average_tokens_across_devices": False},
    "cgd single_pass": {**CGD, **UNEVEN, "gradient_engine": "single_pass"},
    "cgd sketch": {**CGD, **UNEVEN, "gradient_engine": "sketch"},
    "cgd accumulated": {**CGD, "micro_batches": 2, "weight_timing": "next"},
    "cgd momentum": {**CGD, "interaction_momentum": 0.8, "save_strategy": "steps", "save_steps": 3},
    "cgd split halves": {**CGD, "self_term": "split_half"},
    "cgd consensus": {**CGD, "cross_terms": "consensus"},
    "cgd split halves accumulated": {**CGD, "self_term": "split_half", "micro_batches": 2, "weight_timing": "next"},
    "cgd consensus accumulated": {**CGD, "cross_terms": "consensus", "micro_batches": 2, "weight_timing": "next"},
    "cgd checkpointing": {
        **CGD,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "erm weighed": {"objective": "erm", **WEIGHED},
    "erm weighed uneven": {"objective": "erm", **WEIGHED, **UNEVEN, "average_tokens_across_devices": False},
    "group_dro weighed": {"objective": "group_dro", "step_size": 0.5, **WEIGHED, **UNEVEN},
    "cgd weighed accumulated": {**CGD, **WEIGHED, "micro_batches": 2, "weight_timing": "next"},
    "erm unlabelled": {"objective": "erm", "unlabelled": range(30, 36)},
    "group_dro unlabelled": {"objective": "group_dro", "step_size": 0.5, "unlabelled": range(28, 36)},
    "pgi unlabelled": {"objective": "pgi", "penalty_weight": 2.0, "unlabelled": range(30, 36)},
    "irm unlabelled": {"objective": "irm", "penalty_weight": 5.0, "unlabelled": range(30, 36)},
    "coral unlabelled": {"objective": "coral", "penalty_weight": 2.0, "unlabelled": range(30, 36)},
    "cgd unlabelled": {**CGD, "unlabelled": [3, 4, 30, 31, 33, 50]},
    "group_dro excess": {"objective": "group_dro", "step_size": 0.5, "reference_losses": "importance", **UNEVEN},
    "group_dro split forward": {"objective": "group_dro", "step_size": 0.5, "forward_mode": "split"},
    "cgd excess": {**CGD, "micro_batches": 2, "weight_timing": "next", "reference_losses": CONSTANTS},
    "erm tokens": {"objective": "erm", "tokens": "gpt2"},
    "erm tokens accumulated": {"objective": "erm", "tokens": "gpt2", "micro_batches": 2},
    "cgd tokens": {**CGD, "tokens": "gpt2", "group_unit": "token"},
    "cgd tokens accumulated": {
        **CGD,
        "tokens": "gpt2",
        "group_unit": "token",
        "micro_batches": 2,
        "weight_timing": "next",
    },
    "cgd rows of tokens": {**CGD, "tokens": "masked"},
    "cgd unused layer": {**CGD, "unused": True, "weight_decay": 0.5},
    "cgd reduce-scattered": {**CGD, "backend": "another"},
    "cgd all-reduced": {**CGD, "backend": "without"},
}
EVALUATED = ("erm", "cgd")
PUBLISHED = "whole"
"""Name of the repository that a run of several processes is pushed to, where HF_ENDPOINT tells the Hub."""
SAMPLED_ROWS, SAMPLED_STEPS, SAVED_STEP = 36, 8, 4
RAGGED_ROWS = 50
"""Rows of five steps, of which no number of processes fills the last."""


class Collectives:
    """Stands in for `torch.distributed` and notes every collective with the bytes that it is given."""

    def __init__(self, backend: str) -> None:
        self.calls: list[tuple[str, int]] = []
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self) -> str:
        return self._backend

    def all_to_all_single(self, output: torch.Tensor, given: torch.Tensor) -> None:
        self.calls.append(("all_to_all", given.nbytes))
        dist.all_to_all_single(output, given)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.calls.append(("all_reduce", tensor.nbytes))
        dist.all_reduce(tensor)

    def all_gather(self, parts: list[torch.Tensor], given: torch.Tensor) -> None:
        self.calls.append(("all_gather", given.nbytes))
        dist.all_gather(parts, given)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor) -> None:
        if self._backend == "without":
            raise RuntimeError("Backend of this test does not support reduce_scatter")
        self.calls.append(("reduce_scatter", given.nbytes))
        dist.reduce_scatter_single(output, given)


def groups_of_rows(rows: int, case: str = "") -> list[int]:
    """Processes hold different groups: the first one group 0 only, or nearly. Groups 2 and 3 are absent from some batches.

    Of two micro-batches on two processes, examples of group 0 in the second of one process come behind the other's first.
    Consensus wants all groups in every batch.
    """
    first, second = [0] * 6 + [1, 1, 2, 0, 1, 2], [0] * 5 + [1] + [0, 1, 1, 3, 1, 3]
    if "consensus" in case:
        first = second = [0] * 3 + [1, 0, 2] + [0, 1, 2, 3, 2, 3]
    return ((first + second) * (rows // 24 + 1))[:rows]


def arguments(output_dir: str, world: int, **changes: Any) -> GroupRobustConfig:
    micro_batches = changes.pop("micro_batches", 1)
    if world == 1:
        micro_batches = 1
    quiet = dict(
        output_dir=output_dir, group_column="group", max_steps=5, use_cpu=True, report_to=[],
        per_device_train_batch_size=GLOBAL_BATCH // world // micro_batches, per_device_eval_batch_size=2,
        gradient_accumulation_steps=micro_batches, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
        max_grad_norm=0, save_strategy="no", logging_steps=1, disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    return GroupRobustConfig(**{**quiet, **changes})


def run_case(name: str, output_dir: str, resume_from: str | None = None) -> dict[str, Any]:
    """Train one of `CASES`; the result is JSON-ready."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    changes = dict(CASES[name])
    rows, unlabelled, tokens = changes.pop("rows", 60), changes.pop("unlabelled", ()), changes.pop("tokens", None)
    collectives, has_unused = Collectives(changes.pop("backend", "gloo")), changes.pop("unused", False)
    args = arguments(output_dir, world, **changes)
    data = token_dataset(tokens, rows) if tokens else text_dataset(rows)
    data = data.remove_columns("group").add_column("group", groups_of_rows(rows, name))
    data = data.add_column("importance", [0.5 + row % 5 / (1 if "weighed" in name else 10) for row in range(rows)])
    if unlabelled:
        labels = [-100 if row in unlabelled else label for row, label in enumerate(data["labels"][:])]
        data = data.remove_columns("labels").add_column("labels", labels)
    model = tiny_model(tokens) if tokens else tiny_distilbert()
    if has_unused:
        # In the scope, since it stands behind the last block.
        model.unused = torch.nn.Linear(32, 32)
    original, hf_cgd.distributed.communication.dist = hf_cgd.distributed.communication.dist, collectives  # type: ignore[assignment]
    try:
        trainer = GroupRobustTrainer(
            model,
            args,
            train_dataset=data,
            eval_dataset=text_dataset(7, groups=3) if name in EVALUATED else None,
        )
        collectives.calls.clear()
        trainer.train(resume_from_checkpoint=resume_from)
    finally:
        hf_cgd.distributed.communication.dist = original
    others = trainer.accelerator.gather(parameters_of(trainer.model)[None])
    weights = trainer.group_weights
    pooled = getattr(trainer.robust_loss._estimator, "pooled_rows", None)
    result = {
        "world": trainer.accelerator.num_processes,
        "wrapped": type(trainer.model_wrapped).__name__,
        "parameters": parameters_of(trainer.model).tolist(),
        "spread": (others - others[0]).abs().max().item(),
        "weights": None if weights is None else weights.tolist(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "group_losses": [
            {k: v for k, v in entry.items() if k.startswith("group_loss")}
            for entry in trainer.state.log_history
            if "loss" in entry
        ],
        "engine": getattr(getattr(trainer.robust_loss._engine, "chosen", None), "name", None),
        "collectives": collectives.calls,
        "row_size": 0 if pooled is None else pooled.row_size,
    }
    if name in EVALUATED:
        with warnings.catch_warnings():
            # The last group has no rows to evaluate.
            warnings.filterwarnings("ignore", "No examples of the group")
            metrics = trainer.evaluate()
            trainer.predict(text_dataset(7, groups=3))
            alone = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Loss", prediction_loss_only=True)
        result["loss alone"] = alone.metrics["eval_loss"]
        result["metrics"] = {k: v for k, v in metrics.items() if "accuracy" in k or "loss" in k or "count" in k}
        result["reports"] = [str(trainer.group_report(prefix)) for prefix in ("eval", "test")]
    return result


class AfterEachStep(TrainerCallback):
    """Calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.function()


def run_sampling(sampling: str, output_dir: str, rows: int = SAMPLED_ROWS, source: str = "") -> dict[str, Any]:
    """Which rows this process reads, in a run of several epochs and in one that is resumed within an epoch.

    With a `source`, the folder of the former run of any number of processes, only in the one that is resumed.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    result: dict[str, Any] = {}
    for kind in ("resumed",) if source else ("straight", "resumed"):
        resume_from = f"{source or output_dir}/checkpoint-{SAVED_STEP}" if kind == "resumed" else None
        args = arguments(
            output_dir, world, objective="group_dro", group_sampling=sampling, train_sampling_strategy="random",
            max_steps=SAMPLED_STEPS, save_strategy="steps" if resume_from is None else "no", save_steps=SAVED_STEP,
            step_size=30.0 if sampling == "weights" else None,
        )  # fmt: skip
        # Three groups, in turn.
        data = NotedRows(text_dataset(rows, groups=3))
        trainer = GroupRobustTrainer(tiny_distilbert(), args, train_dataset=data)
        # Whatever the processes did with their random states.
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        data.read.clear()
        after = [trainer.group_weights.tolist()]
        trainer.add_callback(AfterEachStep(lambda: after.append(trainer.group_weights.tolist())))  # noqa: B023
        trainer.train(resume_from_checkpoint=resume_from)
        result[kind] = {"read": list(data.read), "weights": trainer.group_weights.tolist(), "after": after}
    return result


def run_many_groups(output_dir: str) -> dict[str, Any]:
    """More groups than are logged by name."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = arguments(output_dir, world, objective="group_dro", step_size=0.5)
    trainer = GroupRobustTrainer(tiny_distilbert(), args, train_dataset=text_dataset(80, groups=40))
    trainer.train()
    return {"weights": trainer.group_weights.tolist(), "files": sorted(os.listdir(output_dir))}


class PushesInTurn(TrainerCallback):
    """Lets a push end before the next checkpoint writes over the files that it sends."""

    trainer: GroupRobustTrainer

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the push that the checkpoint began."""
        self.trainer._finish_current_push()


def run_published(output_dir: str, pushes: bool) -> dict[str, Any]:
    """A run that pushes each checkpoint, and itself at the end; or the same run without a Hub."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    hub: dict[str, Any] = {"push_to_hub": pushes, "hub_model_id": PUBLISHED, "hub_always_push": True}
    args = arguments(output_dir, world, **CGD, save_strategy="steps", save_steps=2, **hub)
    data = text_dataset(60).remove_columns("group").add_column("group", groups_of_rows(60))
    callback = PushesInTurn()
    trainer = GroupRobustTrainer(
        tiny_distilbert(), args, train_dataset=data, eval_dataset=text_dataset(7, groups=3), callbacks=[callback]
    )
    callback.trainer = trainer
    trainer.train()
    with warnings.catch_warnings(), patch("hf_cgd.cards.writing.write_pictures", lambda record, folder: {}):
        # The last group has no rows to evaluate.
        warnings.filterwarnings("ignore", "No examples of the group")
        if pushes:
            trainer.push_to_hub()
        else:
            trainer.evaluate()
    return {"report": trainer.group_report().to_dict(), "weights": trainer.group_weights.tolist()}


def main(folder: Path, source: Path, cases: Sequence[str]) -> None:
    results: dict[str, Any] = {case: run_case(case, str(folder / case)) for case in cases}
    checkpoint = str(source / "cgd momentum" / "checkpoint-3")
    results["resumed"] = run_case("cgd momentum", str(folder / "resumed"), checkpoint)
    for kind in ("none", "balanced", "weighted", "weights") if len(cases) == len(CASES) else ("balanced",):
        results[kind] = run_sampling(kind, str(folder / kind))
    for kind in ("balanced", "weighted", "weights"):
        name = f"{kind} ragged"
        before = "" if folder == source else str(source / name)
        results[name] = run_sampling(kind, str(folder / name), RAGGED_ROWS, before)
    if "HF_ENDPOINT" in os.environ:
        results["published"] = run_published(str(folder / "published"), pushes=True)
    results["many groups"] = run_many_groups(str(folder / "many"))
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The end of every run collects garbage: not through all modules each time, which takes longer than the run.
    gc.freeze()
    run_program(main, Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(CASES))
