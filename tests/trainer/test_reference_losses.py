"""Reference losses in a trainer: a column, a model, numbers of groups; against weights that are formed by hand."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from datasets import Dataset
from tiny import parameters_of, text_rows, tiny_distilbert, with_lora
from tiny_tokens import tiny_model, token_dataset

from hf_cgd import GroupDRO, GroupRobustConfig, GroupRobustTrainer
from hf_cgd.functional import group_dro_step
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.history import read_group_history

Build = Callable[..., GroupRobustTrainer]
ROWS, STEP = 16, 0.9
OPTIONS = {"objective": "group_dro", "step_size": STEP, "train_sampling_strategy": "sequential"}


def rows(**columns: Any) -> Dataset:
    made = text_rows(ROWS, groups=3)
    return Dataset.from_dict({**made, "expected_loss": [0.3 + 0.1 * (row % 7) for row in range(ROWS)], **columns})


def sharp(seed: int, **changes: Any) -> torch.nn.Module:
    """A network that is sure of what it says: losses of another kind than log 2."""
    return tiny_distilbert(seed=seed, initializer_range=0.5, **changes)


def losses_by(model: torch.nn.Module, data: Dataset) -> torch.Tensor:
    ids, labels = torch.tensor(data["input_ids"][:]), torch.tensor(data["labels"][:])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return F.cross_entropy(logits, labels, reduction="none").double()


def weights_after_one_step(excess: torch.Tensor, groups: torch.Tensor, clip: str) -> torch.Tensor:
    if clip == "example":
        excess = excess.clamp_min(0)
    means = torch.stack([excess[groups == group].mean() for group in range(3)]).clamp_min(0)
    equal = torch.full((3,), 1 / 3, dtype=torch.float64)
    return group_dro_step(equal, means, step_size=STEP, min_weight=1e-5 / 3)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("clip", [None, "example", "group"])
@pytest.mark.parametrize("kind", ["column", "model", "numbers"])
def test_weights_move_by_what_the_losses_exceed(trainer: Build, kind: str, clip: Any, accumulated: int) -> None:
    data, reference, model = rows(), sharp(5), sharp(0)
    groups = torch.tensor(data["group"][:])
    given, by_hand = {
        "column": ("expected_loss", torch.tensor(data["expected_loss"][:]).double()),
        "model": (reference, losses_by(reference, data)),
        "numbers": ({"0": 0.6, "1": 0.65, "2": 0.72}, torch.tensor([0.6, 0.65, 0.72]).double()[groups]),
    }[kind]
    changes = {**OPTIONS, "per_device_train_batch_size": ROWS // accumulated, "max_steps": 1, "excess_clip": clip,
               "gradient_accumulation_steps": accumulated}  # fmt: skip
    run = trainer(changes, model=model, train_dataset=data, reference_losses=given)
    own = losses_by(sharp(0), data)
    run.train()
    clip = clip or ("group" if kind == "numbers" else "example")
    expected = weights_after_one_step(own - by_hand, groups, clip)
    assert torch.allclose(run.group_weights, expected, atol=1e-6)
    assert not torch.allclose(expected, torch.full((3,), 1 / 3).double(), atol=1e-3)
    log = run.state.log_history[0]
    differences = own - by_hand
    differences = differences.clamp_min(0) if clip == "example" else differences
    for group in range(3):
        mean = max(0.0, differences[groups == group].mean().item())
        assert log[f"group_excess_loss/{group}"] == pytest.approx(mean, abs=1e-6)
        assert log[f"group_loss/{group}"] == pytest.approx(own[groups == group].mean().item(), rel=1e-5)
    assert any("group_excess_loss/0" in entry for entry in read_group_history(run.args.output_dir))


def test_the_first_step_minimises_what_it_does_without_a_reference(trainer: Build) -> None:
    """Under "next" the weights of the first step are equal with and without: so are its parameters, bit for bit."""
    changes = {**OPTIONS, "max_steps": 1, "weight_timing": "next"}
    ours = trainer(changes, train_dataset=rows(), reference_losses="expected_loss")
    theirs = trainer(changes, train_dataset=rows())
    ours.train()
    theirs.train()
    assert torch.equal(parameters_of(ours.model), parameters_of(theirs.model))
    assert not torch.allclose(ours.group_weights, theirs.group_weights, atol=1e-4)


@pytest.mark.parametrize("objective", ["group_dro", "cgd"])
def test_classes_and_examples_weigh_in_the_excess_as_in_the_loss(trainer: Build, objective: str) -> None:
    """A whole number of copies of an example is a weight of that number."""
    times = [1 + row % 3 for row in range(ROWS)]
    data = rows(times=times)
    copies = data.select([row for row in range(ROWS) for _ in range(times[row])])
    changes = {**OPTIONS, "objective": objective, "max_steps": 2, "per_device_train_batch_size": len(copies)}
    weighed = trainer(
        {**changes, "example_weight_column": "times"}, train_dataset=data, reference_losses="expected_loss"
    )
    copied = trainer(changes, train_dataset=copies, reference_losses="expected_loss")
    weighed.train()
    copied.train()
    assert torch.allclose(weighed.group_weights, copied.group_weights, atol=1e-5)
    assert torch.allclose(parameters_of(weighed.model), parameters_of(copied.model), atol=1e-5)


def test_rows_without_a_label_and_objectives_that_read_logits(trainer: Build) -> None:
    """Rows of class -100 count nowhere: a run with them is one without."""

    class Reads(GroupDRO):
        reads = ("logits",)

    labels = rows()["labels"][:]
    missing = {2, 9, 15}
    with_them = rows(labels=[-100 if row in missing else label for row, label in enumerate(labels)])
    without = rows().select([row for row in range(ROWS) if row not in missing])
    changes = {"train_sampling_strategy": "sequential", "max_steps": 1, "per_device_train_batch_size": ROWS}
    for objective in (GroupDRO(step_size=STEP), Reads(step_size=STEP)):
        for given in ("expected_loss", {"0": 0.6, "1": 0.65, "2": 0.72}, sharp(5)):
            runs = [
                trainer(changes, train_dataset=data, objective=objective, reference_losses=given)
                for data in (with_them, without)
            ]
            for run in runs:
                run.train()
            assert torch.allclose(runs[0].group_weights, runs[1].group_weights, atol=1e-6)


@pytest.mark.parametrize("unit", ["example", "token"])
def test_a_language_model_is_the_reference_of_another(tmp_path: Path, unit: str) -> None:
    """Group-DRO's weights after a step, by the excess of rows (mean token losses), over rows or over tokens."""
    data, model, reference = token_dataset("gpt2", 12), tiny_model("gpt2"), tiny_model("gpt2", seed=5)
    tensors = [torch.tensor(data[name][:]) for name in ("input_ids", "attention_mask", "labels")]
    sums, counts = [], (tensors[2][:, 1:] != -100).sum(dim=1).double()
    for network in (tiny_model("gpt2"), reference):
        with torch.no_grad():
            logits = network.eval()(input_ids=tensors[0], attention_mask=tensors[1]).logits[:, :-1]
        by_token = F.cross_entropy(logits.transpose(1, 2), tensors[2][:, 1:], reduction="none")
        sums.append(by_token.double().sum(dim=1))
    excess = ((sums[0] - sums[1]) / counts).clamp_min(0)
    weigh = counts if unit == "token" else torch.ones(12).double()
    groups = torch.tensor(["abc".index(name) for name in data["group"]])
    means = torch.stack([(weigh * excess)[groups == k].sum() / weigh[groups == k].sum() for k in range(3)])
    equal = torch.full((3,), 1 / 3, dtype=torch.float64)
    expected = group_dro_step(equal, means, step_size=STEP, min_weight=1e-5 / 3)
    args = GroupRobustConfig(
        str(tmp_path), **OPTIONS, group_column="group", group_unit=unit, per_device_train_batch_size=12, max_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    run = GroupRobustTrainer(model, args, train_dataset=data, reference_losses=reference)
    run.train()
    assert torch.allclose(run.group_weights, expected, atol=1e-6)
    assert (expected - equal).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["column", "model"])
def test_a_resumed_run_is_the_uninterrupted_one(trainer: Build, kind: str) -> None:
    changes = {"objective": "cgd", "step_size": STEP, "save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    given: Any = "expected_loss" if kind == "column" else sharp(5, dropout=0.3)
    straight = trainer(changes, model=tiny_distilbert(dropout=0.1), train_dataset=rows(), reference_losses=given)
    straight.train()
    resumed = trainer(
        changes, model=tiny_distilbert(seed=9, dropout=0.1), train_dataset=rows(), reference_losses=given
    )
    checkpoint = str(Path(straight.args.output_dir) / "checkpoint-2")
    resumed.train(resume_from_checkpoint=checkpoint)
    assert torch.equal(resumed.group_weights, straight.group_weights)
    assert torch.equal(parameters_of(resumed.model), parameters_of(straight.model))
    other = trainer(changes, train_dataset=rows())
    with pytest.raises(ValueError, match="excess_clip='example', but this run has None"):
        other.train(resume_from_checkpoint=checkpoint)


def test_a_reference_model_is_left_as_it_is_and_answers_without_dropout(trainer: Build) -> None:
    reference = sharp(5, dropout=0.5).train()
    before = parameters_of(reference)
    plain = trainer({**OPTIONS}, train_dataset=rows(), reference_losses=reference)
    plain.train()
    again = trainer({**OPTIONS}, train_dataset=rows(), reference_losses=sharp(5))
    again.train()
    assert torch.equal(parameters_of(reference), before)
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert torch.equal(plain.group_weights, again.group_weights)


def test_a_diagnosis_looks_at_the_losses_themselves(trainer: Build) -> None:
    changes = {**OPTIONS, "objective": "cgd"}
    ours = trainer(changes, train_dataset=rows(), reference_losses="expected_loss")
    told = [str(run.diagnose_groups(3)) for run in (ours, trainer(changes, train_dataset=rows()))]
    assert told[0] == told[1]
    ours.train()
    assert ours.robust_loss is not None and ours.robust_loss.excess_clip == "example"


def test_a_config_says_it_too(trainer: Build, config: Callable[..., GroupRobustConfig]) -> None:
    text = config(**OPTIONS, reference_losses='{"0": 0.6, "1": 0.65, "2": 1}')
    assert text.reference_losses == {"0": 0.6, "1": 0.65, "2": 1.0}
    by_config = trainer({**OPTIONS, "reference_losses": "expected_loss"}, train_dataset=rows())
    by_argument = trainer({**OPTIONS}, train_dataset=rows(), reference_losses="expected_loss")
    for run in (by_config, by_argument):
        run.train()
    assert torch.equal(by_config.group_weights, by_argument.group_weights)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"objective": "erm"}, "expected_loss", "Reference losses have no effect on ERM"),
        ({"objective": "cgd", "scaling": "gradient"}, "expected_loss", "no effect on CGD.scaling='gradient'"),
        ({"objective": "coral"}, {"0": 1.0, "1": 1.0, "2": 1.0}, "no effect on CORAL"),
        ({"focal_gamma": 2.0}, "expected_loss", "focal_gamma changes the training losses"),
        ({"excess_clip": "group"}, None, "set these, or neither"),
        ({}, "expected", "reference_losses.*'expected'"),
        ({}, "words", "must hold a number for each example, got 'much'"),
        ({}, "spoilt", r"expected finite reference losses, got nan \(row 3\)"),
        ({}, {"0": 1.0, "1": 1.0, "3": 1.0}, r"missing \['2'\], not a group \['3'\]"),
        ({}, {"0": 1.0, "1": float("inf"), "2": 1.0}, "expected finite reference losses"),
        ({}, tiny_distilbert(num_labels=3), "a model with 3 outputs, but the trained one has 2"),
    ],
)
def test_what_cannot_be_right_is_refused_before_the_first_step(
    trainer: Build, options: dict[str, Any], given: Any, message: str
) -> None:
    data = rows(words=["much"] * ROWS, spoilt=[0.5] * 3 + [float("nan")] + [0.5] * (ROWS - 4))
    with pytest.raises(ValueError, match=message):
        trainer({"objective": "group_dro", **options}, train_dataset=data, reference_losses=given)


def test_a_model_that_is_trained_is_no_reference(trainer: Build) -> None:
    model = tiny_distilbert()
    with pytest.raises(ValueError, match="shares trained parameters"):
        trainer(OPTIONS, model=model, train_dataset=rows(), reference_losses=model)
    adapted = with_lora(tiny_distilbert())
    with pytest.raises(ValueError, match="shares trained parameters"):
        trainer(OPTIONS, model=adapted, train_dataset=rows(), reference_losses=adapted.base_model.model)
    trainer(OPTIONS, model=model, train_dataset=rows(), reference_losses=copy.deepcopy(model)).train()


def test_configs_that_cannot_be_right(config: Callable[..., GroupRobustConfig]) -> None:
    for options, message in (
        ({"objective": "erm_uw", "reference_losses": "a"}, "reference_losses has no effect on objective='erm_uw'"),
        ({"reference_losses": {}}, "name of a column or a number for each group"),
        ({"reference_losses": {"a": "much"}}, "name of a column or a number for each group"),
        ({"reference_losses": "{1"}, "starts like JSON and is none"),
        ({"excess_clip": "token"}, "excess_clip must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**options)


def test_a_collator_that_drops_the_column_is_named(trainer: Build) -> None:
    def collate(features: list[Any]) -> dict[str, torch.Tensor]:
        names = ("input_ids", "attention_mask", "labels")
        return {name: torch.tensor([feature[name] for feature in features]) for name in names}

    run = trainer(OPTIONS, train_dataset=rows(), reference_losses="expected_loss", data_collator=collate)
    with pytest.raises(ValueError, match=r"reference_losses='expected_loss': the batch does not hold"):
        run.train()


def _gpt2(vocabulary: int) -> torch.nn.Module:
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=vocabulary, n_embd=8, n_layer=2, n_head=2, eos_token_id=1, bos_token_id=1)
    )


def _tagger(classes: int) -> torch.nn.Module:
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    return tf.BertForTokenClassification(tf.BertConfig(**sizes, vocab_size=48, num_labels=classes))


@pytest.mark.parametrize(
    ("name", "reference", "message"),
    [
        ("gpt2", lambda: _gpt2(49), "a model with 49 outputs, but the trained one has 48"),
        ("gpt2", lambda: _gpt2(60), "a model with 60 outputs, but the trained one has 48"),
        ("gpt2", lambda: tiny_model("masked"), "for masked_lm .BertForMaskedLM., but the trained one is GPT2LMHead"),
        ("masked", lambda: tiny_model("llama"), "for causal_lm .LlamaForCausalLM., but the trained one is BertFor"),
        ("tokens", lambda: _tagger(4), "a model with 4 outputs, but the trained one has 5"),
    ],
)
def test_a_model_of_other_words_is_refused_before_the_first_step(
    tmp_path: Path, name: str, reference: Callable[[], torch.nn.Module], message: str
) -> None:
    args = GroupRobustConfig(str(tmp_path), **OPTIONS, group_column="group", use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=message):
        GroupRobustTrainer(tiny_model(name), args, train_dataset=token_dataset(name), reference_losses=reference())


def test_a_vocabulary_that_is_padded_further_is_only_told_of(tmp_path: Path) -> None:
    """As Qwen2.5's are: 151,936 and 152,064 places for one tokenizer."""
    args = GroupRobustConfig(str(tmp_path), **OPTIONS, group_column="group", use_cpu=True, report_to=[])
    data = token_dataset("gpt2")
    with pytest.warns(GroupRobustWarning, match="reference model has 608 words, that of the trained one 604"):
        GroupRobustTrainer(_gpt2(604), args, train_dataset=data, reference_losses=_gpt2(608))
