"""Which rule is for which layer; users add rules for layers of their own."""

from typing import Any, TypeVar

from torch import nn

from hf_cgd.gradients.autograd import CONTAINERS
from hf_cgd.gradients.layers.base import LayerRule
from hf_cgd.gradients.layers.convolution import Conv2dRule
from hf_cgd.gradients.layers.linear import LinearRule, TransposedLinearRule
from hf_cgd.gradients.layers.norm import LayerNormRule
from hf_cgd.gradients.layers.rerun import RerunRule

RuleOrClass = TypeVar("RuleOrClass", bound=LayerRule | type[LayerRule])

_of_any_layer = RerunRule()
# The first that matches is taken. A new rule of this package is one file and one entry here.
_rules: list[LayerRule] = [LayerNormRule(), Conv2dRule(), LinearRule(), TransposedLinearRule(), _of_any_layer]


def register_layer_rule(rule: RuleOrClass) -> RuleOrClass:
    """Add a rule for a type of layer: a `LayerRule`, or a class of one that takes no arguments.

    It comes before all others, for engines that have not seen the layer yet.

        @register_layer_rule
        class ScaleRule(LayerRule):
            needs_weights = False                   # the gradient does not read the scale itself
            def matches(self, module, arguments, keywords, output):
                return isinstance(module, Scale)    # computes scale * inputs
            def add_gradients(self, call, gradients, order, targets):
                for group, rows in enumerate(order.split(call.inputs * gradients[0])):
                    targets["scale"][group] += rows.flatten(0, -2).sum(dim=0)

    Raises:
        TypeError: neither a rule nor a class of rules.
    """
    instance = rule() if isinstance(rule, type) and issubclass(rule, LayerRule) else rule
    if not isinstance(instance, LayerRule):
        raise TypeError(f"Expected a LayerRule or a subclass of it, got {rule!r}. Derive your rule from LayerRule.")
    _rules.insert(0, instance)
    return rule


def layer_rules() -> tuple[LayerRule, ...]:
    """All rules, in the order in which they are asked."""
    return tuple(_rules)


def rule_for(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> LayerRule:
    """The first rule that matches a call; the arguments are those of a forward hook.

    Parameters in containers are of no type of layer, whatever the module that uses them is.
    """
    if any(isinstance(part, CONTAINERS) for part in module.children()):
        return _of_any_layer
    return next(rule for rule in _rules if rule.matches(module, arguments, keywords, output))
