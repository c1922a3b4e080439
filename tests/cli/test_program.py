"""A program leaves the other processes in order when it is done, and does not wait for them when it failed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_cgd.cli import run_program


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def add(first: int, *, second: int) -> int:
    return first + second


def fail() -> None:
    raise OSError("a file is gone")


@pytest.mark.usefixtures("connected")
def test_the_process_group_is_gone_behind_a_program() -> None:
    assert run_program(add, 1, second=2) == 3
    assert not dist.is_initialized()


@pytest.mark.usefixtures("connected")
def test_a_failed_program_ends_as_it_is() -> None:
    with pytest.raises(OSError, match="a file is gone"):
        run_program(fail)
    assert dist.is_initialized()


def test_one_process_has_nothing_to_leave() -> None:
    assert not dist.is_initialized()
    assert run_program(add, 1, second=2) == 3
