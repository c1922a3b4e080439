"""Pushes to the Hub: the card goes along, no token does, and a push that fails loses nothing."""

import copyreg
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, upload_folder
from huggingface_hub.errors import HfHubHTTPError
from transformers.trainer_utils import HubStrategy

from hf_cgd.cards import CARD_FILE
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.publishing import PublishingTrainer
from hf_cgd.whole_files import write_whole

logger = logging.getLogger(__name__)

REJECTED = "Invalid metadata in README.md"
"""How huggingface_hub begins the message where the Hub refuses a card."""


NO_REPOSITORY = (
    "push_to_hub=True: the repository on the Hub could not be made, and nothing was trained. Check the connection and "
    "the login (hf auth login, or hub_token=), or leave push_to_hub out and call trainer.push_to_hub() after training."
)


class PushingTrainer(PublishingTrainer):
    """A `Trainer` whose failed pushes lose nothing and say so."""

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
            # Older Trainers have no parameter `private`.
            given = {} if private is None else {"private": private}
            try:
                pushed = super().push_to_hub(commit_message, blocking, token, revision, **given, **kwargs)
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

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """See `Trainer`. With `push_to_hub=True` it is called when the trainer is built."""
        try:
            super().init_hf_repo(*args, **kwargs)
        except Exception as error:
            if not hasattr(self, "_setup"):
                _add_words(error, NO_REPOSITORY)
            raise

    def _upload(self, commit_message: str | None, blocking: bool, token: str | None, revision: str | None) -> Any:
        assert self.hub_model_id is not None and self.args.output_dir is not None
        return upload_folder(
            repo_id=self.hub_model_id, folder_path=self.args.output_dir, commit_message=commit_message,
            token=token or self.args.hub_token, run_as_future=not blocking, ignore_patterns=["_*", "checkpoint-*"],
            revision=revision or self.args.hub_revision,
        )  # fmt: skip

    def _leave_out_front_matter(self, reason: str) -> None:
        assert self.args.output_dir is not None
        path = Path(self.args.output_dir) / CARD_FILE
        card = ModelCard.load(path)
        kept = ModelCardData(tags=card.data.tags, **_present(library_name=card.data.library_name))
        write_whole(path, f"---\n{kept.to_yaml()}\n---\n{card.text}")
        warnings.warn(
            "The Hub refused the front matter of the card, so all but tags and library_name is left out of it. "
            f"{' '.join(reason.split())}",
            GroupRobustWarning,
            stacklevel=3,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """See `Trainer`. The card goes along; an earlier push that has failed is told of."""
        if self.is_world_process_zero() and self._will_push():
            self._warn_of_failed_pushes()
            name = (self.hub_model_id or "").split("/")[-1] or None
            try:
                # Pictures are for the end: training waits for them.
                self._write_card({"name": name}, draw=False)
            except Exception as error:
                warnings.warn(f"The card could not be written: {error!r}.", GroupRobustWarning, stacklevel=2)
        with _without_token(self.args):
            super()._push_from_checkpoint(checkpoint_folder)

    def _will_push(self) -> bool:
        """Whether a checkpoint is pushed now; to be asked on the main process, which alone knows of its pushes."""
        running = self.push_in_progress is not None and not self.push_in_progress.is_done()
        return self.args.hub_strategy != HubStrategy.END and (self.args.hub_always_push or not running)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """See `Trainer`. The arguments that are saved beside the weights, and pushed with them, hold no token."""
        with _without_token(self.args):
            super()._save(output_dir, state_dict)

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
                    f"A push to the Hub failed: {' '.join(str(error).split())} {self._words_after_failure()}",
                    GroupRobustWarning,
                    stacklevel=3,
                )

    def _words_after_failure(self) -> str:
        return (
            f"The push to {self.hub_model_id or 'the Hub'} failed, the training did not: model, card and reports are "
            f"in {self.args.output_dir}. Call trainer.push_to_hub() again when the Hub can be reached."
        )


@contextmanager
def _without_token(args: Any) -> Iterator[None]:
    """Within, arguments are pickled without the token for the Hub."""
    kind = type(args)

    def parts(one: Any) -> tuple[Any, ...]:
        return copyreg.__newobj__, (kind,), {**vars(one), "hub_token": None}  # type: ignore[attr-defined]

    before = copyreg.dispatch_table.get(kind)
    copyreg.pickle(kind, parts)
    try:
        yield
    finally:
        del copyreg.dispatch_table[kind]
        if before is not None:
            copyreg.dispatch_table[kind] = before


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _add_words(error: Exception, words: str) -> None:
    """Add to what an error says, whatever its type."""
    if isinstance(error, HfHubHTTPError):
        error.append_to_message(f"\n{words}")
    elif hasattr(error, "add_note"):  # From Python 3.11 on.
        error.add_note(words)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{words}", *error.args[1:])
    logger.error("%s", words)
