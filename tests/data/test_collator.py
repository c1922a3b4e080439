"""Group ids follow the rows through any collator; where they cannot, it is refused."""

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, DataCollatorWithFlattening, default_data_collator

from hf_cgd.data.collator import GroupCollator, SubgroupCollator
from hf_cgd.data.groups import GroupInfo

Rows = list[Any]
GROUPS = GroupInfo(["air", "land", "water"], columns=["group"])


def rows_of(size: int = 12, seed: int = 0) -> Rows:
    """Rows of 1 to 6 tokens; the first token is the row's own, so that a batch tells which row is which."""
    random = np.random.default_rng(seed)
    return [
        {"input_ids": [100 + i, *random.integers(1, 9, random.integers(0, 6)).tolist()], "labels": int(i % 2),
         "group": GROUPS.names[random.integers(3)], "text": "x" * int(random.integers(1, 6)) + f" {i}"}
        for i in range(size)
    ]  # fmt: skip


def padded(rows: Rows, left: bool = False) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    fill = [[0] * (width - len(row["input_ids"])) for row in rows]
    ids = [[*f, *row["input_ids"]] if left else [*row["input_ids"], *f] for row, f in zip(rows, fill, strict=True)]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor([row["labels"] for row in rows])}


def by_length(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: -len(row["input_ids"]))


def tokenized(rows: Rows) -> dict[str, torch.Tensor]:
    """Nothing but the labels is a column of the rows."""
    width = max(len(row["text"]) for row in rows)
    return {
        "codes": torch.tensor([[ord(c) for c in row["text"].ljust(width)] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def named_labels(rows: Rows) -> dict[str, torch.Tensor]:
    batch = tokenized([{**row, "labels": 0} for row in rows])
    return {**batch, "labels": torch.tensor([{"no": 0, "yes": 1}[row["answer"]] for row in rows])}


def noisy(rows: Rows) -> dict[str, torch.Tensor]:
    batch = padded(rows)
    return {"pixels": torch.rand(len(rows), 3), "first": batch["input_ids"][:, 0] * 0, "labels": batch["labels"]}


def collators() -> dict[str, Callable[[Rows], Any]]:
    """Each also tells the row of each entry of its batch, by the first token or the end of the text."""
    return {
        "in order": padded,
        "backwards": lambda rows: padded(rows[::-1]),
        "by length": lambda rows: padded(by_length(rows)),
        "padded on the left": lambda rows: padded(by_length(rows), left=True),
        "filtered": lambda rows: padded([row for row in rows if len(row["input_ids"]) > 2]),
        "doubled": lambda rows: padded([row for row in rows for _ in (0, 1)]),
        "two views": lambda rows: padded([*rows, *rows]),
        "filtered, doubled and turned": lambda rows: padded([*rows[1:], *rows[1:]][::-1]),
        "an object": lambda rows: BatchEncoding(padded(rows[::-1])),
        "arrays": lambda rows: {name: value.numpy() for name, value in padded(rows[::-1]).items()},
        "tokenized": tokenized,
        "tokenized, by length": lambda rows: tokenized(sorted(rows, key=lambda row: -len(row["text"]))),
        "tokenized, doubled": lambda rows: tokenized([*rows, *rows]),
        "keeps the column": lambda rows: {
            **tokenized(rows[::-1]), "group": torch.tensor([row["group"] for row in rows[::-1]])
        },
    }  # fmt: skip


def wrapped(collator: Callable[[Rows], Any], **options: Any) -> GroupCollator:
    return GroupCollator(collator, GROUPS, batch_key="group", group_columns=["group"], **options)


def own_rows(batch: Any) -> list[int]:
    """Numbers of the rows of a batch, read from what the rows hold."""
    if "input_ids" in batch:
        return [int(max(row)) - 100 for row in np.asarray(batch["input_ids"])]
    texts = ["".join(map(chr, row)) for row in np.asarray(batch["codes"])]
    return [int(text.split()[-1]) for text in texts]


@pytest.mark.parametrize("in_group_order", [False, True])
@pytest.mark.parametrize("name", collators())
def test_ids_follow_the_rows(name: str, in_group_order: bool) -> None:
    collator = wrapped(collators()[name], in_group_order=in_group_order)
    for seed in range(6):
        rows = rows_of(seed=seed)
        batch = collator(rows)
        assert batch["group"].dtype == torch.int64
        assert [GROUPS.names[i] for i in batch["group"]] == [rows[row]["group"] for row in own_rows(batch)]
        assert "group" in rows[0] and isinstance(rows[0]["group"], str)


@pytest.mark.parametrize("name", [name for name in collators() if name != "keeps the column"])
def test_memberships_follow_the_rows(name: str) -> None:
    collator = SubgroupCollator(
        collators()[name], GroupInfo(["a", "b"], columns=["a", "b"]), batch_key="ids", group_columns=["a", "b"]
    )
    rows = [{**row, "a": i % 3 == 0, "b": int(i % 4 == 0)} for i, row in enumerate(rows_of())]
    batch = collator(rows)
    assert batch["ids"].tolist() == [[int(rows[i]["a"]), rows[i]["b"]] for i in own_rows(batch)]


def test_labels_that_the_collator_names() -> None:
    rows = [{**row, "answer": ("no", "yes")[row["labels"]]} for row in rows_of()]
    batch = GroupCollator(named_labels, GROUPS, batch_key="g", group_columns=["group"], labels=["answer"])(rows)
    assert [GROUPS.names[i] for i in batch["g"]] == [row["group"] for row in rows]


def test_what_cannot_be_recognised_is_refused_with_the_remedy() -> None:
    def shuffled(rows: Rows) -> Any:
        rows = [{**rows[i], "answer": "yes"} for i in np.random.permutation(len(rows))]
        return {"noise": torch.rand(len(rows), 4), "labels": torch.ones(len(rows), dtype=torch.int64)}

    with pytest.raises(ValueError, match=r"shuffled made a batch of 12 of 12 rows.*Have it keep the column 'group'"):
        wrapped(shuffled)([{key: row[key] for key in ("text", "group")} for row in rows_of()])
    same = [{**row, "group": "land"} for row in rows_of()]
    assert wrapped(shuffled)(same)["group"].tolist() == [1] * 12


def test_a_random_collator_draws_what_it_would_draw() -> None:
    torch.manual_seed(3)
    plain = [noisy(rows_of())["pixels"] for _ in range(5)]
    torch.manual_seed(3)
    collator = wrapped(noisy)
    for expected in plain:
        batch = collator(rows_of())
        assert torch.equal(batch["pixels"], expected)
        assert [GROUPS.names[i] for i in batch["group"]] == [row["group"] for row in rows_of()]


def test_a_collator_that_stops_keeping_the_order_is_noticed() -> None:
    calls = []

    def sometimes(rows: Rows) -> Any:
        calls.append(0)
        rows = rows if len({len(row["text"]) for row in rows}) == 1 else rows[::-1]
        return tokenized(rows)

    collator = wrapped(sometimes)
    even = [{**row, "text": f"a {i:02d}"} for i, row in enumerate(rows_of())]
    for _ in range(5):
        assert [GROUPS.names[i] for i in collator(even)["group"]] == [row["group"] for row in even]
    assert len(calls) == 5 + 2 * 3, "called again in the first three batches only"
    batch = collator(rows_of())
    assert [GROUPS.names[i] for i in batch["group"]] == [rows_of()[row]["group"] for row in own_rows(batch)]


RELABELLED: dict[str, Callable[[int], int]] = {
    "two of many": lambda label: int(label > 3),
    "cut": lambda label: min(label, 1),
    "odd or even": lambda label: label % 2,
    "counted from the end": lambda label: 11 - label,
    "moved on": lambda label: (label + 1) % 12,
    "one for all": lambda label: 0,
}


@pytest.mark.parametrize("name", RELABELLED)
@pytest.mark.parametrize("batch_of", [padded, tokenized, lambda rows: padded(rows[::-1])])
def test_labels_that_the_collator_makes_anew_take_no_row_for_another(name: str, batch_of: Callable[..., Any]) -> None:
    """All rows with other labels; the new ones are some rows' old ones. Inputs or a second call tell the rows."""

    def collator(rows: Rows) -> Any:
        return batch_of([{**row, "labels": RELABELLED[name](row["labels"])} for row in rows])

    rows = [{**row, "labels": i} for i, row in enumerate(rows_of())]
    for size in (12, 2, 5):
        batch = wrapped(collator)(rows[:size])
        assert [GROUPS.names[i] for i in batch["group"]] == [rows[row]["group"] for row in own_rows(batch)]


@pytest.mark.parametrize("same", [False, True])
def test_rows_that_are_joined_into_one_are_refused(same: bool) -> None:
    """Also those of one group: their loss would count as one example's."""

    def joined(rows: Rows, cut: int = 0) -> Any:
        names = ("input_ids", "labels")
        return {name: torch.tensor([[one for row in rows for one in row[name]][cut:]]) for name in names}

    rows = [{"input_ids": [i] * i, "labels": [-100] + [i] * (i - 1), "group": row["group"]}
            for i, row in enumerate(rows_of(), start=2)]  # fmt: skip
    rows = [{**row, "group": rows[0]["group"]} for row in rows] if same else rows
    with pytest.raises(ValueError, match=rf"joined joins the {len(rows)} rows of a batch into one.*that pads"):
        wrapped(joined)(rows)
    # Labels may be made by the collator alone.
    unlabelled = [{"input_ids": row["input_ids"], "group": row["group"]} for row in rows]
    with pytest.raises(ValueError, match=rf"joins the {len(rows)} rows of a batch into one.*that pads"):
        wrapped(DataCollatorWithFlattening())(unlabelled)
    assert len(wrapped(joined)(rows[:1])["group"]) == 1
    if not same:
        with pytest.raises(ValueError, match=r"made a batch of 1 of \d+ rows.*does not show which row is which"):
            wrapped(partial(joined, cut=1))(rows)


def test_soft_targets_have_the_group_of_the_first_image() -> None:
    def mixed(rows: Rows, share: float, turned: bool = False) -> Any:
        own = torch.nn.functional.one_hot(torch.tensor([row["labels"] for row in rows]), 3).float()
        batch = {"x": torch.rand(len(rows), 2), "labels": share * own + (1 - share) * own.roll(1, 0)}
        return {name: value.roll(1, 0) for name, value in batch.items()} if turned else batch

    rows = [{**row, "labels": i % 3} for i, row in enumerate(rows_of())]
    for share in (0.7, 0.2):
        batch = wrapped(partial(mixed, share=share))(rows)
        assert [GROUPS.names[i] for i in batch["group"]] == [row["group"] for row in rows]
    with pytest.raises(ValueError, match="does not show which row is which"):
        wrapped(partial(mixed, share=0.7, turned=True))([*rows[:-1], {**rows[-1], "labels": 1}])


@dataclass
class Features:
    input_ids: list[int]
    labels: int
    group: str


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, BatchEncoding, Features])
def test_rows_of_any_kind(kind: Any) -> None:
    plain = [{"input_ids": [i, i + 1], "labels": i % 2, "group": GROUPS.names[i % 3]} for i in range(6)]
    rows = [Features(**row) if kind is Features else kind(row) for row in plain]
    batch = wrapped(default_data_collator)(rows)
    assert batch["group"].tolist() == [0, 1, 2, 0, 1, 2] and batch["input_ids"][:, 0].tolist() == list(range(6))
    assert (rows[1].group if kind is Features else rows[1]["group"]) == "land"


def test_rows_that_are_none() -> None:
    rows: Rows = rows_of()
    rows[5] = None
    batch = wrapped(lambda given: padded([row for row in given if row is not None]))(rows)
    assert [GROUPS.names[i] for i in batch["group"]] == [row["group"] for row in rows if row is not None]

    def filled(given: Rows) -> Any:
        return {"group": torch.tensor([-1 if row is None else row["group"] for row in given])}

    with pytest.raises(ValueError, match="a row of which the dataset gave None"):
        wrapped(filled)(rows)


def test_a_batch_that_is_no_mapping() -> None:
    with pytest.raises(ValueError, match=r"a mapping of names to tensors \(a dict\), got tuple"):
        wrapped(lambda rows: (torch.zeros(2), torch.zeros(2)))(rows_of())


@pytest.mark.parametrize("name", ["group", "group_ids"])
def test_a_batch_without_rows_is_refused(name: str) -> None:
    def drops_all(rows: Rows) -> dict[str, torch.Tensor]:
        return {key: torch.tensor([row[key] for row in rows][:0]) for key in ("labels", name) if key in rows[0]}

    collator = GroupCollator(drops_all, GROUPS, batch_key="group_ids", group_columns=["group"])
    with pytest.raises(ValueError, match="a batch without rows of 12 examples.*dataset.filter"):
        collator(rows_of())
