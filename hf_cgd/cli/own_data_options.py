"""Options of training on one's own data, and which of the other options matter most. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Literal

WIDTH = 110
"""Columns of a help."""
DataCheck = Literal["stop", "warn", "off"]
"""What to do about data that is wrong: stop with the list of all problems, warn of them, or look at nothing."""
DATA_CHECK_HELP = (
    "Data that looks wrong (names that differ in a space, missing values, ids as groups): 'stop' lists all of it and "
    "ends, 'warn' goes on, 'off' does not look."
)

MAX_LENGTH = 128
"""Tokens of a text, unless something else is said or known of the model's training."""
CHANNELS_LAST = "Keep the channels of images innermost in memory: less time for most convolutional networks."
"""Help of the option of that name of `image_classifier`."""

TABLES = "CSV, JSONL or Parquet file; folder of train/validation/test files; or Hub id"
IMAGES = "Image folder with metadata.csv, table with paths of images, or Hub id"


@dataclass
class OwnDataOptions:
    """Options that texts and images share."""

    dataset: str | None = field(default=None, metadata={"help": f"{TABLES}. Required."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a dataset on the Hub."})
    label_column: str = field(default="label", metadata={"help": "Column of the classes: integers or strings."})
    data_check: DataCheck = field(default="stop", metadata={"help": DATA_CHECK_HELP})
    compare: list[str] | None = field(
        default=None,
        metadata={
            "help": "Train under each of these objectives, all else equal, and compare: erm erm_uw group_dro cgd.",
            "nargs": "+",
        },
    )


@dataclass
class TextOptions(OwnDataOptions):
    """Options of training a text classifier."""

    model: str = field(default="distilbert-base-uncased", metadata={"help": "Hub id or local folder."})
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of second texts, for pairs."})
    max_length: int = field(default=MAX_LENGTH, metadata={"help": "Tokens of a text; longer ones are cut."})


@dataclass
class ImageOptions(OwnDataOptions):
    """Options of training an image classifier."""

    dataset: str | None = field(default=None, metadata={"help": f"{IMAGES}. Required."})
    model: str = field(
        default="resnet50", metadata={"help": "timm architecture, Hub id or local folder (timm's own, too)."}
    )
    pretrained: bool = field(default=True, metadata={"help": "Start from published weights, or from scratch."})
    weights: str | None = field(
        default=None, metadata={"help": "File of a timm architecture's weights, in place of the Hub's."}
    )
    image_size: int | None = field(default=None, metadata={"help": "Side in pixels (timm); None for the model's own."})
    channels_last: bool = field(default=False, metadata={"help": CHANNELS_LAST})
    image_column: str = field(default="image", metadata={"help": "Column of the images, or of their paths."})
    augmentation: Literal["none", "crop_flip"] = field(
        default="none",
        metadata={"help": "Of training images: none, or crop_flip: random parts (0.7 of the area or more), mirrored."},
    )


KINDS = {"text": TextOptions, "image": ImageOptions}
"""What can be trained on one's own data, with the options of each."""

GROUP_OPTIONS = {
    "objective": "What is minimised: erm, erm_uw, group_dro, cgd (default), pgi, irm, coral.",
    "group_column": "Column(s) that tell an example's group; several cross.",
    "eval_group_column": "Column(s) to evaluate by, where they are others.",
    "step_size": "Of Group-DRO and CGD (default 0.01). Too large a one makes the weights swing.",
    "adjustment": "C of C / sqrt(n), in favour of small groups (default 0).",
    "group_sampling": "none (default), balanced, weighted or weights: the order of the examples.",
    "class_weights": "A weight for each class, or balanced.",
    "gradient_layers": "Layers that CGD compares (default: the last 3).",
    "min_group_size": "Smallest training group that is accepted (default 2).",
}  # fmt: skip
"""The options of group-robust training that matter most, in a line each."""
TRAINING_OPTIONS = {
    "output_dir": "Folder of the results (default: outputs/<what is trained>).",
    "overwrite_output_dir": "Remove what an earlier run has left there.",
    "resume_from_checkpoint": "true, or a checkpoint: go on with an interrupted run.",
    "do_train": "false only evaluates.",
    "num_train_epochs": "Passes over the data (default 3).",
    "learning_rate": "(default 2e-5 for texts, 1e-4 for images).",
    "weight_decay": "(default 0).",
    "per_device_train_batch_size": "(default 32).",
    "seed": "Of all draws (default 42).",
    "metric_for_best_model": "Which epoch is kept (default worst_group_accuracy).",
    "eval_strategy": "no, steps or epoch (default): when to look at validation.",
    "save_strategy": "no, steps or epoch (default): when to write a checkpoint.",
    "report_to": "Trackers: tensorboard, wandb, mlflow, trackio.",
    "use_cpu": "Even where there is a GPU.",
    "predictions": "Write the model's answer for each row to a file.",
    "pictures": "false draws none (default true).",
    "push_to_hub": "Publish model and card.",
}  # fmt: skip
"""The options of ordinary training that matter most, in a line each."""
