"""Cards, reports and pushes: what the trainer leaves for readers, in its folder and on the Hub."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor, nn
from transformers import Trainer
from transformers.modelcard import TrainingSummary
from transformers.trainer_utils import HubStrategy

from hf_cgd.cards import CARD_FILE, RunRecord, write_card
from hf_cgd.metrics import GroupReport
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.objectives import Objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.config import options_of
from hf_cgd.trainer.evaluation import GroupEvaluation
from hf_cgd.trainer.group_setup import GroupSetup
from hf_cgd.trainer.history import run_history
from hf_cgd.trainer.run_facts import (
    data_facts,
    is_timm,
    model_facts,
    settings_of,
    training_of,
    versions,
    write_timm_config,
)

logger = logging.getLogger(__name__)

GENERATED = "generated_from_trainer"
"""The tag that the Trainer gives to all of its models."""
REJECTED = "Invalid metadata in README.md"
"""How huggingface_hub begins the message where the Hub refuses a card."""


class PublishingTrainer(Trainer):
    """A `Trainer` whose cards tell how each group fares, and whose failed pushes lose nothing."""

    group_objective: Objective
    group_evaluation: GroupEvaluation
    robust_loss: GroupRobustLoss | None
    _setup: GroupSetup
    _warned_of: set[int]

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
        loss, setup = self.robust_loss, self._setup
        reports = {_set_name(prefix): self._report_of(prefix) for prefix in self.group_evaluation.prefixes}
        weights = {} if self._weights() is None or setup.groups is None else dict(
            zip(setup.groups.names, self._weights().tolist(), strict=True)  # type: ignore[union-attr]
        )  # fmt: skip
        cosines = None if loss is None or loss.interactions is None else loss.interactions.cosines
        matrix = None if cosines is None else [[_finite(one) for one in row] for row in cosines.tolist()]
        has_met = matrix is not None and any(one is not None for row in matrix for one in row)
        folder = self.args.output_dir or ""
        return RunRecord(
            name=name or Path(folder).absolute().name,
            objective=self.group_objective.identity(),
            settings=settings_of(self.group_objective, options_of(self.args), setup.columns),
            training=training_of(self.args),
            groups=setup.groups,
            reports=reports,
            history=run_history(self.state.log_history, folder),
            interactions=matrix if has_met else None,
            weights=weights,
            steps=self.state.global_step,
            model=model_facts(self._unwrapped(), finetuned_from, task, self._class_names()),
            data=data_facts(
                {"train": self.train_dataset, **self._evaluation_sets()}, dataset_tags, dataset,
                next(iter(dataset_args), None),
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
        if not self.is_world_process_zero():
            return
        assert self.args.output_dir is not None
        own_tags = _listed(tags)
        if tags is not None:
            own_tags += [tag for tag in _tags_in(Path(self.args.output_dir) / CARD_FILE) if tag not in own_tags]
        given: dict[str, Any] = {
            "finetuned_from": finetuned_from,
            "task": next(iter(_listed(tasks)), None),
            "dataset_tags": _listed(dataset_tags),
            "dataset": _listed(dataset),
            "dataset_args": _listed(dataset_args),
        }
        try:
            record = self.run_record(name=model_name, **given)
            if license is None:
                # The Trainer's own rule: that of the model it was fine-tuned from, where the Hub tells.
                license = TrainingSummary(record.name, finetuned_from=record.model.base_model).license
            write_card(
                record, self.args.output_dir, repo_id=getattr(self, "hub_model_id", None), language=language,
                license=license, tags=[*own_tags, GENERATED], dataset_names=given["dataset"],
                dataset_args=given["dataset_args"],
            )  # fmt: skip
            if record.model.library == "timm" and is_timm(self._unwrapped()):
                write_timm_config(self._unwrapped(), record.model.labels, self.args.output_dir)
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

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """See `Trainer.push_to_hub`. The model is evaluated first where it has not been, for the numbers of its card.

        Raises:
            Exception: that of the client, with a note that says where the results are. They are saved before.
        """
        if self.eval_dataset is not None and not any(self._report_prefixes()):
            self.evaluate()
        try:
            try:
                pushed = super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
            except ValueError as error:
                if not str(error).startswith(REJECTED):
                    raise
                self._leave_out_front_matter(str(error))
                pushed = self._upload(commit_message, blocking, token, revision)
        except Exception as error:
            if self.hub_model_id is None:
                # The repository could not be made, and nothing has been saved yet.
                self.save_model(_internal_call=True)
                self.create_model_card(model_name=kwargs.get("model_name"))
            _add_words(error, self._words_after_failure())
            raise
        return pushed

    def _upload(self, commit_message: str | None, blocking: bool, token: str | None, revision: str | None) -> Any:
        from huggingface_hub import upload_folder

        assert self.hub_model_id is not None and self.args.output_dir is not None
        return upload_folder(
            repo_id=self.hub_model_id, folder_path=self.args.output_dir, commit_message=commit_message,
            token=token or self.args.hub_token, run_as_future=not blocking, ignore_patterns=["_*", "checkpoint-*"],
            revision=revision or self.args.hub_revision,
        )  # type: ignore[call-overload]  # fmt: skip

    def _leave_out_front_matter(self, reason: str) -> None:
        assert self.args.output_dir is not None
        path = Path(self.args.output_dir) / CARD_FILE
        card = ModelCard.load(path)
        for name in [name for name in card.data.to_dict() if name not in ("tags", "library_name")]:
            del card.data[name]
        path.write_text(str(card), encoding="utf-8")
        warnings.warn(
            "The Hub refused the front matter of the card, so all but tags and library_name is left out of it. "
            f"{reason}",
            GroupRobustWarning,
            stacklevel=3,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """See `Trainer`. The card goes along; an earlier push that has failed is told of."""
        running = self.push_in_progress is not None and not self.push_in_progress.is_done()
        will_push = self.args.hub_strategy != HubStrategy.END and (self.args.hub_always_push or not running)
        if self.is_world_process_zero() and will_push:
            self._warn_of_failed_pushes()
            self.create_model_card(model_name=(self.hub_model_id or "").split("/")[-1] or None)
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        """See `Trainer`. Pushes that have failed are told of: the Trainer passes over them."""
        super()._finish_current_push()
        self._warn_of_failed_pushes()

    def _warn_of_failed_pushes(self) -> None:
        running = getattr(self, "push_in_progress", None)
        told: set[int] = self.__dict__.setdefault("_warned_of", set())
        for job in [] if running is None else running.jobs:
            error = job.exception() if job.done() and not job.cancelled() else None
            if error is not None and id(job) not in told:
                told.add(id(job))
                warnings.warn(
                    f"A push to the Hub failed: {error} {self._words_after_failure()}",
                    GroupRobustWarning,
                    stacklevel=3,
                )

    def _words_after_failure(self) -> str:
        return (
            f"The push to {self.hub_model_id or 'the Hub'} failed, the training did not: model, card and reports are "
            f"in {self.args.output_dir}. Call trainer.push_to_hub() again when the Hub can be reached."
        )

    def _report_of(self, prefix: str) -> GroupReport:
        names, objective, setup = self._setup.evaluation.names, self.group_objective.name, self._setup
        weights, counts = setup.by_name(self._weights()), setup.counts_of_evaluated
        step = None if self.robust_loss is None else self.robust_loss.steps
        return self.group_evaluation.report(prefix, names, objective, counts, weights, step)

    def _report_prefixes(self) -> list[str]:
        return [prefix for prefix in self.group_evaluation.prefixes if prefix.split("_")[0] == "eval"]

    def _evaluation_sets(self) -> dict[str, Any]:
        given = self.eval_dataset
        return dict(given) if isinstance(given, dict) else {} if given is None else {"validation": given}

    def _weights(self) -> Tensor | None:
        alpha = None if self.robust_loss is None else self.robust_loss.alpha
        return None if alpha is None else alpha.to("cpu", torch.float64, copy=True)

    def _unwrapped(self) -> nn.Module:
        assert self.model is not None
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        return model

    def _class_names(self) -> list[str]:
        """Names of the labels where the data know them."""
        for data in (self.train_dataset, *self._evaluation_sets().values()):
            features = getattr(data, "features", None) or {}
            for name in self.label_names:
                found = getattr(features.get(name), "names", None)
                if found:
                    return list(found)
        return []


def _set_name(prefix: str) -> str:
    """What readers call an evaluation set: "eval" is the validation set, "eval_<name>" what the user called it."""
    return "validation" if prefix == "eval" else prefix.removeprefix("eval_")


def _listed(value: str | Sequence[str] | None) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _tags_in(card: Path) -> list[str]:
    """Tags of a card that is there, such as a network wrote with its weights."""
    try:
        return list(ModelCard.load(card).data.tags or []) if card.is_file() else []
    except ValueError:
        # It has no front matter that can be read.
        return []


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _add_words(error: Exception, words: str) -> None:
    """Add to what an error says, whatever its type."""
    if isinstance(error, HfHubHTTPError):
        error.append_to_message(f"\n{words}")
    else:
        error.add_note(words)
    logger.error("%s", words)
