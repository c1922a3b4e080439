"""Eight bands: read from files, and changed at random in training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_cgd.tasks.satellite import BANDS, DEVIATIONS, JITTER, MEANS, RED_GREEN_BLUE, SatellitePreparation, read_bands

VISIBLE, OTHERS = [0, 1, 2], [3, 4, 5, 6, 7]


def bands(side: int = 6) -> Tensor:
    """Every value of every band is another one."""
    return torch.randn(len(BANDS), side, side)


def of_each_flip(image: Tensor) -> list[Tensor]:
    return [image, image.flip(-1), image.flip(-2), image.flip(-1, -2)]


def is_one_of(image: Tensor, candidates: list[Tensor]) -> int | None:
    return next((place for place, other in enumerate(candidates) if torch.equal(image, other)), None)


def test_reading(tmp_path: Path) -> None:
    image = bands()
    np.savez_compressed(tmp_path / "a.npz", x=image.numpy())
    assert torch.equal(read_bands(str(tmp_path / "a.npz")), image)
    assert torch.equal(read_bands(image.tolist()), image)
    np.savez(tmp_path / "b.npz", x=image[:3].numpy())
    with pytest.raises(ValueError, match=r"b.npz: expected an image of 8 bands, .* got one of shape \[3, 6, 6\]"):
        read_bands(str(tmp_path / "b.npz"))
    np.savez(tmp_path / "c.npz", y=image.numpy())
    with pytest.raises(ValueError, match="c.npz: expected a .npz file with an array 'x'"):
        read_bands(str(tmp_path / "c.npz"))


@pytest.mark.parametrize("changes", ["none", "wilds1.2", "flips_and_jitter"])
def test_evaluation_images_are_left_alone(changes: Any) -> None:
    image = bands()
    assert torch.equal(SatellitePreparation(changes=changes).steps(training=False)(image), image)


def test_flips_mirror_all_bands_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four mirrorings occur; the bands that are not visible are otherwise as they were."""
    image, seen = bands(), set()
    steps = SatellitePreparation(changes="flips_and_jitter").steps(training=True)
    for _ in range(40):
        changed = steps(image)
        seen.add(is_one_of(changed[OTHERS], of_each_flip(image[OTHERS])))
        assert changed.shape == image.shape and not torch.equal(changed[VISIBLE], image[VISIBLE])
        reflectances = changed[RED_GREEN_BLUE] * DEVIATIONS[:, None, None] + MEANS[:, None, None]
        assert reflectances.min() >= -1e-6 and reflectances.max() <= 1 + 1e-6
    assert seen == {0, 1, 2, 3}
    # Without a jitter the visible bands are the same pixels, mirrored with the others.
    monkeypatch.setattr("hf_cgd.tasks.satellite.JITTER", dict.fromkeys(JITTER, 0.0))
    steps = SatellitePreparation(changes="flips_and_jitter").steps(training=True)
    for _ in range(10):
        changed = steps(image.clamp(-1, 1))
        place = is_one_of(changed[OTHERS], of_each_flip(image.clamp(-1, 1)[OTHERS]))
        assert place is not None
        torch.testing.assert_close(changed[VISIBLE], of_each_flip(image.clamp(-1, 1)[VISIBLE])[place])


def test_wilds_1_2_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit steps of the normalised visible bands, modulo 256; the others stay where they are."""
    monkeypatch.setattr("hf_cgd.tasks.satellite.JITTER", dict.fromkeys(JITTER, 0.0))
    steps = SatellitePreparation(changes="wilds1.2").steps(training=True)
    image = bands()
    # 0.5 * 255 = 127.5, cut to 127; -0.1 * 255 = -25.5, cut to -25, which is 231; 1.5 * 255 = 382.5, so 126.
    image[VISIBLE] = torch.tensor([0.5, -0.1, 1.5])[:, None, None]
    changed = steps(image)
    assert torch.equal(changed[OTHERS], image[OTHERS])
    expected = torch.tensor([127, 231, 126]) / 255
    torch.testing.assert_close(changed[VISIBLE][:, 0, 0], expected)
    # Only the three bands are mirrored.
    image = bands()
    scaled = (image * 255).long().remainder(256).float()[VISIBLE] / 255
    places = set()
    for _ in range(40):
        changed = steps(image)
        assert torch.equal(changed[OTHERS], image[OTHERS])
        place = next(p for p, other in enumerate(of_each_flip(scaled)) if torch.allclose(changed[VISIBLE], other))
        places.add(place)
    assert places == {0, 1, 2, 3}


def test_colours_reach_the_right_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jitter is given red, green, blue; the file holds blue, green, red."""
    from torchvision.transforms import v2

    class OnlyRed:
        def __init__(self, **_: Any) -> None:
            pass

        def __call__(self, visible: Tensor) -> Tensor:
            return torch.cat([torch.ones_like(visible[:1]), visible[1:]])

    monkeypatch.setattr(v2, "ColorJitter", OnlyRed)
    monkeypatch.setattr(v2, "RandomHorizontalFlip", torch.nn.Identity)
    monkeypatch.setattr(v2, "RandomVerticalFlip", torch.nn.Identity)
    image = bands().clamp(-1, 1)
    changed = SatellitePreparation(changes="flips_and_jitter").steps(training=True)(image)
    torch.testing.assert_close(changed[2], torch.full_like(changed[2], ((1 - MEANS[0]) / DEVIATIONS[0]).item()))
    torch.testing.assert_close(changed[:2], image[:2])


def test_other_changes_are_refused() -> None:
    with pytest.raises(ValueError, match="changes must be one of .*, got 'blur'"):
        SatellitePreparation(changes="blur")  # type: ignore[arg-type]
