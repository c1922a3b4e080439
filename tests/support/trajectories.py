"""Short training runs recorded step by step to the last bit: what work that must change no number is held against.

    trajectories.py --write tests/data/trajectories.json    records
    trajectories.py [CASE ...]                              compares with what is recorded, and prints the differences

Only names that the package promises are used, so that its inside can be rebuilt without a word changed here.
"""

import argparse
import gc
import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from programs import run_together
from torch import Tensor, nn
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PrinterCallback,
    TrainerCallback,
)
from transformers.utils.logging import disable_progress_bar

from hf_cgd import (
    CGD,
    CORAL,
    ERM,
    ERMUW,
    IRM,
    PGI,
    GroupDRO,
    GroupInfo,
    GroupRobustConfig,
    GroupRobustLoss,
    GroupRobustTrainer,
    HeadInput,
    gradient_scope,
)
from hf_cgd.arithmetic import DeviceArithmetic
from hf_cgd.gradients import (
    AutoEngine,
    PerGroupCutEngine,
    PerGroupEngine,
    SinglePassEngine,
    SketchEngine,
    StaticShapesEngine,
    TensorHookEngine,
)

Record = dict[str, Any]
RECORDED = Path(__file__).parents[1] / "data" / "trajectories.json"
STEPS, SAVED_STEP = 12, 6
TOLERANCE, STATIC_TOLERANCE, LOW_TOLERANCE = 1e-6, 5e-6, 2e-2
"""Largest relative error on another machine: of most cases, with weights in float32, with steps in bfloat16."""
STEP_SIZE = 0.5

# ---- Cases ----------------------------------------------------------------------------------------------------------

DRO: dict[str, Any] = {"objective": "group_dro", "step_size": STEP_SIZE}
CGD_RUN: dict[str, Any] = {"objective": "cgd", "step_size": STEP_SIZE}
IRM_RUN: dict[str, Any] = {"objective": "irm", "penalty_weight": 5.0, "penalty_anneal_steps": 4}
HALVES: dict[str, Any] = {**CGD_RUN, "self_term": "split_half"}
MOMENTUM: dict[str, Any] = {**CGD_RUN, "interaction_momentum": 0.8}
ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}

TRAINED: dict[str, Record] = {
    "erm": {"objective": "erm"},
    "erm_uw": {"objective": "erm_uw", "adjustment": 2.0},
    "group_dro": DRO,
    "cgd": CGD_RUN,
    "pgi": {"objective": "pgi", "penalty_weight": 2.0},
    "irm": IRM_RUN,
    "coral": {"objective": "coral", "penalty_weight": 2.0},
    "group_dro adjusted": {**DRO, "adjustment": 1.5},
    "group_dro zero_loss": {**DRO, "adjustment": 1.5, "absent_groups": "zero_loss"},
    "cgd scaling=gradient": {**CGD_RUN, "scaling": "gradient"},
    "cgd interaction=mean": {**CGD_RUN, "interaction": "mean"},
    "cgd variant=reference": {**CGD_RUN, "variant": "reference", "adjustment": 1.0},
    "cgd zero_loss": {**CGD_RUN, "absent_groups": "zero_loss"},
    "cgd exponent": {**CGD_RUN, "exponent": 1.0},
    "cgd adjusted": {**CGD_RUN, "adjustment": 1.5},
    "cgd min_weight": {**CGD_RUN, "step_size": 2.0, "min_weight": 0.15},
    "cgd all layers": {**CGD_RUN, "gradient_layers": "all"},
    "cgd one layer": {**CGD_RUN, "gradient_layers": 1},
    "cgd momentum": MOMENTUM,
    "cgd split halves": HALVES,
    "cgd bfloat16": {**CGD_RUN, "bf16": True},
    "group_dro label smoothing": {**DRO, "label_smoothing_factor": 0.1},
    **{
        f"{objective} split forward": {**options, "forward_mode": "split"}
        for objective, options in {
            "erm": {"objective": "erm"}, "cgd": CGD_RUN, "irm": IRM_RUN, "coral": {"objective": "coral"},
        }.items()
    },
    **{
        f"{objective} {sampling}": {**options, "group_sampling": sampling}
        for objective, options in {"group_dro": DRO, "cgd": CGD_RUN}.items()
        for sampling in ("balanced", "weighted")
    },
    **{
        f"{objective} next": {**options, "weight_timing": "next"}
        for objective, options in {"group_dro": DRO, "cgd": CGD_RUN, "cgd split halves": HALVES}.items()
    },
    **{
        f"cgd {engine}": {**CGD_RUN, "gradient_engine": engine}
        for engine in ("per_group", "single_pass", "sketch", "tensor_hooks")
    },
    "cgd auto dropout": {**CGD_RUN, "dropout": 0.1},
    **{
        f"{objective} accumulated": {**options, **ACCUMULATED}
        for objective, options in {
            "erm": {"objective": "erm"}, "group_dro": DRO, "cgd": CGD_RUN, "irm": IRM_RUN, "cgd split halves": HALVES,
            "cgd momentum": MOMENTUM, "cgd tensor_hooks": {**CGD_RUN, "gradient_engine": "tensor_hooks"},
        }.items()
    },
    **{
        f"{objective} accumulated {engine}": {**options, **ACCUMULATED, "gradient_engine": engine}
        for objective, options in {"cgd": CGD_RUN, "cgd split halves": HALVES, "cgd momentum": MOMENTUM}.items()
        for engine in ("per_group", "sketch")
    },
    **{
        f"{objective} {engine}": {**options, "gradient_engine": engine}
        for objective, options in {"cgd split halves": HALVES, "cgd momentum": MOMENTUM}.items()
        for engine in ("per_group", "sketch")
    },
}  # fmt: skip
"""Runs of a `GroupRobustTrainer`: fields of its config, and the dropout of the network."""

RESUMED: dict[str, Record] = {
    f"{name} resumed": {**options, "dropout": 0.1, "optim": "adamw_torch", "learning_rate": 1e-3,
                        "save_strategy": "steps", "save_steps": SAVED_STEP}
    for name, options in {
        "cgd": CGD_RUN, "cgd momentum": MOMENTUM, "group_dro": DRO, "irm": {**IRM_RUN, "penalty_anneal_steps": 8},
        "cgd tensor_hooks": {**CGD_RUN, "gradient_engine": "tensor_hooks"},
        "cgd sketch balanced": {**CGD_RUN, "gradient_engine": "sketch", "group_sampling": "balanced"},
    }.items()
}  # fmt: skip

EVALUATED: dict[str, Record] = {
    "erm evaluated": {"objective": "erm"},
    "cgd evaluated": CGD_RUN,
}

PAIRED: dict[str, Record] = {
    f"two processes: {name}": options
    for name, options in {
        "erm": {"objective": "erm"},
        "erm_uw": {"objective": "erm_uw", "adjustment": 2.0},
        "group_dro": DRO,
        "cgd": CGD_RUN,
        "cgd split halves": HALVES,
        "cgd momentum": MOMENTUM,
        "pgi": {"objective": "pgi", "penalty_weight": 2.0},
        "irm": IRM_RUN,
        "coral": {"objective": "coral", "penalty_weight": 2.0},
        "cgd tensor_hooks": {**CGD_RUN, "gradient_engine": "tensor_hooks"},
        "cgd sketch": {**CGD_RUN, "gradient_engine": "sketch"},
        "cgd per_group": {**CGD_RUN, "gradient_engine": "per_group"},
        "cgd accumulated": {**CGD_RUN, "gradient_accumulation_steps": 2},
        "cgd weighted": {**CGD_RUN, "group_sampling": "weighted"},
        "cgd evaluated": CGD_RUN,
        "cgd momentum resumed": {**MOMENTUM, "save_strategy": "steps", "save_steps": SAVED_STEP},
    }.items()
}
"""Cases of two processes, all in one launch: the records of both."""

ADJUSTED = CGD(step_size=STEP_SIZE, adjustment=1.5, interaction="mean", min_weight=0.01)
PLAIN: dict[str, Record] = {
    **{f"dense {name}": {"engine": name} for name in ("per_group", "cut", "single_pass", "sketch", "hooks", "auto")},
    "dense small budget": {"engine": "small_budget", "layers": "all"},
    "dense cut all layers": {"engine": "cut", "layers": "all"},
    "dense float64": {"engine": "single_pass", "dtype": torch.float64},
    **{
        f"mixed {name}": {"network": "mixed", "engine": name, "layers": "all"}
        for name in ("per_group", "single_pass", "sketch", "hooks", "auto")
    },
    **{f"wide {name}": {"network": "wide", "engine": name} for name in ("single_pass", "sketch", "sketched_hooks")},
    "mixed cut": {"network": "mixed", "engine": "cut", "layers": 3},
    "mixed small budget": {"network": "mixed", "engine": "small_budget", "layers": "all"},
    **{
        f"gpt2 {name}": {"network": "gpt2", "engine": name, "layers": layers}
        for name, layers in {"single_pass": [r"\.h\.", "ln_f", "score"], "sketch": 3, "hooks": 3, "auto": 3}.items()
    },
    **{
        f"{network} static {name}": {"network": network, "engine": name, "layers": layers, "static": True}
        for network, layers in {"dense": 2, "mixed": "all", "gpt2": 3}.items()
        for name in ("static", "static_auto", "per_group")
    },
    "static next": {"engine": "static", "static": True, "timing": "next"},
    "static accumulated": {"engine": "static", "static": True, "parts": 4},
    "static bad losses": {"engine": "static", "static": True, "bad_step": 4},
    **{
        f"static {name}": {"objective": objective, "engine": engine, "static": True}
        for name, objective, engine in (
            ("erm_uw", ERMUW(adjustment=2.0), None),
            ("group_dro", GroupDRO(step_size=STEP_SIZE, adjustment=1.5, absent_groups="zero_loss"), None),
            ("cgd adjusted", ADJUSTED, "static"),
            ("cgd reference", CGD(step_size=STEP_SIZE, variant="reference", adjustment=1.0), "static"),
            ("cgd scaling=gradient", CGD(step_size=STEP_SIZE, scaling="gradient"), "static"),
            ("pgi", PGI(penalty_weight=0.5), None),
            ("irm", IRM(penalty_weight=5.0, penalty_anneal_steps=4), None),
            ("coral", CORAL(penalty_weight=2.0), None),
        )
    },
    **{
        f"dense {name}": {"objective": objective, "engine": None}
        for name, objective in (
            ("erm", ERM()),
            ("erm_uw", ERMUW(adjustment=2.0)),
            ("pgi", PGI(penalty_weight=0.5)),
            ("irm", IRM(penalty_weight=5.0, penalty_anneal_steps=4)),
            ("coral", CORAL(penalty_weight=2.0)),
            ("cgd default engine", CGD(step_size=STEP_SIZE)),
        )
    },
    **{
        f"{name} accumulated {engine}": {"objective": objective, "engine": engine, "parts": 4}
        for name, objective in (
            ("halves", CGD(step_size=STEP_SIZE, self_term="split_half")),
            ("momentum", CGD(step_size=STEP_SIZE, interaction_momentum=0.8)),
        )
        for engine in ("cut", "single_pass", "sketch")
    },
    "fifteen groups": {"objective": ADJUSTED, "network": "wide", "engine": "single_pass", "layers": "all", "groups": 15},
    "seventy groups": {"objective": CGD(step_size=STEP_SIZE, interaction="mean"), "engine": "sketch", "groups": 70},
    "bad losses": {"engine": "single_pass", "bad_step": 4},
    "scaled": {"engine": "single_pass", "loss_scale": 8.0, "undone_step": 5},
    "scaled per_group": {"engine": "per_group", "loss_scale": 8.0, "undone_step": 5},
    "scaled momentum": {
        "objective": CGD(step_size=STEP_SIZE, interaction_momentum=0.8), "engine": "single_pass", "loss_scale": 8.0,
        "undone_step": 5, "timing": "next", "parts": 2,
    },
}  # fmt: skip
"""Runs of a loop of one's own around a `GroupRobustLoss`."""

CASES = (*TRAINED, *RESUMED, *EVALUATED, *PLAIN, *PAIRED)


def run_case(name: str) -> Record:
    """Runs a case anew (those of two processes once, all together)."""
    if name in PAIRED:
        return two_processes()[name]
    with alone(), tempfile.TemporaryDirectory() as folder:
        return run_loop(PLAIN[name]) if name in PLAIN else run_trainer(name, folder)


# ---- Runs of the Trainer --------------------------------------------------------------------------------------------


@cache
def text_data(rows: int, seed: int) -> Dataset:
    """Three groups of unequal sizes: in a random batch of 8 the smallest is often absent."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.multinomial(torch.tensor([0.65, 0.25, 0.1]), rows, replacement=True, generator=generator)
    return Dataset.from_dict(
        {
            "input_ids": torch.randint(1, 64, (rows, 8), generator=generator).tolist(),
            "attention_mask": [[1] * 8] * rows,
            "labels": torch.randint(0, 2, (rows,), generator=generator).tolist(),
            "group": groups.tolist(),
        }
    )


def distilbert(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=64, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32, num_labels=2,
        dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout,
    )  # fmt: skip
    return DistilBertForSequenceClassification(config)


class RecordingTrainer(GroupRobustTrainer):
    """Takes note of the loss of every micro-batch as it is, where the Trainer's log would be a mean over processes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.weights: list[Any] = []
        self.remove_callback(PrinterCallback)
        self.add_callback(_AfterSteps(self))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


class _AfterSteps(TrainerCallback):
    def __init__(self, trainer: RecordingTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.weights.append(self._trainer.group_weights)


def run_trainer(name: str, folder: str) -> Record:
    """One of `TRAINED`, `RESUMED`, `EVALUATED`, or this process's part of one of `PAIRED`."""
    options = dict((TRAINED | RESUMED | EVALUATED | PAIRED)[name])
    straight = trained(options, folder)
    if name.endswith("resumed"):
        resumed = trained(options, folder, f"{folder}/checkpoint-{SAVED_STEP}")
        return {"straight": record_of(straight), "resumed": record_of(resumed)}
    record = record_of(straight)
    if name.endswith("evaluated"):
        predicted = straight.predict(text_data(19, seed=2))
        record["metrics"] = numbers_of(straight.evaluate())
        record["predicted"] = {**numbers_of(predicted.metrics), "predictions": predicted.predictions.tolist()}
    return in_hex(record)


def trained(options: Record, folder: str, resume_from: str | None = None) -> RecordingTrainer:
    options = dict(options)
    dropout = options.pop("dropout", 0.0)
    processes, parts = int(os.environ.get("WORLD_SIZE", "1")), options.get("gradient_accumulation_steps", 1)
    quiet = dict(
        output_dir=folder, group_column="group", per_device_train_batch_size=12 // processes // parts,
        per_device_eval_batch_size=4, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0,
        use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, max_steps=STEPS, disable_tqdm=True, seed=0,
    )  # fmt: skip
    if processes == 1:
        quiet["per_device_train_batch_size"] = 8
    args = GroupRobustConfig(**{**quiet, **options})
    data = text_data(96, seed=1)
    trainer = RecordingTrainer(distilbert(dropout), args, train_dataset=data, eval_dataset=text_data(22, seed=3))
    torch.manual_seed(7)
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer


def record_of(trainer: RecordingTrainer) -> Record:
    assert trainer.groups is not None and trainer.model is not None
    names = [f"group_loss/{name}" for name in trainer.groups.names]
    entries = [entry for entry in trainer.state.log_history if "loss" in entry][-len(trainer.weights) :]
    parts = trainer.args.gradient_accumulation_steps
    return in_hex(
        {
            "losses": [sum(trainer.losses[start : start + parts]) for start in range(0, len(trainer.losses), parts)],
            "weights": trainer.weights,
            "group_losses": [[entry.get(name) for name in names] for entry in entries],
            "interactions": trainer.group_interactions,
            "parameters": checksum(trainer.model),
        }
    )


def numbers_of(metrics: dict[str, Any] | None) -> Record:
    """Metrics without how long they took."""
    return {k: v for k, v in (metrics or {}).items() if not k.endswith(("_runtime", "_per_second"))}


# ---- Two processes --------------------------------------------------------------------------------------------------


@cache
def two_processes() -> dict[str, Record]:
    """The records of both processes for each of `PAIRED`, from one launch."""
    with tempfile.TemporaryDirectory() as folder:
        run_together(2, __file__, "--process-of", folder)
        first, second = (json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(2))
    return {name: {"first": first[name], "second": second[name]} for name in PAIRED}


def one_of_two(folder: Path) -> None:
    with alone():
        records = {name: run_trainer(name, str(folder / str(place))) for place, name in enumerate(PAIRED)}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(records))
    torch.distributed.destroy_process_group()


# ---- Loops of one's own ---------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """Linear layers and a layer norm, on features."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.body, self.norm, self.middle = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.middle(self.norm(self.body(x)).tanh())))


class Mixed(nn.Module):
    """Convolutions, and modules whose gradients take a second run of them: embedding, group norm, RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.wide = nn.Conv2d(1, 4, 3, padding=1)
        self.group_norm = nn.GroupNorm(2, 4)
        self.grouped = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.dilated = nn.Conv2d(8, 6, (1, 3), padding=(0, 2), dilation=(1, 2), bias=False)
        self.rms = nn.RMSNorm(18)
        self.twice = nn.Linear(18, 18)
        self.head = nn.Linear(18, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.relu(self.group_norm(self.wide(self.embed(tokens)[:, None])))
        hidden = self.dilated(self.grouped(hidden).tanh()).mean(dim=3).flatten(1)
        return self.head(F.relu(self.twice(F.relu(self.twice(self.rms(hidden))))))


class Causal(nn.Module):
    """GPT-2, whose weights are [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, num_labels=3, pad_token_id=0,
                            bos_token_id=None, eos_token_id=None,
                            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
        self.model = GPT2ForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": Dense,
    "wide": lambda: Dense(150),
    "mixed": Mixed,
    "gpt2": Causal,
}
SKETCH = {"size": 4, "seed": 3}
"""Small enough that the weights of these networks are sketched."""
ENGINES: dict[str, Callable[[nn.Module, list[nn.Parameter]], Any]] = {
    "per_group": lambda model, scope: PerGroupEngine(scope),
    "cut": PerGroupCutEngine,
    "single_pass": SinglePassEngine,
    "small_budget": lambda model, scope: SinglePassEngine(model, scope, memory_budget=2000),
    "sketch": lambda model, scope: SketchEngine(model, scope, **SKETCH),
    "hooks": TensorHookEngine,
    "sketched_hooks": lambda model, scope: TensorHookEngine(model, scope, sketch=True),
    "auto": AutoEngine,
    "static": StaticShapesEngine,
    "static_auto": lambda model, scope: AutoEngine(model, scope, static=True),
}
MAKE_UPS = [[0, 0, 0, 0, 0, 1, 1, 2], [0, 1, 0, 2, 0, 0, 1, 0], [0, 1, 0, 0, 1, 0, 1, 0], [0] * 8,
            [2, 2, 1, 1, 0, 0, 2, 1]]  # fmt: skip
"""Groups of the examples of a batch: in order and out of it, with absent ones, of one group."""


def batches(network: str, groups: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        ids = torch.tensor(MAKE_UPS[step % len(MAKE_UPS)])
        if groups > 3:
            ids = torch.randint(0, groups, (2 * groups,), generator=generator)
        if network in ("dense", "wide"):
            inputs = torch.randn(len(ids), 6, generator=generator)
        else:
            inputs = torch.randint(1, 11, (len(ids), 6), generator=generator)
        yield inputs, torch.randint(0, 3, (len(ids),), generator=generator), ids


def run_loop(case: Record) -> Record:
    """One of `PLAIN`."""
    network, static, parts = case.get("network", "dense"), case.get("static", False), case.get("parts", 1)
    scale, groups = case.get("loss_scale"), case.get("groups", 3)
    torch.manual_seed(0)
    model = NETWORKS[network]().to(case.get("dtype", torch.float32))
    scope = list(gradient_scope(model, case.get("layers", 2)).values())
    engine = None if case["engine"] is None else ENGINES[case["engine"]](model, scope)
    late = parts > 1 or isinstance(engine, TensorHookEngine)
    counts = [60, 25, 11] if groups == 3 else [5 + 3 * group for group in range(groups)]
    thirds = [[count // 3 for count in counts]] * 2
    info = GroupInfo(
        [f"g{group}" for group in range(groups)],
        counts,
        class_counts=[*thirds, [count - 2 * (count // 3) for count in counts]],
    )
    robust_loss = GroupRobustLoss(
        case.get("objective", CGD(step_size=STEP_SIZE)), info, scope, engine=engine,
        weight_timing=case.get("timing", "next" if late else "current"),
        loss_scale=None if scale is None else lambda: scale,
        arithmetic=DeviceArithmetic(torch.device("cpu")) if static else None,
    )  # fmt: skip
    head = HeadInput(model, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses: list[float] = []
    weights: list[Tensor | None] = []
    group_losses: list[list[float | None]] = []
    for step, (inputs, labels, ids) in enumerate(batches(network, groups)):
        optimizer.zero_grad()
        robust_loss.open_window(list(ids.chunk(parts)))
        total = 0.0
        for part, own, group_ids in zip(inputs.chunk(parts), labels.chunk(parts), ids.chunk(parts), strict=True):
            with ExitStack() as recording:
                recording.enter_context(robust_loss.recording())
                recording.enter_context(head.recording())
                logits = model(part.to(case["dtype"]) if "dtype" in case else part)
            by_example = F.cross_entropy(logits, own, reduction="none")
            if step == case.get("bad_step"):
                by_example = by_example * torch.where(group_ids == group_ids[0], math.inf, 1.0)
            features = head.features(logits)
            loss = robust_loss(by_example, group_ids, logits=logits, labels=own, features=features) / parts
            (loss * (scale or 1.0)).backward()
            robust_loss.after_backward()
            total += loss.item()
        losses.append(total)
        if step == case.get("undone_step"):
            robust_loss.undo_update()
        elif step != case.get("bad_step"):
            for parameter in model.parameters():
                if scale is not None and parameter.grad is not None:
                    parameter.grad /= scale
            optimizer.step()
        found = robust_loss.drain_group_losses()
        group_losses.append([found.get(name) for name in info.names])
        weights.append(None if robust_loss.alpha is None else robust_loss.alpha.double())
    interactions = robust_loss.interactions
    return in_hex(
        {
            "losses": losses,
            "weights": weights,
            "group_losses": group_losses,
            "interactions": None if interactions is None else interactions.cosines,
            "updates": [robust_loss.steps, robust_loss.updates, robust_loss.skipped_updates],
            "parameters": checksum(model),
        }
    )


# ---- Records --------------------------------------------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[None]:
    """One thread, since sums over several would depend on their number; no warnings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Every run of a Trainer collects garbage, a third of its time, among the objects of all the modules imported.
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def checksum(model: nn.Module) -> Record:
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    values = parameters.double()
    factors = torch.randn(len(values), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return {
        "size": len(values),
        "norm": math.sqrt(math.fsum((values * values).tolist())),
        "sum": math.fsum(values.tolist()),
        "weighted_sum": math.fsum((values * factors).tolist()),
        "sha256": hashlib.sha256(parameters.numpy().tobytes()).hexdigest(),
    }


def in_hex(value: Any) -> Any:
    """JSON-ready: every float as the hexadecimal string that has all its digits."""
    if isinstance(value, Tensor):
        return in_hex(value.tolist())
    if isinstance(value, dict):
        return {name: in_hex(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_hex(part) for part in value]
    return value.hex() if isinstance(value, float) else value


def environment() -> Record:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": processor or platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
    }


def errors(recorded: Any, found: Any, place: tuple[str, ...] = (), scales: Record | None = None) -> Record:
    """Relative error of every number, by its place in the record; infinite for what has another form.

    Hashes are left out: they tell nothing but whether all bits are the same.
    """
    if isinstance(recorded, dict) and isinstance(found, dict) and recorded.keys() == found.keys():
        if "weighted_sum" in recorded:
            norm = float.fromhex(recorded["norm"])
            scales = {"weighted_sum": norm, "sum": norm * math.sqrt(recorded["size"])}
        pairs = [(name, recorded[name], found[name]) for name in recorded]
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = [(str(number), *both) for number, both in enumerate(zip(recorded, found, strict=True))]
    else:
        return {".".join(place): _error(recorded, found, place, scales or {})}
    result: Record = {}
    for name, one, other in pairs:
        result |= errors(one, other, (*place, name), scales)
    return result


def _error(recorded: Any, found: Any, place: tuple[str, ...], scales: Record) -> float:
    if recorded == found or place[-1] == "sha256":
        return 0.0
    if not (isinstance(recorded, str) and isinstance(found, str)):
        return math.inf
    one, other = float.fromhex(recorded), float.fromhex(found)
    # Cosines and scores may be zero but for rounding.
    own = 1.0 if {"interactions", "predictions"} & set(place) else max(abs(one), 1e-9)
    error = abs(one - other) / scales.get(place[-1], own)
    return error if math.isfinite(error) else math.inf


def tolerance_of(name: str) -> float:
    if "bfloat16" in name:
        return LOW_TOLERANCE
    return STATIC_TOLERANCE if PLAIN.get(name, {}).get("static") else TOLERANCE


def recorded_cases() -> dict[str, Record]:
    return json.loads(RECORDED.read_text())["cases"]


def write(path: Path, cases: dict[str, Record]) -> None:
    """One line for each case, so that a changed one shows as one line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(record)}" for name, record in cases.items())
    path.write_text(f'{{"environment": {json.dumps(environment())},\n"cases": {{\n{lines}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description="Records trajectories, or compares with the recorded ones.")
    parser.add_argument("cases", nargs="*", help="names; all by default")
    parser.add_argument("--write", type=Path, help="where to write the records")
    parser.add_argument("--process-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process_of is not None:
        one_of_two(options.process_of)
        return
    disable_progress_bar()
    names = options.cases or CASES
    if options.write is not None:
        write(options.write, {name: run_case(name) for name in names})
        return
    known, changed, wrong = recorded_cases(), 0, 0
    for name in names:
        found = run_case(name)
        if found == known[name]:
            continue
        changed += 1
        by_place = errors(known[name], found)
        worst = max(by_place, key=by_place.__getitem__)
        wrong += by_place[worst] > tolerance_of(name)
        print(f"{name}: {by_place[worst]:.1e} at {worst}" + (", TOO MUCH" * (by_place[worst] > tolerance_of(name))))
    print(f"{len(names)} cases, {changed} with other bits, {wrong} beyond the tolerance.")
    if changed:
        print(f"Recorded on: {json.loads(RECORDED.read_text())['environment']}\nThis is:     {environment()}")
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
