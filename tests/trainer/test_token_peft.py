"""Adapters on language models: a scope of adapters only, exact, and layers that are stored in 4 bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import with_adapters_at_work
from tiny_tokens import COMMON, tiny_model, token_dataset

from hf_cgd import GroupRobustConfig, GroupRobustTrainer, gradient_scope
from hf_cgd.gradients.autograd import modules_around

pytest.importorskip("peft")


def adapted(name: str, dropout: float = 0.0) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(name)
    targets = ["q_proj", "v_proj", "down_proj"] if name == "llama" else ["c_attn", "c_proj"]
    kind = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=targets, lora_dropout=dropout, fan_in_fan_out=name == "gpt2"
    )
    return with_adapters_at_work(get_peft_model(model, kind), std=0.3)


def trained(
    output: Path, name: str, engine: str, layers: Any = "all", dropout: float = 0.0, checkpoints: bool = False
) -> GroupRobustTrainer:
    torch.manual_seed(0)
    options: dict[str, Any] = {**COMMON, "max_steps": 2, "group_column": "group", "step_size": 0.5}
    options |= {"gradient_checkpointing": checkpoints, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    args = GroupRobustConfig(str(output), gradient_layers=layers, gradient_engine=engine, **options)
    trainer = GroupRobustTrainer(adapted(name, dropout), args, train_dataset=token_dataset(name))
    if checkpoints:
        trainer.model.enable_input_require_grads()
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


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layers", [2, "all"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_of_the_last_blocks_take_one_pass(
    tmp_path: Path, name: str, layers: Any, dropout: float, checkpoints: bool
) -> None:
    """What flows into the first block of the scope is the cut: residual connections pass the adapters' own input by."""
    runs = [trained(tmp_path / kind, name, kind, layers, dropout, checkpoints) for kind in ("auto", "per_group")]
    engine = runs[0].robust_loss.engine
    assert engine.chosen.name == "single_pass", engine.reason
    torch.testing.assert_close(runs[0].group_weights, runs[1].group_weights, rtol=1e-4, atol=1e-6)
    for own, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def with_scales(name: str) -> Any:
    from peft import IA3Config

    feed_forward = ["down_proj"] if name == "llama" else ["mlp.c_proj"]
    targets = ["k_proj", "v_proj"] if name == "llama" else ["c_attn"]
    return IA3Config(
        task_type="CAUSAL_LM", target_modules=[*targets, *feed_forward], feedforward_modules=feed_forward,
        fan_in_fan_out=name == "gpt2",
    )  # fmt: skip


def with_tokens(name: str) -> Any:
    from peft import TrainableTokensConfig

    return TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[3, 4, 5], target_modules=["embed_tokens"])


def with_lora_and_tokens(name: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], trainable_token_indices=[3, 4])


def with_lora_on_embeddings(name: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["embed_tokens", "q_proj"])


@pytest.mark.parametrize(
    ("name", "config", "layers"),
    [
        ("llama", with_scales, "all"), ("llama", with_scales, 2), ("gpt2", with_scales, "all"), ("gpt2", with_scales, 2),
        ("llama", with_tokens, "all"), ("llama", with_lora_and_tokens, "all"), ("llama", with_lora_on_embeddings, "all"),
    ],
)  # fmt: skip
def test_adapters_whose_parameters_lie_in_containers_take_one_pass(
    tmp_path: Path, name: str, config: Any, layers: Any
) -> None:
    """Nobody calls these; they took a pass through the network for each group."""
    from peft import get_peft_model

    runs = []
    for engine in ("auto", "per_group"):
        model = get_peft_model(tiny_model(name), config(name))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * parameter.requires_grad * torch.randn_like(parameter)
        torch.manual_seed(0)
        options: dict[str, Any] = {**COMMON, "max_steps": 3, "group_column": "group", "step_size": 0.5}
        args = GroupRobustConfig(str(tmp_path / engine), gradient_layers=layers, gradient_engine=engine, **options)
        runs.append(GroupRobustTrainer(model, args, train_dataset=token_dataset(name)))
        runs[-1].train()
    chosen = runs[0].robust_loss.engine
    assert chosen.chosen.name == "single_pass", chosen.reason
    assert runs[0].group_weights.std() > 1e-4
    torch.testing.assert_close(runs[0].group_weights, runs[1].group_weights, rtol=1e-4, atol=1e-6)
    for own, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", ["cgd", "erm"])
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_with_scores_are_refused_when_the_trainer_is_built(
    tmp_path: Path, kind: str, objective: str
) -> None:
    """The first batch would have three scores too many. Those before an encoder's tokens have none."""
    import peft

    options = {"num_virtual_tokens": 3, "encoder_hidden_size": 4} if "Encoder" in kind else {"num_virtual_tokens": 3}
    args = GroupRobustConfig(str(tmp_path), objective=objective, group_column="group", **{**COMMON, "max_steps": 1})
    model = peft.get_peft_model(tiny_model("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    ids = torch.tensor([[3, 4, 5]])
    assert model(input_ids=ids, attention_mask=ids > 0).logits.shape[1] == 6
    with pytest.raises(ValueError, match=f"{kind}: the network gives its 3 virtual tokens scores.*PrefixTuningConfig"):
        GroupRobustTrainer(model, args, train_dataset=token_dataset("llama"))
    served = [
        ("llama", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        ("t5", getattr(peft, kind)(task_type="SEQ_2_SEQ_LM", **options)),
    ]
    for name, config in served:
        trainer = GroupRobustTrainer(
            peft.get_peft_model(tiny_model(name), config), args, train_dataset=token_dataset(name)
        )
        trainer.train()
        assert trainer.state.global_step == 1


def test_modules_around_a_scope() -> None:
    """All of a block in which nothing but the scope is trained; none where nothing is frozen."""
    model = adapted("llama")
    around = modules_around(model, list(gradient_scope(model, 2).values()))
    block = model.get_base_model().model.layers[-1]
    assert around[0] is block and block.self_attn in around and model not in around
    whole = tiny_model("llama")
    assert modules_around(whole, list(gradient_scope(whole, 2).values())) == []
    assert modules_around(model, list(gradient_scope(model, "all").values()))[0] is model
