"""Losses in excess of a reference: what the weights move by, against formulas by hand, and what stays as it was."""

import json
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from hf_cgd import CGD, ERM, ERMUW, IRM, PGI, GroupDRO, GroupInfo, GroupRobustLoss, Objective
from hf_cgd.arithmetic import DeviceArithmetic
from hf_cgd.functional import cgd_step, group_dro_step
from hf_cgd.robust_loss.excess import EXCESS_CLIPS, ExcessClip

GROUPS = GroupInfo("abc", [40, 30, 20])
IDS = torch.tensor([0, 0, 1, 1, 1, 2])
LOSSES = [2.0, 1.0, 0.5, 4.0, 3.0, 1.0]
REFERENCE = torch.tensor([1.5, 2.0, 1.0, 3.0, 3.5, 2.0])
BY_HAND = {"example": [0.25, 1 / 3, 0.0], "group": [0.0, 0.0, 0.0]}
"""Differences .5 -1 | -.5 1 -.5 | -1: clipped and then averaged; their means -.25, 0, -1, clipped."""


def losses() -> Tensor:
    return torch.tensor(LOSSES, requires_grad=True)


@pytest.mark.parametrize("clip", EXCESS_CLIPS)
def test_group_dro_moves_by_the_excess_and_minimises_the_losses(clip: ExcessClip) -> None:
    excess = torch.tensor(BY_HAND[clip], dtype=torch.float64)
    robust_loss = GroupRobustLoss(GroupDRO(step_size=0.7), GROUPS, excess_clip=clip)
    given, alpha = losses(), torch.full((3,), 1 / 3, dtype=torch.float64)
    scalar = robust_loss(given, IDS, reference_losses=REFERENCE)
    alpha = group_dro_step(alpha, excess, step_size=0.7, min_weight=1e-5 / 3)
    assert torch.allclose(robust_loss.alpha, alpha, atol=1e-9)
    means = torch.tensor([1.5, 2.5, 1.0], dtype=torch.float64)
    assert scalar.item() == pytest.approx((alpha * means).sum().item(), rel=1e-6)
    scalar.backward()
    expected = (alpha / torch.tensor([2, 3, 1]))[IDS]
    assert torch.allclose(given.grad.double(), expected, atol=1e-7)
    assert robust_loss.drain_group_losses() == pytest.approx({"a": 1.5, "b": 2.5, "c": 1.0})
    assert robust_loss.drain_group_excess() == pytest.approx(dict(zip("abc", BY_HAND[clip], strict=True)), abs=1e-7)
    assert robust_loss.drain_group_excess() == {}


def test_every_factor_of_equation_5_is_the_excess_and_every_cosine_that_of_the_losses() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 1, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    reference = torch.tensor([0.1, 0.0, 0.3, 0.2, 0.0, 0.05], dtype=torch.float64)

    def of(rows: Tensor) -> Tensor:
        return layer(rows).squeeze(1) ** 2

    rows = []
    for group in range(3):
        gradient = torch.autograd.grad(of(x[group == IDS]).mean(), list(layer.parameters()))
        rows.append(torch.cat([part.flatten() for part in gradient]))
    gram = torch.stack(rows) @ torch.stack(rows).T
    differences = (of(x).detach() - reference).clamp_min(0)
    excess = torch.stack([differences[group == IDS].mean() for group in range(3)])
    expected = cgd_step(torch.full((3,), 1 / 3).double(), excess, gram, step_size=0.9, min_weight=1e-5 / 3)
    robust_loss = GroupRobustLoss(CGD(step_size=0.9), GROUPS, list(layer.parameters()), excess_clip="example")
    robust_loss(of(x), IDS, reference_losses=reference).backward()
    assert torch.allclose(robust_loss.alpha, expected, atol=1e-9)
    assert not torch.allclose(expected, torch.full((3,), 1 / 3).double(), atol=1e-3)


OBJECTIVES = [GroupDRO(step_size=0.3), CGD(step_size=0.3), CGD(step_size=0.3, self_term="split_half"),
              CGD(step_size=0.3, interaction_momentum=0.6)]  # fmt: skip


def trained(objective: Objective, clip: ExcessClip | None, reference: float, parts: int = 1, **options: Any) -> Any:
    """Weights and parameters after steps of which some lack a group; a reference that changes from row to row."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    layer = nn.Linear(5, 1, dtype=torch.float64)
    robust_loss = GroupRobustLoss(
        objective, GROUPS, list(layer.parameters()), weight_timing="next", excess_clip=clip, **options
    )
    for _ in range(5):
        x = torch.randn(24, 5, generator=generator, dtype=torch.float64)
        ids = torch.randint(0, 3, (24,), generator=generator).sort().values
        robust_loss.open_window(ids.chunk(parts))
        layer.zero_grad()
        for rows, own in zip(x.chunk(parts), ids.chunk(parts), strict=True):
            wanted = None if clip is None else reference * rows[:, 0].abs()
            (robust_loss(layer(rows).squeeze(1) ** 2, own, reference_losses=wanted) / parts).backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.02 * parameter.grad
    return robust_loss.alpha, torch.cat([p.detach().flatten() for p in layer.parameters()])


@pytest.mark.parametrize("clip", EXCESS_CLIPS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_of_any_make_up_equal_one_batch(objective: Objective, clip: ExcessClip) -> None:
    one, many = (trained(objective, clip, 0.4, parts) for parts in (1, 4))
    assert torch.allclose(one[0], many[0], atol=1e-12) and torch.allclose(one[1], many[1], rtol=1e-10)
    assert not torch.allclose(one[0], trained(objective, None, 0.0)[0], atol=1e-4)


@pytest.mark.parametrize("clip", EXCESS_CLIPS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_reference_of_zero_is_none(objective: Objective, clip: ExcessClip) -> None:
    ours, theirs = trained(objective, clip, 0.0), trained(objective, None, 0.0)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("clip", EXCESS_CLIPS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_reference_that_no_loss_exceeds_moves_nothing(objective: Objective, clip: ExcessClip) -> None:
    alpha = trained(objective, clip, 1e6)[0]
    assert torch.allclose(alpha, torch.full((3,), 1 / 3).double(), atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES[:2])
def test_a_device_that_is_not_looked_at_gives_the_same(objective: Objective) -> None:
    arithmetic = DeviceArithmetic(torch.device("cpu"), fixed_shapes=False)
    ours, theirs = trained(objective, "group", 0.4, arithmetic=arithmetic), trained(objective, "group", 0.4)
    assert torch.allclose(ours[0], theirs[0], atol=1e-12) and torch.allclose(ours[1], theirs[1], atol=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=3), st.sampled_from(EXCESS_CLIPS))
def test_hardness_that_the_reference_shares_does_not_count(shift: list[float], clip: ExcessClip) -> None:
    """What a group's losses and its reference have in common leaves every weight; losses may be negative then."""
    common = torch.tensor(shift)[IDS]
    weights = []
    for added in (torch.zeros(6), common):
        robust_loss = GroupRobustLoss(GroupDRO(step_size=0.7), GROUPS, excess_clip=clip)
        robust_loss(losses() + added, IDS, reference_losses=REFERENCE + added)
        weights.append(robust_loss.alpha)
    assert torch.allclose(*weights, atol=1e-5)


def test_negative_losses_are_no_trouble_for_cgd_where_their_excess_is_what_counts() -> None:
    layer = nn.Linear(1, 1)
    for arithmetic in (None, DeviceArithmetic(torch.device("cpu"), fixed_shapes=False)):
        robust_loss = GroupRobustLoss(
            CGD(step_size=0.1), GROUPS, list(layer.parameters()), excess_clip="group", arithmetic=arithmetic
        )
        given = layer(torch.ones(6, 1)).squeeze(1) - 100
        robust_loss(given, IDS, reference_losses=torch.full((6,), -120.0)).backward()
        robust_loss.drain_group_losses()
        assert robust_loss.updates == 1 and robust_loss.skipped_updates == 0


def test_examples_without_a_label_count_in_no_excess() -> None:
    ids = torch.tensor([0, -100, 1, 1, -100, 2])
    whole = GroupRobustLoss(GroupDRO(step_size=0.7), GROUPS, excess_clip="example")
    whole(losses(), ids, reference_losses=REFERENCE)
    kept = GroupRobustLoss(GroupDRO(step_size=0.7), GROUPS, excess_clip="example")
    rows = ids >= 0
    kept(losses()[rows], ids[rows], reference_losses=REFERENCE[rows])
    assert torch.equal(whole.alpha, kept.alpha)


def test_a_reference_that_is_not_finite_moves_nothing_and_says_so() -> None:
    robust_loss = GroupRobustLoss(GroupDRO(), GROUPS, excess_clip="example")
    with pytest.warns(UserWarning, match=r"group\(s\) \['b'\] is not finite"):
        robust_loss(losses(), IDS, reference_losses=torch.tensor([0, 0, torch.nan, 0, 0, 0]))
    assert robust_loss.skipped_updates == 1


@pytest.mark.parametrize(
    "objective",
    [ERM(), ERMUW(), IRM(), CGD(scaling="gradient"), CGD(exponent=0.0), CGD(variant="reference")],
    ids=lambda objective: str(objective.knobs()),
)
def test_objectives_for_which_a_reference_means_nothing_refuse_it(objective: Objective) -> None:
    parameters = list(nn.Linear(2, 1).parameters())
    with pytest.raises(ValueError, match="Reference losses have no effect on"):
        GroupRobustLoss(objective, GROUPS, parameters, excess_clip="example")
    assert not PGI().moves_by_losses and GroupDRO().moves_by_losses


@pytest.mark.parametrize(
    ("clip", "reference", "message"),
    [
        (None, REFERENCE, "built without excess_clip"),
        ("example", None, r"reference_losses \[B\]; got none"),
        ("group", REFERENCE[:4], r"each of the 6 examples.*shape \(4,\)"),
        ("group", torch.ones(6, dtype=torch.long), "int64"),
    ],
)
def test_what_is_missing_or_too_much_is_refused(clip: Any, reference: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupRobustLoss(GroupDRO(), GROUPS, excess_clip=clip)(losses(), IDS, reference_losses=reference)
    with pytest.raises(ValueError, match="excess_clip must be one of 'example', 'group', got 'token'"):
        GroupRobustLoss(GroupDRO(), GROUPS, excess_clip="token")  # type: ignore[arg-type]


def test_a_run_is_not_resumed_with_another_kind_of_reference() -> None:
    robust_loss = GroupRobustLoss(GroupDRO(), GROUPS, excess_clip="example")
    robust_loss(losses(), IDS, reference_losses=REFERENCE)
    saved = json.loads(json.dumps(robust_loss.state_dict()))
    with pytest.raises(ValueError, match="excess_clip='example', but this run has None"):
        GroupRobustLoss(GroupDRO(), GROUPS).load_state_dict(saved)
    GroupRobustLoss(GroupDRO(), GROUPS, excess_clip="example").load_state_dict(saved)


# ---- The mean of the weights, and weights that are drawn by ---------------------------------------------------------


def test_the_mean_of_the_weights_is_one_over_steps() -> None:
    robust_loss = GroupRobustLoss(GroupDRO(step_size=0.7), GROUPS)
    assert robust_loss.mean_alpha.tolist() == [1 / 3] * 3
    seen = []
    for _ in range(4):
        robust_loss(losses(), IDS)
        seen.append(robust_loss.alpha)
    assert torch.allclose(robust_loss.mean_alpha, torch.stack(seen).mean(dim=0), atol=1e-12)
    saved = json.loads(json.dumps(robust_loss.state_dict()))
    again = GroupRobustLoss(GroupDRO(step_size=0.7), GroupInfo("cba", [20, 30, 40]))
    again.load_state_dict(saved)
    assert again.mean_alpha.tolist() == robust_loss.mean_alpha.tolist()[::-1]
    again(losses(), 2 - IDS)
    robust_loss(losses(), IDS)
    assert torch.allclose(again.mean_alpha.flip(0), robust_loss.mean_alpha, atol=1e-12)
    del saved["mean_alpha"], saved["averaged_steps"]
    old = GroupRobustLoss(GroupDRO(step_size=0.7), GROUPS)
    old.load_state_dict(saved)
    assert old.mean_alpha.tolist() == old.alpha.tolist()
    assert GroupRobustLoss(ERM(), GROUPS).mean_alpha is None


def test_a_step_that_a_scaler_left_out_counts_with_the_weights_before_it() -> None:
    robust_loss = GroupRobustLoss(GroupDRO(step_size=0.7), GROUPS, loss_scale=lambda: 2.0)
    robust_loss(losses(), IDS)
    first = robust_loss.alpha
    robust_loss(losses(), IDS)
    robust_loss.undo_update()
    assert torch.allclose(robust_loss.mean_alpha, first, atol=1e-12)


@pytest.mark.parametrize("objective", [ERMUW(adjustment=3.0), *OBJECTIVES, CGD(absent_groups="zero_loss")])
@pytest.mark.parametrize("parts", [1, 3])
def test_where_groups_are_drawn_by_weight_no_weight_counts_twice(objective: Objective, parts: int) -> None:
    """The scalar and its gradient are those of the plain mean over the examples, and the weights move all the same."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 1, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 0, 2])
    robust_loss = GroupRobustLoss(
        objective, GROUPS, list(layer.parameters()), weight_timing="next", weights_enter="sampling"
    )
    before = robust_loss.alpha
    robust_loss.open_window(ids.chunk(parts))
    total = 0.0
    for rows, own in zip(x.chunk(parts), ids.chunk(parts), strict=True):
        scalar = robust_loss(layer(rows).squeeze(1) ** 2, own) / parts
        scalar.backward()
        total += scalar.item()
    plain = (layer(x).squeeze(1) ** 2).mean()
    gradient = torch.autograd.grad(plain, list(layer.parameters()))
    assert total == pytest.approx(plain.item(), rel=1e-10)
    for parameter, expected in zip(layer.parameters(), gradient, strict=True):
        assert torch.allclose(parameter.grad, expected, rtol=1e-9)
    assert torch.equal(robust_loss.alpha, before) != objective.moves_weights
