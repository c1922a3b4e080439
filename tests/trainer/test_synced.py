"""SyncBatchNorm in the body: group gradients of the head do not pass it, those of anything before it do."""

import json
from pathlib import Path

import pytest
from paths import RECIPES, SUPPORT
from programs import run

TWO_CPUS = RECIPES / "accelerate" / "cpu-2proc.yaml"


@pytest.mark.slow
def test_the_head_behind_shared_statistics_is_trained_as_on_one_process(tmp_path: Path) -> None:
    """One process with all rows, two with half of them each; a fake layer, since torch's own wants GPUs."""
    script = SUPPORT / "synced_processes.py"
    run(script, tmp_path, OMP_NUM_THREADS="1")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", TWO_CPUS, "--main_process_port", 0]
    run(*launcher, script, tmp_path, OMP_NUM_THREADS="1")
    alone, *ranks = (json.loads((tmp_path / f"rank{name}.json").read_text()) for name in ("alone", 0, 1))
    for name in ("auto", "per_group", "accumulated"):
        for rank in ranks:
            assert rank[name]["weights"] == pytest.approx(alone[name]["weights"], rel=1e-4)
            assert rank[name]["parameters"] == pytest.approx(alone[name]["parameters"], rel=1e-3, abs=1e-5)
        assert max(alone[name]["weights"]) - min(alone[name]["weights"]) > 1e-3
    # One pass a step comes to the two layers, however many groups there are.
    assert [rank["auto"]["backward"] for rank in (alone, *ranks)] == [8, 8, 8]
    for rank in ranks:
        for name in ("body", "behind"):
            assert "SyncBatchNorm each pass adds up" in rank[name] and "gradient_layers='head'" in rank[name]
