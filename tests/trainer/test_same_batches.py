"""What one process meets while it reads its batches ends all of them, with its words: none waits for ever.

One launch of two processes, each of which notes how its runs ended. A process that waited would stop the launch.
"""

import json

import pytest
import torch
from failing_processes import SENTENCE
from paths import SUPPORT
from programs import run_together

from hf_cgd.distributed.communication import Communication
from hf_cgd.trainer.same_batches import SameBatches


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("failing")
    run_together(2, SUPPORT / "failing_processes.py", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failing", "kind", "words"),
    [
        ("unknown group", 0, "ValueError", "belongs to group '7', which is not one of the known groups"),
        ("unknown group, own shards", 1, "ValueError", "belongs to group '7', which is not one of the known groups"),
        ("broken row", 1, "OSError", SENTENCE),
        ("broken row, accumulated", 0, "OSError", SENTENCE),
        ("no label", 1, "ValueError", "No example of the batch has a label"),
        ("bad weight, erm", 1, "ValueError", "expected finite numbers > 0, got 0.0 (row 2)"),
        ("bad weight", 0, "ValueError", "expected finite numbers > 0, got 0.0 (row 2)"),
        ("bad reference", 1, "ValueError", "expected finite reference losses, got nan (row 2)"),
        ("changed ids", 1, "ValueError", "were changed after the collator made it"),
        ("broken row, evaluation", 0, "OSError", SENTENCE),
    ],
)
def test_both_processes_end_with_the_words_of_the_one_that_failed(
    ends: list[dict[str, str]], name: str, failing: int, kind: str, words: str
) -> None:
    own, other = ends[failing][name], ends[1 - failing][name]
    assert own.startswith(f"{kind}: ") and words in own
    assert other.startswith("RuntimeError: The batches could not be read") and words in other
    assert f"process {failing}: {kind}" in other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("uneven batches", r"[5, 4] batches in an epoch"),
        ("uneven shards", r"[1, 0] batches left for a step"),
        ("uneven shards, accumulated", r"[2, 0] batches left for a step"),
    ],
)
def test_other_numbers_of_batches_are_refused_by_both(ends: list[dict[str, str]], name: str, numbers: str) -> None:
    """51 rows in batches of 6 are nine batches, of which one process has five; shards have 48 rows and 24."""
    for end in ends:
        assert end[name].startswith(f"ValueError: The processes have {numbers}") and "dispatch_batches" in end[name]


@pytest.mark.slow
def test_evaluations_that_would_miss_rows_are_refused_by_both(ends: list[dict[str, str]]) -> None:
    """13 rows in batches of 2 on two processes are three whole rounds and one row."""
    for end in ends:
        assert end["uneven batches, evaluation"].startswith("ValueError: 13 rows are evaluated on 2 processes")
        assert "expected a multiple of 4 rows" in end["uneven batches, evaluation"]
        assert end["gathered as objects"].startswith("ValueError: eval_use_gather_object=True")
        assert end["even batches, evaluation"] == "finished"


@pytest.mark.slow
def test_streams_without_trouble_finish(ends: list[dict[str, str]]) -> None:
    for end in ends:
        assert end["a stream of several epochs"] == end["own shards of several epochs"] == "finished"


def test_a_single_process_asks_nobody() -> None:
    def refused(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nobody is there")

    same = SameBatches(Communication(refused), asks=True)
    assert same.take(iter("abc"), 2) == ["a", "b"] and same.take(iter(()), 2) == []
