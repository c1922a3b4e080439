"""What an average of the weights does to the swings of Colored-MNIST's worst group, beside the weights themselves.

python benchmarks/weight_average.py --data_dir my/mnist --objective group_dro --seeds 0 1 --output averages.json

Exponential averages (torch's own, of batch statistics as well) go along with each run and are evaluated with it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.cli import image_classifier
from hf_cgd.tasks.colored_mnist import ColoredMNIST

LAST = 3
Entry = tuple[int, float, float | None, float | None]


class Averages(tf.TrainerCallback):
    """Averages of one decay each, and the worst group of all at every `every` steps.

    Attributes:
        found: by "no average" or the decay: (step, worst on validation, average and worst on test) each time; test is
            None but for a new best on validation and the last step.
    """

    def __init__(self, decays: Sequence[float], every: int, splits: Mapping[str, Any]) -> None:
        self.every, self.splits = every, splits
        self.decays = decays
        self.models: dict[str, nn.Module] = {}
        self.found: dict[str, list[Entry]] = {}
        self.trainer: GroupRobustTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self.models = {
            f"{decay:g}": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
            for decay in self.decays
        }

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        for average in self.models.values():
            average.update_parameters(model)  # type: ignore[operator]
        if state.global_step % self.every == 0:
            own = {name: value.clone() for name, value in model.state_dict().items()}
            models: dict[str, nn.Module | None] = {"no average": None, **self.models}
            for name, kept in models.items():
                if kept is not None:
                    model.load_state_dict(kept.module.state_dict())  # type: ignore[union-attr]
                entries = self.found.setdefault(name, [])
                worst = self._metrics("validation")[1]
                is_best = all(worst > earlier[1] for earlier in entries)
                tested = self._metrics("test") if is_best or state.global_step == args.max_steps else (None, None)
                entries.append((state.global_step, worst, *tested))
            model.load_state_dict(own)

    def _metrics(self, name: str) -> tuple[float, float]:
        assert self.trainer is not None
        metrics = self.trainer.predict(self.splits[name], metric_key_prefix=name).metrics
        assert metrics is not None
        return metrics[f"{name}_accuracy"], metrics[f"{name}_worst_group_accuracy"]


def trained(options: argparse.Namespace, seed: int) -> dict[str, list[Entry]]:
    """One run, and what `Averages.found` of it."""
    task = ColoredMNIST(ratio=options.ratio, train_size=50_050, validation_size=2_000, seed=seed)
    splits = task.load(None, options.data_dir)
    tf.set_seed(seed)
    model, _ = image_classifier(
        options.model, task.info.label_names, pretrained=False, channels_last=True, **task.info.image_format
    )
    averages = Averages(options.decays, options.max_steps // 10, splits)
    own: dict[str, Any] = {} if options.objective in ("erm", "erm_uw") else {"step_size": options.step_size}
    if options.objective == "cgd":
        own |= {"gradient_layers": ["all"], "self_term": "split_half" if options.split_half else None}
    config = GroupRobustConfig(
        output_dir=str(options.output.with_suffix("")), objective=options.objective, group_column=["group"], seed=seed,
        group_sampling="balanced", max_steps=options.max_steps,
        per_device_train_batch_size=128, per_device_eval_batch_size=500, learning_rate=options.learning_rate,
        weight_decay=options.weight_decay, lr_scheduler_type=options.lr_scheduler_type, optim="sgd",
        optim_args="momentum=0.9", max_grad_norm=0.0, save_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False, use_cpu=not torch.cuda.is_available(), logging_steps=50,
        **own,
    )  # fmt: skip
    trainer = GroupRobustTrainer(model=model, args=config, train_dataset=splits["train"], callbacks=[averages])
    averages.trainer = trainer
    trainer.train()
    return averages.found


def table(runs: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> str:
    """Mean (standard deviation) over the runs of each method, in per cent."""
    lines = [
        "| | average | seeds | test worst, best evaluation | validation, last three | test worst, last evaluation |"
    ]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    cells: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for run, found in runs.items():
        for name, entries in found.items():
            values = np.asarray(entries, dtype=float)
            best = values[values[:, 1].argmax(), 3]
            cells.setdefault((run.rsplit(" seed", 1)[0], name), []).append(
                (best, values[-LAST:, 1].mean(), values[-1, 3])
            )
    for (method, name), found_cells in cells.items():
        columns = 100 * np.asarray(found_cells)
        spread = columns.std(axis=0, ddof=1) if len(columns) > 1 else np.full(3, np.nan)
        shown = " | ".join(f"{mean:.1f} ({sd:.1f})" for mean, sd in zip(columns.mean(axis=0), spread, strict=True))
        lines.append(f"| {method} | {name} | {len(columns)} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="Folder of MNIST's IDX files.")
    parser.add_argument("--objective", default="erm_uw")
    parser.add_argument("--split_half", action="store_true", help="Split halves (cgd).")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--decays", type=float, nargs="+", default=[0.9, 0.99, 0.995])
    parser.add_argument("--ratio", type=float, default=1000)
    parser.add_argument("--step_size", type=float, default=0.1)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--lr_scheduler_type", default="constant")
    parser.add_argument("--max_steps", type=int, default=1500)
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--output", type=Path, default=Path("out/averages.json"), help="All runs so far; is added to.")
    options = parser.parse_args()
    tf.logging.set_verbosity_error()
    runs = json.loads(options.output.read_text()) if options.output.exists() else {}
    ways = f"{options.objective}{' split halves' if options.split_half else ''}, {options.lr_scheduler_type}"
    for seed in options.seeds:
        runs[f"{ways} seed {seed}"] = trained(options, seed)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(runs, indent=1))
        print(table(runs), flush=True)


if __name__ == "__main__":
    main()
