"""Groups by clusters of the last layer's input within each class, as in GEORGE (Sohoni et al. 2020)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
from torch import nn

from hf_cgd.discovery.features import example_features, label_column_of
from hf_cgd.discovery.found import FOUND_COLUMN, FoundGroups, found_groups, require_room, with_true_groups
from hf_cgd.discovery.trust import stability

Method = Literal["gaussian_mixture", "kmeans"]
COMPONENTS = 10
"""Principal components of the features that are clustered."""
CHOOSING_ROWS = 2000
"""Rows of a class, at most, by which the number of its clusters is chosen."""
CLOUDS = 5
"""Draws of a single Gaussian that a class has to be better clustered than."""
REPEATS = 5


def groups_from_clusters(
    dataset: datasets.Dataset,
    model: nn.Module,
    *,
    method: Method = "gaussian_mixture",
    most_clusters: int = 5,
    min_cluster_size: int = 20,
    validation: Any = None,
    true_group_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    column: str = FOUND_COLUMN,
    seed: int = 0,
    **options: Any,
) -> FoundGroups:
    """Clusters of each class in what a plain (ERM) model sees of it.

        found = groups_from_clusters(train, model, processing_class=tokenizer)
        print(found)
        GroupRobustTrainer(..., train_dataset=found.dataset, group_column=found.column)

    The number of clusters of a class has the best silhouette (Rousseeuw 1987). The class stays whole where that is no
    better than the best one of a single Gaussian with the same covariance.

    Args:
        dataset: the rows to train on.
        model: a classifier that was trained on them without groups.
        method: scikit-learn's.
        most_clusters: in a class, >= 2.
        min_cluster_size: in rows; numbers of clusters with a smaller one are passed over.
        validation: rows whose true groups are known; None for none.
        true_group_column: column(s) of the true groups there, which are crossed with the class.
        label_column: of the classes; None for the first of labels, label, label_ids.
        column: name of the new column.
        seed: of everything that is drawn.
        **options: see `hf_cgd.discovery.example_features`.

    Raises:
        ValueError: parts that do not fit together, or no class that is split.
    """
    require_room(dataset, column)
    if (validation is None) != (true_group_column is None):
        raise ValueError("validation and true_group_column go together: pass both or neither.")
    if most_clusters < 2 or min_cluster_size < 1:
        raise ValueError(
            f"Expected most_clusters >= 2 and min_cluster_size >= 1, got {most_clusters} and {min_cluster_size}."
        )
    true = [true_group_column] if isinstance(true_group_column, str) else list(true_group_column or ())
    run = {"label_column": label_column, "not_inputs": true, **options}
    seen = example_features(model, dataset, **run)
    clustering = ClassClusters.fit(
        seen.features, seen.labels, method=method, most_clusters=most_clusters, min_cluster_size=min_cluster_size,
        seed=seed,
    )  # fmt: skip
    whole = [seen.class_names[n] for n, part in clustering.parts.items() if part is None]
    if len(whole) == len(clustering.parts):
        raise ValueError(
            f"No class is more than one cloud to the model (classes {whole}; clusters of at least {min_cluster_size} "
            "rows), so there are no groups to train on. Try groups_from_errors, or a model that was trained less."
        )
    cautions = []
    if whole:
        cautions.append(f"One cloud each, left whole: {', '.join(map(repr, whole))}.")
    largest = max(len(np.unique(clustering.ids[seen.labels == number])) for number in clustering.parts)
    names = [f"{name} (cluster {1 + place})" for name in seen.class_names for place in range(largest)]
    agrees = None
    if validation is not None and true_group_column is not None:
        other = example_features(model, validation, **run)
        own, _ = label_column_of(validation, label_column)
        found = clustering.assign(other.features, other.labels)
        agrees = with_true_groups(validation, true_group_column, own, found, other.labels)
    split = np.isin(seen.labels, [n for n, part in clustering.parts.items() if part is not None])
    again = [ids[split] for ids in clustering.repeated(seen.features, seen.labels, REPEATS)]
    stable = stability(clustering.ids[split], again, seen.labels[split], "halves of the rows, with other seeds")
    numbers = [f"{seen.class_names[n]}: {part or 'one cloud'}" for n, part in clustering.parts.items()]
    how = f"Groups by clusters of the last layer's input within the classes ({method}). {'; '.join(numbers)}."
    return found_groups(dataset, column, names, seen.labels * largest + clustering.ids, how, stable, agrees, cautions)


@dataclass(frozen=True)
class Clustered:
    """The clusters of one class.

    Args:
        clusters: how many, >= 2.
        silhouette: of the rows that the number was chosen by, in [-1, 1].
        of_one_cloud: the best one of `CLOUDS` draws of a single Gaussian.
        assign: features [n, D] -> cluster [n], 0 for the largest.
    """

    clusters: int
    silhouette: float
    of_one_cloud: float
    assign: Callable[[np.ndarray], np.ndarray]

    def __str__(self) -> str:
        return f"{self.clusters} clusters (silhouette {self.silhouette:.2f}, of one cloud {self.of_one_cloud:.2f})"


@dataclass(frozen=True)
class ClassClusters:
    """Clusters within each class.

    Args:
        parts: by class; None for one that stays whole.
        ids: [N] cluster of each row that was fitted, within its class, 0 for the largest.
        method, most_clusters, min_cluster_size, seed: see `groups_from_clusters`.
    """

    parts: dict[int, Clustered | None]
    ids: np.ndarray
    method: Method
    most_clusters: int
    min_cluster_size: int
    seed: int

    @classmethod
    def fit(
        cls,
        features: np.ndarray,
        classes: np.ndarray,
        *,
        method: Method = "gaussian_mixture",
        most_clusters: int = 5,
        min_cluster_size: int = 20,
        seed: int = 0,
    ) -> "ClassClusters":
        """Clusters of features [N, D] within the classes [N]."""
        parts = {
            int(number): _clusters(
                features[classes == number], method, most_clusters, min_cluster_size, np.random.default_rng(seed)
            )
            for number in np.unique(classes)
        }
        made = cls(parts, np.zeros(len(classes), dtype=np.int64), method, most_clusters, min_cluster_size, seed)
        return cls(parts, made.assign(features, classes), method, most_clusters, min_cluster_size, seed)

    def assign(self, features: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """[n] cluster of each row within its class; 0 for classes that stay whole or were not fitted."""
        ids = np.zeros(len(classes), dtype=np.int64)
        for number, part in self.parts.items():
            rows = classes == number
            if part is not None and rows.any():
                ids[rows] = part.assign(features[rows])
        return ids

    def repeated(self, features: np.ndarray, classes: np.ndarray, repeats: int) -> list[np.ndarray]:
        """[N] clusters as found, number and all, in random halves of each class that is split, for each repetition."""
        results = []
        for repeat in range(repeats):
            random = np.random.default_rng([self.seed, 1 + repeat])
            ids = np.zeros(len(classes), dtype=np.int64)
            for number, part in self.parts.items():
                if part is not None:
                    rows = np.flatnonzero(classes == number)
                    half = features[random.permutation(rows)[: len(rows) // 2]]
                    least = max(self.min_cluster_size // 2, 1)
                    other = _clusters(half, self.method, self.most_clusters, least, random, against_cloud=False)
                    ids[rows] = 0 if other is None else other.assign(features[rows])
            results.append(ids)
        return results


def _clusters(
    features: np.ndarray,
    method: Method,
    most: int,
    least_rows: int,
    random: np.random.Generator,
    against_cloud: bool = True,
) -> Clustered | None:
    """Clusters of one class, None where it stays whole."""
    from sklearn.decomposition import PCA

    features = features.astype(np.float64)
    spread = float(np.sqrt(features.var(axis=0).sum()))
    if len(features) < max(2 * least_rows, 4) or not spread > 1e-12 * (1 + float(np.abs(features).max())):
        return None
    project = PCA(min(COMPONENTS, features.shape[1], len(features) - 1), random_state=_seed(random)).fit(features)
    points = project.transform(features) / spread
    few = points[random.permutation(len(points))[:CHOOSING_ROWS]]
    least_share = least_rows / len(points)
    clusters, silhouette = _best_number(few, method, most, least_share, random)
    cloud = -1.0
    if clusters and against_cloud:
        drawn = [random.standard_normal(few.shape) * few.std(axis=0) for _ in range(CLOUDS)]
        cloud = max(_best_number(points_of_one, method, most, least_share, random)[1] for points_of_one in drawn)
    if not clusters or silhouette <= cloud:
        return None
    model = _clusterer(method, clusters, random).fit(points)
    sizes = np.bincount(model.predict(points), minlength=clusters)
    place = np.argsort(np.argsort(-sizes, kind="stable"))

    def assign(other: np.ndarray) -> np.ndarray:
        return np.asarray(place[model.predict(project.transform(other.astype(np.float64)) / spread)])

    return Clustered(clusters, silhouette, cloud, assign)


def _best_number(
    points: np.ndarray, method: Method, most: int, least_share: float, random: np.random.Generator
) -> tuple[int, float]:
    """The number of clusters with the best silhouette, and that; (0, -1) where every number gives too small a one."""
    from sklearn.metrics import silhouette_score

    best = (0, -1.0)
    for clusters in range(2, min(most, len(points) - 1) + 1):
        ids = _clusterer(method, clusters, random).fit(points).predict(points)
        if np.bincount(ids, minlength=clusters).min() < max(least_share * len(points), 1):
            continue
        value = float(silhouette_score(points, ids))
        if value > best[1]:
            best = (clusters, value)
    return best


def _clusterer(method: Method, clusters: int, random: np.random.Generator) -> Any:
    from sklearn.cluster import KMeans
    from sklearn.mixture import GaussianMixture

    if method == "kmeans":
        return KMeans(clusters, n_init=4, random_state=_seed(random))
    if method == "gaussian_mixture":
        return GaussianMixture(clusters, n_init=2, reg_covar=1e-4, random_state=_seed(random))
    raise ValueError(f"method: expected 'gaussian_mixture' or 'kmeans', got {method!r}.")


def _seed(random: np.random.Generator) -> int:
    return int(random.integers(2**31))
