"""Where groups are not labelled, or a model is trained already: find groups, and retrain the last layer."""

from hf_cgd.discovery.clusters import groups_from_clusters
from hf_cgd.discovery.errors import groups_from_errors
from hf_cgd.discovery.features import ExampleFeatures, example_features
from hf_cgd.discovery.found import FoundGroups
from hf_cgd.discovery.last_layer import LastLayerRetraining, last_layer_retraining
from hf_cgd.discovery.predictions import Predictions, out_of_fold_predictions, predict_classes
from hf_cgd.discovery.trust import Agreement, Stability, TrueGroup

__all__ = [
    "Agreement",
    "ExampleFeatures",
    "FoundGroups",
    "LastLayerRetraining",
    "Predictions",
    "Stability",
    "TrueGroup",
    "example_features",
    "groups_from_clusters",
    "groups_from_errors",
    "last_layer_retraining",
    "out_of_fold_predictions",
    "predict_classes",
]
