"""The recipes of the benchmarks: from each source's miniature files to the table of groups and the published row."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import raw_layouts as raw
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessor

from hf_cgd.tasks import TASKS
from hf_cgd.tasks.civilcomments import SUBGROUPS

# Two steps teach nothing, which a warning says; another is of the size of a miniature.
pytestmark = pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")

Recipe = Callable[..., Any]
LAYOUTS: dict[str, tuple[Callable[[Path], Path], Callable[[Path, Path], Path]]] = {
    "waterbirds": (raw.write_waterbirds, raw.hub_waterbirds),
    "celeba": (raw.write_celeba, raw.hub_celeba),
    "civilcomments": (raw.write_civilcomments, raw.hub_civilcomments),
    "multinli": (raw.write_multinli, raw.hub_multinli),
}


@pytest.fixture
def image_model(tmp_path: Path) -> Path:
    """A folder with a tiny ResNet and an image processor."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=2)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "image_model")
    ViTImageProcessor().save_pretrained(tmp_path / "image_model")
    return tmp_path / "image_model"


def words_of(source: str, name: str, folder: Path) -> list[Any]:
    write, hub = LAYOUTS[name]
    own = write(folder / "own")
    if source == "files":
        return ["--data_dir", own]
    if source == "path":
        return ["--source", own]
    if source == "hub":
        return ["--source", "hub", "--data_dir", hub(folder / "hub", own)]
    wilds = TASKS[name]().info.wilds
    assert wilds is not None
    return ["--source", "wilds", "--data_dir", raw.as_wilds(folder / "root", wilds.name, own)]


@pytest.mark.parametrize(
    ("name", "source"),
    [(name, source) for name in LAYOUTS for source in ("files", "hub", "wilds") if (name, source) != ("multinli", "wilds")],
)  # fmt: skip
def test_from_raw_files_to_the_published_row(
    name: str, source: str, recipe: Recipe, tmp_path: Path, capsys: Any, image_model: Path, text_model: Path
) -> None:
    info = TASKS[name]().info
    model = image_model if info.kind == "image" else text_model
    preset = "group_dro" if "group_dro" in info.presets else "wilds2.0"
    few = ["--per_device_train_batch_size", 8, "--dataloader_num_workers", 0, "--learning_rate", 1e-3]
    if info.kind == "text":
        few += ["--max_length", 16]
    trainer = recipe(f"{name}_cgd", *words_of(source, name, tmp_path), "--model", model, "--preset", preset, *few)
    assert trainer.state.global_step == 2 and trainer.args.metric_for_best_model == info.metric
    report = json.loads((tmp_path / "out/group_report.json").read_text(encoding="utf-8"))
    assert list(report) == ["validation", "test"]
    counts = {row["name"]: row["count"] for row in report["test"]["groups"]}
    if name == "civilcomments":
        assert set(counts) == set(SUBGROUPS) and min(counts.values()) == 4
        assert len(trainer.groups.names) == 4
    elif name != "multinli":
        assert counts == dict.fromkeys(info.train_counts or {}, raw.PER_CELL)
        assert trainer.groups.counts == (raw.PER_CELL,) * 4
    shown = capsys.readouterr().out
    published = info.published["paper"]
    assert f"cgd, paper {' '.join(published.cells['cgd'])}" in " ".join(shown.split())
    columns = [*published.metrics, *({info.average_metric} - {*published.metrics})]
    own = [f"{100 * report['test']['overall'][metric]:.1f}" for metric in columns]
    assert f"cgd, this run {' '.join(own)}" in " ".join(shown.split())


def test_images_are_prepared_as_the_preset_says(recipe: Recipe, tmp_path: Path, image_model: Path) -> None:
    """A picture through the recipe's loader, against the steps done one by one with PIL."""
    import numpy as np
    from PIL import Image

    words = words_of("path", "celeba", tmp_path)
    few = ["--per_device_train_batch_size", 4, "--dataloader_num_workers", 2, "--eval_strategy", "no"]
    trainer = recipe("celeba_cgd", *words, "--model", image_model, "--load_best_model_at_end", "false", *few)
    batch = next(iter(trainer.get_eval_dataloader()))
    picture = Image.open(tmp_path / "own/img_align_celeba" / trainer_names(tmp_path)[0])
    square = picture.crop((0, 20, 178, 198)).resize((224, 224), Image.Resampling.BILINEAR)
    expected = (np.asarray(square, dtype=np.float64) / 255 - 0.5) / 0.5
    found = batch["pixel_values"][0].double().permute(1, 2, 0).numpy()
    # The processor of this model has mean and deviation 0.5.
    assert abs(found - expected).max() < 0.02, "half a step of 255, twice"


def trainer_names(folder: Path) -> list[str]:
    table = raw.celeba_rows()
    return table.loc[table["partition"] == 1, "image_id"].tolist()


def test_an_image_that_cannot_be_decoded_ends_the_run_with_its_name(
    recipe: Recipe, tmp_path: Path, image_model: Path
) -> None:
    words = words_of("files", "waterbirds", tmp_path)
    bad = sorted((tmp_path / "own").rglob("*.jpg"))[0]
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(ValueError, match=rf"{bad.name}: expected an image, but it cannot be decoded"):
        recipe("waterbirds_cgd", *words, "--model", image_model, "--dataloader_num_workers", 0, "--max_steps", 20)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("waterbirds", ["--data_dir", "nowhere"], r"metadata.csv in nowhere, which is not there"),
        ("waterbirds", ["--source", "wlids"], "--source: expected one of 'hub', 'wilds', 'files', 'demo' or a folder"),
        ("celeba", ["--source", "wilds"], r"expected the folder celebA_v… of the wilds package in data"),
        ("civilcomments", [], r"(?s)Expected to load 'pietrolesci/civilcomments-wilds'.*Pass --data_dir"),
        ("multinli", ["--split", "group_dro", "--demo", "--data_dir", "FULL"], "is not empty; made-up data wants"),
    ],
)
def test_what_is_missing_is_said_in_the_words_of_the_command_line(
    name: str, words: list[str], message: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL/mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match=message):
        recipe(f"{name}_cgd", *words)
    assert not (tmp_path / "out").exists() and not (tmp_path / "data").exists()


def test_a_preset_that_is_not_there(recipe: Recipe, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        recipe("waterbirds_cgd", "--preset", "wilds1.0")
    assert "'paper', 'group_dro', 'wilds2.0'" in capsys.readouterr().err


@pytest.mark.parametrize("objective", ["erm", "coral"])
def test_civilcomments_made_up(objective: str, recipe: Recipe, capsys: Any) -> None:
    trainer = recipe("civilcomments_cgd", "--demo", "--objective", objective, "--max_steps", 3)
    shown = " ".join(capsys.readouterr().out.split())
    cell = TASKS["civilcomments"]().info.published["paper"].cells[objective][0]
    assert f"{objective}, paper {cell}" in shown and "was made up: its numbers do not compare" in shown
    assert trainer.state.global_step == 3 and trainer.args.group_sampling == (
        "balanced" if objective == "coral" else "none"
    )
    card = (Path(trainer.args.output_dir) / "README.md").read_text(encoding="utf-8")
    assert "trained on made-up data in the form of civilcomments with" in card
    assert "- The data was made up: nothing here tells how a model fares on civilcomments." in card
