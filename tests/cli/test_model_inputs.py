"""What a network is given of images: what its processor says, and random parts of it in training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from datasets import Image as ImageFeature
from PIL import Image
from transformers import ConvNextImageProcessor, ViTImageProcessor, set_seed

from hf_cgd import GroupRobustWarning
from hf_cgd.cli import image_classifier
from hf_cgd.cli.model_inputs import require_images, with_pixel_values
from hf_cgd.data.images import opened_image

SIDE = 32


def test_sixteen_bits_of_which_few_are_used_are_told(tmp_path: Path) -> None:
    """12 bits as scanners give them: of 4096 shades 17 are left. One image of the whole range is enough."""
    shades = np.linspace(0, 4095, 64).reshape(8, 8).astype(np.uint16)
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for path in paths:
        Image.fromarray(shades).save(path)
    rows = Dataset.from_dict({"image": paths}).cast_column("image", ImageFeature())
    with pytest.warns(GroupRobustWarning, match="in 3 of 3 of them is 4095, where 65535 is white.* leaves 17 shades"):
        require_images(DatasetDict(train=rows), "image")
    assert len(np.unique(np.asarray(opened_image(paths[0])))) == 17
    Image.fromarray(shades * 16).save(paths[1])
    require_images(DatasetDict(train=rows), "image")


PROCESSORS: dict[str, Any] = {
    "timm": lambda: image_classifier("test_resnet", ["a", "b"], pretrained=False, input_size=(3, SIDE, SIDE))[1],
    "vit": lambda: ViTImageProcessor(size={"height": SIDE, "width": SIDE}),
    "convnext": lambda: ConvNextImageProcessor(size={"shortest_edge": SIDE}),
}


def read(name: str, pixels: np.ndarray, folder: Path, augmentation: str, times: int = 1) -> torch.Tensor:
    Image.fromarray(pixels.astype(np.uint8)).save(folder / "a.png")
    rows = Dataset.from_dict({"image": [str(folder / "a.png")], "label": [1], "other": [0]})
    rows = rows.cast_column("image", ImageFeature())
    seen = with_pixel_values(rows, "image", ["label"], PROCESSORS[name](), augmentation)  # type: ignore[arg-type]
    assert set(seen[0]) == {"pixel_values", "label"}
    set_seed(0)
    return torch.cat([seen[:]["pixel_values"] for _ in range(times)])


@pytest.mark.parametrize("name", PROCESSORS)
def test_random_parts_are_scaled_as_whole_images(name: str, tmp_path: Path) -> None:
    """Of one colour all parts are the same: what the processor makes of the whole."""
    pixels = np.broadcast_to([200, 90, 10], (50, 70, 3))
    whole = read(name, pixels, tmp_path, "none")
    parts = read(name, pixels, tmp_path, "crop_flip", times=3)
    assert whole.shape == (1, 3, SIDE, SIDE)
    torch.testing.assert_close(parts, whole.expand(3, -1, -1, -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PROCESSORS)
def test_random_parts_are_large_and_half_of_them_mirrored(name: str, tmp_path: Path) -> None:
    """Brightness rises from left to right: its range is the part's width, its direction tells what is mirrored."""
    pixels = np.broadcast_to(np.linspace(0, 255, 80)[None, :, None], (80, 80, 3))
    seen = read(name, pixels, tmp_path, "crop_flip", times=60)
    assert torch.equal(seen, read(name, pixels, tmp_path, "crop_flip", times=60))
    lines = seen[:, 0].mean(dim=1)
    black, white = (read(name, np.full((40, 40, 3), value), tmp_path, "none")[0, 0, 0, 0] for value in (0, 255))
    rises = (lines[:, -1] - lines[:, 0]) / (white - black)
    # A part of 70 % of the area is 70 % as wide at least, less half a pixel at each end.
    assert rises.abs().min() > 0.7 * (1 - 2 / SIDE) - 0.02 and rises.abs().max() > 0.9
    assert len(rises.abs().unique()) > 20
    # Of 60 throws of a coin; outside of 15 to 45 is rarer than one in ten thousand.
    assert 15 <= int((rises > 0).sum()) <= 45
