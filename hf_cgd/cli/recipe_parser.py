"""The parser of recipes: their own options first in a short help, the hundreds of others behind `--help-all`."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import HfArgumentParser

from hf_cgd.cli.own_data_options import TRAINING_OPTIONS, WIDTH
from hf_cgd.cli.parser import OneLineParser
from hf_cgd.trainer.config import GroupOptions


class _OneName(argparse.ArgumentDefaultsHelpFormatter):
    """Options by one of their spellings, and their defaults where they have any."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = next((text for text in action.option_strings if text.startswith("--")), None)
        if name is None or action.nargs == 0:
            return name or super()._format_action_invocation(action)
        return f"{name} {self._format_args(action, action.dest.upper())}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class RecipeParser(OneLineParser, HfArgumentParser):
    """Options of a recipe and of its config.

    Args:
        kinds: the dataclasses, the recipe's own first.
        options: see `argparse.ArgumentParser`.
    """

    help_flag = "--help-all"

    def __init__(self, kinds: Sequence[Any], **options: Any) -> None:
        self._own = kinds[0]
        options.setdefault("formatter_class", _OneName)
        HfArgumentParser.__init__(self, kinds, allow_abbrev=False, **options)
        self.add_argument(
            "--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="Show every option and end."
        )

    def format_help(self) -> str:
        """The options that matter most."""
        own = {one.name for one in fields(self._own)}
        ours = {one.name for one in fields(GroupOptions)}
        sections = {"this program": own, "the groups": ours - own, "training": TRAINING_OPTIONS.keys() - own - ours,
                    "all": {"help", "help_all"}}  # fmt: skip
        formatter = self._get_formatter()
        formatter.add_text(f"usage: {self.prog} [FILE.yaml] [--option value ...]")
        for title, names in sections.items():
            formatter.start_section(title)
            # Without the second spelling of a switch, --no_…
            shown = (action for action in self._actions if not action.option_strings[0].startswith("--no_"))
            formatter.add_arguments(action for action in shown if action.dest in names)
            formatter.end_section()
        return formatter.format_help()


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        print(HfArgumentParser.format_help(parser))
        parser.exit()
