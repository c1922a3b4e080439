"""Programs that tests start: Python with the package of this folder, and no clock but one that ends a hang."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from paths import PYTHONPATH

HANGS = 1800
"""Seconds after which a program counts as hanging: far more than any needs on any machine."""


@contextmanager
def started(*command: Any, cwd: Path | None = None, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """`python COMMAND`, left running; at the end of the block it is ended, with the processes that it started."""
    program = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=cwd, text=True, encoding="utf-8", errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
    )  # fmt: skip
    try:
        yield program
    finally:
        end(program)


def end(program: "subprocess.Popen[Any]") -> None:
    """Kill a program that was started in a session of its own, and all that is left of its session."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    for pipe in (program.stdout, program.stderr):
        if pipe is not None:
            pipe.close()


def wait_until(condition: Callable[[], Any], program: "subprocess.Popen[Any] | None" = None) -> None:
    """Until it holds; an error where it never will, since the program that is to bring it about has ended."""
    last = time.monotonic() + HANGS
    while not condition():
        if program is not None and program.poll() is not None:
            error = "" if program.stderr is None else program.stderr.read()[-4000:]
            raise AssertionError(f"ended with {program.returncode} before its time: {error}")
        assert time.monotonic() < last, f"waited for {HANGS} seconds in vain"
        time.sleep(0.02)


def run(*command: Any, cwd: Path | None = None, code: int = 0, **environment: str) -> tuple[str, str]:
    """What `python COMMAND` wrote to its outputs; it has to end with `code`."""
    with started(*command, cwd=cwd, **environment) as program:
        output, error = program.communicate(timeout=HANGS)
    assert program.returncode == code, f"ended with {program.returncode}: {error[-4000:]}"
    return output, error


def run_together(processes: int, *command: Any, **environment: str) -> None:
    """`python COMMAND` as several processes of one run, as a launcher starts them; all have to end well.

    They meet at a store of this process. Its port is taken as soon as it is known, and no other can get it in between;
    and no program has to be imported that only launches.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", **environment,
    }  # fmt: skip
    with ExitStack() as stack:
        logs, running = [], []
        for rank in range(processes):
            log = stack.enter_context(tempfile.TemporaryFile())
            own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            program = subprocess.Popen(
                [sys.executable, *map(str, command)], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, env=own,
            )  # fmt: skip
            stack.callback(end, program)
            logs.append(log)
            running.append(program)
        last = time.monotonic() + HANGS
        # One that failed is waited for by the others.
        while None in (codes := [program.poll() for program in running]) and not any(codes):
            assert time.monotonic() < last, "hangs\n" + _ends(logs)
            time.sleep(0.05)
        assert not any(codes), f"ended with {codes} (None: was still running)\n{_ends(logs)}"


def _ends(logs: list[Any]) -> str:
    texts = []
    for rank, log in enumerate(logs):
        log.seek(0)
        texts.append(f"process {rank}:\n{log.read().decode(errors='replace')[-3000:]}")
    return "\n".join(texts)
