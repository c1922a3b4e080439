"""What a group-robust training step costs, in steps of the stock `transformers.Trainer` on the same batch and model.

    python benchmarks/step_time.py                          all settings, about half an hour on 2 cores
    python benchmarks/step_time.py --settings distilbert-k4 --pairs 9

A step is forward and backward, without the optimizer. Each method takes turns with the stock step within one process,
pair by pair; the figure is the median of the pairwise ratios. "noise" is the same for the stock step against itself:
differences of that size mean nothing. On a machine that others use, `--threads 1 --clock cpu` counts the process's own
time on the processor instead of the time on the wall. Peak memory is the growth of the resident set over a few steps,
each method in a process of its own. Models have random weights, dropout as in their configs.
"""

import argparse
import copy
import ctypes
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from memory import forget_peak, resident
from torch import Tensor, nn

from hf_cgd import GroupRobustConfig, GroupRobustTrainer, gradient_scope
from hf_cgd.functional import cgd_step
from hf_cgd.models.outputs import logits_of
from hf_cgd.trainer.host_ids import HOST_IDS


@dataclass(frozen=True)
class Setting:
    build: Callable[[], nn.Module]
    batch: int
    groups: int
    present: int
    tokens: int = 0
    pixels: int = 0
    scope: Any = 3
    vocabulary: int = 20000
    predicts_words: bool = False
    """Labels are the tokens; the last two methods are not for it."""


def bert(size: int, layers: int, heads: int) -> nn.Module:
    config = tf.BertConfig(
        hidden_size=size, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * size
    )
    return tf.BertForSequenceClassification(config)


def distilbert() -> nn.Module:
    return tf.DistilBertForSequenceClassification(tf.DistilBertConfig())


def gpt2(tied: bool = True) -> nn.Module:
    return tf.GPT2LMHeadModel(tf.GPT2Config(tie_word_embeddings=tied))


def timm_model(name: str, **options: Any) -> nn.Module:
    return tf.TimmWrapperForImageClassification(
        tf.TimmWrapperConfig(architecture=name, num_labels=2, model_args=options or None)
    )


SETTINGS = {
    "distilbert-k4": Setting(distilbert, 32, 4, 4, tokens=128),
    "distilbert-k24": Setting(distilbert, 32, 24, 24, tokens=128),
    "distilbert-16x64": Setting(distilbert, 16, 4, 4, tokens=64),
    "minilm-k4": Setting(lambda: bert(384, 6, 12), 32, 4, 4, tokens=64),
    "bert-base-k6": Setting(lambda: bert(768, 12, 12), 16, 6, 6, tokens=128),
    "vit-small-96": Setting(lambda: timm_model("vit_small_patch16_224", img_size=96), 32, 4, 4, pixels=96),
    "gpt2-k4": Setting(gpt2, 8, 4, 4, tokens=128, vocabulary=50257, predicts_words=True),
    "gpt2-untied-k4": Setting(lambda: gpt2(tied=False), 8, 4, 4, tokens=128, vocabulary=50257, predicts_words=True),
    "minilm-16-of-16": Setting(lambda: bert(384, 6, 12), 64, 16, 16, tokens=64),
    "minilm-16-of-1000": Setting(lambda: bert(384, 6, 12), 64, 1000, 16, tokens=64),
    "resnet50-96": Setting(lambda: timm_model("resnet50"), 32, 4, 4, pixels=96),
    "resnet50-96-narrow": Setting(
        lambda: timm_model("resnet50"), 32, 4, 4, pixels=96, scope=[r"\.fc\.", r"\.layer4\.2\."]
    ),
}
METHODS: dict[str, dict[str, Any]] = {
    "erm": {"objective": "erm"},
    "erm_uw": {"objective": "erm_uw"},
    "group_dro": {"objective": "group_dro"},
    "cgd": {"objective": "cgd"},
    "cgd sketch": {"objective": "cgd", "gradient_engine": "sketch"},
    "cgd head": {"objective": "cgd", "gradient_layers": ["head"]},
    "cgd per_group": {"objective": "cgd", "gradient_engine": "per_group"},
}
PAIRWISE = "one backward per group, pairwise products"
TORCHJD = "torchjd autogram, examples averaged to groups"
"""Needs `pip install torchjd`."""


class Steps:
    """The stock step and those of the methods on one model and one batch.

    Args:
        setting: model and batch.
        device: where they are.
        options: more of the training arguments, the same for all methods (`bf16`).
    """

    def __init__(self, setting: Setting, device: str = "cpu", **options: Any) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.options = {"use_cpu": device == "cpu", "report_to": "none", **options}
        self.model = setting.build().train().to(device)
        generator = torch.Generator().manual_seed(0)
        if setting.tokens:
            shape = (setting.batch, setting.tokens)
            self.batch = {
                "input_ids": torch.randint(setting.vocabulary // 20, setting.vocabulary, shape, generator=generator),
                "attention_mask": torch.ones(shape, dtype=torch.long),
            }
        else:
            shape = (setting.batch, 3, setting.pixels, setting.pixels)  # type: ignore[assignment]
            self.batch = {"pixel_values": torch.randn(shape, generator=generator)}
        labels = torch.randint(0, 2, (setting.batch,), generator=generator)
        self.batch["labels"] = self.batch["input_ids"].clone() if setting.predicts_words else labels
        self.batch = {name: value.to(device) for name, value in self.batch.items()}
        group_ids = (torch.arange(setting.batch) % setting.present).sort().values
        self.group_ids = group_ids.to(device)
        """As the collator hands them over, in order."""
        self.on_host = {} if device == "cpu" else {HOST_IDS: group_ids.numpy()}
        self.stock = tf.Trainer(self.model, tf.TrainingArguments("out/benchmark", **self.options))
        self.stock.create_optimizer()
        self.stock.current_gradient_accumulation_steps = 1
        # Half precision is in the prepared forward pass, and nowhere else.
        self.model = self.stock.accelerator.prepare_model(self.model)

    def erm(self) -> None:
        self.model.zero_grad()
        self.stock.training_step(self.model, dict(self.batch))

    def method(self, name: str) -> Callable[[], None]:
        if name == PAIRWISE:
            return self._pairwise
        if name == TORCHJD:
            return self._torchjd()
        knobs = dict(METHODS[name])
        if knobs["objective"] == "cgd" and "gradient_layers" not in knobs:
            layers = self.setting.scope
            knobs["gradient_layers"] = layers if isinstance(layers, list) else [str(layers)]
        labels = [0] if self.setting.predicts_words else 0
        rows = [{"labels": labels, "input_ids": [0], "group": group} for group in range(self.setting.groups)]
        args = GroupRobustConfig("out/benchmark", group_column=["group"], min_group_size=1, **self.options, **knobs)
        trainer = GroupRobustTrainer(model=self.model, args=args, train_dataset=rows)
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
        batch = {**self.batch, "group": self.group_ids, **self.on_host}

        def step() -> None:
            self.model.zero_grad()
            trainer.training_step(self.model, dict(batch))

        return step

    def _torchjd(self) -> Callable[[], None]:
        """The same job from the Gram matrix of the examples' gradients, on a copy of the model, which it hooks."""
        from torchjd.autogram import Engine

        model = copy.deepcopy(self.model)
        scope = {id(parameter) for parameter in gradient_scope(model, self.setting.scope).values()}
        inside = [
            module
            for module in model.modules()
            if any(True for _ in module.parameters()) and all(id(p) in scope for p in module.parameters())
        ]
        nested = {id(part) for module in inside for part in module.modules() if part is not module}
        engine = Engine(*(module for module in inside if id(module) not in nested), batch_dim=0)
        inputs = {name: value for name, value in self.batch.items() if name != "labels"}
        members = torch.nn.functional.one_hot(self.group_ids).T.float()
        shares = members / members.sum(dim=1, keepdim=True)

        def step() -> None:
            model.zero_grad()
            losses = nn.functional.cross_entropy(logits_of(model(**inputs)), self.batch["labels"], reduction="none")
            gram = shares @ engine.compute_gramian(losses) @ shares.T
            means = (shares @ losses.detach()).double()
            alpha = torch.full_like(means, 1 / len(means))
            alpha = cgd_step(alpha, means, gram.double(), step_size=0.01).float()
            losses.backward(alpha @ shares)

        return step

    def _pairwise(self) -> None:
        """Equation 5 as it stands: a gradient for each group, a product for each pair, then the weighted loss."""
        self.model.zero_grad()
        inputs = {name: value for name, value in self.batch.items() if name != "labels"}
        losses = nn.functional.cross_entropy(logits_of(self.model(**inputs)), self.batch["labels"], reduction="none")
        scope = list(gradient_scope(self.model, self.setting.scope).values())
        means = [losses[self.group_ids == group].mean() for group in range(self.setting.present)]
        gradients = [torch.autograd.grad(mean, scope, retain_graph=True) for mean in means]
        exponents = []
        for i, gi in enumerate(gradients):
            total = 0.0
            for j, gj in enumerate(gradients):
                total += float((means[i] * means[j]).sqrt() * _dot(gi, gj) / (_dot(gi, gi) * _dot(gj, gj)).sqrt())
            exponents.append(0.01 * total)
        alpha = torch.softmax(torch.tensor(exponents), 0)
        (alpha * torch.stack(means)).sum().backward()


def _dot(one: Any, other: Any) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def ratios(
    first: Callable[[], None], second: Callable[[], None], pairs: int, clock: Callable[[], float]
) -> list[float]:
    """Times of `first` over those of `second`, in turn, after a warm-up of each."""
    for step in (first, second):
        step()
        step()
    result = []
    for place in range(pairs):
        times = {}
        for step in (first, second) if place % 2 else (second, first):
            start = clock()
            step()
            times[step] = clock() - start
        result.append(times[first] / times[second])
    return result


def first_steps(steps: Steps, method: str, rounds: int, clock: Callable[[], float]) -> list[float]:
    """Times of the first steps of new trainers, which check the engine, over those of the stock step right after."""
    steps.erm()
    result = []
    for _ in range(rounds):
        step, times = steps.method(method), []
        for each in (step, steps.erm):
            start = clock()
            each()
            times.append(clock() - start)
        result.append(times[0] / times[1])
    return result


def peak_memory(name: str, method: str | None, threads: int, queue: Any) -> None:
    """Growth of this process's resident set in the first step, which checks the engine, and in later ones, in MiB.

    Linux only.
    """
    torch.set_num_threads(threads)
    steps = Steps(SETTINGS[name])
    step = steps.erm if method is None else steps.method(method)
    start = resident("VmRSS")
    forget_peak()
    step()
    first = resident("VmHWM")
    # What the first step took is given back.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    forget_peak()
    for _ in range(3):
        step()
    queue.put(((first - start) / 1024, (resident("VmHWM") - start) / 1024))


def measure_memory(name: str, method: str | None, threads: int) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=peak_memory, args=(name, method, threads, queue))
    process.start()
    first, later = queue.get()
    process.join()
    return float(first), float(later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--methods", nargs="+", default=["group_dro", "cgd", "cgd sketch", PAIRWISE])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too, of first steps and later ones")
    parser.add_argument("--first", action="store_true", help="measure first steps, which check the engine, alone")
    parser.add_argument("--output", default="out/benchmark/step_time.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tf.logging.set_verbosity_error()
    results: dict[str, dict[str, Any]] = {}
    print(f"{options.threads} thread(s), {options.clock} time, {options.pairs} pairs, torch {torch.__version__}")
    print(f"{'setting':20} {'method':44} {'median':>7} {'low':>6} {'high':>6}  memory MiB (ERM): first step, later")
    for name in options.settings:
        steps = Steps(SETTINGS[name])
        rows: dict[str, Callable[[], None]] = {} if options.first else {"noise": steps.erm}
        rows |= {method: steps.method(method) for method in options.methods}
        results[name] = {}
        stock_memory = measure_memory(name, None, options.threads) if options.memory else None
        for method, step in rows.items():
            # A second callable, so that the stock step can be set against itself.
            clock = CLOCKS[options.clock]
            if options.first:
                found = first_steps(steps, method, options.pairs, clock)
            else:
                found = ratios(lambda step=step: step(), steps.erm, options.pairs, clock)  # type: ignore[misc]
            entry: dict[str, Any] = {"median": statistics.median(found), "low": min(found), "high": max(found)}
            memory = ""
            if options.memory and method != "noise":
                entry["memory"], entry["memory_erm"] = measure_memory(name, method, options.threads), stock_memory
                memory = " ".join(
                    f"{own:.0f} ({stock:.0f})" for own, stock in zip(entry["memory"], stock_memory or (), strict=False)
                )
            results[name][method] = entry
            print(
                f"{name:20} {method:44} {entry['median']:7.3f} {entry['low']:6.3f} {entry['high']:6.3f}  {memory}",
                flush=True,
            )
    path = Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
