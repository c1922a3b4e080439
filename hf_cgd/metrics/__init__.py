"""How each group fares: metrics, intervals, and the table of groups."""

from hf_cgd.metrics.group_metrics import ONE_CLASS, group_metrics, is_interval, lower_is_better
from hf_cgd.metrics.intervals import wilson_interval
from hf_cgd.metrics.report import GroupReport, GroupRow

__all__ = [
    "ONE_CLASS",
    "GroupReport",
    "GroupRow",
    "group_metrics",
    "is_interval",
    "lower_is_better",
    "wilson_interval",
]
