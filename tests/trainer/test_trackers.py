"""What trackers get, read back from what they wrote."""

import importlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import predicts_one_class, text_dataset

from hf_cgd import GroupRobustTrainer, GroupRobustWarning
from hf_cgd.trainer.trackers import CLEANED, colliding

pytestmark = predicts_one_class
Build = Callable[..., GroupRobustTrainer]
TRACKED: dict[str, Any] = {
    "objective": "cgd", "step_size": 0.5, "eval_strategy": "steps", "eval_steps": 1, "project": "robust", "max_steps": 3,
}  # fmt: skip


def series(run: GroupRobustTrainer) -> dict[str, list[float]]:
    """What trackers are to show, by the names that the Trainer gives them: weights, losses, accuracies of the groups."""
    found: dict[str, list[float]] = {}
    for entry in run.state.log_history:
        for name, value in entry.items():
            if name.startswith(("group_weight/", "group_loss/")):
                found.setdefault(f"train/{name}", []).append(value)
            elif name.startswith(("eval_group_accuracy/", "eval_worst_group_accuracy")):
                found.setdefault(f"eval/{name.removeprefix('eval_')}", []).append(value)
    assert len(found) == 2 + 2 + 2 + 1 and all(len(values) == 3 for values in found.values())
    return found


@pytest.fixture
def tracked(trainer: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], GroupRobustTrainer]:
    """A run that reports to a tracker, which keeps all it gets below `tmp_path`."""
    places = {"TENSORBOARD_LOGGING_DIR": "tb", "TRACKIO_DIR": "trackio", "HOME": "home"}
    for name, folder in places.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)

    def run(tracker: str) -> GroupRobustTrainer:
        found = trainer({**TRACKED, "report_to": [tracker], "run_name": "first"}, eval_dataset=text_dataset(seed=1))
        found.train()
        return found

    return run


def test_tensorboard(tracked: Callable[[str], GroupRobustTrainer], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked("tensorboard")
    (file,) = tmp_path.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    for name, values in series(run).items():
        assert [event.value for event in events.Scalars(name)] == pytest.approx(values)
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3]
    assert {"groups/group_weights", "groups/group_interactions"} <= set(events.Tags()["images"])


def test_trackio(tracked: Callable[[str], GroupRobustTrainer]) -> None:
    trackio = pytest.importorskip("trackio")
    run = tracked("trackio")
    (logged,) = trackio.Api().runs("robust")
    for name, values in series(run).items():
        found = [row[name] for row in rows_of(trackio, logged.name) if name in row]
        assert found == pytest.approx(values), name
    assert any("groups/group_weights" in row for row in rows_of(trackio, logged.name))


def rows_of(trackio: Any, run: str) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    rows: list[dict[str, Any]] = SQLiteStorage.get_logs("robust", run)
    return rows


def test_mlflow(tracked: Callable[[str], GroupRobustTrainer]) -> None:
    mlflow = pytest.importorskip("mlflow")
    run = tracked("mlflow")
    client = mlflow.MlflowClient()
    (found,) = [
        one for experiment in client.search_experiments() for one in client.search_runs([experiment.experiment_id])
    ]
    for name, values in series(run).items():
        # MLflow gets the names of the log as they are.
        own = name.removeprefix("train/").replace("eval/", "eval_")
        history = client.get_metric_history(found.info.run_id, own)
        assert [metric.value for metric in sorted(history, key=lambda one: one.step)] == pytest.approx(values)
    pictures = {item.path for item in client.list_artifacts(found.info.run_id, "groups")}
    assert "groups/group_weights.png" in pictures


def test_wandb(tracked: Callable[[str], GroupRobustTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    try:
        run = tracked("wandb")
    finally:
        # Ends its process, which writes its file to the end then.
        wandb.teardown()
    (file,) = tmp_path.rglob("run-*.wandb")
    rows = wandb_rows(file)
    for name, values in series(run).items():
        assert [row[name] for row in rows if name in row] == pytest.approx(values), name
        assert [row["train/global_step"] for row in rows if name in row] == [1, 2, 3]
    shown = {row["groups/group_weights/path"] for row in rows if "groups/group_weights/path" in row}
    assert len(shown) == 1 and (file.parent / "files" / shown.pop()).is_file()


def wandb_rows(file: Path) -> list[dict[str, Any]]:
    """What a run was given, in order: the history among wandb's own records, which stand in the form of LevelDB's log."""
    kinds = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, block, last_part = file.read_bytes(), 32768, (1, 4)
    rows, at, gathered = [], 7, b""
    while at < len(content):
        rest = block - at % block
        if rest < 7:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        gathered += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in last_part:
            record, gathered = kinds.Record.FromString(gathered), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_groups_that_a_tracker_would_mix_up_are_warned_of(trainer: Build) -> None:
    pattern = CLEANED["MLflowCallback"]
    assert colliding(["a|b", "a$b", "a b", "c"], pattern) == ["a|b", "a$b"]

    rows = text_dataset().to_dict()
    data = text_dataset().remove_columns("group").add_column("group", ["a|b" if g else "a:b" for g in rows["group"]])
    run = trainer(train_dataset=data)
    mixing = type("TensorBoardCallback", (type(run.callback_handler.callbacks[0]).__mro__[1],), {"tb_writer": None})
    run.add_callback(mixing)
    with pytest.warns(GroupRobustWarning, match=r"TensorBoard will show the groups \['a:b', 'a\|b'\] as one series"):
        run.train()


def test_a_tracker_that_fails_costs_nothing_but_its_picture(trainer: Build) -> None:
    class Writer:
        def add_image(self, name: str, pixels: np.ndarray, step: int, dataformats: str) -> None:
            assert pixels.ndim == 3 and pixels.dtype == np.uint8 and dataformats == "HWC"
            raise OSError("no room")

    run = trainer({"objective": "group_dro"})
    base = type(run.callback_handler.callbacks[0]).__mro__[1]
    run.add_callback(type("TensorBoardCallback", (base,), {"tb_writer": Writer()}))
    with pytest.warns(
        GroupRobustWarning, match=re.escape("'group_weights' did not reach a tracker: OSError('no room')")
    ):
        run.train()
    assert run.state.global_step == 3
