"""How each group fares: metrics, intervals, and the table of groups."""

from hf_cgd.metrics.custom_metrics import GroupMetric
from hf_cgd.metrics.group_metrics import ONE_CLASS, is_interval, lower_is_better, named_metrics
from hf_cgd.metrics.intervals import wilson_interval
from hf_cgd.metrics.on_arrays import group_metrics
from hf_cgd.metrics.report import GroupReport
from hf_cgd.metrics.report_row import GroupRow

__all__ = [
    "ONE_CLASS",
    "GroupMetric",
    "GroupReport",
    "GroupRow",
    "group_metrics",
    "is_interval",
    "lower_is_better",
    "named_metrics",
    "wilson_interval",
]
