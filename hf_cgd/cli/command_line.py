"""The command line of a recipe: its options, its messages, and errors in the words of the command line."""

import json
import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from hf_cgd.cli.parser import wants_traceback
from hf_cgd.cli.recipe_parser import RecipeParser
from hf_cgd.trainer.config import GroupRobustConfig
from hf_cgd.visible_text import did_you_mean


@dataclass
class RecipeConfig(GroupRobustConfig):
    """The config of a recipe's run: that of every run, and what a program is told besides."""

    do_train: bool = field(
        default=True,
        metadata={"help": "Whether to train; false evaluates a trained model or a checkpoint and saves no model."},
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Remove what an earlier run has left in output_dir and start anew."}
    )
    predictions: bool = field(
        default=False, metadata={"help": "Write the answer for each row of the evaluated splits to a CSV file."}
    )
    pictures: bool = field(default=True, metadata={"help": "Draw the pictures of the card, which takes seconds."})

    def __post_init__(self) -> None:
        # A command line has no other way to say True.
        words: dict[Any, Any] = {"true": True, "false": None}
        if isinstance(self.resume_from_checkpoint, str):
            word = self.resume_from_checkpoint.lower()
            self.resume_from_checkpoint = words.get(word, self.resume_from_checkpoint)
        super().__post_init__()


def parse_command_line(
    options: type,
    defaults: Mapping[str, Any] | Callable[[Namespace], Mapping[str, Any]] | None = None,
    arguments: Sequence[str] | None = None,
) -> tuple[Any, RecipeConfig]:
    """Options of a recipe and a `RecipeConfig` from the command line.

    The first argument may be a YAML or JSON file of options; further ones take precedence over it. What is wrong ends
    the program with a message.

    Args:
        options: the recipe's own options, a dataclass.
        defaults: values of either dataclass that the recipe prefers to the dataclass's own; or a function that gives
            them for the options chosen so far, for defaults that depend on other options.
        arguments: the command line, `sys.argv` by default.
    """
    parser, values = read_command_line(options, defaults, arguments)
    with readable_errors(options, RecipeConfig):
        own, config = parser.parse_dict(values)
    return own, config


def read_command_line(
    options: type,
    defaults: Mapping[str, Any] | Callable[[Namespace], Mapping[str, Any]] | None = None,
    arguments: Sequence[str] | None = None,
    program: str | None = None,
) -> tuple[HfArgumentParser, dict[str, Any]]:
    """The options by name before they are made a config of, and the parser whose `parse_dict` does that.

    Args:
        options, defaults, arguments: see `parse_command_line`.
        program: what the program is called; None for the name of its file.
    """
    show_messages()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = RecipeParser([options, RecipeConfig], prog=program)
    from_file: dict[str, Any] = {}
    if arguments and Path(arguments[0]).suffix in (".yaml", ".yml", ".json"):
        with readable_errors():
            known = {f.name for kind in parser.dataclass_types for f in fields(kind)}
            from_file = _read_options(Path(arguments.pop(0)), known)
        parser.set_defaults(**from_file)
    if callable(defaults):
        # A call for help has to wait until the parser knows the defaults that it is to show.
        asked = [argument for argument in arguments if argument not in ("-h", "--help", "--help-all")]
        defaults = defaults(parser.parse_known_args(asked)[0])
    parser.set_defaults(**{**(defaults or {}), **from_file})
    return parser, vars(parser.parse_args(arguments))


def _read_options(path: Path, known: set[str]) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file of options, but there is none. Correct the path.")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8, got other bytes at {error.start}. Save the file as UTF-8."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{path}{line}: this is not YAML ({error.problem}). Lines read `option: value`.") from error
    except ValueError as error:
        raise ValueError(f"{path}: this is not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected lines of the form `option: value`, got {str(values)[:60]!r}.")
    unknown = sorted(str(name) for name in set(values) - known)
    if unknown:
        meant = "".join(did_you_mean(name, known) for name in unknown[:3])
        raise ValueError(f"{path}: no such option: {', '.join(unknown)}.{meant} --help-all shows them all.")
    return values


def show_messages() -> None:
    """Let the package's own messages through: all of them on the main process, warnings on the others."""
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_main else logging.WARNING, format="%(message)s")
    # Its lines on every request would drown ours.
    logging.getLogger("httpx").setLevel(logging.WARNING)


@contextmanager
def readable_errors(*options: Any, spellings: Mapping[str, str] | None = None) -> Iterator[None]:
    """Within, an error about a file, the Hub, a value or a missing package ends the program with its message alone.

    The library speaks of arguments, a person at the command line of flags: see `in_flags`.

    Args:
        options: dataclasses, or their instances, whose fields are the options of the program.
        spellings: further words of messages and what to say in their place.
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        if wants_traceback():
            raise
        message = str(error)
        for word, replacement in (spellings or {}).items():
            message = message.replace(word, replacement)
        names = [field.name for kind in options for field in fields(kind)]
        raise SystemExit(in_flags(message, names)) from error


def in_flags(message: str, names: Sequence[str]) -> str:
    """The message with arguments as flags: `name=value`, `name=` and, at the start of a line, `name:`.

    Args:
        message: of an error of the library.
        names: arguments that are options of the command line; others stay as they are.
    """
    one_of = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    if not one_of:
        return message
    message = re.sub(rf"^({one_of}): ", r"--\1: ", message, flags=re.MULTILINE)
    return re.sub(rf"(?<![\w.-])({one_of})=(?=(\S)?)", lambda found: f"--{found[1]}{' ' if found[2] else ''}", message)
