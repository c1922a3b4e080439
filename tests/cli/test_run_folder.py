"""Which run a model's folder belongs to: by what lies there, not by what it is called."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hf_cgd.cards.record import REPORT_FILE, RUN_FILE, RunRecord, write_json, write_reports
from hf_cgd.cli.data_notes import preparation_of
from hf_cgd.cli.own_data import _where_it_was_trained
from hf_cgd.cli.run_folder import run_folder_of
from hf_cgd.data.row_digests import RowDigests
from hf_cgd.metrics import GroupReport, GroupRow


def recorded(folder: Path, max_length: int | None = 7) -> Path:
    """A folder with the record of a training; of an evaluation where `max_length` is None."""
    folder.mkdir(parents=True, exist_ok=True)
    reports = {"validation": GroupReport((GroupRow("a", count=5, accuracy=0.5),), {"accuracy": 0.5}, "erm")}
    write_reports(reports, folder)
    known = RunRecord("m", None if max_length is None else {"name": "erm"}).to_dict()
    write_json({**known, "data": {"preparation": {"max_length": max_length}}}, folder / RUN_FILE)
    return folder


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    return folder


def own_run(folder: Path) -> Path:
    """A run whose folder is called as a checkpoint is, in that of another run."""
    recorded(folder)
    return recorded(folder / "checkpoint-3", max_length=9)


def evaluated_there(folder: Path) -> Path:
    """A checkpoint into whose folder an evaluation has written its report."""
    return recorded(checkpoint(recorded(folder) / "checkpoint-3"), max_length=None)


def by_a_link(folder: Path) -> Path:
    checkpoint(recorded(folder / "run") / "checkpoint-3")
    (folder / "best").symlink_to(folder / "run" / "checkpoint-3")
    return folder / "best"


def without_state(folder: Path) -> Path:
    (recorded(folder) / "checkpoint-3").mkdir()
    return folder / "checkpoint-3"


def broken(folder: Path) -> Path:
    own = own_run(folder)
    (own / REPORT_FILE).write_text("{")
    return own


@pytest.mark.parametrize(
    ("build", "expected", "length"),
    [
        (recorded, ".", 7),
        (lambda folder: checkpoint(recorded(folder) / "checkpoint-3"), ".", 7),
        (lambda folder: checkpoint(recorded(folder) / "best"), ".", 7),
        (without_state, ".", 7),
        (by_a_link, "run", 7),
        (evaluated_there, ".", 7),
        (own_run, "checkpoint-3", 9),
        (broken, "checkpoint-3", None),
        # The folder of a model that only has such a name, beside a run that did not leave it.
        (lambda folder: _made(recorded(folder) / "checkpoint-study"), "checkpoint-study", None),
        (lambda folder: checkpoint(folder / "checkpoint-3"), "checkpoint-3", None),
    ],
)
def test_the_run_of_a_folder(
    build: Callable[[Path], Path], expected: str, length: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = build(tmp_path)
    config = SimpleNamespace(resume_from_checkpoint=None, output_dir="nowhere")
    resumed = SimpleNamespace(resume_from_checkpoint=str(place), output_dir="nowhere")
    found = [
        run_folder_of(place),
        run_folder_of(f"{place}/"),
        _where_it_was_trained(SimpleNamespace(model=str(place)), config),
        _where_it_was_trained(SimpleNamespace(model="nowhere"), resumed),
    ]
    monkeypatch.chdir(place)
    found.append(run_folder_of("."))
    assert {folder.resolve() for folder in found} == {(tmp_path / expected).resolve()}
    assert preparation_of(place).get("max_length") == length


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_digests_alone_tell_of_a_training_and_ids_of_the_hub_stay(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "checkpoint-3")
    RowDigests.of(np.arange(3, dtype=np.uint64)).save(tmp_path)
    assert run_folder_of(place) == tmp_path
    assert str(run_folder_of("user/checkpoint-3")) == "user/checkpoint-3"
