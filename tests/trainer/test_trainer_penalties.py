"""PGI, IRM and CORAL in the Trainer: twins written out by hand, models of every make, resumption, refusals."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from datasets import Dataset
from tiny import logged, parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from torch import Tensor, nn
from transformers import Trainer

from hf_cgd import GroupInfo, GroupRobustConfig, GroupRobustTrainer, Objective
from hf_cgd.objectives import GroupBatch, ObjectiveOutput

Build = Callable[..., GroupRobustTrainer]
PENALTIES = ("pgi", "irm", "coral")


def by_hand(objective: str, logits: Tensor, features: Tensor, labels: Tensor, ids: Tensor, weight: float) -> Tensor:
    """The loss of a batch with two groups, both with examples of both classes; group 0 is the larger one."""
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    parts = [ids == 0, ids == 1]
    if objective == "pgi":
        penalty = torch.zeros(())
        for label in (0, 1):
            p, q = (logits[part & (labels == label)].softmax(1).mean(0) for part in parts)
            penalty = penalty + (q * (q / p).log()).sum()
        return losses.mean() + weight * penalty
    if objective == "irm":
        penalty = torch.zeros(())
        for part in parts:
            rows = part.nonzero().flatten()
            w = torch.ones((), requires_grad=True)
            risks = [nn.functional.cross_entropy(logits[half] * w, labels[half]) for half in (rows[0::2], rows[1::2])]
            one, other = (torch.autograd.grad(risk, w, create_graph=True)[0] for risk in risks)
            penalty = penalty + one * other / 2
        return sum(losses[part].mean() for part in parts) / 2 + weight * penalty
    means = [features[part].mean(0) for part in parts]
    covariances = [features[part].T.cov() for part in parts]
    distance = (means[0] - means[1]).square().mean() + (covariances[0] - covariances[1]).square().mean()
    return losses.mean() + weight * distance


def crossed(size: int = 32) -> Dataset:
    """Rows whose every eight hold both labels of both groups, more of group 0."""
    data = text_dataset(size)
    data = data.remove_columns(["group", "labels"])
    return data.add_column("group", [0, 0, 0, 0, 0, 1, 1, 1] * (size // 8)).add_column(
        "labels", [0, 1, 0, 1, 1, 0, 1, 1] * (size // 8)
    )


@pytest.mark.parametrize("objective", PENALTIES)
def test_a_run_equals_a_plain_loop(trainer: Build, objective: str) -> None:
    changes = {"objective": objective, "penalty_weight": 2.0, "per_device_train_batch_size": 8}
    run = trainer({**changes, "train_sampling_strategy": "sequential", "max_steps": 4}, train_dataset=crossed())
    run.train()
    model = tiny_distilbert().train()
    rows = crossed().with_format("torch")
    kept: list[Tensor] = []
    model.classifier.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    for step in range(4):
        batch = rows[8 * step : 8 * step + 8]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = by_hand(objective, logits, kept[-1], batch["labels"], batch["group"], 2.0)
        assert logged(run)[step] == pytest.approx(loss.item(), rel=1e-4)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    assert torch.allclose(parameters_of(run.model), parameters_of(model), atol=1e-6)
    assert run.group_weights is None


@pytest.mark.parametrize("objective", PENALTIES)
def test_without_weight_the_run_is_that_of_the_base(trainer: Build, objective: str) -> None:
    base = trainer({"objective": "erm_uw" if objective == "irm" else "erm"})
    base.train()
    run = trainer({"objective": objective, "penalty_weight": 0.0})
    run.train()
    assert torch.allclose(parameters_of(run.model), parameters_of(base.model), atol=1e-7)
    assert logged(run) == pytest.approx(logged(base), rel=1e-6)


@pytest.mark.parametrize("objective", PENALTIES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_is_bit_equal_to_the_uninterrupted_run(trainer: Build, objective: str, accumulation: int) -> None:
    changes: dict[str, Any] = {
        "objective": objective, "penalty_weight": 5.0, "gradient_accumulation_steps": accumulation, "max_steps": 8,
        "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
    }  # fmt: skip
    if objective == "irm":
        changes["penalty_anneal_steps"] = 5  # behind the checkpoint, so that the counter matters
    straight = trainer(changes, model=tiny_distilbert(dropout=0.1), train_dataset=crossed())
    straight.train()
    resumed = trainer(changes, model=tiny_distilbert(dropout=0.1, seed=9), train_dataset=crossed())
    resumed.train(resume_from_checkpoint=str(Path(straight.args.output_dir) / "checkpoint-3"))
    assert torch.equal(parameters_of(resumed.model), parameters_of(straight.model))
    assert logged(resumed)[-5:] == logged(straight)[-5:]
    assert resumed.robust_loss.steps == straight.robust_loss.steps == 8
    if objective == "irm":
        # A checkpoint that has forgotten its steps anneals again, and another model comes of it.
        file = Path(straight.args.output_dir) / "checkpoint-3" / "trainer_state.json"
        state = json.loads(file.read_text())
        state["stateful_callbacks"]["GroupStateCallback"]["attributes"]["saved"]["steps"] = 0
        file.write_text(json.dumps(state))
        forgetful = trainer(changes, model=tiny_distilbert(dropout=0.1, seed=9), train_dataset=crossed())
        forgetful.train(resume_from_checkpoint=str(file.parent))
        assert not torch.equal(parameters_of(forgetful.model), parameters_of(straight.model))


def test_a_plain_checkpoint_has_no_counter(trainer: Build, config: Callable[..., GroupRobustConfig]) -> None:
    changes = {"objective": "irm", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    plain = Trainer(tiny_distilbert(), config(**changes), train_dataset=text_dataset())
    plain.train()
    with pytest.raises(ValueError, match="holds no group weights or counters"):
        trainer(changes).train(resume_from_checkpoint=str(Path(plain.args.output_dir) / "checkpoint-2"))


# ---- Models -----------------------------------------------------------------------------------------------------------


def images(size: int = 16, side: int = 32) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return Dataset.from_dict(
        {
            "pixel_values": torch.randn(size, 3, side, side, generator=generator).tolist(),
            "labels": [0, 1, 1, 0] * (size // 4),
            "group": [0, 0, 1, 1] * (size // 4),
        }
    ).with_format("torch")


@predicts_one_class
@pytest.mark.parametrize("objective", PENALTIES)
@pytest.mark.parametrize("mode", ["joint", "split"])
def test_a_raw_timm_network(trainer: Build, objective: str, mode: str) -> None:
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False, num_classes=2)
    twin = copy.deepcopy(network).train()
    run = trainer(
        {"objective": objective, "forward_mode": mode, "per_device_train_batch_size": 8, "learning_rate": 1e-3,
         "penalty_weight": 2.0, "train_sampling_strategy": "sequential"},
        model=network, train_dataset=images(), eval_dataset=images(),
    )  # fmt: skip
    run.train()
    batch = images()[:8]
    ids = batch["group"]
    passes = [slice(None)] if mode == "joint" else [ids == 0, ids == 1]
    features = torch.cat(
        [twin.forward_head(twin.forward_features(batch["pixel_values"][rows]), pre_logits=True) for rows in passes]
    )
    labels, ids = (torch.cat([column[rows] for rows in passes]) for column in (batch["labels"], ids))
    expected = by_hand(objective, twin.get_classifier()(features), features, labels, ids, 2.0)
    assert len(logged(run)) == 3 and logged(run)[0] == pytest.approx(expected.item(), rel=1e-4)
    assert run.evaluate()["eval_group_count/0"] == 8


@pytest.mark.parametrize("objective", PENALTIES)
def test_split_forward_equals_joint_where_examples_do_not_interact(trainer: Build, objective: str) -> None:
    runs = []
    for mode in ("joint", "split"):
        changes = {"objective": objective, "forward_mode": mode, "per_device_train_batch_size": 8}
        run = trainer(changes, train_dataset=crossed())
        run.train()
        runs.append(parameters_of(run.model))
    assert torch.allclose(runs[0], runs[1], rtol=0, atol=1e-6)


def test_models_that_return_tuples(trainer: Build) -> None:
    for objective in PENALTIES:
        runs = []
        for return_dict in (True, False):
            changes = {"objective": objective, "per_device_train_batch_size": 8}
            run = trainer(changes, model=tiny_distilbert(return_dict=return_dict), train_dataset=crossed())
            run.train()
            runs.append(logged(run))
        assert runs[0] == runs[1]


def test_a_loss_function_of_the_users_own(trainer: Build) -> None:
    """IRM's derivative is that of the user's loss: of a doubled one, doubled; PGI and CORAL do not depend on it."""

    def doubled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return 2 * nn.functional.cross_entropy(outputs.logits, labels, reduction="none")

    for objective, factor in (("pgi", 1), ("irm", 4), ("coral", 1)):
        found = {}
        for name, function in (("plain", None), ("doubled", doubled)):
            # Of a small penalty the difference of two logged losses would keep two digits.
            for weight in (0.0, 300.0):
                changes = {"objective": objective, "penalty_weight": weight, "max_steps": 1, "learning_rate": 0.0}
                run = trainer(
                    {**changes, "per_device_train_batch_size": 8}, train_dataset=crossed(), compute_loss_func=function
                )
                run.train()
                found[name, weight] = logged(run)[0]
        plain, other = (found[name, 300.0] - found[name, 0.0] for name in ("plain", "doubled"))
        assert plain != 0 and other == pytest.approx(factor * plain, rel=1e-2)


@pytest.mark.parametrize("objective", ["irm", "coral"])
@pytest.mark.parametrize("num_labels,labels", [(1, [0.5, -1.0] * 8), (3, [[0.0, 1, 1], [1.0, 0, 0]] * 8)])
def test_regression_and_multi_label(trainer: Build, objective: str, num_labels: int, labels: list) -> None:
    data = text_dataset().remove_columns("labels").add_column("labels", labels)
    runs = []
    for weight in (0.0, 1.0):
        changes = {"objective": objective, "penalty_weight": weight, "per_device_train_batch_size": 8}
        run = trainer(changes, model=tiny_distilbert(num_labels), train_dataset=data)
        run.train()
        runs.append(parameters_of(run.model))
    assert (runs[0] - runs[1]).abs().max() > 1e-6


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"bf16": True}])
@pytest.mark.parametrize("objective", PENALTIES)
def test_other_ways_to_compute(trainer: Build, objective: str, changes: dict[str, Any]) -> None:
    runs = []
    for more in ({}, changes):
        run = trainer({"objective": objective, "per_device_train_batch_size": 8, **more}, train_dataset=crossed())
        start = parameters_of(run.model)
        run.train()
        runs.append(parameters_of(run.model) - start)
    assert runs[0].norm() > 0.05
    assert (runs[1] - runs[0]).norm() < (0.02 if "bf16" in changes else 1e-5) * runs[0].norm()


def test_a_compiled_network_gives_the_same_run(trainer: Build) -> None:
    runs = []
    torch._dynamo.utils.counters.clear()
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        changes = {"objective": "coral", "penalty_weight": 1.0, "per_device_train_batch_size": 8}
        run = trainer({**changes, **compiled}, train_dataset=crossed())
        start = parameters_of(run.model)
        run.train()
        runs.append(parameters_of(run.model) - start)
    torch._dynamo.reset()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert runs[0].norm() > 0.05 and (runs[1] - runs[0]).norm() < 1e-5 * runs[0].norm()


@predicts_one_class
def test_no_hook_is_left_and_none_runs_in_evaluation(trainer: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer({"objective": "coral", "eval_strategy": "steps", "eval_steps": 1}, eval_dataset=text_dataset())
    seen: list[bool] = []
    inner = run.model.classifier.forward

    def forward(x: Tensor) -> Tensor:
        seen.append(bool(run.model.classifier._forward_hooks) == run.model.training)
        return inner(x)

    monkeypatch.setattr(run.model.classifier, "forward", forward)
    run.train()
    run.predict(text_dataset())
    # Three steps, three evaluations of four batches, one prediction, and one look at the model's own loss.
    assert len(seen) == 3 + 3 * 4 + 4 + 1 and all(seen)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())


# ---- Counts of classes, refusals --------------------------------------------------------------------------------------


def test_classes_are_counted_in_the_training_set(trainer: Build) -> None:
    run = trainer({"objective": "pgi"}, train_dataset=crossed())
    assert run.groups.class_counts == ((8, 4), (12, 8))
    assert trainer({"objective": "irm"}).groups.class_counts is None


def test_given_groups_get_counts_too_and_given_counts_are_kept(trainer: Build) -> None:
    swapped = GroupInfo(["1", "0"], [12, 20])
    run = trainer({"objective": "pgi"}, train_dataset=crossed(), groups=swapped)
    assert run.groups.class_counts == ((4, 8), (8, 12))
    own = GroupInfo(["0", "1"], None, class_counts=[[1, 9], [9, 1]])
    assert trainer({"objective": "pgi"}, train_dataset=crossed(), groups=own).groups.class_counts == ((1, 9), (9, 1))


def test_a_stream_needs_counts_of_classes(trainer: Build) -> None:
    stream = crossed().to_iterable_dataset()
    changes = {"objective": "pgi", "per_device_train_batch_size": 8, "penalty_weight": 2.0}
    with pytest.raises(ValueError, match=r"PGI needs the number of training examples of each class in each group"):
        trainer(changes, train_dataset=stream, groups=GroupInfo(["0", "1"], [20, 12]))
    groups = GroupInfo(["0", "1"], [20, 12], class_counts=[[8, 4], [12, 8]])
    streamed = trainer(changes, train_dataset=stream, groups=groups)
    streamed.train()
    mapped = trainer({**changes, "train_sampling_strategy": "sequential"}, train_dataset=crossed())
    mapped.train()
    assert torch.equal(parameters_of(streamed.model), parameters_of(mapped.model))


def test_an_objective_set_between_runs_gets_its_counts(trainer: Build) -> None:
    run = trainer({"objective": "erm"}, train_dataset=crossed())
    run.args.objective = "pgi"
    run.train()
    assert run.groups.class_counts == ((8, 4), (12, 8)) and run.robust_loss.steps == 3


@pytest.mark.parametrize(
    "model,labels,message",
    [
        (dict(num_labels=1), [0.5, -1.0] * 8, r"problem_type None and 1 output"),
        (dict(num_labels=3, problem_type="multi_label_classification"), [[0.0, 1, 1]] * 16,
         r"problem_type 'multi_label_classification' and 3 output"),
        (dict(num_labels=3), [[0.0, 1, 1]] * 16, r"one integer >= 0 per example in column 'labels', got \[0.0"),
        (dict(num_labels=2), [0.0, 1.0] * 8, r"expected a class in 0..1, got 0.0"),
    ],
)  # fmt: skip
def test_pgi_is_refused_but_for_classes_before_the_first_step(
    trainer: Build, model: dict[str, Any], labels: list, message: str
) -> None:
    data = text_dataset().remove_columns("labels").add_column("labels", labels)
    with pytest.raises(ValueError, match=message):
        trainer({"objective": "pgi"}, model=tiny_distilbert(**model), train_dataset=data)


def test_a_network_without_a_head_is_refused_before_the_first_step(trainer: Build) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.EmbeddingBag(64, 2)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embedding(input_ids)

    with pytest.raises(ValueError, match=r"Expected Bag to end in a linear layer .*last linear layers .*: none"):
        trainer({"objective": "coral"}, model=Bag())


@pytest.mark.parametrize("objective", ["irm", "coral"])
def test_a_group_of_one_is_refused_before_the_first_step(trainer: Build, objective: str) -> None:
    data = text_dataset(9).remove_columns("group").add_column("group", ["a"] * 8 + ["b"])
    with pytest.raises(ValueError, match=r"at least 2 training examples in each group.*fewer: 'b'"):
        trainer({"objective": objective, "min_group_size": 1}, train_dataset=data)


def test_an_objective_of_the_users_own_may_ask_for_what_it_needs(trainer: Build) -> None:
    class Confident(Objective):
        name = "confident"
        has_weights = False
        reads = ("logits", "labels", "features")

        def loss(self, batch: GroupBatch) -> ObjectiveOutput:
            assert batch.logits is not None and batch.labels is not None and batch.features is not None
            assert batch.features.shape == (4, 32) and batch.step == len(steps)
            steps.append(batch.step)
            return ObjectiveOutput(batch.losses.mean(), batch.logits.square().mean())

    steps: list[int] = []
    run = trainer(objective=Confident())
    run.train()
    assert steps == [0, 1, 2]
