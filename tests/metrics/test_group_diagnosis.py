"""The numbers of a probe: by hand, and on made gradients whose truth is known."""

import pytest
import torch

from hf_cgd.functional import merge_halves
from hf_cgd.metrics.diagnosis import GroupDiagnosis, diagnosis_of
from hf_cgd.objectives import GroupStatistics

F64 = torch.float64


def step(halves: torch.Tensor, losses: list[float], sizes: list[list[float]]) -> GroupStatistics:
    """Of the gradients [K, 2, P] of the halves of K groups."""
    counts = torch.tensor(sizes, dtype=F64)
    flat = halves.double().flatten(0, 1)
    inner = (flat @ flat.T).view(len(sizes), 2, len(sizes), 2)
    gram, products = merge_halves(inner, counts)
    present = counts.sum(dim=1) > 0
    gram = torch.where(present[:, None] & present, gram, 0.0)
    names = [f"g{place}" for place in range(len(sizes))]
    numbers = torch.tensor(losses, dtype=F64), counts.sum(dim=1), torch.ones(len(sizes), dtype=F64)
    return GroupStatistics(*numbers, gram, names, products)


def test_by_hand() -> None:
    """Halves (3, 0), (1, 0) and (0, 2), (0, 0): group gradients (2, 0) and (0, 1), self-products 3 and 0."""
    halves = torch.tensor([[[3.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]])
    found = diagnosis_of([step(halves, [4.0, 1.0], [[1, 1], [1, 1]])] * 2)
    assert (found.steps, list(found.names)) == (2, ["g0", "g1"])
    assert found.losses.tolist() == [4, 1] and found.examples.tolist() == [2, 2]
    assert found.signal.tolist() == [0.75, 0]
    assert found.agreement[0, 0] == 1 and found.agreement[0, 1].isnan(), "of a group without signal nothing is told"
    assert found.cosines.tolist() == [[1, 0], [0, 1]]
    assert found.pull_dro.tolist() == [1.5, -1.5]
    assert found.pull_cgd.tolist() == [1.5, -1.5], "l_i cos(g_i, g_i) alone, as the groups are orthogonal"
    assert found.pull_halves.tolist() == [1.5, -1.5], "4 x .75 and 1 x 0, less their mean"
    assert found.pull_consensus.tolist() == [1.5, -1.5], "the losses, as there are no two others that could agree"


def test_noise_is_taken_out_of_the_agreement() -> None:
    """Two groups whose expected gradients have a cosine of .8, under noise that leaves .2 of it to a step."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.zeros(2, 100, dtype=F64)
    truth[0, 0], truth[1, 0], truth[1, 1] = 1.0, 0.8, 0.6
    steps = []
    for _ in range(400):
        noise = torch.randn(2, 2, 100, generator=generator, dtype=F64) * 0.245
        steps.append(step(truth[:, None] + noise, [1.0, 1.0], [[4, 4], [4, 4]]))
    found = diagnosis_of(steps)
    # Each half has noise of squared norm 100 x .245² = 6, the mean of both half of that: 1 / (1 + 3).
    assert found.signal.tolist() == pytest.approx([0.25, 0.25], abs=0.02)
    assert found.agreement[0, 1].item() == pytest.approx(0.8, abs=0.06)
    assert found.cosines[0, 1].item() == pytest.approx(0.8 * 0.25, abs=0.03)


def of_directions(losses: list[float], directions: list[list[float]]) -> GroupDiagnosis:
    """A diagnosis of groups whose gradients have no noise."""
    halves = torch.tensor(directions)[:, None].repeat(1, 2, 1)
    return diagnosis_of([step(halves, losses, [[2, 2]] * len(losses))])


def test_the_pull_of_consensus() -> None:
    """Losses .81, .25, .25; the first against two that agree wholly: .81 - 2 · .45; these have their losses."""
    found = of_directions([0.81, 0.25, 0.25], [[-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    assert found.pull_consensus.tolist() == pytest.approx([x - (0.5 - 0.09) / 3 for x in (-0.09, 0.25, 0.25)])


@pytest.mark.parametrize(
    ("losses", "directions", "apart"),
    [
        ([0.3, 0.9, 0.2], [[1.0, 0.1], [-1.0, 0.2], [1.0, -0.1]], 1),
        ([0.9, 0.3, 0.2], [[1.0, 0.1], [-1.0, 0.2], [1.0, -0.1]], None),  # What opposes has not the highest loss.
        ([0.3, 0.9, 0.2], [[1.0, 0.0], [-1.0, -1.0], [0.0, 1.0]], None),  # The others do not agree.
        ([0.3, 0.9, 0.2], [[1.0, 0.1], [1.0, 0.2], [1.0, -0.1]], None),
        ([0.9, 0.3, 0.2, 0.1], [[1.0, 0.3], [1.0, -0.3], [-1.0, -0.3], [-1.0, 0.3]], None),  # Crossed with the label.
        ([0.3, 0.9], [[1.0, 0.1], [-1.0, 0.2]], None),
    ],
)
def test_a_group_that_stands_apart(losses: list[float], directions: list[list[float]], apart: int | None) -> None:
    found = of_directions(losses, directions)
    assert found.stands_apart == apart
    assert ("Not Group-DRO" in found.advice) == (apart is not None)
    assert ("'g1' has the highest loss" in str(found)) == (apart == 1)
    assert ("Two groups" in found.advice) == (len(losses) == 2)


def test_groups_that_are_rare() -> None:
    """The second group is in one of two steps, with a single example, and the third in none."""
    halves = torch.tensor([[[1.0, 0.0]] * 2, [[2.0, 0.0], [0.0, 0.0]], [[0.0, 0.0]] * 2])
    both = step(halves, [1.0, 3.0, 0.0], [[2, 2], [1, 0], [0, 0]])
    alone = step(halves, [2.0, 0.0, 0.0], [[2, 2], [0, 0], [0, 0]])
    found = diagnosis_of([both, alone])
    assert found.losses[:2].tolist() == [1.5, 3] and found.losses[2].isnan()
    assert found.examples[:2].tolist() == [4, 1]
    assert found.known.tolist() == [True, False, False] and found.signal[:2].tolist() == [1, 1]
    assert found.agreement[0, 1] == 1 and found.agreement[0, 2].isnan()
    assert "not measured" in str(found) and "nan" not in str(found)
    line = next(line for line in str(found).splitlines() if line.startswith("g2"))
    assert line.split()[1:3] == ["n/a", "n/a"]
    with pytest.raises(ValueError, match="one step or more, got none"):
        diagnosis_of([])
