"""Which parameters the group gradients are taken over, and how they are taken."""

from hf_cgd.gradients.auto import ENGINES, AutoEngine
from hf_cgd.gradients.one_hot import OneHotEngine, needs_static_shapes
from hf_cgd.gradients.per_group import (
    GroupGradients,
    PerGroupCutEngine,
    PerGroupEngine,
    gram_matrix,
    gram_on_device,
)
from hf_cgd.gradients.scope import gradient_scope
from hf_cgd.gradients.single_pass import SinglePassEngine
from hf_cgd.gradients.sketch import SketchEngine
from hf_cgd.gradients.surrogate import NotExactError
from hf_cgd.gradients.tensor_hooks import TensorHookEngine

__all__ = [
    "ENGINES",
    "AutoEngine",
    "GroupGradients",
    "NotExactError",
    "OneHotEngine",
    "PerGroupCutEngine",
    "PerGroupEngine",
    "SinglePassEngine",
    "SketchEngine",
    "TensorHookEngine",
    "gradient_scope",
    "gram_matrix",
    "gram_on_device",
    "needs_static_shapes",
]
