"""Checkpoints are loaded whole or refused, under whatever names `save_pretrained` writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tiny import image_dataset, predicts_one_class, text_dataset, tiny_distilbert
from torch import nn

from hf_cgd import GroupRobustTrainer, GroupRobustWarning
from hf_cgd.trainer.weights import load_converted, misfits, saved_names

pytestmark = predicts_one_class

Build = Callable[..., GroupRobustTrainer]
SMALL = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "ViT": lambda: tf.ViTForImageClassification(tf.ViTConfig(**SMALL)),
    "BEiT": lambda: tf.BeitForImageClassification(tf.BeitConfig(**SMALL)),
    "DINOv2": lambda: tf.Dinov2ForImageClassification(
        tf.Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16)
    ),
    "Swin": lambda: tf.SwinForImageClassification(
        tf.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4)
    ),
    "DeiT": lambda: tf.DeiTForImageClassification(tf.DeiTConfig(**SMALL)),
}
SAVING = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, objective="group_dro")


class Watch(tf.TrainerCallback):
    """Keeps a copy of the parameters at every checkpoint."""

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, torch.Tensor]] = {}

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.saved[state.global_step] = {name: part.clone() for name, part in model.state_dict().items()}


def equal(model: nn.Module, saved: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == saved.keys() and all(torch.equal(state[name], saved[name]) for name in saved)


def built(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_the_best_model_is_loaded_whole(trainer: Build, name: str) -> None:
    watch = Watch()
    data = image_dataset()
    # The loss rises: the first checkpoint is the best.
    options = dict(SAVING, load_best_model_at_end=True, metric_for_best_model="worst_group_loss", max_steps=2,
                   greater_is_better=True, learning_rate=1e-2)  # fmt: skip
    with pytest.warns(GroupRobustWarning, match="although its name says the opposite"):
        run = trainer(options, model=built(name), train_dataset=data, eval_dataset=data, callbacks=[watch])
    run.train()
    other = {1: 2, 2: 1}[run.state.best_global_step]
    assert equal(run.model, watch.saved[run.state.best_global_step]) and not equal(run.model, watch.saved[other])


@pytest.mark.parametrize("name", ["ViT", "Swin"])
def test_a_resumed_run_is_that_of_one_go(trainer: Build, name: str) -> None:
    data = image_dataset()
    options = dict(SAVING, eval_strategy="no", learning_rate=1e-2)
    whole = trainer({**options, "max_steps": 2}, model=built(name), train_dataset=data)
    whole.train()
    # Another seed: what is not loaded would show.
    resumed = trainer({**options, "max_steps": 2}, model=built(name, seed=1), train_dataset=data)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-1")
    assert equal(resumed.model, whole.model.state_dict())
    assert resumed.group_weights.tolist() == whole.group_weights.tolist()


def test_conversion_moves_no_random_state_and_keeps_type_and_tensors(tmp_path: Path) -> None:
    model = built("ViT").to(torch.float64)
    model.save_pretrained(tmp_path)
    state = {name: part.clone() for name, part in model.state_dict().items()}
    assert misfits(model, saved_names(str(tmp_path)) or ())[0]
    other = built("ViT", seed=1).to(torch.float64)
    before, kept = torch.get_rng_state(), list(other.parameters())
    assert load_converted(other, str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(other, state) and all(one is two for one, two in zip(other.parameters(), kept, strict=True))


def test_sharded_checkpoints_are_converted(tmp_path: Path) -> None:
    model = built("ViT")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    other = built("ViT", seed=1)
    assert load_converted(other, str(tmp_path)) and equal(other, model.state_dict())


def test_a_checkpoint_that_fits_is_left_to_the_trainer(tmp_path: Path) -> None:
    model = tiny_distilbert()
    model.save_pretrained(tmp_path)
    assert not load_converted(tiny_distilbert(seed=1), str(tmp_path))
    tied = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))
    tied.save_pretrained(tmp_path / "tied")
    assert not load_converted(tied, str(tmp_path / "tied"))
    assert saved_names(str(tmp_path / "nothing")) is None


def test_a_checkpoint_that_lacks_weights_or_holds_others_is_refused(trainer: Build) -> None:
    run = trainer(dict(SAVING, eval_strategy="no", max_steps=1))
    run.train()
    checkpoint = Path(run.args.output_dir) / "checkpoint-1"
    weights = load_file(checkpoint / "model.safetensors")
    weights["classifier.renamed"] = weights.pop("classifier.weight")
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    again = trainer(dict(SAVING, eval_strategy="no", max_steps=2), model=tiny_distilbert(seed=1))
    with pytest.raises(
        ValueError, match=r"1 missing \(classifier.weight\); 1 not of the model \(classifier.renamed\)"
    ):
        again.train(resume_from_checkpoint=str(checkpoint))


def test_a_network_of_torch_is_refused_likewise(trainer: Build) -> None:
    class Net(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(32, 2))
            self.name = name

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            ids = torch.nn.functional.one_hot(input_ids % 32, 32).float().mean(1)
            return self.get_submodule(self.name)(ids)

    data = text_dataset().remove_columns("attention_mask")
    options = dict(SAVING, eval_strategy="no")
    run = trainer({**options, "max_steps": 1}, model=Net("head"), train_dataset=data)
    run.train()
    checkpoint = f"{run.args.output_dir}/checkpoint-1"
    same = trainer({**options, "max_steps": 2}, model=Net("head"), train_dataset=data)
    same.train(resume_from_checkpoint=checkpoint)
    with pytest.raises(
        ValueError, match=r"do not fit the model Net: 2 missing \(head.weight|do not fit the model Net"
    ):
        trainer({**options, "max_steps": 2}, model=Net("top"), train_dataset=data).train(
            resume_from_checkpoint=checkpoint
        )
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
    assert state["global_step"] == 1
