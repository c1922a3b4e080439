"""Networks that a recipe is asked for by name."""

import sys

import pytest
import torch

from hf_cgd.cli import image_classifier


def test_image_models_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--model: timm has no network 'resnet1888'. .* \['resnet"):
        image_classifier("resnet1888", ["a", "b"])
    with pytest.raises(OSError, match=r"(?s)--model: expected 'resnet18'.*--pretrained false"):
        image_classifier("resnet18", ["a", "b"])
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r'pip install "hf-cgd\[vision\]"'):
        image_classifier("resnet18", ["a", "b"])


def test_timm_s_own_initial_weights() -> None:
    import timm

    torch.manual_seed(0)
    model, _ = image_classifier("resnet18", ["a", "b"], pretrained=False)
    own = timm.create_model("resnet18", num_classes=2)
    assert model.timm_model.conv1.weight.std().item() == pytest.approx(own.conv1.weight.std().item(), rel=0.02)
