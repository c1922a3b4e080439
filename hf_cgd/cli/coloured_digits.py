"""The demo: coloured digits from seven sources, five methods. What the groups are, `recipes/quickstart.py` tells."""

import colorsys
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_cgd.metrics import GroupReport
from hf_cgd.plots import LogHistory, comparison_figure, save_figure, weight_curves
from hf_cgd.trainer.config import GroupRobustConfig
from hf_cgd.trainer.trainer import GroupRobustTrainer

STEPS = 150
METHODS: Mapping[str, Mapping[str, str]] = {
    "ERM": {"objective": "erm"},
    "equal weights": {"objective": "erm_uw"},
    "Group-DRO": {"objective": "group_dro"},
    "CGD": {"objective": "cgd"},
    "CGD, consensus": {"objective": "cgd", "cross_terms": "consensus"},
}
COUNTS = {"matching": 450, "misleading": 45, "careless": 135} | {f"scan {name}": 67 for name in "ABCD"}
BRIGHTNESS = {"scan B": 0.85, "scan C": 0.7, "scan D": 0.55}
COLORS = torch.tensor([colorsys.hsv_to_rgb(digit / 10, 1, 1) for digit in range(10)])


def show(images: Tensor, digits: Tensor, group: str, draw: torch.Generator) -> Tensor:
    """Images [N, 8, 8] as a source shows them, [N, 3, 8, 8]; all colours are equally strong."""
    other_digits = (digits + torch.randint(1, 10, digits.shape, generator=draw)) % 10
    grey = torch.ones(len(digits), 3)
    colors = {"matching": COLORS[digits], "misleading": COLORS[other_digits]}.get(group, grey)
    colors = BRIGHTNESS.get(group, 1.0) * colors / colors.norm(dim=1, keepdim=True)
    return images[:, None] * colors[:, :, None, None]


def make_splits(seed: int) -> dict[str, list[dict[str, Any]]]:
    """898 training images of one source each, 399 validation images, and 500 test images that no seed trains on."""
    data = load_digits()
    images, digits = torch.tensor(data.images / 16, dtype=torch.float32), torch.tensor(data.target)
    draw = torch.Generator().manual_seed(seed)
    rest, test = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).split([1297, 500])
    train, validation = rest[torch.randperm(1297, generator=draw)].split([898, 399])
    sources = {"train": train.split(list(COUNTS.values())), "validation": [validation] * 7, "test": [test] * 7}
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in sources}
    for split, rows_of_sources in sources.items():
        for group, rows in zip(COUNTS, rows_of_sources, strict=True):
            pixels, labels = show(images[rows], digits[rows], group, draw), digits[rows]
            if split == "train" and group == "careless":
                wrong = torch.rand(labels.shape, generator=draw) < 0.8
                labels = torch.where(wrong, torch.randint(10, labels.shape, generator=draw), labels)
            pairs = zip(pixels, labels, strict=True)
            splits[split] += [{"pixel_values": image, "labels": label, "group": group} for image, label in pairs]
    return splits


class Network(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits [N, 10] of images [N, 3, 8, 8]."""
        return super().forward(pixel_values)


def train(method: Mapping[str, Any], splits: Mapping[str, Any], seed: int, options: Namespace) -> GroupRobustTrainer:
    """One run, evaluated."""
    transformers.set_seed(seed)
    args = GroupRobustConfig(
        str(Path(options.output).parent),
        group_column=["group"],
        step_size=options.step_size if method["objective"] in ("group_dro", "cgd") else None,
        # All of the data in each batch: noise in the group gradients would blur CGD's cosines.
        per_device_train_batch_size=1024,
        max_steps=STEPS,
        learning_rate=5e-3,
        # Strong, since a network that fits all of its training set leaves no loss to weigh.
        weight_decay=3.0,
        per_device_eval_batch_size=4096,
        seed=seed,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **method,
    )
    trainer = GroupRobustTrainer(model=Network(), args=args, train_dataset=splits["train"])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.predict(splits[options.split])
    return trainer


def numbers(report: GroupReport, history: LogHistory) -> dict[str, float]:
    """What the table shows of one run: a row's title and its value."""
    values = {"average*": report.overall["adjusted_accuracy"], "worst group": report.overall["worst_group_accuracy"]}
    values |= {f"  {row.name}": row.accuracy for row in report.rows if row.accuracy is not None}
    return values | {f"final weight of {name}": curve[-1] for name, curve in weight_curves(history)[1].items()}


def run(options: Namespace) -> None:
    """Train every method with every seed; print the table, write the picture.

    Args:
        options: those of `hf-cgd demo`.
    """
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # The network is too small to share among cores.
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    print(f"{len(METHODS)} methods x {len(seeds)} seeds, about a minute in all ...", flush=True)
    reports: dict[str, list[GroupReport]] = {method: [] for method in METHODS}
    histories: dict[str, list[LogHistory]] = {method: [] for method in METHODS}
    bar = tqdm(
        total=len(METHODS) * len(seeds), unit="run", disable=None if os.environ.get("RANK", "0") == "0" else True
    )
    for seed in seeds:
        splits = make_splits(seed)
        for method, own in METHODS.items():
            bar.set_description(f"{method}, seed {seed}")
            trainer = train(own, splits, seed, options)
            reports[method].append(trainer.group_report("test"))
            histories[method].append(trainer.state.log_history)
            bar.update()
    bar.close()
    if not trainer.is_world_process_zero():
        return
    results = {m: [numbers(r, h) for r, h in zip(reports[m], histories[m], strict=True)] for m in METHODS}
    print(f"\n{options.split} split, mean +- standard deviation over {len(seeds)} seeds\n")
    print(f"{'accuracy':28}" + "".join(f"{method:>17}" for method in METHODS))
    for title in results["CGD"][0]:
        columns = [[run[title] for run in runs if title in run] for runs in results.values()]
        spreads = [f" +- {np.std(c, ddof=1):.3f}" if len(c) > 1 else "" for c in columns]
        cells = [f"{np.mean(c):.3f}{spread}" if c else "-" for c, spread in zip(columns, spreads, strict=True)]
        print(f"{title:28}" + "".join(f"{cell:>17}" for cell in cells))
    print("\n* over the sources as often as they occur in training")
    print(
        "Look at: 'misleading', where the colour shortcut fails; and the weight of 'careless', whose labels are noise."
        "\nGroup-DRO follows the noise and is behind equal weights; CGD with consensus takes weight from noise and "
        "from 'matching', which teaches the shortcut."
    )
    figure = comparison_figure(reports, histories, highlight=["matching", "misleading", "careless"])
    print("Picture:", ", ".join(str(file) for file in save_figure(figure, options.output)))
