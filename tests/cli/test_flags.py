"""Messages of the library in the words of the command line."""

from dataclasses import dataclass

import pytest

from hf_cgd.cli import readable_errors
from hf_cgd.cli.command_line import in_flags


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("data_dir: expected a folder", "--data_dir: expected a folder"),
        ("It failed.\ndata_dir: expected", "It failed.\n--data_dir: expected"),
        ("Pass data_dir= with a folder", "Pass --data_dir with a folder"),
        ("Use classes=2.", "Use --classes 2."),
        ("set size='big' or data_dir='x'", "set --size 'big' or --data_dir 'x'"),
        ("the data_dir: no", "the data_dir: no"),
        ("in cgd_size=2/seed-0 and other=3", "in cgd_size=2/seed-0 and other=3"),
        ("size == 3", "size == 3"),
        ("resize=3", "resize=3"),
    ],
)
def test_arguments_become_flags(message: str, said: str) -> None:
    assert in_flags(message, ["data_dir", "classes", "size"]) == said


def test_a_program_ends_with_the_message_alone() -> None:
    @dataclass
    class Options:
        size: int = 1

    with (
        pytest.raises(SystemExit, match=r"^Use --size 2, or --demo\.$"),
        readable_errors(Options(), spellings={"source=demo": "--demo"}),
    ):
        raise ValueError("Use size=2, or source=demo.")
    with pytest.raises(SystemExit, match=r"^Use size=2\.$"), readable_errors():
        raise ValueError("Use size=2.")
    with pytest.raises(KeyError), readable_errors(Options):
        raise KeyError("a mistake of ours keeps its traceback")
