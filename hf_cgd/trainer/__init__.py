"""The `transformers.Trainer` that knows groups, and its options."""

from hf_cgd.trainer.config import GroupRobustConfig
from hf_cgd.trainer.trainer import GroupRobustTrainer

__all__ = ["GroupRobustConfig", "GroupRobustTrainer"]
