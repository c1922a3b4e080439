"""What PGI, IRM and CORAL have in common: gradients, bases, accumulation, several processes, what is refused."""

import pytest
import torch
from penalties import F64, cross_entropy, groups_with, penalty_of
from torch import Tensor

from hf_cgd import CORAL, ERM, ERMUW, IRM, PGI, GroupInfo, GroupRobustLoss, Objective
from hf_cgd.distributed.communication import Communication


@pytest.mark.parametrize("objective", [IRM(), CORAL()])
def test_a_training_group_of_one_is_refused(objective: Objective) -> None:
    name = type(objective).__name__
    with pytest.raises(ValueError, match=rf"{name} needs at least 2 training examples in each group.*fewer: 'b'\."):
        GroupRobustLoss(objective, GroupInfo("ab", [5, 1]))


GROUPS = groups_with([[20, 5, 3], [4, 18, 6], [7, 7, 9]])


def batch_of(seed: int = 0, size: int = 14) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, 4, generator=generator, dtype=F64)
    labels = torch.randint(0, 3, (size,), generator=generator)
    return {"features": features, "labels": labels}, torch.randint(0, 3, (size,), generator=generator)


@pytest.mark.parametrize("objective", [PGI(1.7), IRM(1.7), CORAL(1.7)])
def test_gradients_equal_finite_differences(objective: Objective) -> None:
    batch, group_ids = batch_of()
    head = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def loss(features: Tensor, head: Tensor) -> Tensor:
        logits = 2 * (features @ head).tanh()
        losses = cross_entropy(logits, batch["labels"])
        given = dict(logits=logits, labels=batch["labels"], features=features)
        return GroupRobustLoss(objective, GROUPS)(losses, group_ids, **given)

    features = batch["features"].requires_grad_()
    assert torch.autograd.gradcheck(loss, (features, head))
    (found,) = torch.autograd.grad(loss(features, head), features)
    objective = type(objective)(0.0)
    (without,) = torch.autograd.grad(loss(features, head), features)
    assert (found - without).abs().max() > 1e-3


@pytest.mark.parametrize(
    "objective,base", [(PGI(0.0), ERM()), (CORAL(0.0), ERM()), (IRM(0.0), ERMUW()), (IRM(0.0, 5), ERMUW())]
)
def test_without_weight_it_is_its_base(objective: Objective, base: Objective) -> None:
    batch, group_ids = batch_of()
    logits = batch["features"][:, :3].clone().requires_grad_()
    losses = cross_entropy(logits, batch["labels"])
    found = GroupRobustLoss(objective, GROUPS)(losses, group_ids, logits=logits, **batch)
    assert found.item() == pytest.approx(GroupRobustLoss(base, GROUPS)(losses, group_ids).item(), rel=1e-12)


@pytest.mark.parametrize("objective", [PGI(3.0), IRM(3.0), CORAL(3.0)])
def test_with_one_group_it_is_erm(objective: Objective) -> None:
    batch, group_ids = batch_of()
    logits = batch["features"][:, :3].clone().requires_grad_()
    losses = cross_entropy(logits, batch["labels"])
    one = GroupInfo(["all"], [60], class_counts=[[20], [20], [20]])
    found = GroupRobustLoss(objective, one)(losses, torch.zeros_like(group_ids), logits=logits, **batch)
    assert found.item() == pytest.approx(losses.mean().item(), rel=1e-12)


@pytest.mark.parametrize("objective", [PGI(1.7), IRM(1.7), CORAL(1.7)])
def test_under_accumulation_the_penalty_is_the_mean_of_the_micro_batches(objective: Objective) -> None:
    batch, group_ids = batch_of(size=24)
    logits = batch["features"][:, :3].clone().requires_grad_()
    losses = cross_entropy(logits, batch["labels"])
    parts = [slice(0, 8), slice(8, 16), slice(16, 24)]
    given = {"logits": logits, **batch}
    windows = GroupRobustLoss(objective, GROUPS)
    windows.open_window([group_ids[part] for part in parts])
    total = sum(
        windows(
            cross_entropy(z, batch["labels"][part]),
            group_ids[part],
            logits=z,
            **{k: v[part] for k, v in batch.items()},
        )
        for part in parts
        for z in [logits[part]]
    ) / len(parts)
    penalties = [
        penalty_of(objective, GROUPS, group_ids[part], losses=cross_entropy(z, batch["labels"][part]), logits=z,
                   **{k: v[part] for k, v in batch.items()})
        for part in parts
        for z in [logits[part]]
    ]  # fmt: skip
    base = GroupRobustLoss(type(objective)(0.0), GROUPS)(losses, group_ids, **given)
    assert total.item() == pytest.approx((base + sum(penalties) / 3).item(), rel=1e-12)


@pytest.mark.parametrize("objective", [PGI(1.7), IRM(1.7), CORAL(1.7)])
@pytest.mark.parametrize("seed", range(5))
def test_processes_together_give_the_loss_and_gradient_of_one(objective: Objective, seed: int) -> None:
    """Three processes in turn, with the sums that a run of all would have: their gradients average to that of one."""
    batch, group_ids = batch_of(seed, size=18)
    labels = batch["labels"]
    features = batch["features"].requires_grad_()
    head = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    parts = [slice(0, 7), slice(7, 8), slice(8, 18)]

    def loss(robust_loss: GroupRobustLoss, part: slice) -> Tensor:
        logits = features[part] @ head
        return robust_loss(
            cross_entropy(logits, labels[part]),
            group_ids[part],
            logits=logits,
            labels=labels[part],
            features=features[part],
        )

    one = loss(GroupRobustLoss(objective, GROUPS), slice(0, 18))
    (expected,) = torch.autograd.grad(one, features)
    # All processes run until each collective is known: a first round fills in the tensors of one call after another.
    sums: list[Tensor] = []
    while True:
        calls: list[list[Tensor]] = []
        losses = []
        for index, part in enumerate(parts):
            mine: list[Tensor] = []

            def reduce(tensor: Tensor, mine: list[Tensor] = mine) -> Tensor:
                mine.append(tensor.clone())
                return sums[len(mine) - 1].clone() if len(mine) <= len(sums) else tensor.clone()

            communication = Communication(reduce, 3, index)
            losses.append(loss(GroupRobustLoss(objective, GROUPS, communication=communication), part))
            calls.append(mine)
        assert len({len(mine) for mine in calls}) == 1 or len(sums) < max(map(len, calls))
        if all(len(mine) == len(sums) for mine in calls):
            break
        place = len(sums)
        assert len({mine[place].shape for mine in calls}) == 1, "collectives differ in size"
        sums.append(sum(mine[place] for mine in calls))
    gradient = sum(torch.autograd.grad(part_loss, features)[0] for part_loss in losses) / 3
    assert torch.allclose(gradient, expected, atol=1e-12)
    assert sum(part_loss.item() for part_loss in losses) / 3 == pytest.approx(one.item(), rel=1e-12)


@pytest.mark.parametrize("objective", [PGI(1.7), IRM(1.7), CORAL(1.7)])
def test_autocast_takes_nothing_from_the_precision(objective: Objective) -> None:
    batch, group_ids = batch_of()
    features = (10 * batch["features"]).float()
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = features[:, :3].clone().requires_grad_()
            losses = cross_entropy(logits, batch["labels"])
            given = dict(logits=logits, labels=batch["labels"], features=features)
            found.append(GroupRobustLoss(objective, GROUPS)(losses, group_ids, **given).item())
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_several_processes_have_to_say_which_they_are() -> None:
    with pytest.raises(ValueError, match=r"num_processes=2 it has to be known which process this is: pass rank"):
        Communication(lambda tensor: tensor, 2)


@pytest.mark.parametrize(
    "objective,missing",
    [(PGI(), r"PGI needs logits and labels of the batch .*\(losses, group_ids, logits=..., labels=...\)"),
     (IRM(), r"IRM needs logits of the batch"), (CORAL(), r"CORAL needs features of the batch")],
)  # fmt: skip
def test_what_is_missing_is_named(objective: Objective, missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        GroupRobustLoss(objective, GROUPS)(torch.ones(2), torch.tensor([0, 1]))


@pytest.mark.parametrize("objective", [PGI, IRM, CORAL])
def test_weights_out_of_range(objective: type) -> None:
    with pytest.raises(ValueError, match=r"penalty_weight must be a finite number >= 0, got -1"):
        objective(penalty_weight=-1.0)
