"""What recipes and commands share: the command line, the networks, and a run from its config to its files."""

from typing import TYPE_CHECKING

from hf_cgd.lazy import names_on_demand

if TYPE_CHECKING:
    from hf_cgd.cards import REPORT_FILE
    from hf_cgd.cli.command_line import parse_command_line, readable_errors
    from hf_cgd.cli.networks import image_classifier, text_classifier
    from hf_cgd.cli.program import run_program
    from hf_cgd.cli.task_recipe import TaskRecipe
    from hf_cgd.cli.training import BEST_WORST_GROUP, run, task_options
else:
    __getattr__ = names_on_demand(
        __name__,
        {
            "REPORT_FILE": "hf_cgd.cards",
            "parse_command_line": "hf_cgd.cli.command_line",
            "readable_errors": "hf_cgd.cli.command_line",
            "image_classifier": "hf_cgd.cli.networks",
            "text_classifier": "hf_cgd.cli.networks",
            "run_program": "hf_cgd.cli.program",
            "TaskRecipe": "hf_cgd.cli.task_recipe",
            "BEST_WORST_GROUP": "hf_cgd.cli.training",
            "run": "hf_cgd.cli.training",
            "task_options": "hf_cgd.cli.training",
        },
    )

__all__ = [
    "BEST_WORST_GROUP",
    "REPORT_FILE",
    "TaskRecipe",
    "image_classifier",
    "parse_command_line",
    "readable_errors",
    "run",
    "run_program",
    "task_options",
    "text_classifier",
]
