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
from hf_cgd.cli.launch import BEST_WORST_GROUP, image_classifier, parse_command_line, readable_errors, run
from hf_cgd.tasks import colored_mnist, mnist_settings


@dataclass
class Options:
    setting: str = field(default="noise", metadata={"help": "Which one.", "choices": list(mnist_settings.GROUPS)})
    classes: int = field(default=2, metadata={"help": "0-4 against 5-9, or the 10 digits."})
    model: str = field(default="resnet18", metadata={"help": "A timm architecture, trained from scratch."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder of MNIST's IDX files; None for the Hub."})
    train_counts: list[int] = field(default_factory=lambda: list(mnist_settings.TRAIN_COUNTS))
    validation_size: int = mnist_settings.VALIDATION_SIZE


def defaults(chosen: Namespace) -> dict[str, Any]:
    own: dict[str, Any] = {"output_dir": f"outputs/mnist_settings/{chosen.setting}", "group_column": ["group"]}
    # The pixels come with reading, so no column may be taken away before that.
    own |= {"remove_unused_columns": False}
    return own | BEST_WORST_GROUP | mnist_settings.hyperparameters(chosen.setting, chosen.objective)


def main(arguments: Sequence[str] | None = None) -> GroupRobustTrainer:
    own, config = parse_command_line(Options, defaults, arguments)
    with readable_errors(), config.main_process_first():
        data = colored_mnist.load(own.data_dir)
        sizes: Any = {"train_counts": own.train_counts, "validation_size": own.validation_size}
        splits = mnist_settings.splits_of(data, own.setting, classes=own.classes, seed=config.seed, **sizes)
        set_seed(config.seed)
        names = mnist_settings.label_names(own.classes)
        model, _ = image_classifier(own.model, names, pretrained=False, **colored_mnist.IMAGE_FORMAT)
    return run(config, model, splits)


if __name__ == "__main__":
    main()
