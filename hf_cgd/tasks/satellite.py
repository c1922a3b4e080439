"""Satellite images of eight bands: read from .npz files, and changed at random in training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

SatelliteAugmentation = Literal["none", "wilds1.2", "flips_and_jitter"]
"""Of training images, see `augmented`."""
SATELLITE_AUGMENTATIONS: tuple[SatelliteAugmentation, ...] = get_args(SatelliteAugmentation)
BANDS = ("blue", "green", "red", "swir1", "swir2", "temperature", "nir", "nightlights")
RED_GREEN_BLUE = [BANDS.index(name) for name in ("red", "green", "blue")]
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


def augmented(image: Tensor, kind: SatelliteAugmentation, means: Tensor, deviations: Tensor) -> Tensor:
    """An image changed at random, by torch's random numbers.

    "flips_and_jitter" mirrors all bands together and changes the colours of the visible bands as reflectances in
    [0, 1], in which they are clipped. "wilds1.2" is what the examples of WILDS 1.2 do to the *normalised* values of
    the visible bands, in steps of an 8-bit image: 255 x is cut to a whole number and taken modulo 256, the result
    lies in [0, 1] and is not normalised again, and only these three bands are mirrored. So training images differ
    from those of an evaluation; the numbers of the paper were had this way.

    Args:
        image: float32 [8, H, W], normalised.
        kind: "none" gives the image as it is.
        means, deviations: [3] of red, green and blue, by which they were normalised.
    """
    if kind == "none":
        return image
    from torchvision.transforms import v2

    flips: list[Any] = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    image = image.clone() if kind == "wilds1.2" else v2.Compose(flips)(image)
    visible = image[RED_GREEN_BLUE]
    if kind == "wilds1.2":
        eight_bits = (visible * 255).to(torch.int64).remainder(256).to(torch.uint8)
        steps = v2.Compose([*flips, v2.ColorJitter(**JITTER), v2.ToDtype(torch.float32, scale=True)])
        image[RED_GREEN_BLUE] = steps(eight_bits)
    else:
        scale, shift = deviations[:, None, None], means[:, None, None]
        reflectances = (visible * scale + shift).clamp(0, 1)
        image[RED_GREEN_BLUE] = (v2.ColorJitter(**JITTER)(reflectances) - shift) / scale
    return image
