"""Clusters of what a model sees, from a dataset to a column that a trainer takes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset
from tiny import predicts_one_class
from torch import Tensor, nn

from hf_cgd import GroupRobustTrainer, GroupRobustWarning, groups_from_clusters

FEW: dict[str, Any] = {"most_clusters": 2}


class Identity(nn.Module):
    """Its features are the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x)


def planted(distance: float = 9.0, seed: int = 0) -> Dataset:
    """Cats in two places, 90 and 45 rows; dogs in one, 80 rows."""
    random = np.random.default_rng(seed)
    places = [0] * 90 + [1] * 45 + [0] * 80
    x = random.standard_normal((215, 4))
    x[:, 0] += distance * np.array(places)
    x[135:, 1] += 20
    rows = {
        "x": x.astype(np.float32),
        "labels": [0] * 135 + [1] * 80,
        "place": [("in", "out")[place] for place in places],
    }
    return Dataset.from_dict(rows).cast_column("labels", ClassLabel(names=["cat", "dog"])).shuffle(seed)


def test_clusters_become_a_column_with_what_is_known_of_it() -> None:
    data = planted()
    with pytest.warns(GroupRobustWarning, match="One cloud each, left whole: 'dog'"):
        found = groups_from_clusters(
            data, Identity(), validation=planted(seed=1), true_group_column="place", not_inputs=[], **FEW
        )
    assert found.counts == {"cat (cluster 1)": 90, "cat (cluster 2)": 45, "dog (cluster 1)": 80}
    expected = {("cat", "in"): "cat (cluster 1)", ("cat", "out"): "cat (cluster 2)", ("dog", "in"): "dog (cluster 1)"}
    names = [expected[("cat", "dog")[row["labels"]], row["place"]] for row in data]
    assert found.dataset["found_group"][:] == names
    assert found.stability is not None and found.stability.mean > 0.99 and found.stability.repeats == 5
    # Dogs are in one place, so that there is nothing to find among them.
    assert [(group.name, group.recall) for group in found.agreement.groups] == [
        ("labels:cat place:in", 1.0),
        ("labels:cat place:out", 1.0),
    ]
    assert "cat: 2 clusters (silhouette 0." in str(found) and "dog: one cloud" in str(found)


def test_clusters_that_are_not_the_true_groups_are_warned_of() -> None:
    data = planted()
    validation = planted(seed=1).remove_columns("place").add_column("place", ["in", "out"] * 107 + ["in"])
    with pytest.warns(GroupRobustWarning, match="do not stand in for the true ones"):
        groups_from_clusters(data, Identity(), validation=validation, true_group_column="place", **FEW)


def test_what_has_no_clusters_or_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="No class is more than one cloud"):
        groups_from_clusters(planted(distance=0.0), Identity(), **FEW)
    with pytest.raises(ValueError, match="go together"):
        groups_from_clusters(planted(), Identity(), validation=planted())
    with pytest.raises(ValueError, match="most_clusters >= 2"):
        groups_from_clusters(planted(), Identity(), most_clusters=1)
    with pytest.raises(ValueError, match="method: expected 'gaussian_mixture' or 'kmeans', got 'dbscan'"):
        groups_from_clusters(planted(), Identity(), method="dbscan")  # type: ignore[arg-type]


@predicts_one_class
@pytest.mark.filterwarnings("ignore:Groups that were found")
def test_a_trainer_takes_the_column(config: Callable[..., Any]) -> None:
    found = groups_from_clusters(planted(), Identity(), **FEW)
    torch.manual_seed(0)
    data = found.dataset.select_columns(["x", "labels", found.column])
    run = GroupRobustTrainer(Identity(), config(group_column=found.column, max_steps=1), train_dataset=data)
    assert (run.groups.names, run.groups.counts) == (found.names, (90, 45, 80))
    run.train()
