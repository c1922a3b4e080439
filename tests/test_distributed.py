"""Two processes of 4 examples equal one process of 8, in training and in evaluation."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def launch(output_dir: Path, processes: int) -> list[dict[str, Any]]:
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "29731"]
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
    }
    command = [sys.executable, *(launcher if processes > 1 else []), str(HERE / "two_processes.py"), str(output_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((output_dir / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    two = launch(tmp_path_factory.mktemp("two"), 2)
    (one,) = launch(tmp_path_factory.mktemp("one"), 1)
    return two, one


@pytest.mark.parametrize("objective", ["erm", "erm_uw", "group_dro", "cgd", "pgi", "irm", "coral"])
def test_two_processes_equal_one(results: tuple[list[dict[str, Any]], dict[str, Any]], objective: str) -> None:
    (first, second), one = [rank[objective] for rank in results[0]], results[1][objective]
    assert (first["world"], one["world"]) == (2, 1)
    assert first["wrapped"] == "DistributedDataParallel"
    assert first["spread"] == 0.0
    assert first["weights"] == second["weights"]
    if one["weights"] is not None:
        assert first["weights"] == pytest.approx(one["weights"], abs=1e-6)
    assert torch.allclose(torch.tensor(first["parameters"]), torch.tensor(one["parameters"]), atol=1e-5)
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-5)
    for ours, theirs in zip(first["group_losses"], one["group_losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_padding_rows_are_not_counted(results: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    """Seven rows in batches of two over two processes: one row is repeated by the loader."""
    for objective, one in results[1].items():
        for rank in results[0]:
            metrics = rank[objective]["metrics"]
            assert sum(value for name, value in metrics.items() if "group_count/" in name) == 7
            assert metrics == pytest.approx(one["metrics"], rel=1e-4)


def test_reports_are_the_same_on_all_processes(results: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    for objective in results[1]:
        first, second = (rank[objective]["reports"] for rank in results[0])
        assert first == second and all("(worst)" in report for report in first)
