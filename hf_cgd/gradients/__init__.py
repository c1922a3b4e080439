"""Which parameters the group gradients are taken over, and how they are taken."""

from hf_cgd.gradients.auto import AutoEngine
from hf_cgd.gradients.per_group import GroupGradients, PerGroupEngine, gram_matrix
from hf_cgd.gradients.scope import gradient_scope
from hf_cgd.gradients.single_pass import NotSinglePassError, SinglePassEngine

__all__ = [
    "AutoEngine",
    "GroupGradients",
    "NotSinglePassError",
    "PerGroupEngine",
    "SinglePassEngine",
    "gradient_scope",
    "gram_matrix",
]
