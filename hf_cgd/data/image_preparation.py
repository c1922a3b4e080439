"""From an opened image to the numbers that a network is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

Augmentation = Literal["none", "crop_flip"]
"""Of training images: none, or a random part (70-100 % of the area) at the full size and a random mirroring."""
AUGMENTATIONS: tuple[Augmentation, ...] = get_args(Augmentation)
AREA, SHAPE = (0.7, 1.0), (0.75, 4 / 3)
"""Of the random parts: shares of the image's area, and of their height the width."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImagePreparation:
    """Steps in the order of the fields; each is left out at its default.

    Attributes:
        first_crop: side of a centred square that is cut out of the image as it is.
        resize: height and width that the image is brought to, whatever its shape.
        crop: side of a centred square that is cut out after that.
        augmentation: of training images, in place of the last crop.
        normalise: whether values in [0, 1] are brought to the mean 0 and deviation 1 of the network's data.
    """

    first_crop: int | None = None
    resize: tuple[int, int] | None = None
    crop: int | None = None
    augmentation: Augmentation = "none"
    normalise: bool = True

    def __post_init__(self) -> None:
        if self.augmentation not in AUGMENTATIONS:
            raise ValueError(f"augmentation must be one of {AUGMENTATIONS}, got {self.augmentation!r}.")

    def steps(
        self, training: bool, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
    ) -> Callable[[Any], torch.Tensor]:
        """A function from a PIL image in RGB to float32 [3, H, W].

        Args:
            training: whether to augment.
            mean, std: of the network's data, one number for each channel, of values in [0, 1].

        Raises:
            ImportError: torchvision is not installed.
        """
        try:
            from torchvision.transforms import v2
        except ImportError as error:
            raise ImportError('Images are prepared by torchvision: pip install "hf-cgd[vision]"') from error
        chain: list[Any] = [] if self.first_crop is None else [v2.CenterCrop(self.first_crop)]
        if training and self.augmentation == "crop_flip":
            side = self.crop or (self.resize[0] if self.resize else self.first_crop)
            if side is None:
                raise ValueError("augmentation='crop_flip' needs to know the size: set crop or resize.")
            chain += [v2.RandomResizedCrop(side, scale=AREA, ratio=SHAPE), v2.RandomHorizontalFlip()]
        else:
            chain += [] if self.resize is None else [v2.Resize(list(self.resize))]
            chain += [] if self.crop is None else [v2.CenterCrop(self.crop)]
        chain += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
        chain += [v2.Normalize(list(mean), list(std))] if self.normalise else []
        return v2.Compose(chain)
