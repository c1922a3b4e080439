"""The small half of benchmarks/networks.py: real networks, perturbed, every step against plain autograd in float64."""

from typing import Any

import pytest
from paths import benchmark

sweep: Any = benchmark("networks")
catalogue: Any = benchmark("networks_of")

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
