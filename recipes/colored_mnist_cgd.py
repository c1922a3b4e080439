"""The CGD paper's Colored-MNIST: the digit's colour gives the class away, but for a minority of 1 in 1,001.

accelerate launch recipes/colored_mnist_cgd.py --objective cgd --step_size 0.1
python recipes/colored_mnist_cgd.py --data_dir my/mnist --objective group_dro --ratio 100 --num_train_epochs 10
python recipes/colored_mnist_cgd.py --train_size 10010 --group_column label group --group_sampling balanced
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import set_seed

from hf_cgd import GroupRobustTrainer
from hf_cgd.cli import image_classifier, parse_command_line, readable_errors, run, task_options
from hf_cgd.tasks import colored_mnist, mnist


@dataclass
class Options:
    model: str = field(default="resnet18", metadata={"help": "A timm architecture, trained from scratch."})
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder of the four IDX files of MNIST, plain or .gz; None for the Hub."}
    )
    ratio: float = field(
        default=colored_mnist.RATIO, metadata={"help": "Majority examples for each of the minority in training."}
    )
    train_size: int | None = field(default=None, metadata={"help": "Train on this many images, at the same ratio."})
    validation_size: int = field(
        default=colored_mnist.VALIDATION_SIZE, metadata={"help": "Training images that are kept to validate."}
    )
    legacy_coloring: bool = field(
        default=False,
        metadata={
            "help": "As the authors' released code: the minority recolours images of the majority, cyan/magenta."
        },
    )


def defaults(chosen: Namespace) -> dict[str, Any]:
    options = task_options(colored_mnist.ColoredMNIST(), "paper", chosen.objective)
    # The pixels come with reading, so no column may be taken away before that.
    return options | {"remove_unused_columns": False}


def main(arguments: Sequence[str] | None = None) -> GroupRobustTrainer:
    own, config = parse_command_line(Options, defaults, arguments)
    with readable_errors(own, config), config.main_process_first():
        task = colored_mnist.ColoredMNIST(
            ratio=own.ratio,
            train_size=own.train_size,
            validation_size=own.validation_size,
            legacy=own.legacy_coloring,
            min_group_size=config.min_group_size,
            seed=config.seed,
        )
        splits = task.load(data_dir=own.data_dir)
        set_seed(config.seed)
        model, _ = image_classifier(own.model, task.info.label_names, pretrained=False, **mnist.IMAGE_FORMAT)
    return run(config, model, splits)


if __name__ == "__main__":
    main()
