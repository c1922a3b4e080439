"""Adapters on language models: a scope of adapters only, exact, and layers that are stored in 4 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import with_adapters_at_work
from tiny_tokens import COMMON, tiny_model, token_dataset

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

pytest.importorskip("peft")


def adapted(name: str) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(name)
    targets = ["q_proj", "v_proj", "down_proj"] if name == "llama" else ["c_attn", "c_proj"]
    kind = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=targets, lora_dropout=0.0, fan_in_fan_out=name == "gpt2"
    )
    return with_adapters_at_work(get_peft_model(model, kind), std=0.3)


def trained(output: Path, name: str, engine: str) -> GroupRobustTrainer:
    torch.manual_seed(0)
    options: dict[str, Any] = {**COMMON, "max_steps": 2, "group_column": "group", "step_size": 0.5}
    args = GroupRobustConfig(str(output), gradient_layers="all", gradient_engine=engine, **options)
    trainer = GroupRobustTrainer(adapted(name), args, train_dataset=token_dataset(name))
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_all_layers_of_an_adapted_model_are_its_adapters(tmp_path: Path, name: str) -> None:
    fast, exact = trained(tmp_path / "1", name, "auto"), trained(tmp_path / "2", name, "per_group")
    assert fast.robust_loss is not None and fast.robust_loss.engine is not None
    scope = {id(parameter) for parameter in fast.robust_loss.engine.parameters}
    assert scope == {id(p) for p in fast.model.parameters() if p.requires_grad}
    assert fast.robust_loss.engine.chosen.name == "single_pass", fast.robust_loss.engine.reason
    torch.testing.assert_close(fast.group_weights, exact.group_weights, rtol=1e-4, atol=1e-6)
    for own, other in zip(fast.model.parameters(), exact.model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
