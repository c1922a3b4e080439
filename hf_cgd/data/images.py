"""Images of any mode as RGB, without loss of what their values say."""

import struct
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

DEPTH_16 = 65535


def as_rgb(image: Image.Image) -> Image.Image:
    """The image with 8 bits for each of red, green and blue; 16-bit greys are scaled, where PIL would cut them at 255.

    Raises:
        ValueError: greys of 32 bits or fractions, whose range is not known.
    """
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min(initial=0) < 0 or values.max(initial=0) > DEPTH_16:
            raise ValueError(
                f"Expected an image of 8 or 16 bits, got values from {values.min()} to {values.max()} (mode "
                f"{image.mode}). Scale the images to 8 bits when they are written."
            )
        return Image.fromarray(((values * 255 + DEPTH_16 // 2) // DEPTH_16).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError(
            "Expected an image of 8 or 16 bits, got one of fractions (mode F), whose range is not known. Scale the "
            "images to 8 bits when they are written."
        )
    if image.mode in ("La", "RGBa"):
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    return image.convert("RGB")


def opened_image(value: Any) -> Image.Image:
    """An image in RGB, the way up that its camera says (EXIF).

    Args:
        value: a path, an opened image, or what `datasets.Image(decode=False)` gives.

    Raises:
        ValueError: it cannot be decoded; the message names the file.
        FileNotFoundError: there is no such file.
    """
    if isinstance(value, Image.Image):
        return as_rgb(_upright(value))
    content = value.get("bytes") if isinstance(value, Mapping) else None
    path = value["path"] if isinstance(value, Mapping) else value
    try:
        with Image.open(path if content is None else BytesIO(content)) as image:
            image.load()
            return as_rgb(_upright(image))
    except FileNotFoundError:
        raise
    except (OSError, SyntaxError) as error:
        raise ValueError(
            f"{path}: expected an image, but it cannot be decoded ({error}). Fetch the file again."
        ) from error


def _upright(image: Image.Image) -> Image.Image:
    """The image as the camera was held, which `datasets` and viewers turn as well; as it is where nothing tells."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except (SyntaxError, ValueError, struct.error):
        # Broken notes about an image do not make it a broken image.
        return image
    return ImageOps.exif_transpose(image) if turned else image
