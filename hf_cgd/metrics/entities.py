"""F1 of the entities that a token classifier finds, through seqeval."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_cgd.data.training_groups import IGNORED
from hf_cgd.metrics.custom_metrics import GroupMetric


def entity_f1(class_names: Sequence[str], **options: Any) -> GroupMetric:
    """The micro-averaged F1 of entities, for `group_metrics={"entity_f1": entity_f1(names)}` (needs seqeval).

    An entity is found where its kind and all of its tokens are right, as in CoNLL.

    Args:
        class_names: of the classes by number, in a scheme such as "O", "B-PER", "I-PER".
        **options: of `seqeval.metrics.f1_score`, such as `mode="strict", scheme=IOB2`.

    Raises:
        ValueError: names of no scheme.
        ImportError: seqeval is not there: pip install "hf_cgd[tokens]".
    """
    names = list(class_names)
    if not any(name[:2] in ("B-", "I-", "E-", "S-", "U-", "L-") for name in names):
        raise ValueError(
            f"Expected class names of a scheme, such as 'O', 'B-PER' and 'I-PER', got {names[:8]}. For classes that "
            "are no parts of entities, token_accuracy tells."
        )
    try:
        from seqeval.metrics import f1_score
    except ImportError as error:
        raise ImportError("entity_f1 needs seqeval: pip install 'hf_cgd[tokens]'.") from error

    def compute(predictions: np.ndarray, labels: np.ndarray) -> float:
        found = [
            # No answer (scores that are NaN) has a number below 0, which would be the name of the last class.
            ([names[place] if place >= 0 else "O" for place in given[kept]], [names[place] for place in true[kept]])
            for given, true in zip(predictions, labels, strict=True)
            if (kept := true != IGNORED).any()
        ]
        return float(f1_score([true for _, true in found], [given for given, _ in found], **options))

    return GroupMetric(compute, greater_is_better=True)
