"""Noise-, Rotation- and Spurious-MNIST of the CGD paper (appendix D): one run, and Table 2 of all runs so far.

accelerate launch recipes/mnist_settings.py --setting noise --objective cgd --step_size 0.1 --seed 0
python recipes/mnist_settings.py --setting rotation --classes 10 --objective group_dro --data_dir my/mnist
python recipes/mnist_settings.py --table

Runs go to outputs/mnist_settings/<setting>-<classes>/<objective>-<step size>-<seed> unless --output_dir says where;
the table takes all that it finds under --results and chooses the step size on validation.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import set_seed

from hf_cgd import GroupRobustConfig, GroupRobustTrainer
from hf_cgd.launch import BEST_WORST_GROUP, image_classifier, parse_command_line, readable_errors, run
from hf_cgd.tasks import colored_mnist, mnist_settings
from hf_cgd.tasks.simple_settings import searched_knob


@dataclass
class Options:
    setting: str = field(default="noise", metadata={"help": "Which one.", "choices": list(mnist_settings.GROUPS)})
    classes: int = field(default=2, metadata={"help": "0-4 against 5-9, or the 10 digits."})
    model: str = field(default="resnet18", metadata={"help": "A timm architecture, trained from scratch."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder of MNIST's IDX files; None for the Hub."})
    train_counts: list[int] = field(default_factory=lambda: list(mnist_settings.TRAIN_COUNTS))
    validation_size: int = mnist_settings.VALIDATION_SIZE
    results: str = field(default="outputs/mnist_settings", metadata={"help": "Folder whose runs the table shows."})
    table: bool = field(default=False, metadata={"help": "Train nothing, only print the table."})


def defaults(chosen: Namespace) -> dict[str, Any]:
    value = getattr(chosen, searched_knob(chosen.objective) or "", None)
    tried = f"{chosen.objective}-{'default' if value is None else value}-{chosen.seed}"
    own: dict[str, Any] = {
        "output_dir": f"{chosen.results}/{chosen.setting}-{chosen.classes}/{tried}",
        "group_column": ["group"],
    }
    # The pixels come with reading, so no column may be taken away before that.
    return (
        own
        | {"remove_unused_columns": False}
        | BEST_WORST_GROUP
        | mnist_settings.hyperparameters(chosen.setting, chosen.objective)
    )


def train(own: Options, config: GroupRobustConfig) -> GroupRobustTrainer:
    with readable_errors(), config.main_process_first():
        data = colored_mnist.load(own.data_dir)
        sizes: Any = {"train_counts": own.train_counts, "validation_size": own.validation_size}
        splits = mnist_settings.splits_of(data, own.setting, classes=own.classes, seed=config.seed, **sizes)
        set_seed(config.seed)
        names = mnist_settings.label_names(own.classes)
        model, _ = image_classifier(own.model, names, pretrained=False, **colored_mnist.IMAGE_FORMAT)
    trainer = run(config, model, splits)
    if trainer.is_world_process_zero():
        reports = {"validation": trainer.group_report("eval"), "test": trainer.group_report("test")}
        folder, objective = str(config.output_dir), trainer.objective
        mnist_settings.save_result(folder, own.setting, own.classes, config.seed, objective, reports)
    return trainer


def main(arguments: Sequence[str] | None = None) -> GroupRobustTrainer | None:
    own, config = parse_command_line(Options, defaults, arguments)
    trainer = None if own.table else train(own, config)
    if trainer is None or trainer.is_world_process_zero():
        with readable_errors():
            print(mnist_settings.table(mnist_settings.load_results(own.results)))
    return trainer


if __name__ == "__main__":
    main()
