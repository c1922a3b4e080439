"""What recipes and commands share: the command line, the networks, and a run from its config to its files."""

from hf_cgd.cards import REPORT_FILE
from hf_cgd.cli.command_line import parse_command_line, readable_errors
from hf_cgd.cli.networks import image_classifier, text_classifier
from hf_cgd.cli.task_recipe import TaskRecipe
from hf_cgd.cli.training import BEST_WORST_GROUP, run, task_options

__all__ = [
    "BEST_WORST_GROUP",
    "REPORT_FILE",
    "TaskRecipe",
    "image_classifier",
    "parse_command_line",
    "readable_errors",
    "run",
    "task_options",
    "text_classifier",
]
