"""What experiment trackers get besides the Trainer's log: pictures, and a warning where names of groups collide.

Weights, losses and accuracies of the groups reach TensorBoard, Weights & Biases, trackio and MLflow with the Trainer's
own log, a series each: "train/group_weight/<name>", "train/group_loss/<name>", "eval/group_accuracy/<name>".
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_cgd.cards import RunRecord
from hf_cgd.cards.pictures import figures_of
from hf_cgd.data.groups import GroupInfo
from hf_cgd.monitors import GroupRobustWarning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLEANED = {"TensorBoardCallback": re.compile(r"[^-/\w.]"), "MLflowCallback": re.compile(r"[^0-9A-Za-z_\-. :/]")}
"""Characters of a series' name that a tracker replaces by an underscore, by the class of its callback."""


class TrackedRun(Protocol):
    """What the callback needs of a trainer."""

    groups: GroupInfo | None
    callback_handler: Any

    def run_record(self) -> RunRecord:
        """The run, as pictures show it."""


class TrackerPictures(TrainerCallback):
    """Sends the pictures of a run to its trackers when it ends.

    It has to stand before the callbacks of the trackers, which close them at that moment.

    Args:
        trainer: whose run it is.
    """

    def __init__(self, trainer: TrackedRun) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn of groups that a tracker would show as one series."""
        groups = self._trainer.groups
        for callback in self._trainer.callback_handler.callbacks if groups is not None else ():
            pattern = CLEANED.get(type(callback).__name__)
            same = [] if pattern is None or groups is None else colliding(groups.names, pattern)
            if same:
                warnings.warn(
                    f"{type(callback).__name__.removesuffix('Callback')} will show the groups {same} as one series, "
                    "since it replaces some characters of their names. Give them names of letters and digits.",
                    GroupRobustWarning,
                    stacklevel=2,
                )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw, and send."""
        senders = list(_senders(self._trainer.callback_handler.callbacks)) if state.is_world_process_zero else []
        if not senders:
            return
        for name, figure in figures_of(self._trainer.run_record()).items():
            pixels = pixels_of(figure)
            for send in senders:
                try:
                    send(name, pixels, state.global_step)
                except Exception as error:
                    # A tracker that is away must not cost the run.
                    words = f"The picture {name!r} did not reach a tracker: {error!r}."
                    warnings.warn(words, GroupRobustWarning, stacklevel=2)


def colliding(names: Sequence[str], replaced: re.Pattern[str]) -> list[str]:
    """The names that are another's once the characters are replaced."""
    cleaned = [replaced.sub("_", name) for name in names]
    return [name for name, clean in zip(names, cleaned, strict=True) if cleaned.count(clean) > 1]


def pixels_of(figure: "Figure") -> np.ndarray:
    """A figure as an image [H, W, 3] of bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


Send = Callable[[str, np.ndarray, int], Any]


def _to_tensorboard(callback: Any, name: str, pixels: np.ndarray, step: int) -> None:
    callback.tb_writer.add_image(f"groups/{name}", pixels, step, dataformats="HWC")


def _to_wandb(callback: Any, name: str, pixels: np.ndarray, step: int) -> None:
    callback._wandb.log({f"groups/{name}": callback._wandb.Image(pixels)})


def _to_trackio(callback: Any, name: str, pixels: np.ndarray, step: int) -> None:
    callback._trackio.log({f"groups/{name}": callback._trackio.Image(pixels)})


def _to_mlflow(callback: Any, name: str, pixels: np.ndarray, step: int) -> None:
    callback._ml_flow.log_image(pixels, f"groups/{name}.png")


_SENDERS: dict[str, tuple[str, Callable[[Any, str, np.ndarray, int], None]]] = {
    "TensorBoardCallback": ("tb_writer", _to_tensorboard),
    "WandbCallback": ("_initialized", _to_wandb),
    "TrackioCallback": ("_initialized", _to_trackio),
    "MLflowCallback": ("_initialized", _to_mlflow),
}
"""By the class of a tracker's callback: the attribute that tells whether it runs, and how it takes a picture."""


def _senders(callbacks: Iterable[TrainerCallback]) -> Iterable[Send]:
    for callback in callbacks:
        runs, send = _SENDERS.get(type(callback).__name__, ("", None))
        if send is not None and getattr(callback, runs, None):
            yield partial(send, callback)
