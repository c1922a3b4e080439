"""Importing and using the package needs no optional package, opens no connection and imports nothing heavy beside."""

from pathlib import Path

import pandas
from programs import HANGS, run, started

NO_NETWORK = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("a connection was attempted")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
for name in BLOCKED:
    sys.modules[name] = None
"""


def test_what_only_some_uses_need_is_not_imported() -> None:
    """It would cost every program seconds. (A clock would measure the machine.)"""
    names = ["evaluate", "matplotlib", "optuna", "sklearn", "timm", "wilds"]
    output, _ = run("-c", f"import sys, hf_cgd; print([name for name in {names!r} if name in sys.modules])")
    assert output.strip() == "[]"


def test_group_metrics_without_optional_packages_or_network(tmp_path: Path) -> None:
    """Not told to be offline, as all other tests are."""
    blocked = ["timm", "torchvision", "wilds", "torch_scatter", "peft", "evaluate", "deepspeed", "ogb", "outdated",
               "pkg_resources"]  # fmt: skip
    if int(pandas.__version__.split(".")[0]) >= 3:  # Before, pandas itself needs it.
        blocked.append("pytz")
    code = f"""
BLOCKED = {blocked!r}
{NO_NETWORK}
from tiny import text_dataset, tiny_distilbert
from hf_cgd import GroupRobustConfig, GroupRobustTrainer
args = GroupRobustConfig("out", group_column="group", use_cpu=True, report_to=[], disable_tqdm=True)
trainer = GroupRobustTrainer(tiny_distilbert(), args, train_dataset=text_dataset(), eval_dataset=text_dataset())
print(trainer.evaluate()["eval_group_count/0"])
"""
    home = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    output, _ = run("-c", code, cwd=tmp_path, **home)
    assert output.split()[-1] == "8"


def test_two_runs_in_one_home_do_not_wait_for_each_other(tmp_path: Path) -> None:
    code = """
from hf_cgd.metrics.evaluate_module import GroupAccuracy
metric = GroupAccuracy()
for _ in range(20):
    metric.add_batch(predictions=[0, 1], references=[0, 1], groups=["a", "b"])
    assert metric.compute()["worst_group_accuracy"] == 1.0
"""
    home = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    with started("-c", code, **home) as first, started("-c", code, **home) as second:
        for program in (first, second):
            _, error = program.communicate(timeout=HANGS)
            assert program.returncode == 0, error[-3000:]
