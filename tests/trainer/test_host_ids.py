"""Group ids that stay on the host while the batch goes to a device."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_cgd.data.groups import UNCOUNTED
from hf_cgd.distributed.communication import Communication
from hf_cgd.models.heads import CausalLMHead, ExampleHead
from hf_cgd.trainer.host_ids import HOST_IDS, HostIds, HostIdsCollator

HEAD = ExampleHead(has_classes=True)
IDS, LABELS = torch.tensor([0, 2, 1]), torch.tensor([1, -100, 0])


def host_ids() -> HostIds:
    return HostIds(Communication(), torch.device("cuda"))


def batch_of(has_classes: bool = True, labels: Tensor = LABELS) -> dict[str, object]:
    collator = HostIdsCollator(
        lambda rows: {"group": IDS, "labels": labels}, "group", ["labels"], ExampleHead(has_classes)
    )
    return collator([{}])


def test_the_collator_keeps_the_ids_as_an_array_without_those_of_unlabelled_examples() -> None:
    kept = batch_of()[HOST_IDS]
    assert isinstance(kept, np.ndarray)
    assert kept.tolist() == [0, UNCOUNTED, 1]
    assert batch_of(has_classes=False)[HOST_IDS].tolist() == [0, 2, 1]


def test_a_batch_gives_its_copy_on_the_host() -> None:
    batch = batch_of()
    ids = host_ids()
    found = ids.of(batch, "group", LABELS, HEAD)
    assert found is not None and found.tolist() == [0, UNCOUNTED, 1]
    assert np.shares_memory(found.numpy(), batch[HOST_IDS])
    ids.require_same()


def test_without_a_copy_or_with_one_of_another_size_the_ids_of_the_batch_are_taken() -> None:
    batch = {"group": IDS, HOST_IDS: np.array([0, 0])}
    for taken in (batch, {"group": IDS}):
        found = host_ids().of(taken, "group", LABELS, HEAD)
        assert found is not None and found.tolist() == [0, UNCOUNTED, 1]
    assert host_ids().of({}, "group", LABELS, HEAD) is None


def test_ids_that_were_changed_on_their_way_are_an_error_at_the_next_log_entry() -> None:
    ids = host_ids()
    ids.of(batch_of() | {"group": IDS.flip(0)}, "group", LABELS, HEAD)
    ids.of(batch_of(), "group", LABELS, HEAD)
    with pytest.raises(ValueError, match="changed after the collator"):
        ids.require_same()
    ids.require_same()


def test_a_row_without_a_label_on_any_token_counts_for_nothing() -> None:
    labels = torch.tensor([[7, -100, 4], [7, -100, -100], [-100, 3, -100]])
    collator = HostIdsCollator(lambda rows: {"group": IDS, "labels": labels}, "group", ["labels"], CausalLMHead())
    kept = collator([{}])[HOST_IDS]
    assert isinstance(kept, np.ndarray) and kept.tolist() == [0, UNCOUNTED, 1]


@pytest.mark.parametrize(("device", "wanted"), [("cpu", False), ("cuda", True), ("mps", True), ("xla", False)])
def test_copies_are_kept_where_a_step_would_wait_for_the_ids(device: str, wanted: bool) -> None:
    assert HostIds(Communication(), torch.device(device)).keeps_copies == wanted
