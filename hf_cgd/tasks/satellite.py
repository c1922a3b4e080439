"""Satellite images of eight bands: read from .npz files, and changed at random in training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from hf_cgd.data.image_preparation import IMAGENET_MEAN, IMAGENET_STD, ImagePreparation

SatelliteAugmentation = Literal["none", "wilds1.2", "flips_and_jitter"]
"""Of training images, see `SatellitePreparation`."""
SATELLITE_AUGMENTATIONS: tuple[SatelliteAugmentation, ...] = get_args(SatelliteAugmentation)
BANDS = ("blue", "green", "red", "swir1", "swir2", "temperature", "nir", "nightlights")
RED_GREEN_BLUE = [BANDS.index(name) for name in ("red", "green", "blue")]
MEANS, DEVIATIONS = torch.tensor([0.104145, 0.088619, 0.059183]), torch.tensor([0.051458, 0.03188, 0.022926])
"""Of the reflectances of red, green and blue, by which the images were normalised."""
JITTER: Mapping[str, float] = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.1}


def read_bands(value: Any) -> Tensor:
    """Float32 [8, H, W] of the path of a .npz file whose array is called "x", or of nested lists.

    Raises:
        ValueError: it cannot be read, or is of another shape; the message names the file.
        FileNotFoundError: there is no such file.
    """
    where = value if isinstance(value, str) else "image"
    if isinstance(value, str):
        try:
            with np.load(value) as file:
                value = file["x"]
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise ValueError(
                f"{where}: expected a .npz file with an array 'x', but it cannot be read ({error}). Fetch the file "
                "again."
            ) from error
    array = np.array(value, dtype=np.float32)
    if array.ndim != 3 or len(array) != len(BANDS):
        raise ValueError(
            f"{where}: expected an image of {len(BANDS)} bands, [{len(BANDS)}, height, width], got one of shape "
            f"{list(array.shape)}."
        )
    return torch.from_numpy(array)


@dataclass(frozen=True)
class SatellitePreparation(ImagePreparation):
    """Normalised bands as they are, but for random changes of training images (by torch's random numbers).

    Attributes:
        changes: "flips_and_jitter" mirrors all bands together and changes the colours of the visible bands as
            reflectances, which it clips to [0, 1]. "wilds1.2" is what the examples of WILDS 1.2 do to the *normalised*
            visible bands, in steps of an image of 8 bits: 255 x is cut to a whole number and taken modulo 256, the
            result lies in [0, 1] and is not normalised again, and these three bands alone are mirrored. So training
            images are unlike those of an evaluation; the paper's numbers were had this way. WILDS 2.0 has "none".
    """

    changes: SatelliteAugmentation = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.changes not in SATELLITE_AUGMENTATIONS:
            raise ValueError(f"changes must be one of {SATELLITE_AUGMENTATIONS}, got {self.changes!r}.")

    def steps(
        self, training: bool, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
    ) -> Callable[[Any], Tensor]:
        """A function from float32 [8, H, W] to the same; mean and std of pictures are not for these bands."""
        if not training or self.changes == "none":
            return _unchanged
        try:
            from torchvision.transforms import v2
        except ImportError as error:
            raise ImportError('Images are prepared by torchvision: pip install "hf-cgd[vision]"') from error
        flips, jitter = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()], v2.ColorJitter(**JITTER)
        if self.changes == "wilds1.2":
            return _OfVisible(v2.Compose([*flips, jitter, v2.ToDtype(torch.float32, scale=True)]), _in_eight_bits)
        return v2.Compose([*flips, _OfVisible(jitter, _as_reflectances, _normalised)])


@dataclass(frozen=True)
class _OfVisible:
    """Applies a change to red, green and blue, between two changes of scale."""

    change: Callable[[Tensor], Tensor]
    before: Callable[[Tensor], Tensor]
    after: Callable[[Tensor], Tensor] | None = None

    def __call__(self, image: Tensor) -> Tensor:
        image = image.clone()
        visible = self.change(self.before(image[RED_GREEN_BLUE]))
        image[RED_GREEN_BLUE] = visible if self.after is None else self.after(visible)
        return image


def _unchanged(image: Tensor) -> Tensor:
    return image


def _in_eight_bits(visible: Tensor) -> Tensor:
    return (visible * 255).to(torch.int64).remainder(256).to(torch.uint8)


def _as_reflectances(visible: Tensor) -> Tensor:
    return (visible * DEVIATIONS[:, None, None] + MEANS[:, None, None]).clamp(0, 1)


def _normalised(visible: Tensor) -> Tensor:
    return (visible - MEANS[:, None, None]) / DEVIATIONS[:, None, None]
