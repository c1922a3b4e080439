"""Noise-, Rotation- and Spurious-MNIST of the CGD paper (appendix D): ResNet-18 from scratch, one run.

accelerate launch recipes/mnist_settings.py --setting noise --objective cgd --step_size 0.1 --seed 0
python recipes/mnist_settings.py --setting rotation --classes 10 --objective group_dro --data_dir my/mnist
python -m hf_cgd.experiments mnist_settings -- --data_dir my/mnist        # the paper's Table 2
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import set_seed

from hf_cgd import GroupRobustTrainer
from hf_cgd.cli import image_classifier, parse_command_line, readable_errors, run, task_options
from hf_cgd.tasks import mnist
from hf_cgd.tasks.mnist_settings import TRAIN_COUNTS, VALIDATION_SIZE, Classes, MNISTSettings, SettingName


@dataclass
class Options:
    setting: SettingName = field(default="noise", metadata={"help": "Which one."})
    classes: Classes = field(default=2, metadata={"help": "0-4 against 5-9, or the 10 digits."})
    model: str = field(default="resnet18", metadata={"help": "A timm architecture, trained from scratch."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder of MNIST's IDX files; None for the Hub."})
    train_counts: list[int] = field(default_factory=lambda: list(TRAIN_COUNTS))
    validation_size: int = VALIDATION_SIZE


def defaults(chosen: Namespace) -> dict[str, Any]:
    options = task_options(MNISTSettings(setting=chosen.setting), "paper", chosen.objective)
    # The pixels come with reading, so no column may be taken away before that.
    return options | {"output_dir": f"outputs/mnist_settings/{chosen.setting}", "remove_unused_columns": False}


def main(arguments: Sequence[str] | None = None) -> GroupRobustTrainer:
    own, config = parse_command_line(Options, defaults, arguments)
    with readable_errors(own, config), config.main_process_first():
        sizes: Any = {"train_counts": own.train_counts, "validation_size": own.validation_size}
        task = MNISTSettings(setting=own.setting, classes=own.classes, seed=config.seed, **sizes)
        splits = task.load(data_dir=own.data_dir)
        set_seed(config.seed)
        model, _ = image_classifier(own.model, task.info.label_names, pretrained=False, **mnist.IMAGE_FORMAT)
    return run(config, model, splits)


if __name__ == "__main__":
    main()
