"""Images of any mode as RGB, without loss of what their values say."""

import numpy as np
from PIL import Image

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
