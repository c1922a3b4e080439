"""Several processes equal one process on the joined batch: in training, evaluation, sampling and resuming.

Two launches (two and three processes) are shared by all tests; their twins run in the process of the tests.
"""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import TOKEN, USER, HubServer, running_hub
from huggingface_hub import ModelCard
from paths import RECIPES, SUPPORT
from programs import run, run_together
from several_processes import (
    CASES,
    EVALUATED,
    GLOBAL_BATCH,
    PUBLISHED,
    RAGGED_ROWS,
    SAMPLED_ROWS,
    SAMPLED_STEPS,
    SAVED_STEP,
    groups_of_rows,
    run_case,
    run_published,
    run_sampling,
)
from tiny import predicts_one_class

from hf_cgd.data.sampling import BalancedGroupSampler, WeightedGroupSampler
from hf_cgd.data.weight_sampling import DrawnGroups, GroupWeightSampler

pytestmark = [
    pytest.mark.slow,
    predicts_one_class,
    # Those of group 3 are for training only.
    pytest.mark.filterwarnings("ignore:No examples of the group"),
]

TWO_CPUS = RECIPES / "accelerate" / "cpu-2proc.yaml"
WITH_THREE = (
    "erm_uw uneven", "group_dro uneven", "cgd per_group", "cgd single_pass", "cgd sketch", "cgd momentum",
)  # fmt: skip
RUNS = [(2, case) for case in CASES] + [(3, case) for case in WITH_THREE]
BESIDES = ("weighed", "unlabelled", "tokens", "excess")
IN_HALVES = tuple(case for case in CASES if "halves" in case or "consensus" in case)
WITHOUT_FORMULA = ("cgd momentum", *(case for case in CASES if any(word in case for word in BESIDES)))
"""Cases that say more to one another than the formula of the collectives knows."""
Results = dict[int, list[dict[str, Any]]]


def launch(folder: Path, *words: Any, **environment: str) -> None:
    """Two processes as a user starts them."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", TWO_CPUS]
    # Port 0 stands for one that is free.
    launcher += ["--main_process_port", 0]
    run(*launcher, SUPPORT / "several_processes.py", folder, *words, OMP_NUM_THREADS="1", **environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with running_hub() as server:
        yield server


@pytest.fixture(scope="module")
def results(folder: Path, hub: HubServer) -> Results:
    two, three = folder / "two", folder / "three"
    two.mkdir()
    three.mkdir()
    at_hub = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    launch(two, two, **at_hub)
    run_together(3, SUPPORT / "several_processes.py", three, two, *WITH_THREE)
    return {
        world: [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(world)]
        for world, place in ((2, two), (3, three))
    }


@pytest.fixture(scope="module")
def twin(folder: Path) -> Any:
    """The same case in this process, on the joined batches."""
    return cache(lambda case: run_case(case, str(folder / "one" / case)))


def assert_same_run(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    if theirs["weights"] is not None:
        assert ours["weights"] == pytest.approx(theirs["weights"], abs=1e-6)
    assert torch.allclose(torch.tensor(ours["parameters"]), torch.tensor(theirs["parameters"]), atol=1e-5)


# ---- Training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "case"), RUNS)
def test_processes_equal_one(results: Results, twin: Any, processes: int, case: str) -> None:
    """Groups on one process only, a process with one group only, absent groups; uneven last batches where named."""
    ranks, one = [rank[case] for rank in results[processes]], twin(case)
    assert (ranks[0]["world"], one["world"]) == (processes, 1)
    assert ranks[0]["wrapped"] == "DistributedDataParallel"
    for rank in ranks:
        assert rank["spread"] == 0.0
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["engine"] == one["engine"]
    assert_same_run(ranks[0], one)
    if "uneven" not in case and case not in ("cgd per_group", "cgd single_pass", "cgd sketch"):
        # With uneven batches the Trainer logs the mean of the processes' losses.
        assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    for here, there in zip(ranks[0]["group_losses"], one["group_losses"], strict=True):
        assert here == pytest.approx(there, rel=1e-5)


def test_engines_and_switches_do_what_they_are_named_for(results: Results, twin: Any) -> None:
    assert [twin(f"cgd {name}")["engine"] for name in ("single_pass", "sketch")] == ["single_pass", "sketch"]
    # A tied head outside of the scope has its gradient summed by DDP as any other.
    assert {twin(case)["engine"] for case in ("cgd tokens", "cgd rows of tokens")} == {"single_pass"}
    assert twin("cgd sketch")["row_size"] == 0
    two = results[2][0]
    assert 0 < two["cgd sketch"]["row_size"] < two["cgd single_pass"]["row_size"]
    weights = [twin(case)["weights"] for case in ("cgd per_group", "cgd sketch", "group_dro uneven")]
    assert weights[0] != weights[1] != weights[2]
    assert twin("cgd momentum")["weights"] != pytest.approx(twin("cgd")["weights"], abs=1e-4)


# ---- What is sent ---------------------------------------------------------------------------------------------------


def expected_collectives(
    case: str, world: int, row_size: int, present: list[int], votes: int
) -> list[tuple[str, int]]:
    """One step after the other; K = 4 groups, float64 statistics, float32 rows, a log at every step."""
    width = -(-row_size // world)
    # How many batches each process has: in an epoch, and in each step.
    asks = ("all_gather", 8)
    calls = [asks]
    for step, groups in enumerate(present):
        calls.append(asks)
        # Which half an example is in depends on how many of its group come before it, on any process.
        turns = CASES[case].get("micro_batches", 1)
        calls += (
            [("all_gather", 8), ("all_reduce", 4 * 8 * world * turns)]
            if case in IN_HALVES
            else [("all_reduce", 4 * 8)]
        )
        if step == 0:
            calls += [("all_reduce", 4)] * votes
        if case.startswith("cgd"):
            rows = {"cgd all-reduced": "all_reduce", "cgd reduce-scattered": "reduce_scatter"}.get(case, "all_to_all")
            calls.append((rows, world * groups * width * 4))
            calls.append(("all_reduce", (4 + groups**2) * 8))
        elif case.startswith("group_dro"):
            calls.append(("all_reduce", 4 * 8))
        calls.append(("all_reduce", 2 * 4 * 8))
    return calls


@pytest.mark.parametrize(("processes", "case"), [run for run in RUNS if run[1] not in WITHOUT_FORMULA])
def test_collectives_are_the_same_on_all_processes_and_as_large_as_the_formula_says(
    results: Results, processes: int, case: str
) -> None:
    rows = CASES[case].get("rows", 60)
    groups = groups_of_rows(rows, case)
    batches = [Counter(groups[start : start + GLOBAL_BATCH]) for start in range(0, rows, GLOBAL_BATCH)]
    assert {len(batch) for batch in batches} == {4 if "consensus" in case else 3}
    rows_of_group = 2 if case in IN_HALVES else 1
    present = [sum(min(count, rows_of_group) for count in batch.values()) for batch in batches]
    votes = 2 if case.startswith("cgd") and case != "cgd per_group" else 0
    for rank in results[processes]:
        if case in ("pgi", "irm", "coral"):
            # Counts, losses and the log as for ERM at each of five steps, and the penalty's own statistics.
            assert rank[case]["collectives"] == results[processes][0][case]["collectives"]
            assert len(rank[case]["collectives"]) > len(rank["erm"]["collectives"])
            continue
        if case.startswith("erm_uw"):
            # Fixed weights need no statistics; those that it could move by are summed all the same.
            assert [size for _, size in rank[case]["collectives"]] == [8, *[8, 32, 32, 64] * 5]
            continue
        expected = expected_collectives(case, processes, rank[case]["row_size"], present, votes)
        assert [tuple(call) for call in rank[case]["collectives"]] == expected


# ---- Resuming -------------------------------------------------------------------------------------------------------


def test_running_averages_are_saved_whole_and_resumed_with_any_number_of_processes(
    results: Results, twin: Any, folder: Path
) -> None:
    """Saved by two; resumed by two (bit for bit), three and one; and the whole averages are those of a single run."""
    straight = results[2][0]["cgd momentum"]
    again = results[2][0]["resumed"]
    assert again["weights"] == straight["weights"] and again["parameters"] == straight["parameters"]
    assert_same_run(results[3][0]["resumed"], straight)
    checkpoint = folder / "two" / "cgd momentum" / "checkpoint-3"
    assert_same_run(run_case("cgd momentum", str(folder / "one" / "resumed"), str(checkpoint)), straight)
    twin("cgd momentum")
    from safetensors.torch import load_file

    name = Path("cgd momentum") / "checkpoint-3" / "group_gradients.safetensors"
    ours, theirs = load_file(folder / "two" / name), load_file(folder / "one" / name)
    assert list(ours) == list(theirs) and len(ours) == 4
    for key, row in ours.items():
        assert torch.allclose(row, theirs[key], atol=1e-6) and row.shape == theirs[key].shape


# ---- Sampling -------------------------------------------------------------------------------------------------------


def test_the_trainers_own_order_is_resumed_in_mid_epoch_too(results: Results) -> None:
    size = GLOBAL_BATCH // 2
    for rank in results[2]:
        straight, resumed = rank["none"]["straight"], rank["none"]["resumed"]
        rest = straight["read"][SAVED_STEP * size : SAMPLED_STEPS * size]
        assert resumed["read"][: len(rest)] == rest
        assert resumed["weights"] == straight["weights"]


@pytest.mark.parametrize(("processes", "sampling"), [(2, "balanced"), (2, "weighted"), (3, "balanced")])
def test_the_order_of_a_sampler_is_dealt_out_once(results: Results, processes: int, sampling: str) -> None:
    """Whatever their random states, processes share one order; each batch of each is one run of it."""
    size = GLOBAL_BATCH // processes
    group_ids = np.arange(SAMPLED_ROWS) % 3
    kind = BalancedGroupSampler if sampling == "balanced" else WeightedGroupSampler
    sampler = kind(group_ids, size, seed=42)
    batches = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = list(sampler)
        batches += [order[start : start + size] for start in range(0, SAMPLED_ROWS, size)]
    per_epoch = SAMPLED_ROWS // size
    for number, rank in enumerate(results[processes]):
        expected = [row for batch in batches[number::processes][:SAMPLED_STEPS] for row in batch]
        straight, resumed = rank[sampling]["straight"], rank[sampling]["resumed"]
        assert straight["read"][: len(expected)] == expected
        rest = expected[SAVED_STEP * size :]
        assert resumed["read"][: len(rest)] == rest
        assert resumed["weights"] == straight["weights"]
        if sampling == "balanced":
            for batch in batches[number::processes][:SAMPLED_STEPS]:
                counts = Counter(group_ids[batch].tolist())
                assert len(counts) == 3 and max(counts.values()) - min(counts.values()) <= 1
    if sampling == "balanced":
        first_epoch = [
            row
            for rank in results[processes]
            for row in rank[sampling]["straight"]["read"][: SAMPLED_ROWS // processes]
        ]
        assert sorted(first_epoch) == list(range(SAMPLED_ROWS)) and per_epoch % processes == 0


def test_groups_drawn_by_weight_are_those_of_one_order_on_all_processes(results: Results) -> None:
    """The order is formed anew here from the weights after each step; it is dealt out batch by batch, and resumed."""
    size, group_ids = GLOBAL_BATCH // 2, np.arange(SAMPLED_ROWS) % 3
    after = results[2][0]["weights"]["straight"]["after"]
    assert after == results[2][1]["weights"]["straight"]["after"] and len(after) == SAMPLED_STEPS + 1
    memory = DrawnGroups(3)
    memory.begin(torch.tensor(after[0], dtype=torch.float64))
    sampler = GroupWeightSampler(group_ids, size, seed=42, step_size=GLOBAL_BATCH, memory=memory)
    order = []
    for step, weights in enumerate(after[:-1]):
        if step:
            memory.note(step, torch.tensor(weights, dtype=torch.float64))
        if step % 3 == 0:
            sampler.set_first_step(step)
            rows = iter(sampler)
        # The loader is a step ahead, but for the first one of an epoch.
        order += [next(rows) for _ in range(GLOBAL_BATCH * (2 if step % 3 == 0 else step % 3 == 1))]
    for number, rank in enumerate(results[2]):
        batches = [order[start : start + size] for start in range(0, len(order), size)][number::2]
        expected = [row for batch in batches for row in batch]
        straight, resumed = (rank["weights"][kind] for kind in ("straight", "resumed"))
        assert straight["read"][: SAMPLED_STEPS * size] == expected[: SAMPLED_STEPS * size]
        rest = straight["read"][SAVED_STEP * size : SAMPLED_STEPS * size]
        assert resumed["read"][: len(rest)] == rest
        assert resumed["weights"] == straight["weights"]


def steps_of(ranks: list[dict[str, Any]], kind: str, steps: int) -> list[list[int]]:
    """The rows of each step, on all processes together."""
    size = GLOBAL_BATCH // len(ranks)
    read = [rank[kind]["read"] for rank in ranks]
    return [sorted(row for own in read for row in own[step * size : (step + 1) * size]) for step in range(steps)]


@pytest.mark.parametrize("sampling", ["balanced", "weighted", "weights"])
def test_the_order_goes_on_with_any_number_of_processes(results: Results, folder: Path, sampling: str) -> None:
    """Saved by two; resumed by two, three and one: 50 rows are nine batches of 6, thirteen of 4, or five of 12."""
    name = f"{sampling} ragged"
    two = [rank[name] for rank in results[2]]
    rest = steps_of(two, "straight", SAMPLED_STEPS)[SAVED_STEP:]
    one = run_sampling(sampling, str(folder / "one" / name), RAGGED_ROWS, str(folder / "two" / name))
    for ranks in (two, [rank[name] for rank in results[3]], [one]):
        assert steps_of(ranks, "resumed", SAMPLED_STEPS - SAVED_STEP) == rest
        assert ranks[0]["resumed"]["weights"] == pytest.approx(two[0]["straight"]["weights"], abs=1e-6)


# ---- Evaluation -----------------------------------------------------------------------------------------------------


def test_padding_rows_are_not_counted(results: Results, twin: Any) -> None:
    """Seven rows in batches of two over two processes: one row is repeated by the loader."""
    for case in EVALUATED:
        for rank in results[2]:
            metrics = rank[case]["metrics"]
            assert sum(value for name, value in metrics.items() if "group_count/" in name) == 7
            assert metrics == pytest.approx(twin(case)["metrics"], rel=1e-4)
            assert rank[case]["loss alone"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_reports_are_the_same_on_all_processes(results: Results) -> None:
    for case in EVALUATED:
        first, second = (rank[case]["reports"] for rank in results[2])
        assert first == second and all("(worst)" in report for report in first)


def test_one_process_pushes_and_the_card_is_that_of_the_whole_run(
    results: Results, hub: HubServer, tmp_path: Path
) -> None:
    steps = [f"Training in progress, step {step}" for step in (2, 4, 5)]
    repository = hub.repositories[f"{USER}/{PUBLISHED}"]
    assert sorted(message for message, _ in repository.commits) == ["End of training", *steps]
    assert hub.requests.count("POST /api/repos/create") == 1
    files = repository.files
    assert {"README.md", "model.safetensors", "group_report.json", "group_run.json", "group_settings.yaml"} <= set(
        files
    )

    one = run_published(str(tmp_path), pushes=False)
    report, run = (json.loads(files[name]) for name in ("group_report.json", "group_run.json"))
    # Seven rows, which two processes share unevenly; four groups of 60 rows, of which each process held its own.
    assert [row["count"] for row in report["validation"]["groups"]] == [3, 2, 2, None]
    for rank in results[2]:
        assert rank["published"]["report"] == report["validation"]
    here, there = report["validation"]["groups"], one["report"]["groups"]
    assert [row["accuracy"] for row in here] == [row["accuracy"] for row in there]
    assert [row["loss"] for row in here[:3]] == pytest.approx([row["loss"] for row in there[:3]], rel=1e-5)
    assert report["validation"]["overall"] == pytest.approx(one["report"]["overall"], rel=1e-5)
    assert list(run["weights"].values()) == pytest.approx(one["weights"], rel=1e-5)
    assert run["steps"] == 5 and run["groups"]["counts"] == np.bincount(groups_of_rows(60)).tolist()
    card = ModelCard(files["README.md"].decode())
    stated = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert stated["worst_group_accuracy"] == report["validation"]["overall"]["worst_group_accuracy"]
