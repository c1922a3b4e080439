"""Planted clusters are found, in number and rows, and one cloud is left whole."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from hf_cgd.discovery.clusters import ClassClusters
from hf_cgd.discovery.trust import rand_within_classes


def planted(counts: list[list[int]], distance: float = 8.0, dimensions: int = 6, seed: int = 0) -> tuple:
    """Features, classes and true clusters: for each class one cloud of these sizes in each place."""
    random = np.random.default_rng(seed)
    features, classes, clusters = [], [], []
    for number, sizes in enumerate(counts):
        for cluster, size in enumerate(sizes):
            center = 20.0 * number + distance * np.eye(dimensions)[cluster]
            features.append(center + random.standard_normal((size, dimensions)))
            classes += [number] * size
            clusters += [cluster] * size
    order = random.permutation(len(classes))
    return np.concatenate(features)[order].astype(np.float32), np.array(classes)[order], np.array(clusters)[order]


@pytest.mark.parametrize("method,scale", [("gaussian_mixture", 1e-3), ("kmeans", 1.0)])
def test_planted_clusters_are_found(method: str, scale: float) -> None:
    features, classes, clusters = planted([[120, 40], [90, 60, 30]])
    found = ClassClusters.fit(scale * features, classes, method=method, most_clusters=4)
    assert {number: part.clusters for number, part in found.parts.items()} == {0: 2, 1: 3}
    # The largest is cluster 0, as it was planted.
    assert (found.ids == clusters).mean() > 0.99
    fresh, of_class, true = planted([[120, 40], [90, 60, 30]], seed=1)
    assert (found.assign(scale * fresh, of_class) == true).mean() > 0.99
    for again in found.repeated(scale * features, classes, 2):
        assert rand_within_classes(found.ids, again, classes) > 0.95


def test_one_cloud_is_left_whole() -> None:
    features, classes, clusters = planted([[200], [100, 50]])
    found = ClassClusters.fit(features, classes, most_clusters=3)
    assert found.parts[0] is None and found.parts[1] is not None and found.parts[1].clusters == 2
    assert set(found.ids[classes == 0]) == {0}
    assert adjusted_rand_score(found.ids[classes == 1], clusters[classes == 1]) > 0.95


def test_a_stretched_cloud_is_one_cloud() -> None:
    """Its silhouette in two parts is high (.4 and more), and so is that of any Gaussian of that shape."""
    random = np.random.default_rng(0)
    features = random.standard_normal((300, 2)) * [10.0, 1.0]
    assert ClassClusters.fit(features, np.zeros(300, dtype=int)).parts == {0: None}


def test_clusters_below_the_smallest_size_are_passed_over() -> None:
    features, classes, _ = planted([[100, 10]])
    assert ClassClusters.fit(features, classes, min_cluster_size=5, most_clusters=2).parts[0] is not None
    assert ClassClusters.fit(features, classes, min_cluster_size=20, most_clusters=2).parts[0] is None


def test_the_same_seed_gives_the_same_groups_and_few_or_equal_rows_stay_whole() -> None:
    features, classes, _ = planted([[60, 30]], distance=3.0)
    first, second = (ClassClusters.fit(features, classes, seed=3, most_clusters=3).ids for _ in range(2))
    assert np.array_equal(first, second)
    assert ClassClusters.fit(features[:3], classes[:3], min_cluster_size=1).parts == {0: None}
    assert ClassClusters.fit(np.ones((50, 4)), np.zeros(50, dtype=int)).parts == {0: None}
