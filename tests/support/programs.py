"""Programs that tests start: Python with the package of this folder, and no clock but one that ends a hang."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import PYTHONPATH

HANGS = 1800
"""Seconds after which a program counts as hanging: far more than any needs on any machine."""


def start(*command: Any, cwd: Path | None = None, **environment: str) -> "subprocess.Popen[str]":
    """`python COMMAND`, left running."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
    )  # fmt: skip


def run(*command: Any, cwd: Path | None = None, code: int = 0, **environment: str) -> tuple[str, str]:
    """What `python COMMAND` wrote to its outputs; it has to end with `code`."""
    program = start(*command, cwd=cwd, **environment)
    try:
        output, error = program.communicate(timeout=HANGS)
    finally:
        program.kill()
    assert program.returncode == code, error[-4000:]
    return output, error
