"""PovertyMap, FMoW and Camelyon17 from miniature copies of their files, through every source, and what is refused."""

import shutil
import sys
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import wilds_folders as made
from datasets import Dataset, DatasetDict, List, Value
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from hf_cgd.cli import TaskRecipe
from hf_cgd.data.columns import read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.tasks import TASKS, build_task, camelyon17, fmow, load_task, povertymap, wilds_source

NAMES = ("povertymap", "fmow", "camelyon17")
WRITERS: dict[str, Callable[..., Path]] = {
    "povertymap": made.write_poverty,
    "fmow": made.write_fmow,
    "camelyon17": made.write_camelyon,
}
# Our column and the package's field.
FIELDS = {
    "povertymap": {"country": "country", "urban": "urban"},
    "fmow": {"label": "y"},
    "camelyon17": {"label": "y", "hospital": "hospital", "slide": "slide"},
}

pytestmark = pytest.mark.filterwarnings("ignore::hf_cgd.GroupRobustWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all three, as the package unpacks them."""
    folder = tmp_path_factory.mktemp("wilds")
    for write in WRITERS.values():
        write(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(root: Path) -> dict[str, DatasetDict]:
    return {name: load_task(name, "wilds", root)[0] for name in NAMES}


def folder_of(root: Path, name: str) -> Path:
    return next(root.glob(f"{WRITERS[name].__name__.removeprefix('write_')}*_v*"))


def contents(splits: DatasetDict) -> dict[str, Any]:
    """Everything but the images, of which the name of the file."""
    found = {}
    for name, rows in splits.items():
        stored = rows.with_format("arrow")[:].to_pydict()
        stored["image"] = [Path(image["path"] if isinstance(image, dict) else image).name for image in stored["image"]]
        found[name] = stored
    return found


# ---- What is loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_package(name: str, root: Path, loaded: dict[str, DatasetDict]) -> None:
    """Split by split: labels, metadata and images of the package's own subsets, in their order."""
    task = build_task(name)
    dataset = wilds_source.wilds_dataset(task.info, root)
    assert tuple(loaded[name]) == task.info.splits
    assert task.info.wilds is not None
    for theirs, ours in task.info.wilds.splits.items():
        subset, rows = dataset.get_subset(theirs), loaded[name][ours]
        assert len(subset) == len(rows) > 0
        metadata = dict(zip(dataset.metadata_fields, subset.metadata_array.T, strict=True))
        np.testing.assert_array_equal(np.asarray(rows["label"][:], dtype=np.float32), subset.y_array.flatten())
        for column, field in FIELDS[name].items():
            assert rows[column][:] == metadata[field].tolist(), column
        if name == "fmow":
            assert [year - 2002 for year in rows["year"][:]] == metadata["year"].tolist()
            assert rows["region"][:] == [dataset.metadata_map["region"][code] for code in metadata["region"]]
        image, _, _ = subset[len(subset) - 1]
        stored = rows.with_format("arrow")[len(rows) - 1 :]["image"].to_pylist()[0]
        opened = task.open_image(stored)
        if isinstance(opened, Image.Image):
            opened, image = pil_to_tensor(opened), pil_to_tensor(image)
        assert torch.equal(opened, image)


@pytest.mark.parametrize("name", NAMES)
def test_files_in_a_folder_of_any_name(name: str, root: Path, loaded: dict[str, DatasetDict], tmp_path: Path) -> None:
    """Without the file that says the version; given as it is, or as the folder above it under its real name."""
    folder = folder_of(root, name)
    (tmp_path / "mine").symlink_to(folder)
    assert contents(load_task(name, tmp_path / "mine")[0]) == contents(loaded[name])
    assert contents(load_task(name, data_dir=root)[0]) == contents(loaded[name])


def test_groups_of_fmow(loaded: dict[str, DatasetDict]) -> None:
    """Years are trained on, five regions evaluated; a country of no region is in none of them."""
    train, test = loaded["fmow"]["train"], loaded["fmow"]["test"]
    assert set(train["year"][:]) <= set(range(2002, 2013)) and set(test["year"][:]) <= {2016, 2017}
    # The edges: one second before 2013 trains, the first second of 2016 tests.
    assert "2012-12-31T23:59:59Z" in train["timestamp"][:] and "2016-01-01T00:00:00Z" in test["timestamp"][:]
    for rows in loaded["fmow"].values():
        places = np.stack([rows[region][:] for region in fmow.REGIONS], axis=1)
        named = np.asarray(rows["region"][:])
        np.testing.assert_array_equal(places.sum(axis=1), named != fmow.OTHER)
        assert [fmow.REGIONS[place] for place in places[named != fmow.OTHER].argmax(axis=1)] == list(
            named[named != fmow.OTHER]
        )
        of_code = [made.REGIONS.get(code, fmow.OTHER) for code in rows["country_code"][:]]
        assert of_code == list(named)
    assert fmow.OTHER in loaded["fmow"]["train"]["region"][:]


def test_hospitals_of_camelyon17(loaded: dict[str, DatasetDict]) -> None:
    found = {name: sorted(set(rows["hospital"][:])) for name, rows in loaded["camelyon17"].items()}
    assert found == {"train": [0, 3, 4], "validation": [1], "test": [2], "id_validation": [0, 3, 4]}
    groups = GroupInfo.from_columns(read_columns(loaded["camelyon17"]["train"], ["hospital"]))
    assert groups.names == ("0", "3", "4")
    assert set(loaded["camelyon17"]["train"]["patient"][:]) == {"004", "064", "084"}


def test_folds_of_povertymap(tmp_path: Path) -> None:
    """Five folds hold back other countries; together they test each of the 23 once."""
    tested: list[str] = []
    made.write_poverty(tmp_path, id_rows=800, ood_rows=2200)
    for fold in povertymap.FOLDS:
        splits, _ = load_task("povertymap", "wilds", tmp_path, fold=fold)
        names = splits["train"].features["country"].names
        held_back = {name: {names[code] for code in splits[name]["country"][:]} for name in ("validation", "test")}
        assert len(splits["id_validation"]) == len(splits["id_test"]) == 1000
        assert not held_back["test"] & held_back["validation"]
        for split in ("id_validation", "id_test", "train"):
            assert not {names[code] for code in splits[split]["country"][:]} & (
                held_back["test"] | held_back["validation"]
            )
        tested += held_back["test"]
    assert sorted(tested) == sorted(made.COUNTRIES)
    by_seed = [povertymap.PovertyMap(fold="of_seed", seed=seed).replicate for seed in range(6)]
    assert by_seed == [*povertymap.FOLDS, "A"]
    with pytest.raises(ValueError, match="fold must be one of 'A', 'B', 'C', 'D', 'E', 'of_seed', got 'F'"):
        build_task("povertymap", fold="F")


def test_constants_are_those_of_the_package() -> None:
    from wilds.datasets import camelyon17_dataset, fmow_dataset, poverty_dataset

    from hf_cgd.tasks import satellite

    assert list(fmow.CATEGORIES) == fmow_dataset.categories and len(fmow.CATEGORIES) == 62
    assert list(povertymap.COUNTRIES) == poverty_dataset.DHS_COUNTRIES
    assert camelyon17.TEST_HOSPITAL == camelyon17_dataset.TEST_CENTER
    assert camelyon17.VALIDATION_HOSPITAL == camelyon17_dataset.VAL_CENTER
    order = [name.upper() for name in ("red", "green", "blue")]
    assert [poverty_dataset.BAND_ORDER[place] for place in satellite.RED_GREEN_BLUE] == order
    for ours, theirs in ((satellite.MEANS, "_MEANS_2009_17"), (satellite.DEVIATIONS, "_STD_DEVS_2009_17")):
        torch.testing.assert_close(ours, torch.tensor([getattr(poverty_dataset, theirs)[name] for name in order]))


# ---- The Hub's own layout -------------------------------------------------------------------------------------------


def write_hub(folder: Path, splits: dict[str, Any]) -> Path:
    (folder / "data").mkdir(parents=True)
    for name, rows in splits.items():
        rows.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    return folder


def poverty_hub(folder: Path, loaded: DatasetDict, **changes: Any) -> Path:
    """Nested lists for images, labels cut to integers beside the wealth, names for countries, 999 rows of one split."""
    found = {}
    for theirs, ours in povertymap.SPLITS.items():
        rows = loaded[ours].select(range(min(40, len(loaded[ours]))))
        images = [povertymap.read_bands(path).tolist() for path in rows["image"][:]]
        wealth = [float(value) for value in rows["label"][:]]
        names = rows.features["country"].names
        found[theirs] = (
            rows.remove_columns(["image", "label", "country", "urban"])
            .add_column("image", images, feature=List(List(List(Value("float32")))))
            .add_column("label", [int(value) for value in wealth])
            .add_column("wealthpooled", changes.get("wealth", wealth)[: len(rows)])
            .add_column("country", [names[code] for code in rows["country"][:]])
            .add_column("urban", [bool(value) for value in rows["urban"][:]])
        )
    return write_hub(folder, found)


def test_povertymap_of_the_hub(loaded: dict[str, DatasetDict], tmp_path: Path) -> None:
    """The column that is called label holds integers, and is not the label."""
    mine = loaded["povertymap"]
    folder = poverty_hub(tmp_path / "hub", mine)
    splits, _ = load_task("povertymap", "hub", folder)
    task = build_task("povertymap")
    for name, rows in splits.items():
        same = mine[name].select(range(len(rows)))
        for column in ("label", "country", "urban"):
            assert rows[column][:] == same[column][:]
            assert rows.features[column] == same.features[column]
        assert torch.equal(task.open_image(rows[1]["image"]), task.open_image(same[1]["image"]))
    assert any(value % 1 for value in splits["train"]["label"][:])
    for other in ({"fold": "B"}, {"fold": "of_seed", "seed": 1}):
        with pytest.raises(ValueError, match="the Hub has fold 'A' alone, got 'B'"):
            load_task("povertymap", "hub", folder, **other)
    bad = poverty_hub(tmp_path / "bad", mine, wealth=[float("nan")] * 40)
    with pytest.raises(ValueError, match="column 'wealthpooled': expected a number, got NaN in train row 0"):
        load_task("povertymap", "hub", bad)


def camelyon_hub(folder: Path, loaded: DatasetDict) -> Path:
    """One split for both validations; "center" for the hospital."""
    parts = {"train": ["train"], "validation": ["id_validation", "validation"], "test": ["test"]}
    found = {}
    for name, names in parts.items():
        tables = [loaded[split].to_pandas() for split in names]
        table = pd.concat(tables, ignore_index=True)
        paths = [image["path"] for image in table["image"]]
        columns = table[["label", "hospital", "slide"]].rename(columns={"hospital": "center"}).to_dict("list")
        found[name] = Dataset.from_dict({"image": paths, **columns}).cast_column("image", camelyon17.FEATURES["image"])
    return write_hub(folder, found)


def test_camelyon17_of_the_hub(loaded: dict[str, DatasetDict], tmp_path: Path) -> None:
    """Its validation split is taken apart by hospital."""
    mine = loaded["camelyon17"]
    splits, info = load_task("camelyon17", "hub", camelyon_hub(tmp_path / "hub", mine))
    assert tuple(splits) == ("train", "validation", "test", "id_validation") and set(splits) == set(info.splits)
    task = build_task("camelyon17")
    for name, rows in splits.items():
        for column in ("label", "hospital", "slide"):
            assert rows[column][:] == mine[name][column][:], (name, column)
        assert np.array_equal(task.open_image(rows[0]["image"]), task.open_image(mine[name][0]["image"]))


def test_hubs_that_cannot_train() -> None:
    with pytest.raises(
        ValueError, match="(?s)must be one of 'wilds', 'files', 'demo', got 'hub'.*its test split alone"
    ):
        load_task("fmow", "hub")


# ---- From data to metrics -------------------------------------------------------------------------------------------


def trained(name: str, tmp_path: Path, *arguments: Any) -> Any:
    """Two steps of a recipe on a tiny network, evaluated on every split."""
    own = ["--output_dir", tmp_path / "out", "--use_cpu", "--disable_tqdm", "true", "--max_steps", 2]
    own += ["--save_strategy", "no", "--load_best_model_at_end", "false", "--eval_strategy", "no"]
    own += ["--per_device_train_batch_size", 8, "--per_device_eval_batch_size", 256, "--dataloader_num_workers", 0]
    if "--demo" not in arguments:
        own += ["--model", "test_resnet", "--pretrained", "false"]
    return TaskRecipe(TASKS[name]).main([str(argument) for argument in [*own, *arguments]])


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_on_made_up_data(name: str, tmp_path: Path, capsys: Any) -> None:
    trainer = trained(name, tmp_path, "--demo", "--objective", "cgd")
    assert trainer.state.global_step == 2
    shown = capsys.readouterr().out
    assert "cgd, this run" in shown and "cgd, paper" in shown and "made up" in shown
    # StepLR of the package: constant within an epoch.
    factors = {"povertymap": 0.96, "fmow": 0.96, "camelyon17": 1.0}
    steps = {
        name: hyper.shared.get("lr_decay_per_epoch", 1.0) for name, hyper in TASKS[name]().info.hyperparameters.items()
    }
    assert set(steps.values()) == {factors[name]}


def test_a_recipe_on_hub_files(loaded: dict[str, DatasetDict], tmp_path: Path) -> None:
    folder = poverty_hub(tmp_path / "hub", loaded["povertymap"])
    trainer = trained("povertymap", tmp_path, "--source", "hub", "--data_dir", folder, "--objective", "group_dro")
    assert trainer.groups.columns == ("country",) and len(trainer.groups) == 13
    assert trainer.model.timm_model.conv1[0].in_channels == 8
    report = trainer.group_report("id_test")
    assert [row.name for row in report.rows] == ["rural", "urban"]


@pytest.mark.parametrize("name", NAMES)
def test_predictions_for_the_leaderboard(name: str, root: Path, tmp_path: Path) -> None:
    """Read line by line, as the evaluation script of WILDS does, the package's metrics are those that were reported."""
    from wilds.common.metrics.all_metrics import Accuracy, PearsonCorrelation

    options = ["--source", "wilds", "--data_dir", root, "--wilds_predictions", tmp_path / "predictions", "--seed", 3]
    trainer = trained(name, tmp_path, *options, "--objective", "erm", "--freeze_bn")
    info = TASKS[name]().info
    dataset = wilds_source.wilds_dataset(info, root)
    assert info.wilds is not None
    replicate = "fold:A" if name == "povertymap" else "seed:3"
    files = list((tmp_path / "predictions" / info.wilds.name).iterdir())
    assert len(files) == len(info.splits) - 1
    for theirs, ours in info.wilds.splits.items():
        if ours == "train":
            continue
        start = f"{info.wilds.name}_split:{theirs}_{replicate}"
        file = next(path for path in files if path.name.startswith(start) and path.suffix == ".csv")
        read = torch.tensor([literal_eval(line) for line in file.read_text().splitlines()])
        subset = dataset.get_subset(theirs)
        predicted = read.unsqueeze(-1) if read.shape != subset.y_array.shape else read
        reported = trainer.group_report("eval" if ours == "validation" else ours).overall
        if name == "povertymap":
            results, _ = dataset.standard_group_eval(
                PearsonCorrelation(), dataset._eval_grouper, predicted, subset.y_array, subset.metadata_array
            )
            assert reported["worst_group_pearson"] == pytest.approx(results["r_wg"], abs=1e-5)
            assert reported["pearson"] == pytest.approx(results["r_all"], abs=1e-5)
        else:
            assert reported["accuracy"] == pytest.approx(Accuracy().compute(predicted, subset.y_array)["acc_avg"])


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the folder of a benchmark that may be spoiled: tables are files of its own, images links."""

    def make(name: str) -> Path:
        source = folder_of(root, name)
        target = tmp_path / source.name
        shutil.copytree(
            source,
            target,
            copy_function=lambda a, b: shutil.copy(a, b) if a.endswith("csv") else Path(b).symlink_to(a),
        )
        return target

    return make


def spoil(path: Path, column: str, row: int, value: Any) -> None:
    table = pd.read_csv(path, dtype=object, keep_default_na=False)
    table.loc[row, column] = value
    table.to_csv(path, index=False)


BAD_CELLS: list[tuple[str, str, str, Any, str]] = [
    ("povertymap", "dhs_metadata.csv", "wealthpooled", "", "'wealthpooled': expected a number in every row, got nan in row 5"),
    ("povertymap", "dhs_metadata.csv", "country", "atlantis", "'country': expected one of .* got 'atlantis' in row 5"),
    ("povertymap", "dhs_metadata.csv", "urban", "", "'urban': expected one of .* in row 5"),
    ("fmow", "rgb_metadata.csv", "category", "", "'category': expected one of .* got nan in row 5"),
    ("fmow", "rgb_metadata.csv", "split", "valid", "'split': expected one of .* got 'valid' in row 5"),
    ("fmow", "rgb_metadata.csv", "timestamp", "long ago", "'timestamp': expected .* in row 5"),
    ("fmow", "rgb_metadata.csv", "timestamp", "2019-01-01T00:00:00Z", "'timestamp': expected .* in row 5"),
    ("fmow", "country_code_mapping.csv", "region", "Atlantis", "'region': expected one of .* got 'Atlantis'"),
    ("camelyon17", "metadata.csv", "tumor", "", "'tumor': expected one of .* got nan in row 5"),
    ("camelyon17", "metadata.csv", "center", "7", "'center': expected one of .* got 7 in row 5"),
    ("camelyon17", "metadata.csv", "split", "9", "'split': expected one of .* got 9 in row 5"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "column", "value", "message"), BAD_CELLS)
def test_cells_that_the_package_would_take_for_something_else(
    name: str, file: str, column: str, value: Any, message: str, copy: Any
) -> None:
    folder = copy(name)
    spoil(folder / file, column, 5 if "mapping" not in file else 3, value)
    for source, data_dir in ((folder, None), ("wilds", folder.parent)):
        with pytest.raises(ValueError, match=f"{file}.*{message}"):
            load_task(name, source, data_dir)


@pytest.mark.parametrize(("name", "file", "column"), [
    ("povertymap", "dhs_metadata.csv", "wealthpooled"),
    ("fmow", "rgb_metadata.csv", "timestamp"),
    ("camelyon17", "metadata.csv", "center"),
])  # fmt: skip
def test_folders_that_are_not_complete(name: str, file: str, column: str, copy: Any, tmp_path: Path) -> None:
    """A column, an image, the table, everything is missing: the message says what, where, and how to get it."""
    folder = copy(name)
    table = pd.read_csv(folder / file, dtype=object, keep_default_na=False)
    table.rename(columns={column: "another"}).to_csv(folder / file, index=False)
    with pytest.raises(ValueError, match=rf"{file}: expected the column\(s\) \['{column}'\]"):
        load_task(name, folder)
    table.to_csv(folder / file, index=False)
    images = sorted(folder.rglob("*.npz" if name == "povertymap" else "*.png"))
    # The image of a row that is used: all of PovertyMap and Camelyon17, every image of FMoW.
    for image in images[:3]:
        image.unlink()
    whole = rf"files, of which 3 are missing, such as .*{images[0].name}"
    for source, data_dir in ((folder, None), ("wilds", tmp_path)):
        with pytest.raises(FileNotFoundError, match=f"(?s){whole}.*Lay it out like this.*wilds.get_dataset"):
            load_task(name, source, data_dir)
    (folder / file).unlink()
    for source, data_dir in ((folder, None), ("wilds", tmp_path)):
        with pytest.raises(FileNotFoundError, match=f"(?s){file}.*A place to get it"):
            load_task(name, source, data_dir)
    before = sorted(tmp_path.rglob("*"))
    for place in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match="A place to get it"):
            load_task(name, "wilds", place)
    # Nothing was made or fetched.
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", NAMES)
def test_images_that_cannot_be_decoded(name: str, copy: Any) -> None:
    """They are opened when a row is read, and named."""
    folder = copy(name)
    image = sorted(folder.rglob("*.npz" if name == "povertymap" else "*.png"))[0]
    content = image.read_bytes()
    image.unlink()
    image.write_bytes(content[: len(content) // 2])
    splits, _ = load_task(name, folder)
    task = build_task(name)
    stored = [value for rows in splits.values() for value in rows.with_format("arrow")[:]["image"].to_pylist()]
    bad = next(value for value in stored if image.name in str(value))
    with pytest.raises(ValueError, match=f"{image.name}: expected"):
        task.open_image(bad)
    image.unlink()
    with pytest.raises(FileNotFoundError):
        task.open_image(bad)


def test_without_the_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "wilds"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "wilds", None)
    for source, data_dir in (("wilds", root), (root, None)):
        with pytest.raises(ImportError, match=r'pip install "hf-cgd\[wilds\]"'):
            load_task("camelyon17", source, data_dir)
