"""The step of group-robust training for any loop."""

from hf_cgd.robust_loss.loss import GroupRobustLoss

__all__ = ["GroupRobustLoss"]
