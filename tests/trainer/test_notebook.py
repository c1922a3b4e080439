"""What a notebook shows while a run trains."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from tiny import predicts_one_class, text_rows

from hf_cgd import GroupRobustTrainer
from hf_cgd.trainer.notebook import shown_metrics

pytestmark = predicts_one_class


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' notebook callback, with a display that shows nothing."""
    display = types.ModuleType("IPython.display")
    display.HTML = lambda content: content  # type: ignore[attr-defined]
    handle = types.SimpleNamespace(update=lambda content: None)
    display.display = lambda *args, **kwargs: handle  # type: ignore[attr-defined]
    package = types.ModuleType("IPython")
    package.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    yield __import__("transformers.utils.notebook", fromlist=["notebook"])
    monkeypatch.delitem(sys.modules, "transformers.utils.notebook", raising=False)


def test_the_progress_table_has_six_columns(
    notebook: Any, trainer: Callable[..., GroupRobustTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", notebook.NotebookProgressCallback)
    rows = text_rows(24, groups=12)
    data = Dataset.from_dict(rows | {"group": [f"<b>{group}" for group in rows["group"]]})
    run = trainer(
        {"eval_strategy": "steps", "eval_steps": 1, "disable_tqdm": False}, train_dataset=data, eval_dataset=data
    )
    tables: list[Any] = []
    write = notebook.NotebookTrainingTracker.write_line

    def kept(self: Any, values: dict[str, Any]) -> None:
        write(self, values)
        tables.append(self.inner_table)

    monkeypatch.setattr(notebook.NotebookTrainingTracker, "write_line", kept)
    run.train()
    head, *lines = tables[-1]
    columns = {"Step", "Training Loss", "Validation Loss", "Accuracy", "Worst Group Accuracy", "Worst Group"}
    assert set(head) == columns and len(head) == 6
    assert len(lines) == 3
    for line, entry in zip(lines, [e for e in run.state.log_history if "eval_loss" in e], strict=True):
        found = dict(zip(head, line, strict=True))
        assert found["Worst Group Accuracy"] == entry["eval_worst_group_accuracy"]
        name = found["Worst Group"].replace("&lt;", "<").replace("&gt;", ">")
        assert "<b>" not in found["Worst Group"]
        assert entry[f"eval_group_accuracy/{name}"] == entry["eval_worst_group_accuracy"]


def test_sets_of_other_names_and_regressions() -> None:
    metrics = {"eval_a_loss": 1.0, "eval_a_pearson": 0.5, "eval_a_worst_group_pearson": 0.1, "eval_a_runtime": 1.0,
               "eval_a_group_pearson/x": 0.1, "eval_a_group_pearson/y": 0.9, "eval_a_group_loss/x": 2.0}  # fmt: skip
    assert shown_metrics(metrics) == {
        "eval_a_loss": 1.0, "eval_a_pearson": 0.5, "eval_a_worst_group_pearson": 0.1, "eval_a_worst_group": "x",
    }  # fmt: skip


def test_the_worst_group_is_named_where_it_is_known() -> None:
    base = {"eval_pearson": 0.5, "eval_group_pearson/x": 0.1, "eval_group_pearson/y": 0.9, "eval_runtime": 1.0}
    assert shown_metrics(base)["eval_worst_group"] == "not known", "a group that is left out may be worse"
    tied = base | {"eval_group_pearson/z": 0.1, "eval_worst_group_pearson": 0.1}
    assert shown_metrics(tied)["eval_worst_group"] == "x and 1 more"
    alike = {"eval_worst_group_accuracy": 1.0, "eval_group_accuracy/a": 1.0, "eval_group_accuracy/b": 1.0}
    assert shown_metrics(alike)["eval_worst_group"] == "all alike"
