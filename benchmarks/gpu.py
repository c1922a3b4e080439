"""All that has to be known of a GPU, in one script: is everything exact there, what does a step cost, what comes out.

    python benchmarks/gpu.py                        parts exact, steps, compiled, study; 8 minutes
    python benchmarks/gpu.py steps --minutes 4      some of it; what the output holds already is not run again
    python benchmarks/gpu.py --toy                  all of it on a CPU at toy size, to see that every line runs

exact: every engine against one pass per group in the same precision and against float64: float32 without and with
TF32, bfloat16 under autocast, float16 under a loss scale; runs in bfloat16 and under a scaler; a resumed run against
one that was not cut, to the bit. steps: times in those of the stock Trainer (CUDA events, pairs in turn), peak memory,
and whether a step makes the host wait (`torch.cuda.set_sync_debug_mode`). compiled: runs under `torch.compile` against
eager ones. study: the paper's Table 2 and the first column of Table 3 at its own length, several runs at once; it goes
on where it was cut. Results are written as JSON after each case. A case is broken off after 150 seconds.
"""

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from step_time import METHODS, PAIRWISE, TORCHJD, Setting, Steps, bert, distilbert, timm_model
from torch import Tensor, nn

from hf_cgd import GroupRobustConfig, GroupRobustTrainer, gradient_scope
from hf_cgd.experiments.records import write_whole
from hf_cgd.functional import cosine_gram
from hf_cgd.gradients import PerGroupCutEngine, PerGroupEngine, SinglePassEngine, SketchEngine
from hf_cgd.models.outputs import logits_of

Case = tuple[str, Callable[[], dict[str, Any]]]
ENGINES = {"single_pass": SinglePassEngine, "per_group with the cut": PerGroupCutEngine, "sketch": SketchEngine}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
LIMIT = 150
"""Seconds after which a case is broken off."""
SCALE = 2.0**12
"""Loss scale of the float16 passes."""


class Machine:
    """The device that is measured, and what differs between a GPU and a CPU at toy size."""

    def __init__(self, toy: bool) -> None:
        self.toy = toy
        self.device = "cpu" if toy else "cuda"
        self.name = "CPU, toy size" if toy else torch.cuda.get_device_name()
        self.pairs = 2 if toy else 50
        self.seconds = 5.0
        """Pairs of one method end then, so that the large networks leave time for the others."""

    def times(self, steps: list[Callable[[], None]]) -> list[float]:
        """Milliseconds of each step, on the device's own clock."""
        if self.toy:
            marks = [time.perf_counter()]
            for step in steps:
                step()
                marks.append(time.perf_counter())
            return [1000 * (end - start) for start, end in pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        events[0].record()
        for step, event in zip(steps, events[1:], strict=True):
            step()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairwise(events)]

    def peak(self, step: Callable[[], None]) -> float | None:
        """Peak of the allocated memory in a step, in MiB; None on a CPU."""
        if self.toy:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20

    def waits(self, step: Callable[[], None]) -> str:
        """Whether a step makes the host wait: "none", or the first place where it does."""
        if self.toy:
            step()
            return "not measured"
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            frames = [f for f in _frames(error) if "hf_cgd" in f.filename or "transformers" in f.filename]
            return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else str(error)[:80]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return "none"


def _frames(error: BaseException) -> list[Any]:
    return list(traceback.extract_tb(error.__traceback__))


# ---- exact ----------------------------------------------------------------------------------------------------------


def small_text() -> nn.Module:
    """Without dropout: compiled code draws other numbers than eager code, and runs are to be compared."""
    config = tf.DistilBertConfig(
        vocab_size=200, dim=64, hidden_dim=128, n_layers=3, n_heads=4, num_labels=2,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return tf.DistilBertForSequenceClassification(config)


class SmallImages(nn.Sequential):
    """Convolutions, norms and a linear layer."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU(),
            nn.Flatten(), nn.LayerNorm(16 * 36), nn.Linear(16 * 36, 2),
        )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "text": (small_text, lambda: {"input_ids": torch.randint(200, (24, 16))}),
    "images": (SmallImages, lambda: {"input": torch.randn(24, 3, 16, 16)}),
}


@contextmanager
def precision_of(name: str, device: str) -> Iterator[None]:
    """Within, the network computes in that precision."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    try:
        with nullcontext() if half is None else torch.autocast(device, half):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def errors_of_engines(machine: Machine, network: str, precision: str) -> dict[str, Any]:
    """Relative errors of the groups' gradients and absolute ones of their cosines, each engine's."""
    build, make = NETWORKS[network]
    torch.manual_seed(0)
    model, inputs = build().eval().to(machine.device), make()
    ids, labels = torch.arange(24) % 3, torch.randint(2, (24,))

    def rows_of(engine: Any, kind: torch.dtype, name: str) -> Tensor:
        given = {key: value.to(machine.device) for key, value in inputs.items()}
        given = {key: value.to(kind) if value.is_floating_point() else value for key, value in given.items()}
        with precision_of(name, machine.device), engine.recording():
            outputs = model(*given.values()) if network == "images" else model(**given)
        logits = logits_of(outputs).to(torch.promote_types(kind, torch.float32))
        losses = F.cross_entropy(logits, labels.to(machine.device), reduction="none")
        scale = SCALE if name == "fp16" else 1.0
        return engine.group_gradients(losses * scale, ids, [0, 1, 2]).rows.double().cpu() / scale

    scope = list(gradient_scope(model).values())
    own = rows_of(PerGroupEngine(scope), torch.float32, precision)
    found = {name: rows_of(engine(model, scope), torch.float32, precision) for name, engine in ENGINES.items()}
    model.double()
    exact = rows_of(PerGroupEngine(list(gradient_scope(model).values())), torch.float64, "fp32")
    found["per_group"] = own
    result: dict[str, Any] = {}
    for name, rows in found.items():
        cosines = [cosine_gram(one @ one.T) for one in (rows, own, exact)]
        entry = {"cosines": _largest(cosines[0] - cosines[1]), "cosines_float64": _largest(cosines[0] - cosines[2])}
        if rows.shape == own.shape:
            entry["rows"] = _largest(rows - own) / _largest(own)
            entry["rows_float64"] = _largest(rows - exact) / _largest(exact)
        result[name] = entry
    return result


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


class StopAt(tf.TrainerCallback):
    """Ends a run after some steps, as if it had been cut there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


def training(
    machine: Machine, folder: str, steps: int, resume: bool = False, stop: int | None = None, **options: Any
) -> dict[str, Any]:
    """Parameters and group weights after some steps of CGD on a small text network."""
    tf.set_seed(0)
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(200, (16,), generator=generator), "labels": place % 2, "group": place % 3}
        for place in range(96)
    ]
    args = GroupRobustConfig(
        folder, objective="cgd", step_size=0.1, group_column=["group"], max_steps=steps, save_steps=4, logging_steps=4,
        per_device_train_batch_size=24, use_cpu=machine.toy, report_to="none", disable_tqdm=True, **options,
    )  # fmt: skip
    callbacks = [] if stop is None else [StopAt(stop)]
    trainer = GroupRobustTrainer(model=small_text(), args=args, train_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.group_weights is not None
    state = {name: value.detach().cpu().clone() for name, value in trainer.model.state_dict().items()}
    assert trainer.robust_loss is not None
    engine = getattr(trainer.robust_loss.engine, "chosen", None)
    return {"weights": trainer.group_weights, "parameters": state, "engine": "none" if engine is None else engine.name}


def resumed(machine: Machine) -> dict[str, Any]:
    """A run of 8 steps that is cut after 4 and resumed, against one that is not, to the bit."""
    with tempfile.TemporaryDirectory() as folder:
        whole = training(machine, f"{folder}/whole", 8)
        training(machine, f"{folder}/cut", 8, stop=4)
        again = training(machine, f"{folder}/cut", 8, resume=True)
    same = all(torch.equal(value, again["parameters"][name]) for name, value in whole["parameters"].items())
    return {"same_bits": same and torch.equal(whole["weights"], again["weights"])}


def against_eager(machine: Machine, **options: Any) -> dict[str, Any]:
    """A run with those options against the plain one in float32: how far apart they end."""
    start = time.monotonic()
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        plain = training(machine, f"{folder}/plain", 4)
        other = training(machine, f"{folder}/other", 4, **options)
    differences = [
        _largest(one - other["parameters"][name.replace("_orig_mod.", "")])
        for name, one in plain["parameters"].items()
        if one.is_floating_point()
    ]
    apart = {"parameters": max(differences), "weights": _largest(plain["weights"] - other["weights"])}
    return {**apart, "engine": other["engine"], "seconds": time.monotonic() - start}


def exact_cases(machine: Machine) -> Iterator[Case]:
    for network in NETWORKS:
        for precision in PRECISIONS:
            yield f"{network}, {precision}", lambda n=network, p=precision: errors_of_engines(machine, n, p)  # type: ignore[misc]
    yield "resume", lambda: resumed(machine)
    yield "a run in bf16", lambda: against_eager(machine, bf16=True)
    if not machine.toy:
        # A scaler; accelerate has none on CPUs.
        yield "a run in fp16", lambda: against_eager(machine, fp16=True)


def compiled_cases(machine: Machine) -> Iterator[Case]:
    """Apart from the others, and late: what a compiler takes on a machine is not known beforehand."""
    for engine, mode in (("auto", "default"), ("auto", "reduce-overhead"), ("per_group", "reduce-overhead")):
        options = {"torch_compile": True, "torch_compile_mode": mode, "gradient_engine": engine}
        yield f"{engine}, {mode}", lambda options=options: against_eager(machine, **options)  # type: ignore[misc]


# ---- steps ----------------------------------------------------------------------------------------------------------

METHODS_OF_ALL = ("erm", "group_dro", "cgd", "cgd sketch", "cgd head")


def step_settings(toy: bool) -> dict[str, tuple[Setting, dict[str, Any], tuple[str, ...]]]:
    """Setting, options and methods of each line of the table."""
    if toy:
        text = Setting(small_text, 8, 4, 4, tokens=16, vocabulary=200)
        images = Setting(lambda: timm_model("test_resnet"), 8, 4, 4, pixels=64)
        return {
            "toy text, fp32": (text, {}, (*METHODS_OF_ALL, "cgd per_group", PAIRWISE, TORCHJD)),
            "toy text, bf16": (text, {"bf16": True}, METHODS_OF_ALL),
            "toy images, bf16": (images, {"bf16": True}, ("cgd", "cgd head")),
        }
    half = {"bf16": True}
    large = Setting(lambda: roberta_large(), 32, 4, 4, tokens=256)
    first = (*METHODS_OF_ALL, "cgd per_group", PAIRWISE, TORCHJD)
    short = ("group_dro", "cgd", "cgd sketch")
    return {
        "DistilBERT 32 x 128, fp32": (Setting(distilbert, 32, 4, 4, tokens=128), {}, first),
        "DistilBERT 32 x 128, bf16": (Setting(distilbert, 32, 4, 4, tokens=128), half, METHODS_OF_ALL),
        "BERT-base 64 x 128, bf16": (Setting(lambda: bert(768, 12, 12), 64, 4, 4, tokens=128), half, short),
        "RoBERTa-large 32 x 256, bf16": (large, half, short),
        "ViT-B/16 64 x 224, bf16": (
            Setting(lambda: timm_model("vit_base_patch16_224"), 64, 4, 4, pixels=224), half, short
        ),
        "ConvNeXt-T 64 x 224, bf16": (
            Setting(lambda: timm_model("convnext_tiny"), 64, 4, 4, pixels=224), half, ("cgd", "cgd head")
        ),
        "ResNet-50 128 x 224, K = 4, bf16": (
            Setting(lambda: timm_model("resnet50"), 128, 4, 4, pixels=224), half, ("cgd", "cgd head")
        ),
        "ResNet-50 128 x 224, K = 24, bf16": (
            Setting(lambda: timm_model("resnet50"), 128, 24, 24, pixels=224), half, ("cgd", "cgd head")
        ),
    }  # fmt: skip


def roberta_large() -> nn.Module:
    return tf.RobertaForSequenceClassification(
        tf.RobertaConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
            max_position_embeddings=514, vocab_size=50265, type_vocab_size=1, pad_token_id=1,
        )
    )  # fmt: skip


def step_cost(machine: Machine, steps: Steps, method: str) -> dict[str, Any]:
    """Ratio to the stock step, memory and waits of one method."""
    stock = steps.erm
    stock()
    # Before the method, whose buffers live on from step to step.
    memory_stock = machine.peak(stock)
    step = steps.method(method)
    first = machine.peak(step)
    # The engine is checked while gradients are exactly zero, at steps 2, 4, ...: those are no ordinary steps.
    for _ in range(2 if machine.toy else 5):
        step()
        stock()
    ratios: list[float] = []
    end = time.monotonic() + machine.seconds
    for place in range(machine.pairs):
        if len(ratios) >= 2 and time.monotonic() > end:
            break
        own, other = machine.times([step, stock]) if place % 2 else machine.times([stock, step])[::-1]
        ratios.append(own / other)
    result = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "pairs": len(ratios)}
    result["first_memory"] = first
    result |= {"memory": machine.peak(step), "memory_stock": memory_stock}
    # The stock step's own waits (its loss is read only with the log) show what is ours.
    return result | {"waits": machine.waits(step), "waits_stock": machine.waits(stock)}


def step_cases(machine: Machine) -> Iterator[Case]:
    built: dict[str, Steps] = {}
    for name, (setting, options, methods) in step_settings(machine.toy).items():
        for method in methods:

            def measured(
                name: str = name, setting: Any = setting, options: Any = options, method: str = method
            ) -> Any:
                if name not in built:
                    # One network at a time: to draw its weights on the host takes longer than to measure a method.
                    built.clear()
                    gc.collect()
                    built[name] = Steps(setting, machine.device, **options)
                return step_cost(machine, built[name], method)

            yield f"{name}: {method}", measured


# ---- study ----------------------------------------------------------------------------------------------------------

STUDIES = {
    "Table 2": ["mnist_settings", "--values", "step_size=0.1", "--seeds", "0"],
    "Table 3, Colored-MNIST": [
        "colored_mnist", "--values", "step_size=0.1", "penalty_weight=1", "learning_rate=0.001", "weight_decay=0.0001",
        "--seeds", "0",
    ],
}  # fmt: skip
TOY_STUDIES = {"demo": ["multinli", "--fast", "--objectives", "cgd", "--values", "step_size=0.1"]}


def study(machine: Machine, words: list[str], folder: Path, seconds: float) -> dict[str, Any]:
    """A grid of `hf_cgd.experiments`, for as long as there is time; a later call goes on with it."""
    workers = "1" if machine.toy else str(max(1, (os.cpu_count() or 2) // 3))
    command = [sys.executable, "-m", "hf_cgd.experiments", *words, "--workers", workers, "--output_dir", str(folder)]
    start = time.monotonic()
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # Its workers as well, or they would go on beside whatever is measured next.
            os.killpg(process.pid, signal.SIGKILL)
            code = None
    tables = folder / "tables.md"
    shown = tables.read_text(encoding="utf-8") if tables.exists() else ""
    return {"finished": code == 0, "seconds": time.monotonic() - start, "table": shown}


def main() -> None:
    """Reads the command line, runs what the output does not hold yet, and prints all of it."""
    parts = ("exact", "steps", "compiled", "study")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(parts), metavar="part", help=", ".join(parts))
    parser.add_argument("--toy", action="store_true", help="on a CPU, at toy size")
    parser.add_argument("--minutes", type=float, default=8, help="no case begins later than this")
    parser.add_argument("--output", default="out/benchmark/gpu.json")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"Expected parts among {', '.join(parts)}, got {', '.join(sorted(unknown))}.")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    machine = Machine(options.toy)
    end = time.monotonic() + 60 * options.minutes
    tf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    path = Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results["machine"] = {"name": machine.name, "torch": torch.__version__, "transformers": tf.__version__}
    cases: list[tuple[str, Case]] = []
    cases += [("exact", case) for case in exact_cases(machine) if "exact" in options.parts]
    cases += [("steps", case) for case in step_cases(machine) if "steps" in options.parts]
    cases += [("compiled", case) for case in compiled_cases(machine) if "compiled" in options.parts]
    for name, words in (TOY_STUDIES if machine.toy else STUDIES).items() if "study" in options.parts else ():
        folder = path.parent / f"gpu_{words[0]}"
        run = lambda words=words, folder=folder: study(machine, words, folder, end - time.monotonic())  # type: ignore[misc] # noqa: E731
        cases.append(("study", (name, run)))
    signal.signal(signal.SIGALRM, _broken_off)
    for part, (name, run) in cases:
        known = results.setdefault(part, {}).get(name)
        if known is not None and "error" not in known and known.get("finished", True):
            continue
        if time.monotonic() >= end:
            print("The time is up; start the same command again to go on.")
            break
        torch.use_deterministic_algorithms(name == "resume")
        if part != "study":
            # A study keeps the time itself.
            signal.alarm(LIMIT)
        try:
            found = run()
        # One case that fails must not cost the others their turn on the machine.
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        finally:
            signal.alarm(0)
            torch.use_deterministic_algorithms(False)
            gc.collect()
            if not machine.toy:
                torch.cuda.empty_cache()
        results[part][name] = found
        write_whole(path, json.dumps(results, indent=2))
        print(f"{part:6} {name:50} {_shown(found)}", flush=True)
    print(table_of_steps(results.get("steps", {})))
    print(f"{machine.name}, torch {torch.__version__}; all results in {path}")


def _broken_off(signum: int, frame: Any) -> None:
    raise TimeoutError(f"broken off after {LIMIT} seconds")


TARGETS = {
    "DistilBERT 32 x 128, bf16: cgd": 1.10,
    "BERT-base 64 x 128, bf16: cgd": 1.05,
    "RoBERTa-large 32 x 256, bf16: cgd": 1.05,
}
MEMORY_TARGET = 1.10


def table_of_steps(steps: dict[str, Any]) -> str:
    """Markdown: time and memory of a step in those of the stock Trainer, with the targets."""
    lines = [
        "| setting: method | step (low to high) | target | memory | target | first step's memory | waits (stock's) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, found in steps.items():
        if "error" in found:
            lines.append(f"| {name} | {found['error'][:80]} | | | | | |")
            continue
        stock = found["memory_stock"]
        memory = ["not measured" if not stock else f"{found[key] / stock:.3f}" for key in ("memory", "first_memory")]
        step = f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
        goals = TARGETS.get(name, ""), MEMORY_TARGET if name in TARGETS else ""
        waits = f"{found['waits']} ({found['waits_stock']})"
        lines.append(f"| {name} | {step} | {goals[0]} | {memory[0]} | {goals[1]} | {memory[1]} | {waits} |")
    return "\n".join(lines)


def _shown(found: dict[str, Any]) -> str:
    def number(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    cells = []
    for name, value in found.items():
        if isinstance(value, dict):
            value = " ".join(f"{key} {number(entry)}" for key, entry in value.items())
        cells.append(f"{name} {number(value)}")
    return "; ".join(cells)


if __name__ == "__main__":
    assert METHODS.keys() >= set(METHODS_OF_ALL)
    main()
