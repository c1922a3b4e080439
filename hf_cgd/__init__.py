"""hf_cgd: train text and vision models whose worst group does well.

Swap `transformers.Trainer` for `GroupRobustTrainer` and name the column that says which group an example belongs to.
"""

from hf_cgd.cards.loading import load_report
from hf_cgd.data.groups import GroupInfo
from hf_cgd.discovery import groups_from_clusters, groups_from_errors, last_layer_retraining
from hf_cgd.gradients import gradient_scope
from hf_cgd.metrics import GroupMetric, GroupReport, group_metrics
from hf_cgd.models.head import HeadInput
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.objectives import CGD, CORAL, ERM, ERMUW, IRM, PGI, GroupDRO, Objective
from hf_cgd.robust_loss.loss import GroupRobustLoss
from hf_cgd.trainer.config import GroupRobustConfig
from hf_cgd.trainer.trainer import GroupRobustTrainer

__version__ = "0.2.0"

__all__ = [
    "CGD",
    "CORAL",
    "ERM",
    "ERMUW",
    "IRM",
    "PGI",
    "GroupDRO",
    "GroupInfo",
    "GroupMetric",
    "GroupReport",
    "GroupRobustConfig",
    "GroupRobustLoss",
    "GroupRobustTrainer",
    "GroupRobustWarning",
    "HeadInput",
    "Objective",
    "gradient_scope",
    "group_metrics",
    "groups_from_clusters",
    "groups_from_errors",
    "last_layer_retraining",
    "load_report",
]
