"""What a run leaves behind for its readers: one record, written beside the model and read back."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_cgd.data.groups import GroupInfo
from hf_cgd.metrics import GroupReport
from hf_cgd.metrics.values import as_json
from hf_cgd.whole_files import write_whole

REPORT_FILE = "group_report.json"
"""The reports of a run by evaluation set, {"validation": {…}, "test": {…}}."""
EVALUATED_ONLY = "none, evaluated only"
"""The objective of a model that was only evaluated: how it was trained is not known."""
RUN_FILE = "group_run.json"
"""All the rest of its record."""
SETTINGS_FILE = "group_settings.yaml"
"""The settings of a run, in a form that starts an equal one: `GroupRobustConfig("out", **yaml.safe_load(text))`."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the model.

    Attributes:
        kind: its class, such as "DistilBertForSequenceClassification".
        library: "transformers", "timm" or "peft"; None for a network of one's own.
        task: "text-classification", "image-classification", …; None where it is not known.
        base_model: what it was fine-tuned from, an id on the Hub; None where it is not known.
        labels: names of the classes; () where there are none.
        module: where its class is imported from.
    """

    kind: str = ""
    library: str | None = None
    task: str | None = None
    base_model: str | None = None
    labels: Sequence[str] = ()
    module: str = "transformers"


@dataclass(frozen=True)
class DataFacts:
    """What is known of the data: ids on the Hub, and the name, config and split that people know it by.

    `preparation` is how inputs were made of its rows, by name; `cautions` are sentences on what it keeps the numbers
    from telling.
    """

    ids: Sequence[str] = ()
    name: str | None = None
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    """Split by evaluation set, where it is known."""
    preparation: Mapping[str, Any] = field(default_factory=dict)
    cautions: Sequence[str] = ()


@dataclass(frozen=True)
class RunRecord:
    """A run, as cards and reports show it; all of it JSON-ready (`to_dict`), and free of tokens and local paths.

    Attributes:
        name: of the model.
        objective: what `Objective.identity` says; None where the model was only evaluated.
        settings: the options of group-robust training, all of them, by name.
        training: the options of ordinary training that differ from their defaults.
        groups: names and counts of the training groups; None where they are not known.
        reports: by evaluation set, "validation" and "test" for instance.
        history: entries like those of `trainer.state.log_history`, with weights and accuracies of the groups.
        interactions: mean cosines [K, K] between the groups' gradients, None for two that never met; None for none.
        weights: group weights of the step that the model is of, by name; {} for none.
        steps: optimizer steps of the run; None where it is not known.
        kept_step: the step whose model was kept as the best; None for that of the last step.
        compared: evaluations of the run by which its best model was chosen; None where it is not known.
        model, data: what is known of them.
        versions: of the libraries, by name.
    """

    name: str
    objective: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    groups: GroupInfo | None = None
    reports: Mapping[str, GroupReport] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    interactions: Sequence[Sequence[float | None]] | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    steps: int | None = None
    kept_step: int | None = None
    compared: int | None = None
    model: ModelFacts = field(default_factory=ModelFacts)
    data: DataFacts = field(default_factory=DataFacts)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def objective_name(self) -> str:
        """Name of the objective; `EVALUATED_ONLY` where nothing was trained."""
        return EVALUATED_ONLY if self.objective is None else str(self.objective["name"])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form without the reports, which have a file of their own."""
        content: dict[str, Any] = as_json(
            {
                "name": self.name,
                "objective": self.objective,
                "settings": self.settings,
                "training": self.training,
                "groups": None if self.groups is None else self.groups.to_dict(),
                "history": list(self.history),
                "interactions": self.interactions,
                "weights": self.weights,
                "steps": self.steps,
                "kept_step": self.kept_step,
                "compared": self.compared,
                "model": vars(self.model),
                "data": vars(self.data),
                "versions": self.versions,
            }
        )
        return content

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], reports: Mapping[str, GroupReport]) -> "RunRecord":
        """Inverse of `to_dict`, with the reports."""
        own = dict(data)
        groups = own.pop("groups", None)
        return cls(
            **{name: own[name] for name in cls.__dataclass_fields__ if name in own and name not in ("model", "data")},
            groups=None if groups is None else GroupInfo.from_dict(groups),
            reports=reports,
            model=ModelFacts(**own.get("model", {})),
            data=DataFacts(**own.get("data", {})),
        )


def write_reports(reports: Mapping[str, GroupReport], folder: str | os.PathLike[str]) -> Path:
    """Write `REPORT_FILE` into a folder; where it is."""
    return write_json({name: report.to_dict() for name, report in reports.items()}, Path(folder) / REPORT_FILE)


def write_json(content: Any, path: Path) -> Path:
    """Write a file of JSON whole or not at all; where it is."""
    write_whole(path, json.dumps(as_json(content), indent=2, ensure_ascii=False, allow_nan=False))
    return path
