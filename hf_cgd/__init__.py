"""hf_cgd: train text and vision models whose worst group does well.

Swap `transformers.Trainer` for `GroupRobustTrainer` and name the column that says which group an example belongs to.
"""

from typing import TYPE_CHECKING

from hf_cgd.lazy import names_on_demand

if TYPE_CHECKING:
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
else:
    __getattr__ = names_on_demand(
        __name__,
        {
            "load_report": "hf_cgd.cards.loading",
            "GroupInfo": "hf_cgd.data.groups",
            "groups_from_clusters": "hf_cgd.discovery",
            "groups_from_errors": "hf_cgd.discovery",
            "last_layer_retraining": "hf_cgd.discovery",
            "gradient_scope": "hf_cgd.gradients",
            "GroupMetric": "hf_cgd.metrics",
            "GroupReport": "hf_cgd.metrics",
            "group_metrics": "hf_cgd.metrics",
            "HeadInput": "hf_cgd.models.head",
            "GroupRobustWarning": "hf_cgd.monitors",
            "CGD": "hf_cgd.objectives",
            "CORAL": "hf_cgd.objectives",
            "ERM": "hf_cgd.objectives",
            "ERMUW": "hf_cgd.objectives",
            "IRM": "hf_cgd.objectives",
            "PGI": "hf_cgd.objectives",
            "GroupDRO": "hf_cgd.objectives",
            "Objective": "hf_cgd.objectives",
            "GroupRobustLoss": "hf_cgd.robust_loss.loss",
            "GroupRobustConfig": "hf_cgd.trainer.config",
            "GroupRobustTrainer": "hf_cgd.trainer.trainer",
        },
    )

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


def __dir__() -> list[str]:
    # For completion in notebooks: names that have not been imported yet are names too.
    return sorted({*globals(), *__all__})
