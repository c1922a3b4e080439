"""A LoRA model with a trained head: what the scope holds, that the engines agree, and that a run can be gone on with."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import parameters_of, tiny_distilbert, with_lora

from hf_cgd import GroupRobustTrainer
from hf_cgd.gradients import gradient_scope

Build = Callable[..., GroupRobustTrainer]
STEPS = {"step_size": 0.5, "max_steps": 5}


def test_the_scope_holds_the_trainable_copies_only() -> None:
    scope = gradient_scope(with_lora(tiny_distilbert()), 2)
    head = [name for name in scope if "classifier" in name]
    adapters = [name for name in scope if "lora_" in name]
    assert len(head) == 4 and all("modules_to_save.default." in name for name in head)
    assert len(adapters) == 4 and all(".layer.1." in name for name in adapters)
    assert len(scope) == 8 and all(parameter.requires_grad for parameter in scope.values())


@pytest.mark.parametrize("engine", ["single_pass", "tensor_hooks"])
def test_the_fast_engines_equal_one_backward_pass_per_group(trainer: Build, engine: str) -> None:
    timing = {"weight_timing": "next"} if engine == "tensor_hooks" else {}
    fast = trainer({**STEPS, **timing, "gradient_engine": engine}, model=with_lora(tiny_distilbert()))
    exact = trainer({**STEPS, **timing, "gradient_engine": "per_group"}, model=with_lora(tiny_distilbert()))
    frozen = {name: p.clone() for name, p in fast.model.named_parameters() if not p.requires_grad}
    fast.train()
    exact.train()
    assert (fast.group_weights - 0.5).abs().max() > 1e-3
    assert torch.allclose(fast.group_weights, exact.group_weights, rtol=0, atol=1e-6)
    assert torch.allclose(parameters_of(fast.model), parameters_of(exact.model), rtol=0, atol=1e-5)
    assert all(torch.equal(p, frozen[name]) for name, p in fast.model.named_parameters() if name in frozen)


def test_saved_adapters_give_the_same_scores_and_a_resumed_run_is_the_uninterrupted_one(
    trainer: Build, tmp_path: Path
) -> None:
    from peft import PeftModel

    saves = {**STEPS, "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "learning_rate": 1e-3}
    straight = trainer(saves, model=with_lora(tiny_distilbert()))
    straight.train()
    resumed = trainer(saves, model=with_lora(tiny_distilbert(), seed=7))
    resumed.train(resume_from_checkpoint=str(Path(straight.args.output_dir) / "checkpoint-3"))
    assert torch.equal(resumed.group_weights, straight.group_weights)
    assert torch.equal(parameters_of(resumed.model), parameters_of(straight.model))

    straight.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(tiny_distilbert(), str(tmp_path / "adapter")).eval()
    tokens = torch.randint(1, 64, (3, 8))
    with torch.no_grad():
        expected = straight.model.eval()(input_ids=tokens).logits
        assert torch.equal(loaded(input_ids=tokens).logits, expected)
        assert not torch.equal(tiny_distilbert().eval()(input_ids=tokens).logits, expected)
