"""From the rows of a table to what a network takes: texts as tokens, images as pixels."""

from collections.abc import Sequence
from typing import Any

import datasets
from datasets import Dataset, DatasetDict

from hf_cgd.data.images import opened_image


def tokenized(splits: DatasetDict, columns: Sequence[str], tokenizer: Any, max_length: int) -> DatasetDict:
    """The splits with the tokens of one column of texts, or of two as pairs; longer ones are cut."""
    return splits.map(
        lambda rows: tokenizer(*(rows[column] for column in columns), truncation=True, max_length=max_length),
        batched=True,
    )


def with_pixel_values(rows: Dataset, column: str, kept: Sequence[str], processor: Any) -> Dataset:
    """Rows whose images are opened when they are read; one that cannot be is named then.

    Args:
        rows: with a column of images.
        column: its name.
        kept: further columns that a batch shall have, where there are any.
        processor: of the network.
    """

    def read(batch: dict[str, list[Any]]) -> dict[str, Any]:
        found = {name: batch[name] for name in kept if name in batch}
        if column not in batch:
            return found
        return {**processor([opened_image(value) for value in batch[column]], return_tensors="pt"), **found}

    if isinstance(rows.features[column], datasets.Image):
        rows = rows.cast_column(column, datasets.Image(decode=False))
    return rows.with_transform(read)
