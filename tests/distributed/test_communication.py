"""Sums over processes and the layout of pooled rows: several processes played by one, against plain sums."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import hf_cgd.distributed.communication
from hf_cgd.distributed.communication import Communication, ProcessGroupCommunication
from hf_cgd.robust_loss.pooling import PooledRows


class Played(Communication):
    """One of several processes, where what all of them sum is known beforehand."""

    def __init__(self, num_processes: int, rank: int, others: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda tensor: tensor + others(tensor), num_processes, rank)


@given(st.integers(1, 5), st.integers(1, 17), st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=3), st.data())
def test_pooled_rows_are_the_sums_of_the_micro_batches(
    processes: int, size: int, micro_batches: list[set[int]], data: Any
) -> None:
    """The parts of all ranks, side by side and cut to P columns, are the sum; two steps share the memory."""
    present = [*sorted(set().union(*micro_batches)), 7]
    pooled = PooledRows(Communication(num_processes=processes, rank=0))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for _ in range(2):
        expected = torch.zeros(len(present), size)
        pooled.add(present, [], torch.zeros(0, size))
        for batch in micro_batches:
            groups = sorted(batch)
            rows = torch.randn(len(groups), size, generator=generator)
            pooled.add(present, groups, rows)
            for group, row in zip(groups, rows, strict=True):
                expected[present.index(group)] += row
        parts = torch.stack([_close(pooled, processes, rank) for rank in range(processes)])
        whole = parts.transpose(0, 1).flatten(1)
        assert torch.equal(whole[:, :size], expected)
        assert not whole[:, size:].any()


def _close(pooled: PooledRows, processes: int, rank: int) -> Tensor:
    """This rank's part, leaving the step open for the next rank to be played."""
    open_parts = pooled._columns
    pooled._communication.rank = rank
    part = pooled.close().clone()
    if rank < processes - 1:
        pooled._columns = open_parts
    return part


@given(st.integers(1, 6), st.integers(1, 20))
def test_a_row_is_cut_and_joined_again(processes: int, size: int) -> None:
    row = torch.arange(1.0, size + 1)
    cut = [PooledRows(Communication(num_processes=processes, rank=rank)).own_columns(row) for rank in range(processes)]
    for rank in range(processes):
        others = torch.stack([part if other != rank else 0 * part for other, part in enumerate(cut)])
        played = PooledRows(Played(processes, rank, lambda tensor, others=others: others))
        assert torch.equal(played.whole_row(cut[rank], size), row)


def test_agreement() -> None:
    assert Communication().all_agree(True) and not Communication().all_agree(False)
    for others, agreed in ((2.0, True), (1.0, False)):
        played = Played(3, 0, lambda tensor, others=others: torch.tensor([others]))
        assert played.all_agree(True) is agreed and not played.all_agree(False)


class Group:
    """`torch.distributed` with two processes that hold the same."""

    def __init__(self, error: str | None) -> None:
        self.error = error
        self.calls: list[str] = []

    def get_backend(self) -> str:
        return "mpi"

    def get_world_size(self) -> int:
        return 2

    def get_rank(self) -> int:
        return 1

    def all_reduce(self, tensor: Tensor) -> None:
        self.calls.append("all_reduce")
        tensor *= 2

    def reduce_scatter_single(self, output: Tensor, given: Tensor) -> None:
        self.calls.append("reduce_scatter")
        if self.error:
            raise RuntimeError(self.error)
        output.copy_(2 * given.chunk(2)[1])


@pytest.mark.parametrize("error", [None, "Backend mpi does not support reduce_scatter"])
def test_a_backend_without_reduce_scatter_is_asked_once(monkeypatch: pytest.MonkeyPatch, error: str | None) -> None:
    group = Group(error)
    monkeypatch.setattr(hf_cgd.distributed.communication, "dist", group)
    communication = ProcessGroupCommunication(torch.device("cpu"))
    parts = torch.arange(12.0).view(2, 3, 2)
    for _ in range(2):
        assert torch.equal(communication.sum_scattered(parts), 2 * parts[1])
    assert torch.equal(parts, torch.arange(12.0).view(2, 3, 2))
    assert group.calls == (["reduce_scatter"] * 2 if error is None else ["reduce_scatter", "all_reduce", "all_reduce"])


class Hosts(Group):
    """The same with devices that are not there: only a group of hosts is good for anything."""

    def new_group(self, backend: str, timeout: timedelta) -> str:
        self.calls.append(f"new group of {backend}, {timeout}")
        return "hosts"

    def all_reduce(self, tensor: Tensor, group: str = "devices") -> None:
        assert group == "hosts"
        super().all_reduce(tensor)

    def all_gather(self, parts: list[Tensor], given: Tensor, group: str = "devices") -> None:
        assert group == "hosts" and given.is_contiguous()
        self.calls.append("all_gather")
        for rank, part in enumerate(parts):
            part.copy_(given + 10 * (rank - 1))


def test_what_is_on_the_hosts_goes_from_host_to_host(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Hosts(None)
    monkeypatch.setattr(hf_cgd.distributed.communication, "dist", group)
    communication = ProcessGroupCommunication(torch.device("cuda"), timedelta(hours=2))
    own = torch.tensor([3, 0, 4, 0])[::2]
    assert communication.gather(own).tolist() == [-7, -6, 3, 4]
    assert communication.sum(own).tolist() == [6, 8] and own.tolist() == [3, 4]
    assert group.calls == ["new group of gloo, 2:00:00", "all_gather", "all_reduce"]


def test_any_other_failure_of_a_collective_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_cgd.distributed.communication, "dist", Group("Connection closed by peer"))
    with pytest.raises(RuntimeError, match="Connection closed"):
        ProcessGroupCommunication(torch.device("cpu")).sum_scattered(torch.zeros(2, 1))
