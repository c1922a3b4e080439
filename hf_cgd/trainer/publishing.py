"""Records and cards: what the trainer leaves for readers in its folder."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import ModelCard
from torch import Tensor, nn
from transformers import Trainer
from transformers.modelcard import TrainingSummary

from hf_cgd.cards import CARD_FILE, RunRecord, write_card
from hf_cgd.cards.words import gives_one_class
from hf_cgd.metrics import GroupMetric, GroupReport
from hf_cgd.metrics.custom_metrics import declared_directions
from hf_cgd.metrics.values import as_json
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.config import options_of
from hf_cgd.trainer.evaluation import GroupEvaluation
from hf_cgd.trainer.group_setup import GroupSetup
from hf_cgd.trainer.history import GroupLog, run_history
from hf_cgd.trainer.own_loss import source_of_loss
from hf_cgd.trainer.resume import WeightsThen, saved_weights
from hf_cgd.trainer.run_facts import (
    data_facts,
    is_timm,
    model_facts,
    models_compared,
    settings_of,
    training_of,
    versions,
    write_timm_config,
)
from hf_cgd.trainer.search import require_model
from hf_cgd.visible_numbers import decimals

GENERATED = "generated_from_trainer"
"""The tag that the Trainer gives to all of its models."""


class PublishingTrainer(Trainer):
    """A `Trainer` whose cards tell how each group fares."""

    group_objective: Objective
    group_evaluation: GroupEvaluation
    robust_loss: GroupRobustLoss | None
    _setup: GroupSetup
    _own_metrics: dict[str, GroupMetric]
    data_preparation: Mapping[str, Any] = MappingProxyType({})
    """How inputs were made of rows, for the record: {"max_length": 128}."""
    data_cautions: Sequence[str] = ()
    """What the data keeps the numbers from telling, a sentence each, for cards and reports."""
    _group_log: GroupLog | None
    _kept_step: int | None = None
    """The step whose model a run has loaded at its end."""
    _kept_weights: WeightsThen | None = None
    """The group weights of then."""

    def _load_best_model(self) -> None:
        super()._load_best_model()
        checkpoint = self.state.best_model_checkpoint
        if checkpoint is not None:
            # A table of this model beside the weights of the last step would mix two models.
            self._kept_step, self._kept_weights = self.state.best_global_step, saved_weights(checkpoint)
            self._warn_of_collapsed_best()

    def _warn_of_collapsed_best(self) -> None:
        """Warn where the model that is kept gives every evaluated row the same class."""
        step, logs = self.state.best_global_step, self.state.log_history
        if step is not None and gives_one_class(logs, step):
            warnings.warn(
                f"A single class is what the model that is kept, that of step {step}, gives to every evaluated row: "
                f"its {self.args.metric_for_best_model} ({decimals(self.state.best_metric)}) tells which classes "
                "there are in the groups, not what it has learned. Do not use it; train on, or with another "
                "learning_rate or step_size.",
                GroupRobustWarning,
                stacklevel=3,
            )

    def run_record(
        self,
        *,
        name: str | None = None,
        finetuned_from: str | None = None,
        task: str | None = None,
        dataset_tags: Sequence[str] = (),
        dataset: Sequence[str] = (),
        dataset_args: Sequence[str | None] = (),
    ) -> RunRecord:
        """All that cards and report pages show of this run: `hf_cgd.cards.html_report(trainer.run_record(), path)`.

        The reports are those of the latest evaluations of this model; nothing is evaluated anew.

        Args:
            name: of the model; None for the name of `output_dir`.
            finetuned_from, task, dataset_tags, dataset, dataset_args: see `create_model_card`.
        """
        model, loss, setup, own = self._unwrapped(), self.robust_loss, self._setup, source_of_loss(self)
        prefixes = self.group_evaluation.prefixes
        reports = {name: self._report_of(prefix) for prefix, name in zip(prefixes, _set_names(prefixes), strict=True)}
        then = self._weights_of_model()
        weights = {} if then is None else then.weights
        cosines = None if loss is None or loss.interactions is None else loss.interactions.cosines
        matrix = None if cosines is None else as_json(cosines)
        has_met = matrix is not None and any(one is not None for row in matrix for one in row)
        # A history that another run has left in the folder is not this run's.
        written = None if self._group_log is None else self._group_log.folder
        return RunRecord(
            name=name or Path(self.args.output_dir or "").absolute().name,
            objective={**self.group_objective.identity(), **({} if own is None else {"own_loss": own})},
            settings=settings_of(self.group_objective, options_of(self.args), setup.columns),
            training=training_of(self.args),
            groups=setup.groups,
            reports=reports,
            history=run_history(self.state.log_history, written),
            interactions=matrix if has_met else None,
            weights=weights,
            steps=self.state.global_step,
            kept_step=self._kept_step,
            compared=models_compared(self.state.log_history, self.args.metric_for_best_model),
            model=model_facts(model, finetuned_from, task, self._class_names()),
            data=replace(
                data_facts(
                    {"train": self.train_dataset, **self._evaluation_sets()}, dataset_tags, dataset,
                    next(iter(dataset_args), None),
                ),
                preparation=dict(self.data_preparation), cautions=list(self.data_cautions),
            ),
            versions=versions(),
        )  # fmt: skip

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write the card into `output_dir`, with the reports, the settings and the pictures that it speaks of.

        It tells which groups there are, how many examples each had, how each fares and how the model was trained; of
        the latest evaluations, before the first one without numbers. Arguments: those of
        `Trainer.create_model_card`. A card that cannot be written is warned of, and the Trainer's own takes its place.
        """
        require_model(self.model)
        if not self.is_world_process_zero():
            return
        assert self.args.output_dir is not None
        own_tags = _listed(tags)
        if tags is not None:
            own_tags += [tag for tag in _tags_in(Path(self.args.output_dir) / CARD_FILE) if tag not in own_tags]
        known: dict[str, Any] = {
            "name": model_name,
            "finetuned_from": finetuned_from,
            "task": next(iter(_listed(tasks)), None),
            "dataset_tags": _listed(dataset_tags),
            "dataset": _listed(dataset),
            "dataset_args": _listed(dataset_args),
        }
        try:
            self._write_card(known, language=language, license=license, tags=own_tags)
        except Exception as error:
            # Whatever is wrong with a card, the weights are to be pushed.
            warnings.warn(
                f"The card with the groups could not be written ({type(error).__name__}: {error}). The Trainer's own "
                "takes its place.",
                GroupRobustWarning,
                stacklevel=2,
            )
            super().create_model_card(
                language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
            )

    def _write_card(
        self,
        known: dict[str, Any],
        *,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: Sequence[str] = (),
        draw: bool = True,
    ) -> None:
        """Write card and record, with what `run_record` is to know and what stands in the front matter.

        In mid-training `draw` is False: nothing is done that training would wait for.
        """
        assert self.args.output_dir is not None
        record = self.run_record(**known)
        if license is None and draw:
            # The Trainer's own rule: that of the model it was fine-tuned from. It asks the Hub.
            license = TrainingSummary(record.name, finetuned_from=record.model.base_model).license
        write_card(
            record, self.args.output_dir, repo_id=getattr(self, "hub_model_id", None), draw=draw, language=language,
            license=license, tags=[*tags, GENERATED], dataset_names=known.get("dataset", ()),
            dataset_args=known.get("dataset_args", ()),
        )  # fmt: skip
        if record.model.library == "timm" and is_timm(self._unwrapped()):
            write_timm_config(self._unwrapped(), record.model.labels, self.args.output_dir)

    def _report_of(self, prefix: str) -> GroupReport:
        names, objective, setup = self._setup.evaluation.names, self.group_objective.name, self._setup
        own = source_of_loss(self)
        objective += "" if own is None else f", loss by {own}"
        then = self._weights_of_model() if setup.evaluation.are_of_training else None
        weights, step = (None, None) if then is None else then
        counts = setup.counts_of_evaluated
        report = self.group_evaluation.report(prefix, names, objective, counts, weights, step)
        return replace(report, **declared_directions(self._own_metrics))

    def _report_prefixes(self) -> list[str]:
        return [prefix for prefix in self.group_evaluation.prefixes if prefix.split("_")[0] == "eval"]

    def _evaluation_sets(self) -> dict[str, Any]:
        given = self.eval_dataset
        return dict(given) if isinstance(given, dict) else {} if given is None else {"validation": given}

    def _weights(self) -> Tensor | None:
        alpha = None if self.robust_loss is None else self.robust_loss.alpha
        return None if alpha is None else alpha.to("cpu", torch.float64, copy=True)

    def _weights_of_model(self) -> WeightsThen | None:
        """The group weights of the step that the model is of, None where there are none."""
        alpha, groups = self._weights(), self._setup.groups
        if alpha is None or groups is None or self.robust_loss is None:
            return None
        now = WeightsThen(dict(zip(groups.names, alpha.tolist(), strict=True)), self.robust_loss.steps)
        return self._kept_weights or now

    def _unwrapped(self) -> nn.Module:
        model: nn.Module = self.accelerator.unwrap_model(require_model(self.model))
        return model

    def _class_names(self) -> list[str]:
        """Names of the labels where the data know them."""
        for data in (self.train_dataset, *self._evaluation_sets().values()):
            features = getattr(data, "features", None) or {}
            for name in self._setup.label_columns:
                found = getattr(features.get(name), "names", None)
                if found:
                    return list(found)
        return []


def _set_name(prefix: str) -> str:
    """What readers call an evaluation set: "eval" is the validation set, "eval_<name>" what the user called it."""
    return "validation" if prefix == "eval" else prefix.removeprefix("eval_")


def _set_names(prefixes: Sequence[str]) -> list[str]:
    """The same of several; prefixes themselves where two would have one name: "eval_test" beside "test"."""
    names = [_set_name(prefix) for prefix in prefixes]
    return [name if names.count(name) == 1 else prefix for name, prefix in zip(names, prefixes, strict=True)]


def _listed(value: str | Sequence[str] | None) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _tags_in(card: Path) -> list[str]:
    """Tags of a card that is there, such as a network wrote with its weights."""
    try:
        return list(ModelCard.load(card).data.tags or []) if card.is_file() else []
    except ValueError:
        # It has no front matter that can be read.
        return []
