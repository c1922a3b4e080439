"""Engines over rows of tokens: tied and untied heads, rotary positions, grouped queries, decoders that see an encoder."""

from typing import Any

import pytest
import torch
from tiny_tokens import batch_of, tiny_model, token_rows

from hf_cgd.gradients import PerGroupEngine, gradient_scope
from hf_cgd.gradients.engines.auto import AutoEngine
from hf_cgd.models.heads import LossOptions, head_of

FAST = [("gpt2 untied", 3), ("llama", 3), ("llama", "all"), ("llama tied", "all"), ("tokens", 3), ("answers", 3),
        ("tokens", "head"), ("gpt2 untied", "head"), ("gpt2", 3), ("llama tied", 3), ("gpt2 untied", r"h\.[12]\."),
        ("masked", 3)]  # fmt: skip
SLOW = [("gpt2", "head"), ("gpt2", "all"), ("t5", 3), ("masked", "head")]
"""Positions have no row for each example, and an encoder's output goes around the decoder's first input: one backward
pass for each group."""


@pytest.mark.parametrize(("name", "layers"), FAST + SLOW)
def test_group_gradients_over_tokens_are_exact(name: str, layers: Any) -> None:
    model, rows = tiny_model(name).double(), token_rows(name)
    batch, head = batch_of(rows), head_of(model)
    labels = head.labels_in(batch, ["labels"])
    assert labels is not None
    groups = torch.tensor(["abc".index(row["group"]) for row in rows])
    given = {key: value for key, value in batch.items() if key in ("input_ids", "attention_mask")}
    inputs = head.completed(given, labels, model)
    scope = list(gradient_scope(model, layers).values())
    engine = AutoEngine(model, scope)

    def losses() -> torch.Tensor:
        return head.losses(head.scores_of(model(**inputs)), labels, model, LossOptions())

    with engine.recording():
        seen = losses()
    engine.group_gradients(seen, groups, [0, 1, 2])
    with engine.recording():
        seen = losses()
    found = engine.group_gradients(seen, groups, [0, 1, 2])
    exact = PerGroupEngine(scope).group_gradients(losses(), groups, [0, 1, 2])
    torch.testing.assert_close(found.rows, exact.rows, rtol=1e-8, atol=1e-10)
    assert exact.rows.norm(dim=1).min() > 0
    assert engine.chosen is not None
    assert (engine.chosen.name == "single_pass") == ((name, layers) in FAST), engine.reason


@pytest.mark.parametrize("name", ["gpt2", "llama tied", "masked", "t5"])
def test_what_is_tied_to_an_embedding_is_no_part_of_the_last_layers_and_counts_once_elsewhere(name: str) -> None:
    model = tiny_model(name)
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    assert all(parameter is not embedding for parameter in gradient_scope(model, 3).values())
    for layers in ("head", "all"):
        scope = gradient_scope(model, layers)
        assert sum(parameter is embedding for parameter in scope.values()) == 1
    assert sum(p.numel() for p in gradient_scope(model, "all").values()) == sum(p.numel() for p in model.parameters())


def test_the_head_of_a_language_model_that_is_not_tied_is_its_last_layer() -> None:
    scope = gradient_scope(tiny_model("gpt2 untied"), 1)
    assert list(scope) == ["transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"]
    assert list(gradient_scope(tiny_model("gpt2 untied"), "head")) == ["lm_head.weight"]


def test_a_tied_embedding_that_is_frozen_leaves_the_fast_engine_exact() -> None:
    model, rows = tiny_model("gpt2").double(), token_rows("gpt2")
    model.get_input_embeddings().weight.requires_grad_(False)
    batch, head = batch_of(rows), head_of(model)
    scope = list(gradient_scope(model, 3).values())
    engine, groups = AutoEngine(model, scope), torch.tensor(["abc".index(row["group"]) for row in rows])
    with engine.recording():
        losses = head.losses(model(input_ids=batch["input_ids"]).logits, batch["labels"], model, LossOptions())
    engine.group_gradients(losses, groups, [0, 1, 2])
    assert engine.chosen is not None and engine.chosen.name == "single_pass", engine.reason


class StoredIn4Bits(torch.nn.Module):
    """Stands in for a layer of bitsandbytes: packed integers that nothing trains, taken to numbers in each pass."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.scale, self.size = float(weight.abs().max()) / 7, weight.shape
        codes = ((weight / self.scale).round() + 8).to(torch.uint8).flatten()
        self.weight = torch.nn.Parameter((codes[::2] * 16 + codes[1::2])[:, None], requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([self.weight // 16, self.weight % 16], dim=-1).view(self.size)
        return torch.nn.functional.linear(inputs, (codes.to(inputs.dtype) - 8) * self.scale)


class Adapted(torch.nn.Module):
    """Such a layer with an adapter of low rank beside it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = StoredIn4Bits(base)
        self.lora_A = torch.nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.lora_B = torch.nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base_layer(inputs) + self.lora_B(self.lora_A(inputs))
        return output


def test_adapters_on_layers_of_4_bits_are_exact_and_the_layers_themselves_are_refused() -> None:
    model, rows = tiny_model("llama").double(), token_rows("llama")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.down_proj, layer.self_attn.q_proj = Adapted(layer.mlp.down_proj), Adapted(layer.self_attn.q_proj)
    batch, head = batch_of(rows), head_of(model)
    groups = torch.tensor(["abc".index(row["group"]) for row in rows])
    given = {key: value for key, value in batch.items() if key != "labels"}
    scope = gradient_scope(model, "all")
    assert scope and all("lora_" in name for name in scope)
    engine = AutoEngine(model, list(scope.values()))

    def losses() -> torch.Tensor:
        return head.losses(model(**given).logits, batch["labels"], model, LossOptions())

    with engine.recording():
        seen = losses()
    found = engine.group_gradients(seen, groups, [0, 1, 2])
    exact = PerGroupEngine(list(scope.values())).group_gradients(losses(), groups, [0, 1, 2])
    torch.testing.assert_close(found.rows, exact.rows, rtol=1e-8, atol=1e-10)
    assert engine.chosen is not None and engine.chosen.name == "single_pass", engine.reason
    with pytest.raises(ValueError, match="no parameter is trainable"):
        gradient_scope(model, "base_layer")
