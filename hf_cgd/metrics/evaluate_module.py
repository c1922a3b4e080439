"""The group metrics as an `evaluate` module: `GroupAccuracy().compute(predictions=…, references=…, groups=…)`."""

from typing import Any

import datasets
import evaluate
import numpy as np

from hf_cgd.metrics.group_metrics import group_metrics

_DESCRIPTION = "Accuracy over all examples, over each group, and of the worst group, with 95 % Wilson intervals."
_INPUTS = """
Args:
    predictions: predicted classes, one per example.
    references: true classes.
    groups: the group of each example, as strings.
Returns:
    accuracy, worst_group_accuracy, mean_group_accuracy, and per group group_accuracy/<name>,
    group_accuracy_low/<name>, group_accuracy_high/<name>, group_count/<name>.
"""


class GroupAccuracy(evaluate.Metric):
    """Group accuracies behind the `evaluate` interface; works offline, batches can be added one by one."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": datasets.Value("int64"),
                    "references": datasets.Value("int64"),
                    "groups": datasets.Value("string"),
                }
            ),
        )

    def _compute(self, predictions: Any, references: Any, groups: Any) -> dict[str, float]:
        names, ids = np.unique(np.asarray(groups), return_inverse=True)
        return group_metrics(np.asarray(predictions), np.asarray(references), ids, [str(name) for name in names])
