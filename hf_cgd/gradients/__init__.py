"""Which parameters the group gradients are taken over, and how they are taken."""

from hf_cgd.gradients.base import GradientEngine, GroupGradients, NotExactError
from hf_cgd.gradients.engines.auto import ENGINES, AutoEngine, Engine
from hf_cgd.gradients.engines.per_group import PerGroupCutEngine, PerGroupEngine
from hf_cgd.gradients.engines.single_pass import SinglePassEngine
from hf_cgd.gradients.engines.sketch import SketchEngine
from hf_cgd.gradients.engines.static_shapes import StaticShapesEngine, needs_static_shapes
from hf_cgd.gradients.engines.tensor_hooks import TensorHookEngine
from hf_cgd.gradients.gram import gram_matrix, gram_on_device, inner_products
from hf_cgd.gradients.layers.base import LayerRule
from hf_cgd.gradients.layers.registry import register_layer_rule
from hf_cgd.gradients.scope import gradient_scope

__all__ = [
    "ENGINES",
    "AutoEngine",
    "Engine",
    "GradientEngine",
    "GroupGradients",
    "LayerRule",
    "NotExactError",
    "PerGroupCutEngine",
    "PerGroupEngine",
    "SinglePassEngine",
    "SketchEngine",
    "StaticShapesEngine",
    "TensorHookEngine",
    "gradient_scope",
    "gram_matrix",
    "gram_on_device",
    "inner_products",
    "needs_static_shapes",
    "register_layer_rule",
]
