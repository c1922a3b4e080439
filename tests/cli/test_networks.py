"""Networks that a recipe is asked for by name."""

import sys
from pathlib import Path

import pytest
import timm
import torch
from packaging.version import Version
from safetensors.torch import save_file
from timm.models import save_for_hf
from transformers import AutoModelForImageClassification

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
    torch.manual_seed(0)
    model, _ = image_classifier("resnet18", ["a", "b"], pretrained=False)
    own = timm.create_model("resnet18", num_classes=2)
    assert model.timm_model.conv1.weight.std().item() == pytest.approx(own.conv1.weight.std().item(), rel=0.02)


def test_channels_innermost_in_memory() -> None:
    """Convolutions give what they gave, in the order that their weights have."""
    torch.manual_seed(0)
    plain, _ = image_classifier("test_resnet", ["a", "b"], pretrained=False)
    torch.manual_seed(0)
    last, _ = image_classifier("test_resnet", ["a", "b"], pretrained=False, channels_last=True)
    images = torch.randn(3, 3, 128, 128)
    torch.testing.assert_close(last.eval()(images).logits, plain.eval()(images).logits)
    assert last.timm_model.forward_features(images).is_contiguous(memory_format=torch.channels_last)
    assert not plain.timm_model.forward_features(images).is_contiguous(memory_format=torch.channels_last)


def test_eight_channels_and_a_regression(tmp_path: Path) -> None:
    """The wrapper is saved and loaded again with its channels; it gives what the bare network of timm gives."""
    model, _ = image_classifier("test_resnet", [], pretrained=False, in_chans=8)
    images = torch.randn(3, 8, 32, 32)
    model.eval()
    outputs = model(images).logits
    assert outputs.shape == (3, 1) and torch.equal(outputs, model.timm_model(images))
    assert model.config.problem_type == "regression"
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(images).logits, outputs)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_weights_of_a_file(ending: str, tmp_path: Path) -> None:
    """All but the head come from the file; the colours of its first layer are spread over eight channels."""
    torch.manual_seed(0)
    published = timm.create_model("test_resnet", num_classes=1000)
    file = tmp_path / f"weights.{ending}"
    save = torch.save if ending == "pth" else save_file
    save(published.state_dict(), file)
    model, _ = image_classifier("test_resnet", ["a", "b"], pretrained=False, weights=file)
    loaded, head = model.timm_model.state_dict(), model.timm_model.get_classifier()
    assert head.weight.shape[0] == 2
    same = [name for name, value in published.state_dict().items() if torch.equal(loaded[name], value)]
    assert set(loaded) - set(same) == {"fc.weight", "fc.bias"}
    wide, _ = image_classifier("test_resnet", ["a", "b"], weights=file, in_chans=8)
    first, old = next(wide.timm_model.parameters()), next(published.parameters())
    expected = torch.cat([old, old, old[:, :2]], dim=1) * 3 / 8
    torch.testing.assert_close(first, expected)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="weights: expected a file with the weights of test_resnet"):
        image_classifier("test_resnet", ["a", "b"], weights=tmp_path / "none.pth")
    other = tmp_path / "other.pth"
    torch.save({"another": torch.zeros(2)}, other)
    with pytest.raises(OSError, match=r"weights: .*other.pth, but it lacks \d+ of them, such as conv1.0.weight"):
        image_classifier("test_resnet", ["a", "b"], weights=other)
    other.write_bytes(b"cut off")
    with pytest.raises(OSError, match=r"weights: expected the weights of test_resnet .* cannot be loaded"):
        image_classifier("test_resnet", ["a", "b"], weights=other)
    with pytest.raises(ValueError, match="remove weights, in_chans, or name a timm architecture"):
        image_classifier("owner/vit", ["a", "b"], weights="x.pth", in_chans=8)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("written", ["", "local-dir:"])
def test_a_folder_that_timm_wrote(safe: bool, written: str, tmp_path: Path) -> None:
    """All but the head come from it, and what it says of its images; timm reads the same."""
    torch.manual_seed(0)
    own = timm.create_model("test_resnet", num_classes=3)
    own.pretrained_cfg = {**own.pretrained_cfg, "mean": (0.1, 0.2, 0.3), "input_size": (3, 48, 48)}
    save_for_hf(own, tmp_path, safe_serialization=safe)
    name = f"{written}{tmp_path}"
    model, processor = image_classifier(name, ["a", "b"])
    loaded, head = model.timm_model.state_dict(), model.timm_model.get_classifier()
    assert head.weight.shape[0] == 2
    # Of a folder, older versions take another file for weights.
    if not safe or Version(timm.__version__) >= Version("1.0.31"):
        expected = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=2).state_dict()
        assert {key for key in loaded if not torch.equal(loaded[key], expected[key])} == {"fc.weight", "fc.bias"}
    assert {key for key in loaded if not torch.equal(loaded[key], own.state_dict()[key])} == {"fc.weight", "fc.bias"}
    assert processor.data_config["mean"] == (0.1, 0.2, 0.3) and processor.data_config["input_size"] == (3, 48, 48)
    _, resized = image_classifier(name, ["a", "b"], input_size=(3, 32, 32))
    assert resized.data_config["input_size"] == (3, 32, 32)
    new, _ = image_classifier(name, ["a", "b"], pretrained=False)
    assert not torch.equal(next(new.parameters()), next(own.parameters()))
    for file in tmp_path.glob("*model*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"expected model.safetensors or pytorch_model.bin beside .*config"):
        image_classifier(name, ["a", "b"])
