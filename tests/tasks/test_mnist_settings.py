"""Noise-, Rotation- and Spurious-MNIST: groups, noise, angles and colours on images that tell who they are."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from made_files import write_mnist
from paths import RECIPES
from recipe_parts import recipe_parts

from hf_cgd.experiments import PRESETS
from hf_cgd.objectives import OBJECTIVES
from hf_cgd.tasks import build_task, mnist_settings

RECIPE = RECIPES / "mnist_settings.py"

pytestmark = pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")


def numbered(train: int = 1200, test: int = 300) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Digits whose image spells its own number in its middle: rows 13 and 14, in base 200, as 1 + the figure."""
    data = {}
    for name, size in (("train", train), ("test", test)):
        numbers = np.arange(size)
        images = np.zeros((size, 28, 28), np.uint8)
        images[:, 13, 14] = 1 + numbers // 200
        images[:, 14, 14] = 1 + numbers % 200
        data[name] = (images, (numbers % 10).astype(np.uint8))
    return data


def pixels(rows: Dataset) -> torch.Tensor:
    return torch.stack([row["pixel_values"] for row in rows])


def numbers_of(rows: Dataset) -> np.ndarray:
    """Which image of `numbered` each row shows."""
    bytes_ = (pixels(rows).amax(dim=1) * 255).round().int() - 1
    return (bytes_[:, 13, 14] * 200 + bytes_[:, 14, 14]).numpy()


def of_group(rows: Dataset, group: str) -> np.ndarray:
    return np.asarray(rows["group"][:]) == group


def splits(setting: str, **options: Any) -> Any:
    given = {"train_counts": (490, 490, 20), "validation_size": 200, **options}
    return mnist_settings.splits_of(numbered(), setting, **given)


@pytest.mark.parametrize("setting", ["noise", "spurious"])
def test_each_image_is_in_one_group_of_the_promised_size(setting: str) -> None:
    made = splits(setting)
    names = mnist_settings.GROUPS[setting]
    expected = {"train": (490, 490, 20), "validation": (68, 66, 66), "test": (102, 99, 99)}
    for name, counts in expected.items():
        assert Counter(made[name]["group"][:]) == dict(zip(names, counts, strict=True))
    assert sorted(numbers_of(made["train"])) == list(range(1000)), "the first images train"
    assert sorted(numbers_of(made["validation"])) == list(range(1000, 1200)), "the next ones validate"
    assert sorted(numbers_of(made["test"])) == list(range(300))
    again, other = (numbers_of(splits(setting, seed=seed)["train"]) for seed in (0, 1))
    assert np.array_equal(numbers_of(made["train"]), again) and not np.array_equal(again, other)


def test_published_sizes() -> None:
    assert sum(mnist_settings.TRAIN_COUNTS) == 10_000 and mnist_settings.TRAIN_COUNTS == (4900, 4900, 200)
    assert mnist_settings.evaluation_counts(10_000) == (3400, 3300, 3300)
    assert mnist_settings.evaluation_counts(2000) == (680, 660, 660)


@pytest.mark.parametrize("classes", [2, 10])
def test_noise_is_a_toss_in_the_first_training_group_only(classes: int) -> None:
    for name, rows in splits("noise", classes=classes).items():
        digits = numbers_of(rows) % 10
        truth = digits < 5 if classes == 2 else digits
        right = truth == np.asarray(rows["label"][:])
        noisy = of_group(rows, "noisy majority")
        assert right[~noisy].all()
        if name == "train":
            share = 1 / classes
            assert right[noisy].mean() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 490))
        else:
            assert right[noisy].all()
        assert len(rows.features["label"].names) == classes
        images = pixels(rows)
        assert torch.equal(images[:, 0], images[:, 1]) and torch.equal(images[:, 0], images[:, 2])


def test_colors_follow_turn_against_and_ignore_the_label() -> None:
    for rows in splits("spurious").values():
        labels = np.asarray(rows["label"][:])
        assert np.array_equal(labels, numbers_of(rows) % 10 < 5)
        images = pixels(rows)
        blue = (images[:, 2].amax(dim=(1, 2)) > 0).numpy()
        red = (images[:, 0].amax(dim=(1, 2)) > 0).numpy()
        assert images[:, 1].max() == 0 and np.array_equal(red, ~blue)
        first, second, third = (of_group(rows, name) for name in mnist_settings.GROUPS["spurious"])
        assert np.array_equal(blue[first], labels[first] == 1)
        assert np.array_equal(blue[third], labels[third] == 0)
        bound = 4 * math.sqrt(0.25 / second.sum())
        assert (blue[second] == (labels[second] == 1)).mean() == pytest.approx(0.5, abs=bound)


@pytest.mark.parametrize("degrees", [30, 60, 90])
def test_turned_keeps_the_distance_from_the_middle_and_adds_the_angle(degrees: int) -> None:
    """A 3 x 3 blot above the middle; its centre of mass turns counter-clockwise."""
    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 4:7, 13:16] = 200

    def place(one: np.ndarray) -> complex:
        """Centre of mass from the middle: x to the right, y upwards."""
        rows, columns = np.mgrid[:28, :28]
        total = one.astype(float).sum()
        return complex(((columns - 13.5) * one).sum() / total, ((13.5 - rows) * one).sum() / total)

    before, after = place(image[0].astype(float)), place(mnist_settings.turned(image, degrees)[0].astype(float))
    assert abs(after) == pytest.approx(abs(before), abs=0.1)
    assert np.degrees(np.angle(after / before)) == pytest.approx(degrees, abs=0.6)
    assert mnist_settings.turned(image, degrees).sum() == pytest.approx(image.astype(int).sum(), rel=0.02)


def test_a_quarter_turn_is_exact() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28)).astype(np.uint8)
    assert np.array_equal(mnist_settings.turned(images, 90), np.rot90(images, axes=(1, 2)))
    assert mnist_settings.turned(images, 0) is images


@pytest.mark.parametrize("classes", [2, 10])
def test_rotation_turns_each_group_by_its_angle(classes: int) -> None:
    """All images show the same bar, which points up: its direction tells the group."""
    images = np.zeros((60, 28, 28), np.uint8)
    images[:, 4:13, 13:15] = 255
    data = {name: (images, (np.arange(60) % 10).astype(np.uint8)) for name in ("train", "test")}
    made = mnist_settings.splits_of(data, "rotation", classes=classes, train_counts=(20, 15, 5), validation_size=20)
    rows, columns = torch.meshgrid(torch.arange(28) - 13.5, torch.arange(28) - 13.5, indexing="ij")
    for split in made.values():
        light = pixels(split)[:, 1]
        angles = torch.atan2(-(light * columns).sum(dim=(1, 2)), -(light * rows).sum(dim=(1, 2))).rad2deg()
        expected = [int(name.removesuffix(" degrees")) for name in split["group"][:]]
        assert angles.tolist() == pytest.approx(expected, abs=1.0)
        assert len(split.features["label"].names) == classes
    assert Counter(made["train"]["group"][:]) == {"0 degrees": 20, "30 degrees": 15, "60 degrees": 5}


@pytest.mark.parametrize(
    ("setting", "options", "message"),
    [
        ("rotations", {}, "setting must be one of 'noise', 'rotation', 'spurious', got 'rotations'"),
        ("noise", {"classes": 3}, "classes must be one of 2, 10, got 3"),
        ("spurious", {"classes": 10}, "one colour for each of two classes, got classes=10. Use classes=2"),
        ("noise", {"train_counts": (600, 400, 1)}, r"with 200 images to validate, are no more than the 1200 .* got \[600, 400, 1\]"),
        ("noise", {"train_counts": (600, 400)}, r"three groups .* got \[600, 400\]"),
        ("noise", {"train_counts": (600, 400, 0)}, "at least one image each"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(setting: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        splits(setting, **options)


def test_the_papers_grids_draw_balanced_batches_for_all_but_erm() -> None:
    """As the authors' released runs did: with replacement, all groups equally likely."""
    for name in ("colored_mnist", "mnist_settings"):
        sampling = {o: build_task(name).hyperparameters(objective=o)["group_sampling"] for o in OBJECTIVES}
        assert sampling == {o: "none" if o == "erm" else "weighted" for o in OBJECTIVES}
    for name in ("multinli", "waterbirds", "celeba"):
        grid = PRESETS[name].grid
        drawn = {(run.objective, grid.options_of(run)["group_sampling"]) for run in grid.search_runs()}
        assert drawn == {(o, "none" if o == "erm" else "weighted") for o in grid.objectives}


def test_hyperparameters() -> None:
    noise, rotation = (build_task("mnist_settings", setting=setting) for setting in ("noise", "rotation"))
    assert noise.hyperparameters(objective="cgd")["weight_decay"] == 1.0
    assert rotation.hyperparameters(objective="cgd") == build_task("colored_mnist").hyperparameters(objective="cgd")


# ---- The recipe -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "group_names"),
    [
        (["--setting", "spurious", "--objective", "cgd"], mnist_settings.GROUPS["spurious"]),
        (["--setting", "rotation", "--classes", "10", "--objective", "group_dro"], mnist_settings.GROUPS["rotation"]),
    ],
)
def test_recipe(
    options: list[str], group_names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mnist(tmp_path, ".gz", train=80, test=20)
    size = ["--data_dir", str(tmp_path), "--train_counts", "25", "25", "10", "--validation_size", "20"]
    quiet = ["--use_cpu", "--disable_tqdm", "true", "--max_steps", "2", "--report_to", "none"]
    small = ["--model", "resnet10t", "--per_device_train_batch_size", "30", "--output_dir", str(tmp_path / "runs")]
    _, _, main = recipe_parts(RECIPE)
    trainer = main([*size, *quiet, *small, *options, "--step_size", "0.1"])
    assert trainer.state.global_step == 2 and type(trainer.optimizer.optimizer).__name__ == "SGD"
    assert dict(zip(trainer.groups.names, trainer.groups.counts, strict=True)) == dict(
        zip(group_names, (25, 25, 10), strict=True)
    )
    test = trainer.group_report("test").overall
    assert f"worst_group_accuracy {test['worst_group_accuracy']:.3f}" in capsys.readouterr().out
    assert json.loads((tmp_path / "runs/group_report.json").read_text())["test"]["overall"] == test


def test_recipe_without_data(tmp_path: Path) -> None:
    _, _, main = recipe_parts(RECIPE)
    with pytest.raises(SystemExit, match="train-images-idx3-ubyte"):
        main(["--data_dir", str(tmp_path), "--use_cpu", "--output_dir", str(tmp_path / "out")])
