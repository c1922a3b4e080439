"""Settings drawn by chance: a run of the trainer is a plain loop that was written from the formulas alone."""

import copy
import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny import parameters_of, text_rows, tiny_distilbert
from torch import Tensor, nn

from hf_cgd import GroupRobustTrainer, gradient_scope

Build = Callable[..., GroupRobustTrainer]
STEPS, RATE = 5, 0.1
PLAIN: dict[str, Any] = {
    "max_steps": STEPS, "learning_rate": RATE, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential",
}  # fmt: skip
OBJECTIVES: list[dict[str, Any]] = [
    {"objective": "cgd"}, {"objective": "cgd", "exponent": 1.0}, {"objective": "cgd", "interaction": "mean"},
    {"objective": "cgd", "scaling": "gradient"}, {"objective": "group_dro"}, {"objective": "erm_uw"}, {"objective": "erm"},
]  # fmt: skip


def settings_of(draw: random.Random) -> dict[str, Any]:
    def perhaps(share: float = 0.4) -> bool:
        return draw.random() < share

    found = dict(draw.choice(OBJECTIVES))
    found["per_device_train_batch_size"] = draw.choice([3, 4, 6])
    micro_batches = found["gradient_accumulation_steps"] = draw.choice([1, 1, 2, 3])
    by_losses = found.get("scaling") != "gradient"
    if found["objective"] != "erm" and by_losses and perhaps():
        found["adjustment"] = 2.0
    if found["objective"] in ("cgd", "group_dro"):
        found["step_size"] = draw.choice([0.1, 1.0, 3.0])
        found["absent_groups"] = draw.choice(["frozen", "zero_loss"])
        found["min_weight"] = draw.choice([0.0, 0.05, None])
        if micro_batches == 1:
            found["weight_timing"] = draw.choice(["current", "next"])
        if by_losses and perhaps(0.3):
            found["reference_losses"] = draw.choice(["reference", {"0": 0.4, "1": 0.6, "2": 0.5}])
            found["excess_clip"] = draw.choice(["example", "group"])
    if found["objective"] == "cgd":
        found["gradient_layers"] = draw.choice([1, 3, "head", "all"])
        found["gradient_engine"] = draw.choice(["auto", "per_group"])
    if perhaps():
        found["class_weights"] = [1.0, 3.0]
    if perhaps():
        found["example_weight_column"] = "importance"
    if "reference_losses" not in found and perhaps():
        found |= draw.choice([{"focal_gamma": 2.0}, {"label_smoothing_factor": 0.2}])
    return found


def rows_for(draw: random.Random, groups: int) -> dict[str, list[Any]]:
    rows = text_rows(draw.choice([13, 17, 24]), seed=draw.randrange(100))
    size = len(rows["labels"])
    ids = [*range(groups), *range(groups), *(draw.randrange(groups) for _ in range(size - 2 * groups))]
    return rows | {
        "group": draw.sample(ids, size),
        "importance": [draw.choice([0.5, 1.0, 2.0]) for _ in range(size)],
        "reference": [draw.random() for _ in range(size)],
    }


class PlainLoop:
    """The formulas, one example and one group after the other."""

    def __init__(self, model: nn.Module, rows: dict[str, list[Any]], settings: dict[str, Any], groups: int) -> None:
        self.model, self.rows, self.settings, self.groups = model, rows, settings, groups
        counts = torch.tensor([rows["group"].count(group) for group in range(groups)], dtype=torch.float64)
        self.terms = settings.get("adjustment", 0.0) / counts.sqrt()
        start = torch.softmax(self.terms, 0) if settings["objective"] == "erm_uw" else torch.ones(groups) / groups
        self.alpha = start.double()
        self.scope = list(gradient_scope(model, settings.get("gradient_layers", 3)).values())

    def run(self) -> None:
        size, number = self.settings["per_device_train_batch_size"], len(self.rows["labels"])
        batches = [range(start, min(start + size, number)) for start in range(0, number, size)]
        together = self.settings["gradient_accumulation_steps"]
        steps = [[*chain(*batches[start : start + together])] for start in range(0, len(batches), together)]
        for step in range(STEPS):
            self.step(steps[step % len(steps)])

    def step(self, places: Sequence[int]) -> None:
        settings = self.settings
        tokens, labels, groups, importance, reference = (
            torch.tensor([self.rows[name][place] for place in places])
            for name in ("input_ids", "labels", "group", "importance", "reference")
        )
        scores = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        log_chances = F.log_softmax(scores, -1)
        losses = -log_chances[torch.arange(len(labels)), labels]
        if "focal_gamma" in settings:
            losses = (1 - torch.exp(-losses)) ** 2 * losses
        if "label_smoothing_factor" in settings:
            losses = 0.8 * losses - 0.2 * log_chances.mean(-1)
        weights = torch.ones(len(labels)).double()
        if "class_weights" in settings:
            weights = weights * torch.tensor(settings["class_weights"])[labels]
        if "example_weight_column" in settings:
            weights = weights * importance

        def means(values: Tensor) -> Tensor:
            parts = [groups == group for group in range(self.groups)]
            none = torch.zeros((), dtype=torch.float64)
            return torch.stack([
                (weights * values)[part].sum() / weights[part].sum() if part.any() else none for part in parts
            ])  # fmt: skip

        self.model.zero_grad()
        if settings["objective"] == "erm":
            loss = (weights * losses).sum() / weights.sum()
        else:
            of_groups, moved_by = means(losses), means(losses).detach()
            if "reference_losses" in settings:
                given = settings["reference_losses"]
                if given != "reference":
                    reference = torch.tensor([given[str(group)] for group in groups.tolist()])
                excess = losses.detach() - reference
                moved_by = means(excess.clamp_min(0) if settings["excess_clip"] == "example" else excess).clamp_min(0)
            present = torch.tensor([group in groups for group in range(self.groups)])
            before, after = self.alpha, self.next_weights(of_groups, moved_by, present)
            self.alpha = after
            coefficients = (before if self.timing == "next" else after) * present
            if settings.get("absent_groups") != "zero_loss":
                coefficients = coefficients / coefficients.sum()
            loss = (coefficients * of_groups).sum()
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad

    @property
    def timing(self) -> str:
        default = "current" if self.settings["gradient_accumulation_steps"] == 1 else "next"
        return self.settings.get("weight_timing", default)

    def next_weights(self, losses: Tensor, moved_by: Tensor, present: Tensor) -> Tensor:
        settings = self.settings
        if settings["objective"] == "erm_uw":
            return self.alpha
        counted = torch.ones_like(present) if settings["absent_groups"] == "zero_loss" else present
        if settings["objective"] == "group_dro":
            exponents = moved_by + self.terms
        else:
            interactions = self.interactions(losses, moved_by, present) * counted
            exponents = interactions.sum(1)
            if settings.get("interaction") == "mean":
                exponents = exponents / counted.sum()
        floor = settings["min_weight"]
        floor = 1e-5 / self.groups if floor is None else floor
        mass = self.alpha[counted].sum()
        moved = self.alpha[counted] * torch.exp(settings["step_size"] * exponents[counted])
        moved = (mass * moved / moved.sum()).clamp_min(floor)
        alpha = self.alpha.clone()
        alpha[counted] = mass * moved / moved.sum()
        return alpha

    def interactions(self, losses: Tensor, moved_by: Tensor, present: Tensor) -> Tensor:
        rows = torch.zeros(self.groups, sum(parameter.numel() for parameter in self.scope)).double()
        for group in present.nonzero().flatten().tolist():
            found = torch.autograd.grad(losses[group], self.scope, retain_graph=True, allow_unused=True)
            parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.scope, found, strict=True)]
            rows[group] = torch.cat([part.flatten() for part in parts])
        if self.settings.get("scaling") == "gradient":
            return rows @ rows.T
        units = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
        scaled = (moved_by + self.terms) ** self.settings.get("exponent", 0.5)
        return torch.outer(scaled, scaled) * (units @ units.T)


@pytest.mark.parametrize("seed", range(18))
def test_a_run_is_a_plain_loop(trainer: Build, seed: int) -> None:
    draw = random.Random(seed)
    settings, groups = settings_of(draw), draw.choice([2, 3])
    if isinstance(settings.get("reference_losses"), dict):
        settings["reference_losses"] = {name: settings["reference_losses"][name] for name in "012"[:groups]}
    rows = rows_for(draw, groups)
    model = tiny_distilbert(seed=seed).double()
    with torch.no_grad():
        # Larger weights, so that examples differ.
        for parameter in model.parameters():
            parameter *= 3 if parameter.ndim > 1 else 1
    twin = copy.deepcopy(model)
    read = {
        "importance": "example_weight_column" in settings,
        "reference": settings.get("reference_losses") == "reference",
    }
    data = Dataset.from_dict({name: column for name, column in rows.items() if read.get(name, True)})
    run = trainer({**PLAIN, **settings}, model=model, train_dataset=data)
    run.train()
    loop = PlainLoop(twin, rows, settings, groups)
    loop.run()
    assert (parameters_of(model) - parameters_of(twin)).abs().max() < 1e-6, settings
    if run.group_weights is not None:
        assert (run.group_weights - loop.alpha).abs().max() < 1e-6, settings
