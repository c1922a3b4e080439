"""Mean cosines between the groups' gradients: against a loop over the updates, over a resume, and as a picture."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_cgd import CGD, GroupDRO, GroupInfo, GroupRobustLoss, GroupRobustTrainer
from hf_cgd.plots import interactions_figure
from hf_cgd.robust_loss.interactions import MAX_GROUPS

NAMES = ["a", "b", "c"]


class Run:
    """A linear classifier under CGD, and the cosines of each step's groups by plain autograd."""

    def __init__(self, names: list[str] = NAMES) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.names = names
        self.loss = GroupRobustLoss(CGD(step_size=0.1), GroupInfo(names), list(self.model.parameters()))
        self.seen: dict[tuple[str, str], list[float]] = {}

    def step(self, seed: int, groups: list[str]) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(len(groups), 4, generator=generator), torch.arange(len(groups)) % 2
        ids = torch.tensor([self.names.index(group) for group in groups])
        losses = nn.functional.cross_entropy(self.model(x), y, reduction="none")
        rows = {}
        for group in set(groups):
            mean = losses[ids == self.names.index(group)].mean()
            rows[group] = torch.cat(
                [g.flatten() for g in torch.autograd.grad(mean, self.model.parameters(), retain_graph=True)]
            )
        for one, first in rows.items():
            for other, second in rows.items():
                self.seen.setdefault((one, other), []).append(torch.cosine_similarity(first, second, dim=0).item())
        self.model.zero_grad()
        self.loss(losses, ids).backward()
        torch.optim.SGD(self.model.parameters(), 0.1).step()

    def expected(self) -> Tensor:
        means = [[np.mean(self.seen.get((i, j), [np.nan])) for j in self.names] for i in self.names]
        return torch.tensor(means, dtype=torch.float64)

    @property
    def cosines(self) -> Tensor:
        assert self.loss.interactions is not None
        return self.loss.interactions.cosines


def test_means_over_the_updates_in_which_both_took_part() -> None:
    run = Run()
    for seed, groups in enumerate([["a", "b", "a", "b"], ["b", "c", "b"], ["a", "b", "b", "a", "a"]]):
        run.step(seed, groups)
    assert run.cosines[0, 2].isnan() and run.cosines[2, 0].isnan()
    assert torch.allclose(run.cosines, run.expected(), atol=1e-6, equal_nan=True)


def test_they_are_saved_and_matched_by_name() -> None:
    run, other = Run(), Run(["c", "a", "b"])
    run.step(0, ["a", "b", "c", "a"])
    run.step(1, ["a", "b"])
    other.loss.load_state_dict(json.loads(json.dumps(run.loss.state_dict())))
    order = [NAMES.index(name) for name in other.names]
    assert torch.equal(other.cosines, run.cosines[order][:, order])


def test_a_resumed_run_has_those_of_the_uninterrupted_one(trainer: Callable[..., GroupRobustTrainer]) -> None:
    options = {"objective": "cgd", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = trainer(options)
    straight.train()
    resumed = trainer(options)
    resumed.train(resume_from_checkpoint=f"{straight.args.output_dir}/checkpoint-2")
    ours, theirs = resumed.group_interactions, straight.group_interactions
    assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    assert torch.allclose(ours.diagonal(), torch.ones(len(ours), dtype=torch.float64))


def test_objectives_without_gradients_and_very_many_groups_have_none() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    many = GroupInfo([str(group) for group in range(MAX_GROUPS + 1)])
    assert GroupRobustLoss(GroupDRO(), GroupInfo(NAMES)).interactions is None
    assert GroupRobustLoss(CGD(), many, parameters).interactions is None


@pytest.mark.parametrize("groups", [2, 60])
def test_the_picture_shows_the_numbers(groups: int) -> None:
    values = np.linspace(-1, 1, groups**2).reshape(groups, groups)
    values[0, 1] = np.nan
    axes, _ = interactions_figure(torch.tensor(values), [f"group {i}" for i in range(groups)]).axes
    shown = axes.images[0].get_array()
    assert shown.mask[0, 1] and shown.mask.sum() == 1
    assert np.allclose(shown.compressed(), values[~np.isnan(values)])
    assert axes.images[0].get_clim() == (-1, 1)
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == f"group {groups - 1}"
    assert [text.get_text() for text in axes.texts] == (["-1.00", "0.33", "1.00"] if groups == 2 else [])


def test_names_have_to_fit() -> None:
    with pytest.raises(ValueError, match=r"Expected cosines \[3, 3\] for 3 names, got \(2, 2\)"):
        interactions_figure(np.eye(2), NAMES)
