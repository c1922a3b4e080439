"""Importing and using the package needs no optional package and opens no connection."""

import subprocess
import sys
from pathlib import Path

import pytest
from paths import PYTHONPATH, ROOT

NO_NETWORK = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("a connection was attempted")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
for name in BLOCKED:
    sys.modules[name] = None
"""


def python(code: str, tmp_path: Path, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_without_optional_packages_or_network(tmp_path: Path) -> None:
    blocked = ["timm", "torchvision", "wilds", "torch_scatter", "peft", "evaluate", "deepspeed", "ogb", "outdated",
               "pkg_resources", "pytz"]  # fmt: skip
    code = f"BLOCKED = {blocked!r}\n{NO_NETWORK}\nimport time; start = time.time(); import hf_cgd; print(time.time() - start)"
    assert float(python(code, tmp_path)) < 60


@pytest.mark.parametrize("offline", [{}, {"HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}])
def test_group_metrics_without_evaluate_or_network(tmp_path: Path, offline: dict[str, str]) -> None:
    code = f"""
BLOCKED = ["evaluate"]
{NO_NETWORK}
from tiny import text_dataset, tiny_distilbert
from hf_cgd import GroupRobustConfig, GroupRobustTrainer
args = GroupRobustConfig("out", group_column="group", use_cpu=True, report_to=[], disable_tqdm=True)
trainer = GroupRobustTrainer(tiny_distilbert(), args, train_dataset=text_dataset(), eval_dataset=text_dataset())
print(trainer.evaluate()["eval_group_count/0"])
"""
    assert python(code, tmp_path, HOME=str(tmp_path), **offline).split()[-1] == "8"


def test_two_runs_in_one_home_do_not_wait_for_each_other(tmp_path: Path) -> None:
    import os

    code = """
from hf_cgd.metrics.evaluate_module import GroupAccuracy
metric = GroupAccuracy()
for _ in range(20):
    metric.add_batch(predictions=[0, 1], references=[0, 1], groups=["a", "b"])
    assert metric.compute()["worst_group_accuracy"] == 1.0
"""
    environment = {**os.environ, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, cwd=ROOT)
        for _ in range(2)
    ]
    for run in runs:
        _, error = run.communicate(timeout=120)
        assert run.returncode == 0, error.decode()[-3000:]
