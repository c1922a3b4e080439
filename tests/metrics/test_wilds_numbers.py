"""Groups and metrics against those of the `wilds` package on the same predictions (`make_wilds_numbers.py`)."""

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from hf_cgd.data.columns import read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.metrics import named_metrics
from hf_cgd.models.example_losses import CLASSIFICATION, REGRESSION

DATA = Path(__file__).parents[1] / "data"
NUMBERS: Mapping[str, Any] = json.loads((DATA / "wilds_numbers.json").read_text(encoding="utf-8"))
# The package computes in float32.
CLOSE = {"abs": 1e-6}

pytestmark = pytest.mark.filterwarnings("ignore:No examples of the group")


def column(numbers: Mapping[str, Any], field: str) -> np.ndarray:
    return np.asarray(numbers["metadata"])[:, numbers["fields"].index(field)]


def our_ids(numbers: Mapping[str, Any], fields: list[str]) -> np.ndarray:
    """The package lets its first field run fastest, we the last."""
    rows = {field: column(numbers, field).astype(np.int64) for field in reversed(fields)}
    columns = read_columns(Dataset.from_dict(rows), list(rows))
    return GroupInfo.from_columns(columns).encode_columns(columns)


def members_of(grouped: Mapping[str, Any], keep: str = "") -> tuple[np.ndarray, list[str]]:
    """[N, K] of the package's groups whose names hold `keep`."""
    ids = [group for group, name in enumerate(grouped["names"]) if keep in name]
    return np.asarray(grouped["groups"])[:, None] == np.asarray(ids), [grouped["names"][group] for group in ids]


def ours(numbers: Mapping[str, Any], members: np.ndarray, names: list[str], **options: Any) -> dict[str, float]:
    return named_metrics(np.asarray(numbers["predictions"]), np.asarray(numbers["labels"]), members, names, **options)


def assert_groups_agree(
    metrics: Mapping[str, float], results: Mapping[str, float], names: list[str], kind: str
) -> None:
    mine, theirs = {"accuracy": ("accuracy", "acc"), "pearson": ("pearson", "r")}[kind]
    counted = [name for name in names if results[f"count_{name}"] > 0]
    assert counted
    for name in names:
        assert metrics.get(f"group_count/{name}", 0) == results[f"count_{name}"]
        if name in counted:
            assert metrics[f"group_{mine}/{name}"] == pytest.approx(results[f"{theirs}_{name}"], **CLOSE)


@pytest.mark.parametrize("name", NUMBERS)
def test_group_ids(name: str) -> None:
    """Of training and of every evaluation, up to numbers that the package gives to groups without rows."""
    numbers = NUMBERS[name]
    for grouped in [numbers["training"], *numbers["evaluation"]]:
        _, expected = np.unique(grouped["groups"], return_inverse=True)
        np.testing.assert_array_equal(our_ids(numbers, grouped["fields"]), expected)


def test_civilcomments_over_sixteen_overlapping_groups() -> None:
    numbers, results = NUMBERS["civilcomments"], NUMBERS["civilcomments"]["results"]
    parts = [members_of(grouped, f"{grouped['fields'][0]}:1") for grouped in numbers["evaluation"]]
    members, names = np.concatenate([part for part, _ in parts], axis=1), [name for _, part in parts for name in part]
    assert len(names) == 16 and members.sum(axis=1).max() > 1 and not members.any(axis=1).all()
    metrics = ours(numbers, members, names)
    assert_groups_agree(metrics, results, names, "accuracy")
    assert metrics["worst_group_accuracy"] == pytest.approx(results["acc_wg"], **CLOSE)
    assert metrics["accuracy"] == pytest.approx(results["acc_avg"], **CLOSE)


def test_povertymap_over_urban_and_rural() -> None:
    numbers, results = NUMBERS["poverty"], NUMBERS["poverty"]["results"]
    members, names = members_of(numbers["evaluation"][0])
    metrics = ours(numbers, members, names, problem_type=REGRESSION)
    assert_groups_agree(metrics, results, names, "pearson")
    for mine, theirs in {"worst_group_pearson": "r_wg", "pearson": "r_all", "mse": "mse_avg"}.items():
        assert metrics[mine] == pytest.approx(results[theirs], **CLOSE)


def test_fmow_over_regions_but_other() -> None:
    """The worst region is over five; what lies in none counts in the average."""
    numbers, results = NUMBERS["fmow"], NUMBERS["fmow"]["results"]
    years, regions = numbers["evaluation"]
    members, names = members_of(regions)
    kept = [place for place, name in enumerate(names) if "Other" not in name]
    assert len(kept) == 5 < len(names) and not members[:, kept].any(axis=1).all()
    metrics = ours(numbers, members[:, kept], [names[place] for place in kept])
    assert_groups_agree(metrics, results, [names[place] for place in kept], "accuracy")
    assert metrics["worst_group_accuracy"] == pytest.approx(results["acc_worst_region"], **CLOSE)
    assert metrics["accuracy"] == pytest.approx(results["acc_avg"], **CLOSE)
    by_year = ours(numbers, *members_of(years))
    assert by_year["worst_group_accuracy"] == pytest.approx(results["acc_worst_year"], **CLOSE)


@pytest.mark.parametrize("name", ["camelyon17", "waterbirds", "celebA"])
def test_accuracies(name: str) -> None:
    numbers, results = NUMBERS[name], NUMBERS[name]["results"]
    members, names = members_of(numbers["evaluation"][0])
    published = dict(zip(names, (3498, 184, 56, 1057), strict=False)) if name == "waterbirds" else None
    metrics = ours(numbers, members, names, train_counts=published, problem_type=CLASSIFICATION)
    assert_groups_agree(metrics, results, names, "accuracy")
    assert metrics["worst_group_accuracy"] == pytest.approx(results["acc_wg"], **CLOSE)
    if published is None:
        assert metrics["accuracy"] == pytest.approx(results["acc_avg"], **CLOSE)
    else:
        assert metrics["adjusted_accuracy"] == pytest.approx(results["adj_acc_avg"], **CLOSE)


@pytest.mark.filterwarnings("ignore:CombinatorialGrouper", "ignore:Minimum metadata value")
def test_the_package_that_is_installed_gives_the_kept_groups(tmp_path: Path) -> None:
    """Without torch_scatter: rows, predictions and groups of all six, and the correlations of PovertyMap."""
    from wilds.common.metrics.all_metrics import PearsonCorrelation

    script = runpy.run_path(str(DATA / "make_wilds_numbers.py"))
    for name, kept in NUMBERS.items():
        dataset, rows = script["predicted"](name, tmp_path)
        found = script["numbers_of"](dataset, name, rows, {})
        for key in ("fields", "metadata", "labels", "training", "evaluation"):
            assert found[key] == kept[key], (name, key)
        # Drawn numbers in float32, whose last bit is that of the processor.
        assert np.allclose(found["predictions"], kept["predictions"], rtol=1e-6, atol=1e-6), name
        if name == "poverty":
            results, _ = dataset.standard_group_eval(PearsonCorrelation(), dataset._eval_grouper, *rows)
            assert len(results) == 6
            assert {key: kept["results"][key] for key in results} == pytest.approx(results, **CLOSE)
