"""What `evaluate.load` looks for: the metric itself is a part of hf_cgd."""

from hf_cgd.metrics.evaluate_module import GroupAccuracy

__all__ = ["GroupAccuracy"]
