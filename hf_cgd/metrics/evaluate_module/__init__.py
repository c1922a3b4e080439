"""The group metrics as an `evaluate` module that needs no network.

`evaluate.load(hf_cgd.metrics.evaluate_module.FOLDER)`. The folder `group_accuracy` beside this file is a whole module
as `evaluate` wants it: script, card, requirements. Pushed to a Space of that name it is loaded from the Hub.
"""

from itertools import product
from pathlib import Path
from typing import Any

import datasets
import evaluate
import numpy as np

from hf_cgd.data.columns import Column
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.values import named_values
from hf_cgd.metrics.group_metrics import named_metrics
from hf_cgd.metrics.on_arrays import as_array, plain_values, require_classes

FOLDER = str(Path(__file__).parent / "group_accuracy")
"""What to give to `evaluate.load`."""
_KINDS = ("string", "int64")
"""What classes and groups may be; text first, since `datasets` would read the text "007" as a number."""
_DESCRIPTION = "Accuracy over all examples, over each group, and of the worst group, with 95 % Wilson intervals."
_INPUTS = """
Args:
    predictions: predicted classes, one per example, as integers or strings.
    references: true classes, likewise.
    groups: the group of each example, as integers >= 0 or strings.
Returns:
    accuracy, worst_group_accuracy, mean_group_accuracy, one_class_predicted, and per group group_accuracy/<name>,
    group_accuracy_low/<name>, group_accuracy_high/<name>, group_count/<name>.
Examples:
    >>> metric = evaluate.load(hf_cgd.metrics.evaluate_module.FOLDER)
    >>> metric.add_batch(predictions=[0, 1, 1], references=[0, 1, 0], groups=["land", "land", "water"])
    >>> metric.compute()["worst_group_accuracy"]
    0.0
"""


class GroupAccuracy(evaluate.Metric):
    """Group accuracies behind the `evaluate` interface; works offline, batches can be added one by one.

    Raises:
        ValueError: logits in place of classes, missing groups, text compared with numbers.
    """

    def _info(self) -> evaluate.MetricInfo:
        kinds = product(_KINDS, _KINDS)
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=[
                datasets.Features(
                    {
                        "predictions": datasets.Value(classes),
                        "references": datasets.Value(classes),
                        "groups": datasets.Value(groups),
                    }
                )
                for classes, groups in kinds
            ],
        )

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """See `evaluate.Metric.add`; the example is checked as a batch of one."""
        own = {"predictions": prediction, "references": reference}
        given = {name: value for name, value in own.items() if value is not None} | kwargs
        self.add_batch(**{name: [value] for name, value in given.items()})

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """See `evaluate.Metric.add_batch`; `compute` comes through here too."""
        if predictions is not None and references is not None:
            # Decimal numbers would be cut to whole ones on the way into the table.
            require_classes(as_array("references", references), as_array("predictions", predictions))
        if kwargs.get("groups") is not None:
            kwargs["groups"] = _group_values(kwargs["groups"])
        super().add_batch(predictions=predictions, references=references, **kwargs)

    def _compute(self, predictions: Any, references: Any, groups: Any) -> dict[str, float]:
        column = {"groups": Column(list(groups))}
        info = GroupInfo.from_columns(column)
        return named_metrics(np.asarray(predictions), np.asarray(references), info.encode_columns(column), info.names)


def _group_values(groups: Any) -> list[Any]:
    """The groups of a batch; bools by the names that the Trainer gives them.

    Raises:
        ValueError: values that cannot name a group.
    """
    values = plain_values(groups)
    named_values("groups", Column(values), None)
    return [str(bool(value)) if isinstance(value, (bool, np.bool_)) else value for value in values]
