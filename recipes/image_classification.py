"""Fine-tune an image classifier on your own data so that its worst group does well.

accelerate launch recipes/image_classification.py --dataset my/images --group_column label place
python recipes/image_classification.py --dataset table.csv --image_column file --model resnet18 --group_column hospital
python recipes/image_classification.py --dataset owner/name --model google/vit-base-patch16-224 --group_column place
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import set_seed

from hf_cgd import GroupRobustTrainer
from hf_cgd.cli import BEST_WORST_GROUP, image_classifier, parse_command_line, readable_errors, run
from hf_cgd.cli.data_check import DATA_CHECK_HELP, DataCheck, load_checked
from hf_cgd.data import sources
from hf_cgd.data.images import as_rgb

DEFAULTS = BEST_WORST_GROUP | {
    "output_dir": "outputs/image_classification",
    "learning_rate": 1e-4,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    # The pixels come with reading, so no column may be taken away before that.
    "remove_unused_columns": False,
}


@dataclass
class Options:
    dataset: str | None = field(
        default=None,
        metadata={"help": "Image folder with metadata.csv, table with paths of images, or Hub id. Required."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a dataset on the Hub."})
    model: str = field(default="resnet50", metadata={"help": "timm architecture, Hub id or local folder."})
    pretrained: bool = field(default=True, metadata={"help": "Start from published weights, or from scratch."})
    image_size: int | None = field(default=None, metadata={"help": "Side in pixels (timm); None for the model's own."})
    image_column: str = field(default="image", metadata={"help": "Column of the images, or of their paths."})
    label_column: str = field(default="label", metadata={"help": "Column of the classes: integers or strings."})
    data_check: DataCheck = field(default="stop", metadata={"help": DATA_CHECK_HELP})


def main(arguments: Sequence[str] | None = None) -> GroupRobustTrainer:
    own, config = parse_command_line(Options, DEFAULTS, arguments)
    with readable_errors(own, config), config.main_process_first():
        columns = {name: getattr(own, name) for name in ("image_column", "label_column")}
        splits = load_checked(own.dataset, own.dataset_config, columns, config, own.data_check)
        splits = sources.with_images(splits, own.image_column, own.dataset)
        side = own.image_size
        image_format: dict[str, Any] = {} if side is None else {"input_size": (3, side, side)}
        set_seed(config.seed)
        names = splits["train"].features["label"].names
        model, processor = image_classifier(own.model, names, own.pretrained, **image_format)

    kept = ["label", *(config.group_column or ()), *(config.eval_group_column or ())]

    def read(rows: dict[str, list[Any]]) -> dict[str, Any]:
        images = [as_rgb(image) for image in rows[own.image_column]]
        return {**processor(images, return_tensors="pt"), **{name: rows[name] for name in kept if name in rows}}

    return run(config, model, splits.with_transform(read), processing_class=processor)


if __name__ == "__main__":
    main()
