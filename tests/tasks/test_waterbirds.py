"""Waterbirds and CelebA: groups by hand."""

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import raw_layouts as raw

from hf_cgd import GroupInfo, GroupRobustWarning
from hf_cgd.data.columns import read_columns
from hf_cgd.metrics import named_metrics
from hf_cgd.tasks import TASKS, load_task

GROUPS = {
    "waterbirds": [f"label:{y} place:{place}" for y in ("landbird", "waterbird") for place in ("land", "water")],
    "celeba": [f"label:{y} gender:{gender}" for y in ("not blond", "blond") for gender in ("female", "male")],
}


def test_the_four_groups_of_four_birds(tmp_path: Path) -> None:
    """y and place as they stand in metadata.csv: y 1 is a waterbird, place 1 is water."""
    rows = [("a.jpg", 1, 0, 1), ("b.jpg", 0, 0, 0), ("c.jpg", 1, 0, 0), ("d.jpg", 0, 0, 1)]
    rows += [(f"{split}.jpg", 0, split, 0) for split in (1, 2)]
    raw.write_waterbirds(tmp_path, pd.DataFrame(rows, columns=["img_filename", "y", "split", "place"]))
    with pytest.warns(GroupRobustWarning, match="published data has .*'label:waterbird place:land': 56"):
        splits, info = load_task("waterbirds", tmp_path)
    columns = read_columns(splits["train"], info.group_columns)
    groups = GroupInfo.from_columns(columns)
    assert list(groups.names) == GROUPS["waterbirds"] == list(info.train_counts or ())
    assert groups.encode_columns(columns).tolist() == [3, 0, 2, 1]
    assert splits["train"]["img_filename"][:] == ["a.jpg", "b.jpg", "c.jpg", "d.jpg"]


@pytest.mark.filterwarnings("ignore:The (training groups|splits) of")
def test_the_two_attributes_of_celeba(tmp_path: Path) -> None:
    table = raw.celeba_rows()
    splits, _ = load_task("celeba", raw.write_celeba(tmp_path, table))
    for code, name in enumerate(raw.SPLITS):
        part = table[table["partition"] == code]
        assert splits[name]["label"][:] == part["Blond_Hair"].tolist()
        assert splits[name]["gender"][:] == part["Male"].tolist()
        assert splits[name]["image_id"][:] == part["image_id"].tolist()
    assert splits["train"]["Young"][:] == [True] * 4 * raw.PER_CELL and not any(splits["train"]["5_o_Clock_Shadow"])
    assert splits["train"][0]["image"].size == (178, 218)


@pytest.mark.filterwarnings("ignore:The (training groups|splits) of")
def test_the_folder_in_a_folder_of_kaggle_and_another_order_of_the_partition(tmp_path: Path) -> None:
    raw.write_celeba(tmp_path, images="img_align_celeba/img_align_celeba")
    partition = pd.read_csv(tmp_path / "list_eval_partition.csv").iloc[::-1]
    partition.to_csv(tmp_path / "list_eval_partition.csv", index=False)
    splits, _ = load_task("celeba", tmp_path)
    table = raw.celeba_rows()
    assert splits["test"]["image_id"][:] == table.loc[table["partition"] == 2, "image_id"].tolist()


@pytest.mark.parametrize("name", ["waterbirds", "celeba"])
def test_published_sizes(name: str) -> None:
    counts = TASKS[name]().info.train_counts or {}
    assert list(counts) == GROUPS[name]
    expected = {"waterbirds": [3498, 184, 56, 1057], "celeba": [71629, 66874, 22880, 1387]}[name]
    assert list(counts.values()) == expected
    assert sum(expected) == {"waterbirds": 4795, "celeba": 162770}[name]
    # The ratios of the paper's table of data sets.
    assert round(max(expected) / min(expected), 1) == {"waterbirds": 62.5, "celeba": 51.6}[name]


def test_the_average_that_is_reported_of_waterbirds_weights_by_the_training_data() -> None:
    """By hand: accuracies 1, 0, 1, 0 of groups that are 3498 + 56 and 184 + 1057 of 4795."""
    info = TASKS["waterbirds"]().info
    import numpy as np

    ids = np.repeat(np.arange(4), 5)
    labels = np.repeat([0, 0, 1, 1], 5)
    right = np.isin(ids, (0, 2))
    metrics = named_metrics(
        np.where(right, labels, 1 - labels), labels, ids, GROUPS["waterbirds"], train_counts=info.train_counts
    )
    assert metrics[info.average_metric] == pytest.approx((3498 + 56) / 4795)
    assert metrics["accuracy"] == 0.5


@pytest.mark.parametrize("name", ["waterbirds", "celeba"])
def test_made_up_images_have_few_of_one_group(name: str) -> None:
    splits, info = load_task(name, "demo")
    counts = Counter(zip(*(splits["train"][column][:] for column in info.group_columns), strict=True))
    assert len(counts) == 4 and min(counts.values()) >= 4 and min(counts, key=lambda k: counts[k])[0] == 1
    again, _ = load_task(name, "demo")
    assert splits["test"]["label"][:] == again["test"]["label"][:]
    assert splits["train"][3]["image"].tobytes() == again["train"][3]["image"].tobytes()
    other, _ = load_task(name, "demo", seed=1)
    assert splits["test"]["label"][:] != other["test"]["label"][:]
