"""What all parsers of the command line share: errors in one line that say what was meant. Imports nothing heavy."""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from hf_cgd.visible_text import did_you_mean

TRACEBACK = "HF_CGD_TRACEBACK"
"""Environment variable: set, errors show where they come from instead of their message alone."""


def wants_traceback() -> bool:
    """Whether errors are to show where they come from."""
    return os.environ.get(TRACEBACK, "0").lower() not in ("", "0", "false")


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are a line, with the option that was meant, and exit code 2."""

    help_flag = "--help"
    """What shows all options."""

    def error(self, message: str) -> NoReturn:
        """End the program with that line."""
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is not None:
            word = unknown[1].partition("=")[0]
            known = [name for name in self._option_string_actions if name.startswith("--")]
            message = f"there is no option {word}.{did_you_mean(word, known)}"
            if not word.startswith("-"):
                message = f"expected an option (--name), got {word!r}."
        stop = "" if message[-1:] in ".?" else "."
        self.exit(2, f"{self.prog}: {message}{stop} All options: {self.prog} {self.help_flag}\n")


def parser_of(name: str, about: str, examples: Sequence[str], **options: Any) -> OneLineParser:
    """The parser of a command.

    Args:
        name: of the command, behind "hf-cgd".
        about: what it does.
        examples: lines of the command line, without "hf-cgd".
        options: see `argparse.ArgumentParser`.
    """
    shown = "".join(f"\n  hf-cgd {line}" for line in examples)
    return OneLineParser(
        prog=f"hf-cgd {name}", description=about, epilog=f"examples:{shown}", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, **options,
    )  # fmt: skip


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the options by which commands on data are told its columns."""
    columns = parser.add_argument_group("columns of the data")
    columns.add_argument(
        "--group_column", nargs="+", metavar="COLUMN", help="Column(s) that tell an example's group; several cross."
    )
    columns.add_argument("--label_column", default="label", help="Column of the classes (default: label).")


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add where the data is."""
    parser.add_argument(
        "data", metavar="DATA", help="CSV, JSONL or Parquet file, folder of such files or of images, or Hub id."
    )
    parser.add_argument("--dataset_config", help="Configuration of a dataset on the Hub.")
