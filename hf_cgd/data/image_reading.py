"""Images of a dataset as `pixel_values`, opened when a row is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from datasets import Dataset, DatasetDict


@dataclass(frozen=True)
class ImageReader:
    """A transform of `datasets`: of a batch of rows, `pixel_values` and the columns that are kept.

    Attributes:
        column: of the images.
        open_image: from a value of that column to an image.
        steps: from that to float32 [channels, H, W], all of the same size.
        kept: further columns that the batch shall have, where there are any.
    """

    column: str
    open_image: Callable[[Any], Any]
    steps: Callable[[Any], torch.Tensor]
    kept: Sequence[str] = ()

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, Any]:
        """The batch that a loader gets."""
        batch: dict[str, Any] = {name: rows[name] for name in self.kept if name in rows}
        if self.column in rows:
            batch["pixel_values"] = torch.stack([self.steps(self.open_image(value)) for value in rows[self.column]])
        return batch


def with_pixels(
    splits: DatasetDict,
    column: str,
    open_image: Callable[[Any], Any],
    steps: Callable[[bool], Callable[[Any], torch.Tensor]],
    kept: Sequence[str],
) -> DatasetDict:
    """The splits with `pixel_values` on reading, in the workers of a loader; nothing is opened before.

    Args:
        steps: of training images (True) and of others (False); see `ImageReader` for the rest.
    """
    readers = {training: ImageReader(column, open_image, steps(training), kept) for training in (True, False)}
    return DatasetDict(
        {name: undecoded(rows, column).with_transform(readers[name == "train"]) for name, rows in splits.items()}
    )


def undecoded(rows: Dataset, column: str) -> Dataset:
    """Images as they are stored: who opens them can say which file was bad."""
    if isinstance(rows.features[column], datasets.Image):
        return rows.cast_column(column, datasets.Image(decode=False))
    return rows
