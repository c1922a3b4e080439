"""From a file to the numbers that a network is given, in the workers of a loader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from datasets import Dataset, DatasetDict
from datasets import Image as ImageFeature
from PIL import ExifTags, Image
from tiny import predicts_one_class
from torch.utils.data import DataLoader, default_collate

from hf_cgd.cli import image_classifier
from hf_cgd.cli.task_recipe import scale_of
from hf_cgd.data.columns import read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.image_preparation import ImagePreparation
from hf_cgd.data.image_reading import with_pixels
from hf_cgd.data.images import opened_image
from hf_cgd.models.batch_norm import freeze_batch_norm
from hf_cgd.tasks import build_task


def picture(height: int, width: int) -> Image.Image:
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def normalised(image: Image.Image, mean: Any = (0.485, 0.456, 0.406), std: Any = (0.229, 0.224, 0.225)) -> np.ndarray:
    values = np.asarray(image, dtype=np.float64) / 255
    return ((values - mean) / std).transpose(2, 0, 1)


# By PIL alone, as the papers' code says it.
BY_HAND: dict[str, tuple[tuple[int, int], Callable[[Image.Image], Image.Image]]] = {
    # The whole picture to a square of 256, whatever its shape, and its centre.
    "waterbirds": ((300, 400), lambda image: image.resize((256, 256), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))),
    # The centre of 178 x 218, brought to 224.
    "celeba": ((218, 178), lambda image: image.crop((0, 20, 178, 198)).resize((224, 224), Image.Resampling.BILINEAR)),
    "fmow": ((224, 224), lambda image: image),
    "camelyon17": ((96, 96), lambda image: image),
}  # fmt: skip
# CelebA is a task of its own; its steps are those of group_DRO.
STEPS = {
    "celeba": ImagePreparation(first_crop=178, resize=(224, 224)),
    **{name: build_task(name).image_preparation("paper") for name in ("waterbirds", "fmow", "camelyon17")},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_steps_of_each_task(name: str) -> None:
    size, by_hand = BY_HAND[name]
    image = picture(*size)
    for training in (True, False):
        prepared = STEPS[name].steps(training)(image)
        assert prepared.dtype == torch.float32
        np.testing.assert_allclose(prepared, normalised(by_hand(image)), atol=2.1 / 255 / 0.224)


def test_scale_of_the_backbone() -> None:
    """Its mean and deviation are those of its published weights, not always ImageNet's."""
    for name in ("resnet18", "vit_tiny_patch16_224"):
        _, processor = image_classifier(name, ["a", "b"], pretrained=False)
        published = timm.get_pretrained_cfg(name)
        mean, std = scale_of(processor)
        assert (tuple(mean), tuple(std)) == (published.mean, published.std)
    # The last one's is a half.
    np.testing.assert_allclose(
        ImagePreparation().steps(False, mean, std)(picture(4, 4)),
        normalised(picture(4, 4), (0.5,) * 3, (0.5,) * 3),
        atol=1e-6,
    )


def test_random_parts_keep_the_size() -> None:
    steps = ImagePreparation(resize=(256, 256), crop=224, augmentation="crop_flip").steps(training=True)
    first, second = steps(picture(300, 400)), steps(picture(300, 400))
    assert first.shape == second.shape == (3, 224, 224) and not torch.equal(first, second)
    with pytest.raises(ValueError, match="needs to know the size: set crop or resize"):
        ImagePreparation(augmentation="crop_flip").steps(training=True)


@pytest.fixture
def splits(tmp_path: Path) -> DatasetDict:
    """16 pictures in files, of two classes and two places."""
    rows = []
    for number in range(16):
        path = tmp_path / f"{number}.jpg"
        Image.fromarray(np.full((40, 40, 3), 15 * number, dtype=np.uint8)).save(path)
        rows.append({"image": str(path), "label": number % 2, "place": "land" if number < 9 else "water", "note": "x"})
    data = Dataset.from_list(rows).cast_column("image", ImageFeature())
    return DatasetDict(train=data, validation=data)


def read(splits: DatasetDict, side: int = 32) -> DatasetDict:
    preparation = ImagePreparation(resize=(side, side))
    return with_pixels(splits, "image", opened_image, preparation.steps, ["label", "place"])


def test_workers_give_what_the_process_gives(splits: DatasetDict) -> None:
    rows = read(splits)["train"].remove_columns(["place"])
    batches = [list(DataLoader(rows, batch_size=4, num_workers=workers)) for workers in (0, 2)]
    assert len(batches[0]) == 4 and batches[0][0].keys() == {"label", "pixel_values"}
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"]) and torch.equal(one["label"], other["label"])


def test_a_file_that_cannot_be_decoded_is_named(splits: DatasetDict) -> None:
    """When its row is read, by a worker too; its label and group are known without opening it."""
    stored = splits["train"].with_format("arrow")[5:6]["image"].to_pylist()[0]["path"]
    content = Path(stored).read_bytes()
    Path(stored).write_bytes(content[: len(content) // 2])
    rows = read(splits)["train"]
    assert GroupInfo.from_columns(read_columns(rows, ["place"])).counts == (9, 7)
    with pytest.raises(ValueError, match=r"5.jpg: expected an image, but it cannot be decoded"):
        rows[5]
    with pytest.raises(ValueError, match=r"5.jpg: expected an image"):
        list(DataLoader(rows.remove_columns(["place"]), batch_size=8, num_workers=1))
    Path(stored).unlink()
    with pytest.raises(FileNotFoundError):
        rows[5]


@predicts_one_class
@pytest.mark.parametrize("kind", ["raw", "wrapped"])
def test_raw_and_wrapped_networks_train_alike(kind: str, splits: DatasetDict, trainer: Any) -> None:
    """From files to weights of groups, opened in a worker; the bare network in a plain loop is the twin."""
    torch.manual_seed(0)
    model = image_classifier("test_resnet", ["a", "b"], pretrained=False)[0]
    network = model.timm_model
    freeze_batch_norm(network)
    twin = timm.create_model("test_resnet", num_classes=2)
    twin.load_state_dict(network.state_dict())
    freeze_batch_norm(twin)
    rows = read(splits, 64)
    options = {
        "objective": "erm",
        "group_column": "place",
        "remove_unused_columns": False,
        "max_steps": 2,
        "learning_rate": 0.01,
    }
    options |= {"dataloader_num_workers": 1, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
    run = trainer(
        options,
        model=model if kind == "wrapped" else network,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
    )
    run.train()
    batch = default_collate(
        [{name: rows["train"][row][name] for name in ("pixel_values", "label")} for row in range(16)]
    )
    optimizer = torch.optim.SGD(twin.train().parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(twin(batch["pixel_values"]), batch["label"]).backward()
        optimizer.step()
    for name, weight in twin.state_dict().items():
        torch.testing.assert_close(network.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
    assert run.evaluate()["eval_group_count/land"] == 9


@pytest.mark.parametrize("form", ["jpg", "png", "tiff"])
def test_photos_are_turned_as_datasets_turns_them(tmp_path: Path, form: str) -> None:
    """A camera that is held upright stores a picture that lies on its side, and a note (EXIF) that says so."""
    values = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    for orientation in range(1, 9):
        notes = Image.Exif()
        notes[ExifTags.Base.Orientation] = orientation
        path = tmp_path / f"{orientation}.{form}"
        Image.fromarray(values).save(path, exif=notes)
        expected = ImageFeature().decode_example({"path": str(path), "bytes": None}).convert("RGB")
        assert expected.size == ((6, 4) if orientation < 5 else (4, 6))
        for value in (str(path), {"path": None, "bytes": path.read_bytes()}, Image.open(path)):
            assert np.array_equal(np.asarray(opened_image(value)), np.asarray(expected))
