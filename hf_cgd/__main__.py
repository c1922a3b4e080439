"""`hf-cgd`, `python -m hf_cgd`, `accelerate launch -m hf_cgd`: one command for all that the package does.

Exit codes: 0; 1 for what failed on the way; 2 for options or data that are wrong.
"""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import hf_cgd
from hf_cgd.cli.parser import TRACEBACK, wants_traceback
from hf_cgd.cli.program import run_program
from hf_cgd.visible_text import did_you_mean


class Command(NamedTuple):
    """A command: the module whose `main(words)` it is, and what it does."""

    module: str
    about: str


COMMANDS = {
    "demo": Command("hf_cgd.cli.demo", "A shortcut, a noisy group, five methods; offline, about a minute."),
    "groups": Command("hf_cgd.cli.groups", "Look at data: counts, suspicious correlations, small groups."),
    "train": Command("hf_cgd.cli.train", "Train a text or image classifier on your own data."),
    "evaluate": Command("hf_cgd.cli.evaluate", "How each group fares under a model that is there already."),
    "report": Command("hf_cgd.cli.report", "One page about one or several runs, to hand on."),
    "tasks": Command("hf_cgd.cli.tasks", "The benchmarks that come with the package."),
    "experiments": Command("hf_cgd.experiments.__main__", "Grids of runs: objectives, values, seeds; tables."),
}
EXAMPLES = """examples:
  hf-cgd demo
  hf-cgd groups reviews.csv --group_column place
  hf-cgd train text --dataset reviews.csv --group_column label place
  hf-cgd train image --dataset my/images --group_column place --compare erm erm_uw group_dro cgd
  hf-cgd evaluate outputs/text_classification reviews.csv --group_column place
  hf-cgd report outputs/text_classification --output report.html
  accelerate launch -m hf_cgd train text --dataset reviews.csv --group_column place"""
WITHOUT_JSON = ("demo", "experiments")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code.

    Args:
        arguments: the command line, `sys.argv` by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--traceback" in words:
        os.environ[TRACEBACK] = "1"
        words.remove("--traceback")
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    if words[0] == "--version":
        print(hf_cgd.__version__)
        return 0
    name, *rest = words
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        return _wrong(f"hf-cgd: there is no {kind} {name!r}.{did_you_mean(name, COMMANDS)} See hf-cgd --help.")
    as_json = "--json" in rest
    if as_json and name in WITHOUT_JSON:
        return _wrong(f"hf-cgd {name}: there is no option --json. What it writes to its folder can be read.")
    if as_json:
        rest.remove("--json")
    command = import_module(COMMANDS[name].module).main
    return _finished(command, rest, as_json)


def _finished(command: Callable[[Sequence[str]], Any], words: Sequence[str], as_json: bool) -> int:
    """Run a command and print its result, or why there is none."""
    out, form = sys.stdout, warnings.formatwarning
    # Who runs a command wants what a warning says, not the line of our code that says it.
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"
    try:
        # Whoever reads JSON from a pipe gets nothing else there.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            result = run_program(command, words)
    except SystemExit as end:
        # What is wrong with options or data ends a program with a message.
        return _wrong(end.code) if isinstance(end.code, str) else int(end.code or 0)
    except (OSError, ValueError, ImportError) as error:
        if wants_traceback():
            raise
        return _wrong(f"{_last_line(error)} ({TRACEBACK}=1 shows where this comes from.)")
    except KeyboardInterrupt:
        return _wrong("Stopped.", code=130)
    finally:
        warnings.formatwarning = form
    if as_json and os.environ.get("RANK", "0") == "0":
        print(json.dumps(result, indent=2, ensure_ascii=False), file=out)
    return result if isinstance(result, int) else 0


def _last_line(error: BaseException) -> str:
    """The message of an error; of one that comes out of a loader's process the message of the error there."""
    text = str(error).strip() or type(error).__name__
    if "Original Traceback" in text:
        text = text.splitlines()[-1].partition(": ")[2]
    return text


def _wrong(message: str, code: int = 2) -> int:
    print(message, file=sys.stderr)
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {command.about}" for name, command in COMMANDS.items())
    return (
        "usage: hf-cgd COMMAND [options]\n\nModels whose worst group does well: look at groups, train, evaluate, "
        f"report.\n\ncommands:\n{lines}\n\nof all commands:\n"
        f"  {'--help':{width}}  The command's own options.\n"
        f"  {'--json':{width}}  The result as JSON on the standard output, and nothing else there.\n"
        f"  --traceback  Where an error comes from ({TRACEBACK}=1 does the same).\n\n{EXAMPLES}"
    )


if __name__ == "__main__":
    sys.exit(main())
