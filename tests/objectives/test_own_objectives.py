"""Objectives of one's own: by import path, in configs and grids, and beside the options of a config."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cgd import CGD, GroupRobustConfig, GroupRobustTrainer
from hf_cgd.experiments.grid import Grid
from hf_cgd.objectives import ERM, build_objective, knobs_of
from tests.support.tiny import parameters_of, text_dataset, tiny_distilbert

MODULE = """
from dataclasses import dataclass
from hf_cgd import Objective

@dataclass(frozen=True)
class Softmax(Objective):
    step_size: float = 1.0
    def next_weights(self, alpha, statistics):
        return (statistics.losses * self.step_size).softmax(dim=0)

SHARP = Softmax(step_size=9.0)
number = 3
"""
COMMON: dict[str, Any] = {
    "group_column": "group", "max_steps": 3, "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 0,
    "save_strategy": "no", "learning_rate": 0.01, "per_device_train_batch_size": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_this_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_for_this_test", raising=False)


def trained(output: Path, objective: Any = None, **options: Any) -> GroupRobustTrainer:
    args = GroupRobustConfig(str(output), **{**COMMON, **options})
    trainer = GroupRobustTrainer(
        model=tiny_distilbert(), args=args, train_dataset=text_dataset(32), objective=objective
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("path", "knobs", "step_size"), [("Softmax", {}, 1.0), ("Softmax", {"step_size": 4.0}, 4.0), ("SHARP", {}, 9.0)]
)
def test_an_import_path_trains_as_the_object_does(
    tmp_path: Path, path: str, knobs: dict[str, float], step_size: float
) -> None:
    by_path = trained(tmp_path / "path", f"mine_for_this_test:{path}", **knobs)
    import mine_for_this_test  # type: ignore[import-not-found]

    args = GroupRobustConfig(str(tmp_path / "config"), **COMMON, objective=f"mine_for_this_test:{path}", **knobs)
    assert args.build_objective() == by_path.group_objective
    by_object = trained(tmp_path / "object", objective=mine_for_this_test.Softmax(step_size=step_size))
    assert torch.equal(parameters_of(by_path.model), parameters_of(by_object.model))
    assert by_path.group_weights.tolist() == by_object.group_weights.tolist()


def test_a_grid_takes_import_paths_and_knows_their_knobs() -> None:
    own = "mine_for_this_test:Softmax"
    grid = Grid("recipe.py", objectives=("erm", own), values={"step_size": [0.1, 1.0]}, seeds=(0,))
    assert [run.objective for run in grid.search_runs()] == ["erm", own, own]
    assert all(":" not in run.name for run in grid.search_runs())
    assert knobs_of(own) == ("step_size",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("softmax", "import path of your own"),
        ("no_such_module_here:Softmax", "cannot be imported"),
        ("mine_for_this_test:Hardmax", "cannot be imported"),
        ("mine_for_this_test:number", "must be a subclass of hf_cgd.Objective"),
        ("mine_for_this_test:", "import path"),
    ],
)
def test_what_is_no_objective_is_refused_in_words(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupRobustConfig(str(tmp_path), group_column="group", objective=name)


def test_a_knob_that_an_own_objective_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no option 'penalty_weight'; it has step_size"):
        build_objective("mine_for_this_test:Softmax", {"penalty_weight": 1.0})
    with pytest.raises(ValueError, match="has no option 'step_size'; it has none"):
        build_objective("mine_for_this_test:SHARP", {"step_size": 1.0})


def test_options_of_the_config_beside_an_object_are_not_ignored_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step_size of the config would be ignored.*CGD\(step_size=0.5\)"):
        trained(tmp_path, objective=CGD(), step_size=0.5)
    args = GroupRobustConfig(str(tmp_path), objective="erm", **COMMON)
    with pytest.raises(ValueError, match="says objective='erm' and the trainer was given CGD"):
        GroupRobustTrainer(model=tiny_distilbert(), args=args, train_dataset=text_dataset(32), objective=CGD())


def test_a_name_beside_the_config_takes_the_configs_options(tmp_path: Path) -> None:
    trainer = trained(tmp_path, objective="cgd", step_size=0.5)
    assert trainer.group_objective == CGD(step_size=0.5)
    with pytest.raises(ValueError, match="'erm' has no option 'step_size'"):
        trained(tmp_path, objective="erm", step_size=0.5)
    assert trained(tmp_path, objective=ERM()).group_objective == ERM()
