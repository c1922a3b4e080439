"""The sketch engine: inner products right on average, cosines close, and the step itself exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import GROUPS, build, close, losses_of
from tiny import parameters_of, text_dataset, tiny_distilbert
from torch import nn

from hf_cgd import GroupRobustTrainer, gradient_scope
from hf_cgd.functional import cosine_gram
from hf_cgd.gradients import AutoEngine, PerGroupEngine, SketchEngine, gram_matrix

Build = Callable[..., GroupRobustTrainer]


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "ViT", "ResNet, frozen norms", "ConvNeXt", "LSTM", "MLP"])
def test_a_sketch_is_that_of_the_group_gradient_and_the_step_is_exact(name: str) -> None:
    model, inputs = build(name)
    scope = list(gradient_scope(model, "all" if name == "MLP" else 3).values())
    engine = SketchEngine(model, scope, size=4)
    assert engine.group_rows.projections, "nothing would be sketched"
    group_ids = torch.tensor(GROUPS[3])
    with engine.recording():
        losses = losses_of(model, inputs)
    exact = PerGroupEngine(scope).group_gradients(losses, group_ids, [0, 1, 2]).rows
    coefficients = torch.tensor([0.1, 0.5, 0.4])[group_ids]
    weighted = (coefficients * losses).sum()
    everything = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(weighted, everything, retain_graph=True, allow_unused=True)
    gradients = engine.group_gradients(losses, group_ids, [0, 1, 2])
    assert gradients.rows.shape[1] < exact.shape[1]
    assert close(torch.stack([engine.group_rows.sketch(row) for row in exact]), gradients.rows, torch.float32)
    gradients.scalar(weighted, coefficients).backward()
    for parameter, gradient in zip(everything, expected, strict=True):
        if gradient is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert torch.allclose(parameter.grad, gradient, atol=1e-5 * max(gradient.abs().max().item(), 1e-3))


def test_inner_products_are_right_on_average() -> None:
    model = nn.Linear(40, 30, bias=False)
    gradients = torch.randn(2, 1200, generator=torch.Generator().manual_seed(1))
    exact = gram_matrix(gradients)
    draws = torch.stack([
        gram_matrix(torch.stack([SketchEngine(model, [model.weight], 8, seed).group_rows.sketch(row) for row in gradients]))
        for seed in range(400)
    ])  # fmt: skip
    # Four standard errors of the mean of 400 draws.
    assert bool(((draws.mean(0) - exact).abs() <= 4 * draws.std(0) / 20).all())
    assert draws.std(0).max() > 0.01 * exact.max()


def test_small_weights_are_kept_whole() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 33))
    engine = SketchEngine(model, list(model.parameters()))
    row = torch.randn(sum(p.numel() for p in model.parameters()))
    sketch = engine.group_rows.sketch(row)
    assert torch.equal(sketch[: 32 * 32 + 32], row[: 32 * 32 + 32])
    assert len(sketch) == 32 * 32 + 32 + 32 * 32 + 33


def test_the_same_projections_for_the_same_seed() -> None:
    model = nn.Linear(50, 50)
    row = torch.randn(2550)
    one, same, other = (
        SketchEngine(model, list(model.parameters()), 8, seed).group_rows.sketch(row) for seed in (3, 3, 4)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_larger_sketches_give_closer_cosines() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2))
    scope = list(model.parameters())
    group_ids = torch.arange(64) % 4
    x, y = torch.randn(64, 256), torch.randint(0, 2, (64,))
    errors = {}
    for size in (8, 128):
        differences = []
        for seed in range(5):
            engine = SketchEngine(model, scope, size, seed)
            with engine.recording():
                losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            exact = cosine_gram(gram_matrix(PerGroupEngine(scope).group_gradients(losses, group_ids, range(4)).rows))
            rows = engine.group_gradients(losses, group_ids, range(4)).rows
            differences.append(cosine_gram(gram_matrix(rows)) - exact)
        errors[size] = torch.stack(differences).square().mean().sqrt().item()
    # The variance falls like 1/r.
    assert errors[128] < errors[8] / 2 and errors[128] < 0.1


def with_frozen_head() -> nn.Module:
    """The gradients of the head, which is too small to be sketched, would outweigh all others."""
    model = tiny_distilbert()
    model.pre_classifier.requires_grad_(False)
    model.classifier.requires_grad_(False)
    return model


def test_a_run_with_sketches_is_near_the_exact_one_and_resumes_bit_for_bit(trainer: Build) -> None:
    changes: dict[str, Any] = {
        "gradient_engine": "sketch", "step_size": 0.5, "max_steps": 6, "save_strategy": "steps", "save_steps": 3,
    }  # fmt: skip
    data = text_dataset(40, groups=3)
    straight = trainer(changes, model=with_frozen_head(), train_dataset=data)
    straight.train()
    exact = trainer({**changes, "gradient_engine": "per_group", "save_strategy": "no"}, model=with_frozen_head(),
                    train_dataset=data)  # fmt: skip
    exact.train()
    moved = (exact.group_weights - 1 / 3).abs().max()
    error = (straight.group_weights - exact.group_weights).abs().max()
    assert moved > 0.05 and 1e-5 < error < 0.05 * moved
    resumed = trainer(changes, model=with_frozen_head(), train_dataset=data)
    resumed.train(resume_from_checkpoint=f"{straight.args.output_dir}/checkpoint-3")
    assert torch.equal(resumed.group_weights, straight.group_weights)
    assert torch.equal(parameters_of(resumed.model), parameters_of(straight.model))


def test_the_error_of_the_cosines_is_reported() -> None:
    model, inputs = build("BERT")
    engine = AutoEngine(model, list(gradient_scope(model, 3).values()), "sketch")
    with engine.recording():
        losses = losses_of(model, inputs)
    engine.group_gradients(losses, torch.tensor(GROUPS[3]), [0, 1, 2])
    assert "its cosines by" in engine.reason


def test_accumulation_pools_sketches(trainer: Build) -> None:
    runs = []
    for accumulation in (1, 4):
        run = trainer(
            {
                "gradient_engine": "sketch", "step_size": 0.5, "weight_timing": "next", "max_steps": 3,
                "per_device_train_batch_size": 32 // accumulation, "gradient_accumulation_steps": accumulation,
            },
            model=tiny_distilbert(), train_dataset=text_dataset(96, groups=3),
        )  # fmt: skip
        run.train()
        runs.append((parameters_of(run.model), run.group_weights))
    assert torch.allclose(runs[0][0], runs[1][0], atol=1e-6)
    assert torch.allclose(runs[0][1], runs[1][1], rtol=0, atol=1e-5)
    assert (runs[0][1] - 1 / 3).abs().max() > 1e-2
