"""Adapters (peft) on layers that bitsandbytes really keeps in 4 or 8 bits, on the CPU; its stand-in is in test_token_scope."""

import pytest
import torch
from networks import flat
from peft import LoraConfig, get_peft_model
from tiny_tokens import batch_of, tiny_model, token_rows
from torch import Tensor, nn

from hf_cgd.gradients import PerGroupEngine, gradient_scope
from hf_cgd.gradients.engines.auto import AutoEngine
from hf_cgd.models.heads import LossOptions, head_of

bitsandbytes = pytest.importorskip("bitsandbytes")
LAYERS = ("q_proj", "down_proj")


def packed(layer: nn.Linear, bits: int) -> nn.Module:
    sizes = (layer.in_features, layer.out_features)
    kind, options = (
        (bitsandbytes.nn.Linear4bit, {"compute_dtype": torch.float32, "quant_type": "nf4"})
        if bits == 4
        else (bitsandbytes.nn.Linear8bitLt, {"has_fp16_weights": False, "threshold": 0.0})
    )
    made = kind(*sizes, bias=False, **options)
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")


def unpacked(layer: nn.Module, size: torch.Size) -> nn.Linear:
    """A layer of the numbers that the packed ones stand for: what it makes of the unit vectors."""
    twin = nn.Linear(size[1], size[0], bias=False)
    with torch.no_grad():
        twin.weight.copy_(layer(torch.eye(size[1])).T)
    return twin


def adapted(bits: int, as_twin: bool = False) -> nn.Module:
    model = tiny_model("llama")
    for block in model.model.layers:
        for owner, name in ((block.self_attn, LAYERS[0]), (block.mlp, LAYERS[1])):
            layer = getattr(owner, name)
            held = packed(layer, bits)
            setattr(owner, name, unpacked(held, layer.weight.shape) if as_twin else held)
    if not as_twin:
        setattr(model, f"is_loaded_in_{bits}bit", True)
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=list(LAYERS), task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config)


def losses_of(model: nn.Module) -> Tensor:
    batch, head = batch_of(token_rows("llama")), head_of(model)
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return head.losses(logits, batch["labels"], model, LossOptions())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_fast_engine_is_exact_over_adapters_on_packed_layers(bits: int) -> None:
    groups = torch.tensor(["abc".index(row["group"]) for row in token_rows("llama")])
    model = adapted(bits)
    kept = {type(module).__module__ for module in model.modules() if hasattr(module, "base_layer")}
    assert kept == {"peft.tuners.lora.bnb"}
    scope = list(gradient_scope(model, "all").values())
    engine = AutoEngine(model, scope)
    # The first call looks whether the fast engine is exact here, the second one is a step.
    for _ in range(2):
        with engine.recording():
            losses = losses_of(model)
        exact = PerGroupEngine(scope).group_gradients(losses, groups, [0, 1, 2]).rows
        coefficients = torch.linspace(0.1, 0.9, 3)[groups]
        weighted = (coefficients * losses).sum()
        expected = flat(torch.autograd.grad(weighted, scope, retain_graph=True), scope)
        found = engine.group_gradients(losses, groups, [0, 1, 2])
    assert engine.chosen is not None and engine.chosen.name == "single_pass", engine.reason
    torch.testing.assert_close(found.rows, exact, rtol=1e-4, atol=1e-6)
    assert exact.norm(dim=1).min() > 1e-3
    found.scalar(weighted, coefficients).backward()
    torch.testing.assert_close(flat([p.grad for p in scope], scope), expected, rtol=1e-4, atol=1e-6)


def test_gradients_are_those_of_the_numbers_that_4_bits_stand_for() -> None:
    """Layers of 8 bits round their inputs as well, so that a twin of them differs by per cent."""
    groups = torch.tensor(["abc".index(row["group"]) for row in token_rows("llama")])
    rows = []
    for as_twin in (False, True):
        model = adapted(4, as_twin)
        scope = list(gradient_scope(model, "all").values())
        engine = AutoEngine(model, scope)
        with engine.recording():
            losses = losses_of(model)
        rows.append(engine.group_gradients(losses, groups, [0, 1, 2]).rows)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-3, atol=1e-5)
