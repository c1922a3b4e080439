"""What an XLA device (TPUs, or XLA's own CPU device) makes of a run: same numbers as a CPU, and how often it compiles.

In an environment with torch_xla:

    PJRT_DEVICE=CPU python benchmarks/xla_step.py                                 all objectives
    PJRT_DEVICE=CPU python benchmarks/xla_step.py --objectives cgd --engine per_group --steps 20 --mask

A tiny DistilBERT is trained on the same batches on the CPU and on the XLA device, by processes of their own, and once
more on the XLA device from a checkpoint in the middle; then both are evaluated. No two batches in a row hold the same
numbers of examples of each group, and some lack a group. "apart" is the largest difference between the runs on the two
devices: of group weights after any step, of logged losses and group losses, of final parameters and of evaluation
metrics. "resumed" is that between the final parameters (and weights) of the run and of the resumed one. "compiled" is
the number of graphs that XLA compiled in each step, "read" how often something was read from the device in it, logging
included, "fallbacks" the operations that left the device. docs/scaling.md says what came out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from itertools import pairwise
from typing import Any

import torch
import transformers as tf
from datasets import Dataset

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

OBJECTIVES: dict[str, dict[str, Any]] = {
    "erm": {},
    "erm_uw": {"adjustment": 2.0},
    "group_dro": {"step_size": 0.1},
    "cgd": {"step_size": 0.1, "gradient_layers": 2},
    "pgi": {"penalty_weight": 0.5},
    "irm": {"penalty_weight": 0.5},
    "coral": {"penalty_weight": 0.5},
}
BATCH, TOKENS, GROUPS = 8, 16, 3
LOGGING_STEPS = 5
EVALUATED = 20
"""Rows of the evaluation set: the last batch is smaller."""


def rows(steps: int, masked: bool) -> Dataset:
    """Batches one after the other; in each, groups are drawn with odds of their own."""
    generator = torch.Generator().manual_seed(0)
    odds = torch.rand(steps, GROUPS, generator=generator) ** 2 + 1e-3
    groups = torch.multinomial(odds, BATCH, replacement=True, generator=generator).flatten()
    ids = torch.randint(1, 64, (len(groups), TOKENS), generator=generator)
    labels = torch.randint(0, 2, (len(groups),), generator=generator)
    columns = {"input_ids": ids.tolist(), "labels": labels.tolist(), "group": groups.tolist()}
    if masked:
        lengths = torch.randint(TOKENS // 2, TOKENS + 1, (len(groups), 1), generator=generator)
        columns["attention_mask"] = (torch.arange(TOKENS) < lengths).long().tolist()
    return Dataset.from_dict(columns)


class Watch(tf.TrainerCallback):
    """Notes weights, compiled graphs and reads after each step."""

    def __init__(self) -> None:
        self.trainer: GroupRobustTrainer
        self.weights: list[torch.Tensor] = []
        self.counts: list[tuple[int, int]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Take note of the counters."""
        if "torch_xla" in sys.modules:
            from torch_xla.debug import metrics

            numbers = [metrics.metric_data(name) for name in ("CompileTime", "TransferFromDeviceTime")]
            compiled, read = (0 if number is None else number[0] for number in numbers)
            self.counts.append((compiled, read))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """The same behind the last step."""
        self.on_step_begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Keep the weights where they are: reading them here would be a wait of this script's own."""
        assert self.trainer.robust_loss is not None
        if self.trainer.robust_loss.alpha is not None:
            self.weights.append(self.trainer.robust_loss.alpha)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """One run on whatever device there is, the same resumed, and what is to be compared of them."""
    objective, steps = options.objectives[0], options.steps
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 64, "max_position_embeddings": 32}
    still = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    engine = {"gradient_engine": options.engine} if objective == "cgd" else {}
    watch = Watch()

    def trainer_in(folder: str, *callbacks: Any) -> GroupRobustTrainer:
        torch.manual_seed(0)
        model = tf.DistilBertForSequenceClassification(tf.DistilBertConfig(**sizes, **still))
        args = GroupRobustConfig(
            folder, objective=objective, group_column="group", per_device_train_batch_size=BATCH, max_steps=steps,
            optim="adamw_torch", learning_rate=0.003, lr_scheduler_type="constant", logging_steps=LOGGING_STEPS,
            train_sampling_strategy="sequential", save_strategy="steps", save_steps=steps // 2, report_to="none",
            disable_tqdm=True, dataloader_drop_last=True, dataloader_pin_memory=False,
            **OBJECTIVES[objective], **engine,
        )  # fmt: skip
        data = rows(steps, options.mask)
        evaluated = data.select(range(EVALUATED))
        return GroupRobustTrainer(
            model=model, args=args, train_dataset=data, eval_dataset=evaluated, callbacks=list(callbacks)
        )

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_in(folder, watch)
        watch.trainer = trainer
        trainer.train()
        fallbacks: list[str] = []
        if "torch_xla" in sys.modules:
            from torch_xla.debug import metrics

            fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
        evaluation = trainer.evaluate()
        assert len(trainer.group_report().to_dict()["groups"]) == GROUPS
        resumed = trainer_in(folder)
        resumed.train(resume_from_checkpoint=os.path.join(folder, f"checkpoint-{steps // 2}"))
    chosen = getattr(getattr(trainer.robust_loss, "_engine", None), "chosen", None)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "device": str(trainer.args.device),
        "engine": "" if chosen is None else chosen.name,
        "weights": [weights.tolist() for weights in watch.weights],
        "losses": [{k: v for k, v in entry.items() if k == "loss" or k.startswith("group_loss")} for entry in logs],
        "parameters": final(trainer),
        "metrics": {k: v for k, v in evaluation.items() if "_per_second" not in k and "runtime" not in k},
        "resumed": final(resumed),
        "compiled": [after[0] - before[0] for before, after in pairwise(watch.counts)],
        "read": [after[1] - before[1] for before, after in pairwise(watch.counts)],
        "fallbacks": fallbacks,
    }


def final(trainer: GroupRobustTrainer) -> list[float]:
    """Parameters and group weights at the end."""
    assert trainer.model is not None
    values = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).tolist()
    return values if trainer.group_weights is None else values + trainer.group_weights.tolist()


def in_a_process(objective: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """`train` in a process of its own: whether torch_xla is used is decided once for each."""
    command = [sys.executable, __file__, "--child", "--objectives", objective, "--engine", options.engine]
    command += ["--steps", str(options.steps), *(["--mask"] if options.mask else [])]
    environment = os.environ | {"USE_TORCH_XLA": str(int(device == "xla"))}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    if not result["device"].startswith(device):
        raise RuntimeError(f"Expected a run on {device}, got one on {result['device']}. Is torch_xla installed?")
    return result


def apart(one: Any, other: Any) -> float:
    """Largest difference between any two numbers of nested lists and dicts of the same form."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((apart(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list):
        return max((apart(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return abs(one - other)


def main() -> None:
    """Run what was asked for, in pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES))
    parser.add_argument("--engine", default="auto", help="CGD's gradient_engine")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mask", action="store_true", help="pad some rows and pass an attention mask")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        warnings.simplefilter("ignore")
        print(json.dumps(train(options)))
        return
    print(f"torch {torch.__version__}, transformers {tf.__version__}, {options.steps} steps, {BATCH} x {TOKENS}")
    for objective in options.objectives:
        on_cpu = in_a_process(objective, options, "cpu")
        on_xla = in_a_process(objective, options, "xla")
        differences = ", ".join(
            f"{name} {apart(on_cpu[name], on_xla[name]):.1e}"
            for name in ("weights", "losses", "parameters", "metrics")
        )
        print(f"{objective} {on_xla['engine']}\n  apart: {differences}")
        print(f"  resumed: {apart(on_xla['parameters'], on_xla['resumed']):.1e}")
        print(
            f"  compiled {on_xla['compiled']}\n  read {on_xla['read']}\n  fallbacks {on_xla['fallbacks']}", flush=True
        )


if __name__ == "__main__":
    main()
