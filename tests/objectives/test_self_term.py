"""`CGD(self_term="split_half")`: by hand, beside a loop over halves, in windows, on two processes, with every engine."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import HANGS
from tiny import parameters_of, text_dataset

from hf_cgd import CGD, GroupInfo, GroupRobustLoss, GroupRobustTrainer
from hf_cgd.distributed.communication import Communication
from hf_cgd.functional import cgd_step, merge_halves
from hf_cgd.gradients import TensorHookEngine

Build = Callable[..., GroupRobustTrainer]
F64 = torch.float64


# ---- The formula ----------------------------------------------------------------------------------------------------


def test_step_by_hand() -> None:
    """Losses 1 and 4, cosine 1/2, self terms 1/4 and 1: exponents 1 · 1/4 + 2 · 1/2 and 2 · 1/2 + 4."""
    alpha, losses = torch.tensor([0.5, 0.5], dtype=F64), torch.tensor([1.0, 4.0], dtype=F64)
    gram = torch.tensor([[4.0, 1.0], [1.0, 1.0]], dtype=F64)
    found = cgd_step(alpha, losses, gram, step_size=0.5, self_products=torch.tensor([1.0, 1.0], dtype=F64))
    assert torch.allclose(found, torch.softmax(0.5 * torch.tensor([1.25, 5.0], dtype=F64), dim=0))
    # Kept within [0, 1]: a negative product counts as 0, one above the square as 1.
    found = cgd_step(alpha, losses, gram, step_size=0.5, self_products=torch.tensor([-3.0, 9.0], dtype=F64))
    assert torch.allclose(found, torch.softmax(0.5 * torch.tensor([1.0, 5.0], dtype=F64), dim=0))
    # Equation 3: 1 + 1 and 1 + 0.5.
    products = torch.tensor([1.0, 0.5], dtype=F64)
    found = cgd_step(alpha, losses, gram, step_size=0.5, self_products=products, scaling="gradient")
    assert torch.allclose(found, torch.softmax(0.5 * torch.tensor([2.0, 1.5], dtype=F64), dim=0))


def test_squares_for_products_are_the_paper() -> None:
    gram = torch.tensor([[2.0, -0.5, 0.0], [-0.5, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=F64)
    alpha, losses = torch.full((3,), 1 / 3, dtype=F64), torch.tensor([0.3, 0.7, 1.0], dtype=F64)
    for scaling in ("loss", "gradient"):
        arguments: dict[str, Any] = {"step_size": 0.3, "scaling": scaling}
        split = cgd_step(alpha, losses, gram, self_products=gram.diagonal(), **arguments)
        paper = cgd_step(alpha, losses, gram, **arguments)
        assert torch.allclose(split, paper, rtol=0, atol=1e-12), "zero gradients included"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 10_000))
def test_halves_add_up(counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    examples = [torch.randn(count, 3, generator=generator, dtype=F64) for count in counts]
    sizes = torch.tensor([[count - count // 2, count // 2] for count in counts], dtype=F64)
    halves = torch.stack([torch.stack([part[::2].mean(dim=0), part[1::2].sum(dim=0)]) for part in examples])
    halves[:, 1] /= sizes[:, 1:].clamp_min(1)
    rows = torch.stack([part.mean(dim=0) for part in examples])
    merged, products = merge_halves(torch.einsum("iap,jbp->iajb", halves, halves), sizes)
    assert torch.allclose(merged, rows @ rows.T)
    for count, row, half, product in zip(counts, rows, halves, products, strict=True):
        assert product.item() == pytest.approx(float(half[0] @ half[1]) if count > 1 else float(row @ row))


# ---- The step -------------------------------------------------------------------------------------------------------

GRADIENTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(3), dtype=F64) + 1
LOSSES = torch.rand(12, generator=torch.Generator().manual_seed(4), dtype=F64)
GROUPS = torch.tensor([2, 0, 0, 1, 0, 2, 2, 0, 0, 2, 2, 2])
OBJECTIVE = CGD(step_size=0.7, self_term="split_half")


def robust_loss_of(parameter: torch.nn.Parameter, **keywords: Any) -> GroupRobustLoss:
    return GroupRobustLoss(OBJECTIVE, GroupInfo("abcd", [9, 9, 9, 9]), [parameter], **keywords)


def losses_of(parameter: torch.nn.Parameter, rows: slice) -> torch.Tensor:
    """Losses with the gradients and, at 0, the values from above."""
    return LOSSES[rows] + GRADIENTS[rows] @ parameter


def expected_weights() -> torch.Tensor:
    """Group 1 has one example, group 3 none; of groups 0 and 2 every second one is in the other half."""
    rows, products, losses = torch.zeros(4, 4, dtype=F64), torch.zeros(4, dtype=F64), torch.zeros(4, dtype=F64)
    for group in range(3):
        own = GRADIENTS[group == GROUPS]
        rows[group], losses[group] = own.mean(dim=0), LOSSES[group == GROUPS].mean()
        products[group] = own[::2].mean(dim=0) @ own[1::2].mean(dim=0) if len(own) > 1 else own[0] @ own[0]
    present = torch.tensor([True, True, True, False])
    alpha = torch.full((4,), 0.25, dtype=F64)
    arguments: dict[str, Any] = {"present": present, "min_weight": 1e-5 / 4, "step_size": 0.7}
    paper = cgd_step(alpha, losses, rows @ rows.T, **arguments)
    split = cgd_step(alpha, losses, rows @ rows.T, self_products=products, **arguments)
    assert (paper - split).abs().max() > 0.005, "a case that tells them apart"
    return split


def test_weights_of_one_batch_and_its_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=F64))
    robust_loss = robust_loss_of(parameter)
    robust_loss(losses_of(parameter, slice(None)), GROUPS).backward()
    expected = expected_weights()
    assert torch.allclose(robust_loss.alpha, expected)
    shares = expected[:3] / expected[:3].sum()
    means = torch.stack([GRADIENTS[group == GROUPS].mean(dim=0) for group in range(3)])
    assert torch.allclose(parameter.grad, shares @ means), "the gradient of the step is that of whole groups"


def test_micro_batches_are_one_batch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=F64))
    robust_loss = robust_loss_of(parameter, weight_timing="next")
    for _ in range(2):
        robust_loss.reset()
        windows = [slice(0, 1), slice(1, 4), slice(4, 12)]
        robust_loss.open_window([GROUPS[rows] for rows in windows])
        for rows in windows:
            robust_loss(losses_of(parameter, rows), GROUPS[rows])
        assert torch.allclose(robust_loss.alpha, expected_weights())


def test_two_processes_are_one() -> None:
    """Threads that meet at every sum stand for processes; the first has five of the examples."""
    meeting, sums = Barrier(2), [torch.zeros(0), torch.zeros(0)]

    def run(rank: int) -> torch.Tensor:
        def total(tensor: torch.Tensor) -> torch.Tensor:
            sums[rank] = tensor.clone()
            meeting.wait(timeout=HANGS)
            both = sums[0] + sums[1]
            meeting.wait(timeout=HANGS)
            return both

        parameter = torch.nn.Parameter(torch.zeros(4, dtype=F64))
        robust_loss = robust_loss_of(parameter, communication=Communication(total, 2, rank))
        rows = slice(0, 5) if rank == 0 else slice(5, 12)
        robust_loss(losses_of(parameter, rows), GROUPS[rows])
        return robust_loss.alpha

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(run, range(2)):
            assert torch.allclose(found, expected_weights())


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}], ids=["one batch", "window"])
def test_engines_agree(trainer: Build, changes: dict[str, Any]) -> None:
    data = text_dataset(40, groups=3)
    common = {**changes, "self_term": "split_half", "step_size": 0.5, "max_steps": 4}
    runs = {}
    for engine in ("per_group", "single_pass", "auto"):
        runs[engine] = trainer({**common, "gradient_engine": engine}, train_dataset=data)
        runs[engine].train()
    for engine in ("single_pass", "auto"):
        assert torch.allclose(runs[engine].group_weights, runs["per_group"].group_weights, atol=1e-5)
        assert torch.allclose(parameters_of(runs[engine].model), parameters_of(runs["per_group"].model), atol=1e-5)
    paper = trainer({**common, "self_term": "one", "gradient_engine": "per_group"}, train_dataset=data)
    paper.train()
    unset = trainer({**changes, "step_size": 0.5, "max_steps": 4, "gradient_engine": "per_group"}, train_dataset=data)
    unset.train()
    assert torch.equal(paper.group_weights, unset.group_weights)
    assert not torch.allclose(paper.group_weights, runs["per_group"].group_weights, atol=1e-4)


# ---- Refusals -------------------------------------------------------------------------------------------------------


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="self_term must be one of 'one', 'split_half', got 'half'"):
        CGD(self_term="half")
    with pytest.raises(ValueError, match="interaction_momentum cannot be set with self_term='split_half'"):
        CGD(self_term="split_half", interaction_momentum=0.9)
    with pytest.raises(ValueError, match="self_term cannot be set with variant='reference'"):
        CGD(self_term="split_half", variant="reference")
    parameter = torch.nn.Parameter(torch.zeros(4))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match="Tensor hooks see the gradients of whole groups only, but self_term='split_half'"
    ):
        robust_loss_of(parameter, weight_timing="next", engine=TensorHookEngine(model, list(model.parameters())))
