"""Run by every process of tests/trainer/test_synced.py: CGD over the head behind a BatchNorm that processes share.

synced_processes.py OUTPUT_DIR

torch's own SyncBatchNorm runs on GPUs only. The one here sums over gloo, forwards and backwards, and keeps count.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.cli import run_program

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RUNS: dict[str, dict[str, Any]] = {
    "auto": {"gradient_engine": "auto"},
    "per_group": {"gradient_engine": "per_group"},
    "accumulated": {"gradient_accumulation_steps": 2, "weight_timing": "next"},
    "body": {"gradient_layers": "all"},
    "behind": {},
}
passes = {"backward": 0}


class FakeSyncBatchNorm(torch.autograd.Function):
    """The sum of a tensor over the processes; the graph calls its node by a name with SyncBatchNorm in it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        if WORLD > 1:
            dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        passes["backward"] += 1
        summed = gradient.clone()
        if WORLD > 1:
            dist.all_reduce(summed)
        return summed


class Synced(nn.Module):
    """Statistics of the rows of all processes, in training. (DDP refuses torch's class on CPUs.)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), 1e-5

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs
        ones = inputs.new_ones(1)
        sums = FakeSyncBatchNorm.apply(torch.cat([inputs.sum(0), inputs.square().sum(0), ones * len(inputs)]))
        mean, square = sums[:-1].view(2, -1) / sums[-1]
        return (inputs - mean) * (square - mean.square() + self.eps).rsqrt() * self.weight + self.bias


class Network(nn.Module):
    """A body with shared statistics and a head; with another such layer behind the head where it is asked for."""

    def __init__(self, behind: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 6), Synced(6), nn.ReLU(), nn.Linear(6, 6), Synced(6), nn.Tanh())
        self.classifier, self.after = nn.Linear(6, 2), Synced(2) if behind else nn.Identity()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.after(self.classifier(self.body(x)))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def run(folder: Path, name: str) -> dict[str, Any]:
    """Four steps of 24 rows, of which each process has other groups; weights and parameters at their end."""
    generator = torch.Generator().manual_seed(1)
    data = [
        {"x": torch.randn(5, generator=generator).tolist(), "labels": row % 2, "group": "abc"[row // 4 % 3]}
        for row in range(96)
    ]
    options: dict[str, Any] = {"gradient_layers": "head", **RUNS[name]}
    size = 24 // WORLD // options.get("gradient_accumulation_steps", 1)
    args = GroupRobustConfig(
        str(folder / name), objective="cgd", group_column="group", step_size=2.0, max_steps=4, learning_rate=0.5,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=0, per_device_train_batch_size=size, report_to=[],
        use_cpu=True, train_sampling_strategy="sequential",
        save_strategy="no", disable_tqdm=True, logging_steps=1, **options,
    )  # fmt: skip
    passes["backward"] = 0
    trainer = GroupRobustTrainer(Network(behind=name == "behind"), args, train_dataset=data)
    trainer.train()
    parameters = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
    return {"weights": trainer.group_weights.tolist(), "parameters": parameters.tolist(), **passes}


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    for name in RUNS:
        try:
            found[name] = run(folder, name)
        except ValueError as error:
            found[name] = str(error)
    (folder / f"rank{os.environ.get('RANK', 'alone')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_program(main, Path(sys.argv[1]))
