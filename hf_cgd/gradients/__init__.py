"""Which parameters the group gradients are taken over, and how they are taken."""

from hf_cgd.gradients.base import GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.engines.auto import ENGINES, AutoEngine
from hf_cgd.gradients.engines.per_group import PerGroupCutEngine, PerGroupEngine
from hf_cgd.gradients.engines.single_pass import SinglePassEngine
from hf_cgd.gradients.engines.sketch import SketchEngine
from hf_cgd.gradients.engines.static_shapes import OneHotEngine, needs_static_shapes
from hf_cgd.gradients.engines.tensor_hooks import TensorHookEngine
from hf_cgd.gradients.gram import gram_matrix, gram_on_device
from hf_cgd.gradients.scope import gradient_scope

__all__ = [
    "ENGINES",
    "AutoEngine",
    "GradientEngine",
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
