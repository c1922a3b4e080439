"""What fairlearn's MetricFrame says of made-up predictions; `group_metrics` has to say the same.

pip install fairlearn; python tests/support/fairlearn_numbers.py tests/data/fairlearn_numbers.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, mean_absolute_error, precision_score

METRICS = {
    "accuracy": accuracy_score, "f1": f1_score, "precision": precision_score, "balanced": balanced_accuracy_score,
    "mae": mean_absolute_error,
}  # fmt: skip


def arrays() -> dict[str, Any]:
    """300 labels, predictions that are right three times of four, and three groups of unequal size."""
    generator = np.random.default_rng(7)
    truth = generator.integers(0, 2, 300)
    given = np.where(generator.random(300) < 0.75, truth, 1 - truth)
    return {"y_true": truth, "y_pred": given, "groups": generator.choice(["a", "b", "c"], 300, p=[0.6, 0.3, 0.1])}


def main(path: Path) -> None:
    import fairlearn
    from fairlearn.metrics import MetricFrame

    made = arrays()
    frame = MetricFrame(
        metrics=METRICS, y_true=made["y_true"], y_pred=made["y_pred"], sensitive_features=made["groups"]
    )
    found = {
        name: {
            "overall": float(frame.overall[name]),
            "by_group": {str(group): float(value) for group, value in frame.by_group[name].items()},
            "group_min": float(frame.group_min()[name]),
            "group_max": float(frame.group_max()[name]),
            "difference": float(frame.difference()[name]),
            "ratio": float(frame.ratio()[name]),
        }
        for name in METRICS
    }
    path.write_text(json.dumps({"fairlearn": fairlearn.__version__, "metrics": found}, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
