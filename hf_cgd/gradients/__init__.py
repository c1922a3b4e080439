"""Which parameters the group gradients are taken over, and how they are taken."""

from hf_cgd.gradients.per_group import PerGroupEngine, gram_matrix
from hf_cgd.gradients.scope import gradient_scope

__all__ = ["PerGroupEngine", "gradient_scope", "gram_matrix"]
