"""The study of which objective helps where: tables as settings, probes beside the library's own, the script."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from paths import BENCHMARKS

from hf_cgd import GroupInfo, GroupRobustLoss
from hf_cgd.experiments.studies import cosines
from hf_cgd.experiments.studies.cosines import Method, orders_of, simple_task, train
from hf_cgd.experiments.studies.cosines.probe import probe
from hf_cgd.experiments.studies.cosines.tables import read_table, table_task
from hf_cgd.experiments.studies.simple_settings import LEARNING_RATE
from hf_cgd.metrics.diagnosis import diagnosis_of
from hf_cgd.trainer.diagnosis import Probe

SCRIPT = BENCHMARKS / "choice_study.py"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 rows whose first column is their number, in groups of 60, 20, 40 and 80."""
    late = np.repeat([0, 1, 0, 1], (60, 20, 40, 80))
    place = np.repeat([3, 3, 7, 7], (60, 20, 40, 80))
    path = tmp_path_factory.mktemp("table") / "trips.csv"
    columns = {"number": np.arange(200), "place": place, "late": late, "minutes": 10 * late, "same": 1}
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def test_a_table_is_split_by_group(table: Path) -> None:
    features, labels, ids, names = read_table(table, "late", ["label", "place"], ["minutes"])
    assert names == ["label:0 place:3", "label:0 place:7", "label:1 place:3", "label:1 place:7"]
    assert features.shape == (200, 3) and labels.tolist() == np.repeat([0, 1, 0, 1], (60, 20, 40, 80)).tolist()
    task = table_task("Trips", features, labels, ids, [0, 1], ([0], names[0]), hidden=4)
    for seed in range(2):
        found = []
        for name, share in (("train", 0.6), ("validation", 0.2), ("test", 0.2)):
            split = task.splits[name]
            assert np.bincount(split.group_ids[seed]).tolist() == [round(share * n) for n in (60, 40, 20, 80)]
            assert torch.equal(split.labels[seed], torch.from_numpy(split.group_ids[seed] // 2)), "rows stay whole"
            found.append(split.features[seed])
        assert found[0].mean(dim=0).tolist() == pytest.approx([0, 0, 0, 1], abs=1e-6)
        assert found[0].std(dim=0, correction=0).tolist() == pytest.approx([1, 1, 0, 0], abs=1e-6)
        numbers = torch.cat(found)[:, 0]
        assert len(numbers.unique()) == 200, "each row is in one split"
    assert not torch.equal(task.splits["train"].features[0], task.splits["train"].features[1])
    assert [tuple(layer.shape) for layer in task.layers] == [(2, 4, 4), (2, 5, 2)]


def test_a_group_is_spoilt_in_training_alone(table: Path) -> None:
    features, labels, ids, names = read_table(table, "late", ["label", "place"])
    plain, spoilt = (table_task("Trips", features, labels, ids, [0, 1], ([0], names[0]), spoilt=s) for s in (None, 3))
    for split in ("train", "validation", "test"):
        assert torch.equal(plain.splits[split].features, spoilt.splits[split].features)
        other = plain.splits[split].labels != spoilt.splits[split].labels
        assert bool(other.any()) == (split == "train")
        assert set(plain.splits[split].group_ids[other.numpy()]) <= {3}
    # Of 2 x 48 labels four in five are drawn from two classes.
    assert 0.25 < (plain.splits["train"].labels != spoilt.splits["train"].labels).sum().item() / 96 < 0.55
    fewer, *_ = read_table(table, "late", ["late"], rows=100)
    assert len(fewer) == 100 and set(fewer[:, 0]) < set(features[:, 0])


@pytest.mark.parametrize(
    ("label", "groups", "message"),
    [("late", ["town"], "the columns town"), ("late", ["number"], "20 examples or more in each group, got 1")],
)
def test_tables_that_do_not_fit_are_refused(table: Path, label: str, groups: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_table(table, label, groups)


def test_a_probe_is_that_of_the_library() -> None:
    task = simple_task("noise", [0])
    data = task.splits["train"]
    (found,) = probe(task, 32, 6, 4, ["a", "b", "c"])
    torch.manual_seed(0)
    classifier = torch.nn.Linear(2, 2).double()
    objective = Probe()
    loss = GroupRobustLoss(objective, GroupInfo("abc", [450, 450, 100]), list(classifier.parameters()))
    optimizer = torch.optim.SGD(classifier.parameters(), lr=LEARNING_RATE)
    for step, batch in enumerate(orders_of(data.group_ids[0], 32, 10, 0)):
        optimizer.zero_grad()
        scores = classifier(data.features[0, batch, :-1])
        losses = torch.nn.functional.cross_entropy(scores, data.labels[0, batch], reduction="none")
        loss(losses, torch.from_numpy(data.group_ids[0, batch])).backward()
        if step < 6:
            optimizer.step()
    twin = diagnosis_of(objective.kept[6:])
    for name in (
        "losses",
        "signal",
        "agreement",
        "cosines",
        "pull_dro",
        "pull_cgd",
        "pull_halves",
        "pull_consensus",
        "examples",
    ):
        assert torch.allclose(getattr(found, name), getattr(twin, name), atol=1e-6, equal_nan=True), name
    assert (found.steps, found.names) == (twin.steps, ["a", "b", "c"])


def test_weights_by_size_are_plain_erm_on_the_whole_set() -> None:
    """On full batches: the weights are shares, so that a single weighted step is one of the mean over the examples."""
    task = simple_task("spurious", [0])
    ids = task.splits["train"].group_ids
    orders = np.stack([orders_of(ids[0], cosines.FULL, 1, 0)])
    (outcome,) = train(task, [Method("by size", None, by_size=True)], [0.1], orders)
    assert outcome.weights[0] == pytest.approx([0.49, 0.49, 0.02])
    torch.manual_seed(0)
    classifier = torch.nn.Linear(3, 2).double()
    data = task.splits["train"]
    optimizer = torch.optim.SGD(classifier.parameters(), lr=LEARNING_RATE)
    torch.nn.functional.cross_entropy(classifier(data.features[0, :, :-1]), data.labels[0]).backward()
    optimizer.step()
    test = task.splits["test"]
    losses = torch.nn.functional.cross_entropy(
        classifier(test.features[0, :, :-1]), test.labels[0], reduction="none"
    ).detach()
    worst = max(losses[torch.from_numpy(test.group_ids[0] == group)].mean().item() for group in range(3))
    assert outcome.test[0] == pytest.approx(worst, abs=1e-6)


def test_script(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script: dict[str, Any] = runpy.run_path(str(SCRIPT))
    line = [str(table), "--label", "late", "--group_columns", "label", "place", "--leave_out", "minutes"]
    (result,) = script["main"]([*line, "--seeds", "2", "--steps", "3", "--batch_size", "16"])
    printed = capsys.readouterr().out
    assert result.counts == (36, 24, 12, 48) and result.choosing == 1
    assert "label:1 place:7" in printed and "cgd, split halves" in printed
    worst = result.scores("erm_uw")
    assert worst.shape == (1,) and f"{worst[0]:.1f}" in printed
    gain = result.scores("cgd, consensus")[0] - worst[0]
    cells = [line.split("|")[2:-1] for line in printed.splitlines() if line.startswith("| trips")][1]
    assert float(cells[4].split()[0]) == pytest.approx(gain, abs=0.051), "columns but for equal weights"
    (alone,) = script["main"](
        [*line, "--seeds", "2", "--steps", "3", "--batch_size", "16", "--methods", "cgd, consensus"]
    )
    assert [outcome.method.name for outcome in alone.outcomes] == ["cgd, consensus"] * 3
    assert alone.scores("cgd, consensus").tolist() == result.scores("cgd, consensus").tolist(), "whatever else is run"
    assert "less erm_uw" not in capsys.readouterr().out
    ordinary = ["--ordinary", "--first_seed", "4", "--rows", "200", "--spoilt", "1"]
    (other,) = script["main"]([*line, *ordinary, "--seeds", "2", "--steps", "3", "--batch_size", "16"])
    assert sum(other.counts) == 120 and "cgd, consensus" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="expected 2 or more, got 1"):
        script["main"]([*line, "--seeds", "1"])
