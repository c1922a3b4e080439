"""The small half of benchmarks/networks.py: real networks, perturbed, every step against plain autograd in float64."""

import importlib.util
import sys

import pytest
from paths import BENCHMARKS

# Behind the tests' own helpers, which have a module `networks` as well.
sys.path.append(str(BENCHMARKS))
import networks_of as catalogue

_spec = importlib.util.spec_from_file_location("sweep_over_networks", BENCHMARKS / "networks.py")
assert _spec is not None and _spec.loader is not None
sweep = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = sweep
_spec.loader.exec_module(sweep)

HALF = {
    ("text", "bert"): "single_pass",
    ("text", "gpt2"): "single_pass",
    ("text", "llama"): "single_pass",
    ("text", "albert"): "single_pass",
    ("text", "deberta-v2"): "per_group",
    ("text", "bart"): "per_group",
    ("vision", "beit"): "per_group with the cut",
    ("vision", "resnet"): "per_group with the cut",
    ("timm", "test_nfnet"): "per_group",
    ("timm", "test_vit"): "single_pass",
    ("timm", "beit_base_patch16_224"): "per_group with the cut",
    ("torchvision", "VisionTransformer"): "per_group with the cut",
    ("torchvision", "SqueezeNet"): "single_pass",
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), HALF)
def test_every_step_is_that_of_plain_autograd(family: str, name: str) -> None:
    network = sweep.build(catalogue.FAMILIES[family]()[name])
    auto = sweep.compare(network, "auto")
    assert auto.engine == HALF[family, name], auto.reason
    assert auto.error < sweep.GREATEST_ERROR, auto
    hooks = sweep.compare(network, "tensor_hooks")
    assert hooks.error < sweep.GREATEST_ERROR, hooks
