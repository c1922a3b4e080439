"""Each benchmark from miniature copies of its raw layouts: every source gives the same, and what is wrong is said."""

import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import raw_layouts as raw
from datasets import DatasetDict
from PIL import Image

from hf_cgd import GroupInfo
from hf_cgd.data.columns import read_columns
from hf_cgd.tasks import TASKS, load_task
from hf_cgd.tasks.wilds_source import wilds_dataset

# A miniature has other sizes than the published data, which is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:The (training groups|splits) of")


@dataclass(frozen=True)
class Layout:
    """How the files of a benchmark are made, in its own layout and in the Hub's."""

    write: Callable[[Path], Path]
    hub: Callable[[Path, Path], Path]
    settings: dict[str, Any]
    kept: dict[str, Any]


LAYOUTS = {
    "waterbirds": Layout(raw.write_waterbirds, raw.hub_waterbirds, {}, {"file": "metadata.csv", "column": "place"}),
    "celeba": Layout(raw.write_celeba, raw.hub_celeba, {}, {"file": "list_attr_celeba.csv", "column": "Male"}),
    "civilcomments": Layout(
        raw.write_civilcomments, raw.hub_civilcomments, {}, {"file": "all_data_with_identities.csv", "column": "black"}
    ),
    "multinli": Layout(
        raw.write_multinli, raw.hub_multinli, {"split": "genres"},
        {"file": "multinli_1.0_dev_matched.jsonl", "column": "sentence2"},
    ),
}  # fmt: skip
IMAGES = ["waterbirds", "celeba"]
ON_WILDS = ["waterbirds", "celeba", "civilcomments"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder that holds `own`, `hub` and `root` (of the wilds package) of a benchmark; not to be written to."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            folder = made[name] = tmp_path_factory.mktemp(name)
            LAYOUTS[name].write(folder / "own")
            LAYOUTS[name].hub(folder / "hub", folder / "own")
            wilds = TASKS[name]().info.wilds
            if wilds is not None:
                raw.as_wilds(folder / "root", wilds.name, folder / "own")
        return made[name]

    return of


@pytest.fixture
def own(folders: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a benchmark's own files, to be spoiled."""
    return lambda name: Path(shutil.copytree(folders(name) / "own", tmp_path / "own"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def content(name: str, splits: DatasetDict) -> dict[str, list[Any]]:
    """What every source has to agree on: inputs, label and groups of all rows."""
    task, info = TASKS[name](), TASKS[name]().info
    names = ["label", *info.group_columns, *(info.evaluation_group_columns or ())]
    found = {f"{split} {column}": rows[column][:] for split, rows in splits.items() for column in names}
    for split, rows in splits.items():
        for column in info.inputs:
            values = rows[column][:]
            pictures = isinstance(values[0], Image.Image)
            found[f"{split} {column}"] = [task.open_image(v).tobytes() for v in values] if pictures else values
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_source_gives_the_same(name: str, folders: Callable[[str], Path]) -> None:
    layout, folder = LAYOUTS[name], folders(name)
    splits, info = load_task(name, folder / "own", **layout.settings)
    assert tuple(splits) == info.splits
    expected = content(name, splits)
    assert content(name, load_task(name, "hub", folder / "hub", **layout.settings)[0]) == expected
    if info.wilds is not None:
        assert content(name, load_task(name, "wilds", folder / "root")[0]) == expected
        # The folder above that of the files will do as well.
        assert content(name, load_task(name, folder / "root")[0]) == expected


@pytest.mark.parametrize("name", ON_WILDS)
def test_group_ids_are_those_of_the_wilds_package(name: str, folders: Callable[[str], Path]) -> None:
    from wilds.common.grouper import CombinatorialGrouper

    fields = {"waterbirds": ["background", "y"], "celeba": ["male", "y"], "civilcomments": ["black", "y"]}[name]
    info, root = TASKS[name]().info, folders(name) / "root"
    assert info.wilds is not None
    theirs = wilds_dataset(info, root)
    grouper = CombinatorialGrouper(theirs, fields)
    ours = load_task(name, "wilds", root)[0]
    for split, named in info.wilds.splits.items():
        subset = theirs.get_subset(split)
        expected = grouper.metadata_to_group(subset.metadata_array).tolist()
        columns = read_columns(ours[named], info.group_columns)
        ids = GroupInfo.from_columns(columns).encode_columns(columns).tolist()
        assert ids == expected and len(set(ids)) == 4
        assert ours[named]["label"][:] == subset.y_array.tolist()


# ---- What is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_without_the_files(name: str, tmp_path: Path) -> None:
    """Nothing, and a folder that a download that failed has left: file, folder, layout and places are named."""
    info, empty = TASKS[name]().info, tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_task(name, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError) as error:
        load_task(name, empty)
    message = str(error.value)
    assert str(empty) in message and "found []" in message
    if name != "multinli":
        assert (
            LAYOUTS[name].kept["file"] in message and info.layout in message and all(p in message for p in info.places)
        )
    with pytest.raises(FileNotFoundError, match=f"a copy of {info.hub.id if info.hub else ''} of the Hub"):
        load_task(name, "hub", empty)
    with pytest.raises(ConnectionError, match="(?s)Expected to load.*HF_HUB_OFFLINE is set.*Pass data_dir="):
        load_task(name, "hub")
    assert not list(empty.iterdir())


@pytest.mark.parametrize("name", ON_WILDS)
def test_the_wilds_package_without_its_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: Callable[[str], Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    info = TASKS[name]().info
    assert info.wilds is not None
    with pytest.raises(FileNotFoundError, match=f"expected the folder {info.wilds.name}_v… .* in data, which is not"):
        load_task(name, "wilds")
    (tmp_path / f"root/{info.wilds.name}_v1.0").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="(?s)RELEASE_v….txt.*A place to get it: "):
        load_task(name, "wilds", tmp_path / "root")
    (tmp_path / f"root/{info.wilds.name}_v1.0/RELEASE_v1.0.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=f"{LAYOUTS[name].kept['file']} in .*found"):
        load_task(name, "wilds", tmp_path / "root")
    assert list(raw.files_below(tmp_path)) == [f"root/{info.wilds.name}_v1.0/RELEASE_v1.0.txt"]
    monkeypatch.setitem(sys.modules, "wilds", None)
    with pytest.raises(ImportError, match=r'pip install "hf-cgd\[wilds\]"'):
        load_task(name, "wilds", folders(name) / "root")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_column_that_is_missing(name: str, own: Callable[[str], Path]) -> None:
    folder, kept = own(name), LAYOUTS[name].kept
    path = folder / kept["file"]
    path.write_text(path.read_text(encoding="utf-8").replace(kept["column"], "other"), encoding="utf-8")
    before = raw.files_below(folder)
    with pytest.raises(ValueError, match=f"expected (the|a) column.*{kept['column']}"):
        load_task(name, folder, **LAYOUTS[name].settings)
    assert raw.files_below(folder) == before


@pytest.mark.parametrize("name", IMAGES)
def test_half_of_the_images(name: str, own: Callable[[str], Path]) -> None:
    folder = own(name)
    images = sorted(path for path in folder.rglob("*.jpg"))
    for path in images[::2]:
        path.unlink()
    with pytest.raises(FileNotFoundError) as error:
        load_task(name, folder)
    message = str(error.value)
    gone = [str(path) for path in images[::2]]
    assert f"{len(images)} files, of which {len(gone)} are missing, such as " in message
    assert any(path.endswith(message.split("such as ")[1].split(", in ")[0]) for path in gone)


@pytest.mark.parametrize("name", IMAGES)
def test_no_image_is_opened_to_learn_its_group_and_a_bad_one_is_named_when_it_is_read(
    name: str, own: Callable[[str], Path]
) -> None:
    """Every image is a page of an error message, as a download that went wrong leaves them."""
    folder = own(name)
    for path in folder.rglob("*.jpg"):
        path.write_text("<html>404</html>")
    splits, info = load_task(name, folder)
    groups = GroupInfo.from_columns(read_columns(splits["train"], info.group_columns))
    assert groups.counts == (raw.PER_CELL,) * 4
    from datasets import Image as ImageFeature

    undecoded = splits["train"].cast_column("image", ImageFeature(decode=False))
    with pytest.raises(ValueError, match=rf"{folder}.*\.jpg: expected an image, but it cannot be decoded"):
        TASKS[name]().open_image(undecoded[0]["image"])


def spoiled(path: Path, line: int, old: str, new: str) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "file", "column", "value", "message"),
    [
        ("waterbirds", "metadata.csv", "y", None, r"column 'y': expected one of \[0, 1\] in every row, got nan in row 2"),
        ("waterbirds", "metadata.csv", "y", 2, r"column 'y': .* got 2 in row 2 \(1 such rows\)"),
        ("waterbirds", "metadata.csv", "place", "sea", "column 'place': .* got 'sea' in row 2"),
        ("waterbirds", "metadata.csv", "split", 7, r"one of the splits \[0, 1, 2\] in every row, got 7 in row 2"),
        ("celeba", "list_attr_celeba.csv", "Blond_Hair", None, r"'Blond_Hair': expected one of \[-1, 1\] .* got nan"),
        ("celeba", "list_attr_celeba.csv", "Male", 0, "'Male': .* got 0 in row 2"),
        ("celeba", "list_eval_partition.csv", "partition", 3, "got 3 in row 2"),
        ("celeba", "list_eval_partition.csv", "image_id", "x.jpg", "1 images are not among them"),
        ("civilcomments", "all_data_with_identities.csv", "toxicity", None, "'toxicity': expected a number .* got nan"),
        ("civilcomments", "all_data_with_identities.csv", "toxicity", "high", "got 'high' in row 2"),
        ("civilcomments", "all_data_with_identities.csv", "split", "dev", r"\['train', 'val', 'test'\] .* got 'dev'"),
        ("multinli", "metadata_random.csv", "gold_label", None, "column 'gold_label': .* got nan in row 2"),
        ("multinli", "metadata_random.csv", "split", 5, "column 'split': .* got 5 in row 2"),
    ],
)  # fmt: skip
def test_values_that_are_wrong(
    name: str, file: str, column: str, value: Any, message: str, own: Callable[[str], Path]
) -> None:
    import pandas as pd

    folder = own(name)
    table = pd.read_csv(folder / file, keep_default_na=False)
    table[column] = table[column].astype(object)
    table.loc[2, column] = value
    table.to_csv(folder / file, index=False)
    with pytest.raises(ValueError, match=message):
        load_task(name, folder, **({"split": "group_dro"} if name == "multinli" else {}))


def test_a_file_that_was_cut_off(own: Callable[[str], Path]) -> None:
    folder = own("civilcomments")
    path = folder / "all_data_with_identities.csv"
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.index('"He said') + 5], encoding="utf-8")
    with pytest.raises(ValueError, match="(?s)expected a CSV file, but it cannot be read.*Fetch the file again"):
        load_task("civilcomments", folder)


def test_one_part_of_the_corpus_is_missing(own: Callable[[str], Path]) -> None:
    folder = own("multinli")
    (folder / "multinli_1.0_dev_mismatched.jsonl").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"(?s)expected multinli_1.0_dev_mismatched.jsonl in .*A place to get it"
    ):
        load_task("multinli", folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_of_the_hub_that_is_another_dataset(name: str, tmp_path: Path) -> None:
    raw.write_parquet(tmp_path / "data/train-00000-of-00001.parquet", {"a": [1]}, None)
    (tmp_path / "README.md").write_text("")
    with pytest.raises((ValueError, FileNotFoundError), match="expected"):
        load_task(name, "hub", tmp_path)
