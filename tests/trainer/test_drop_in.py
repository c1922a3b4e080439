"""Scripts as they are found beside transformers, with another import line and other arguments: twins of plain runs."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drop_in import entity_script, image_script, text_script
from hub_server import TOKEN, USER, HubServer, at_this_hub
from PIL import Image
from seqeval.metrics import f1_score
from tiny import logged, parameters_of, predicts_one_class, text_dataset, tiny_distilbert
from transformers import (
    BertConfig,
    BertForTokenClassification,
    BertTokenizerFast,
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_cgd import GroupInfo, GroupRobustConfig, GroupRobustTrainer, load_report
from hf_cgd.cli.tiny_networks import tiny_text_classifier
from hf_cgd.metrics.entities import entity_f1

pytestmark = [predicts_one_class, pytest.mark.filterwarnings("ignore:No examples of the group")]
WORDS = {"sad": ["rain", "grey", "loss"], "glad": ["sun", "song", "win"]}
PLACES = ["north", "south"]
COMMON = [
    "--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--logging_steps", "1", "--per_device_train_batch_size",
    "8", "--learning_rate", "0.01", "--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3",
]  # fmt: skip
GROUPS = ["--group_column", "place", "--objective"]
ALL = ["--do_train", "--do_eval", "--do_predict"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text model with its tokenizer, and three CSV files."""
    folder = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    sentences = []
    for name, size in (("train", 48), ("validation", 20), ("test", 10)):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["sentence", "mood", "place"])
            for _ in range(size):
                label, place = random.choice(list(WORDS)), random.choice(PLACES)
                words = [
                    *random.choice(WORDS[label], 2),
                    place,
                    *random.choice(["a", "the", "of"], random.integers(4)),
                ]
                sentences.append(" ".join(words))
                table.writerow([sentences[-1], label, place])
    torch.manual_seed(0)
    model, tokenizer = tiny_text_classifier([sentences], ["a", "b", "c"])
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    return folder


def text_line(folder: Path, output: Path, *more: str) -> list[str]:
    files = [
        word for name in ("train", "validation", "test") for word in (f"--{name}_file", str(folder / f"{name}.csv"))
    ]
    return ["--model", str(folder / "model"), *files, "--output_dir", str(output), *COMMON, *more]


def metrics_of(output: Path, split: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / f"{split}_results.json").read_text())
    return found


def require_twins(ours: Trainer, plain: Trainer) -> None:
    assert torch.equal(parameters_of(ours.model), parameters_of(plain.model))
    assert logged(ours) == logged(plain) and len(logged(plain)) == 6
    for name in ("eval_share_right", "eval_loss"):
        here, there = (metrics_of(Path(run.args.output_dir), "eval")[name] for run in (ours, plain))
        assert here == pytest.approx(there, rel=1e-6), name


def test_a_text_script_under_erm_is_the_plain_one(folder: Path, tmp_path: Path) -> None:
    plain = text_script(Trainer, TrainingArguments, text_line(folder, tmp_path / "plain", *ALL))
    line = text_line(folder, tmp_path / "ours", *ALL, *GROUPS, "erm")
    ours = text_script(GroupRobustTrainer, GroupRobustConfig, line)
    require_twins(ours, plain)
    files = [(tmp_path / name / "predictions.txt").read_text() for name in ("ours", "plain")]
    assert files[0] == files[1] and len(files[0].splitlines()) == 10
    assert set(files[0].splitlines()) <= set(WORDS)
    assert ours.model.config.id2label == {0: "glad", 1: "sad"}
    metrics = metrics_of(tmp_path / "ours", "eval")
    counts = [metrics[f"eval_group_count/{place}"] for place in PLACES]
    with open(folder / "validation.csv") as file:
        places = [row["place"] for row in csv.DictReader(file)]
    assert counts == [places.count(place) for place in PLACES]
    accuracies = np.array([metrics[f"eval_group_accuracy/{place}"] for place in PLACES])
    assert accuracies @ counts / 20 == pytest.approx(metrics["eval_share_right"])
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert names <= {path.name for path in (tmp_path / "ours").iterdir()}


@pytest.mark.parametrize("objective", ["erm", "cgd"])
def test_a_text_script_that_was_stopped_goes_on_in_its_folder(folder: Path, tmp_path: Path, objective: str) -> None:
    """As a cluster does it: the same line again. What it finds in the folder is where it goes on."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    words = ["--do_train", *GROUPS, objective, "--gradient_accumulation_steps", "2"]
    words += ["--step_size", "0.5"] if objective == "cgd" else []
    whole = text_script(GroupRobustTrainer, GroupRobustConfig, text_line(folder, tmp_path / "whole", *words))
    line = text_line(folder, tmp_path / "parts", *words)
    with pytest.raises(KeyboardInterrupt):
        text_script(GroupRobustTrainer, GroupRobustConfig, line, callbacks=[Stop()])
    parts = text_script(GroupRobustTrainer, GroupRobustConfig, line)
    assert torch.equal(parameters_of(parts.model), parameters_of(whole.model))
    assert logged(parts) == logged(whole)
    if objective == "cgd":
        assert torch.equal(parts.group_weights, whole.group_weights)
        assert (whole.group_weights - 0.5).abs().max() > 1e-3


def test_a_text_script_evaluates_and_predicts_a_model_that_is_trained(folder: Path, tmp_path: Path) -> None:
    line = text_line(folder, tmp_path / "first", *ALL, *GROUPS, "group_dro")
    text_script(GroupRobustTrainer, GroupRobustConfig, line)
    again = text_line(folder, tmp_path / "again", *ALL[1:], *GROUPS, "group_dro")
    again[1] = str(tmp_path / "first")
    text_script(GroupRobustTrainer, GroupRobustConfig, again)
    before, after = (metrics_of(tmp_path / name, "eval") for name in ("first", "again"))
    same = [name for name in after if "accuracy" in name or "loss" in name or "count" in name]
    assert len(same) > 8
    # What needs the counts of a training set has none here.
    assert set(before) - set(after) <= {"epoch", "eval_adjusted_accuracy", *[n for n in before if "interval" in n]}
    assert {name: after[name] for name in same} == pytest.approx({name: before[name] for name in same}, rel=1e-6)
    assert (tmp_path / "first/predictions.txt").read_text() == (tmp_path / "again/predictions.txt").read_text()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with at_this_hub(monkeypatch, tmp_path) as server:
        yield server


def test_a_text_script_pushes_what_it_trained(
    folder: Path, tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_cgd.cards.writing.write_pictures", lambda record, folder: {})
    words = ["--push_to_hub", "--hub_model_id", "moods", "--hub_token", TOKEN, "--save_strategy", "no"]
    line = text_line(folder, tmp_path / "ours", *ALL[:2], *GROUPS, "cgd", *words)
    trainer = text_script(GroupRobustTrainer, GroupRobustConfig, line)
    files = hub.repositories[f"{USER}/moods"].files
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "group_report.json"} <= set(files)
    card = files["README.md"].decode()
    assert "base_model: a-tiny-model" in card and "made up" in card and "worst_group_accuracy" in card
    assert load_report(f"{USER}/moods") == trainer.group_report()
    assert TOKEN not in card


PEOPLE, TOWNS = ["ada", "ben", "cleo"], ["oslo", "rome", "new york"]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a tokenizer of word pieces, and two JSONL files of words, their tags, and a place."""
    folder = tmp_path_factory.mktemp("notes")
    random = np.random.default_rng(0)
    for name, size in (("train", 48), ("validation", 16)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for _ in range(size):
                place = random.choice(PLACES)
                who, town = random.choice(PEOPLE), random.choice(TOWNS).split()
                words = [who, *["walks", "to"][: random.integers(1, 3)], *town]
                tags = ["B-PER", *["O"] * (len(words) - 1 - len(town)), "B-LOC", *["I-LOC"] * (len(town) - 1)]
                file.write(json.dumps({"words": words, "tags": tags, "place": place}) + "\n")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    pieces += ["ben", "walk", "to", "rome", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(pieces), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=64)  # fmt: skip
    BertForTokenClassification(config).save_pretrained(folder / "model")
    return folder


def entity_line(folder: Path, output: Path, *more: str) -> list[str]:
    return ["--model", str(folder / "model"), "--train_file", str(folder / "train.jsonl"), "--validation_file",
            str(folder / "validation.jsonl"), "--output_dir", str(output), *COMMON, "--per_device_eval_batch_size", "16", *more]  # fmt: skip


def test_an_entity_script_under_erm_is_the_plain_one(notes: Path, tmp_path: Path) -> None:
    """Dropout too. Beside the script's own metrics each group has its F1, which the script's would be on its rows.

    All rows are evaluated in one batch: of several, the plain Trainer's loss is the mean of the batches' means.
    """
    line = entity_line(notes, tmp_path / "plain", "--every_piece")
    plain = entity_script(Trainer, TrainingArguments, line)
    names = list(plain.model.config.id2label.values())
    line = entity_line(notes, tmp_path / "ours", "--every_piece", *GROUPS, "erm")
    # `compute_metrics` sees what it saw; the metric of groups is one more line.
    ours = entity_script(GroupRobustTrainer, GroupRobustConfig, line, group_metrics={"entity_f1": entity_f1(names)})
    require_twins(ours, plain)
    here, there = (metrics_of(tmp_path / name, "predict") for name in ("ours", "plain"))
    assert here["predict_f1"] == there["predict_f1"] == pytest.approx(here["predict_entity_f1"])
    files = [(tmp_path / name / "predictions.txt").read_text() for name in ("ours", "plain")]
    assert files[0] == files[1] and len(files[0].splitlines()) == 16

    rows = [json.loads(row) for row in (notes / "validation.jsonl").read_text().splitlines()]
    prepared = ours.eval_dataset
    found = [row.split() for row in files[0].splitlines()]
    true = [[names[label] for label in labels if label != -100] for labels in prepared["labels"]]
    for place in PLACES:
        kept = [number for number, row in enumerate(rows) if row["place"] == place]
        assert here[f"predict_group_count/{place}"] == len(kept)
        expected = f1_score([true[number] for number in kept], [found[number] for number in kept])
        assert here[f"predict_group_entity_f1/{place}"] == pytest.approx(expected)
        right = [a == b for number in kept for a, b in zip(true[number], found[number], strict=True)]
        assert here[f"predict_group_token_accuracy/{place}"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize(("objective", "unit"), [("group_dro", "example"), ("cgd", "token"), ("cgd", "example")])
def test_an_entity_script_moves_the_weights_of_its_groups(
    notes: Path, tmp_path: Path, objective: str, unit: str
) -> None:
    words = [*GROUPS, objective, "--step_size", "0.5", "--group_unit", unit]
    run = entity_script(GroupRobustTrainer, GroupRobustConfig, entity_line(notes, tmp_path / "out", *words))
    assert list(run.groups.names) == PLACES
    assert len(logged(run, "group_weight/north")) == 6
    assert (run.group_weights - 0.5).abs().max() > 1e-4


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT with its processor, 32 images in two places, two classes, and their table."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    with open(folder / "table.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "label", "place"])
        for number in range(32):
            label, place = number % 2, number // 2 % 2
            pixels = random.integers(0, 120, (20, 24, 3)) + np.array([100 * label, 0, 100 * place])
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
            table.writerow([str(folder / f"{number}.png"), ["cat", "dog"][label], PLACES[place]])
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16,
                       patch_size=8)  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder / "model")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "model")
    return folder


def image_line(folder: Path, output: Path, *more: str) -> list[str]:
    # Scripts that open images when a batch is made say so themselves; without it, the Trainer takes the images away.
    return ["--model", str(folder / "model"), "--table", str(folder / "table.csv"), "--output_dir", str(output), *COMMON,
            "--remove_unused_columns", "false", "--do_train", "--do_eval", *more]  # fmt: skip


def test_an_image_script_under_erm_is_the_plain_one(pictures: Path, tmp_path: Path) -> None:
    """The same random crops, too. The script's collator knows nothing of groups."""
    plain = image_script(Trainer, TrainingArguments, image_line(pictures, tmp_path / "plain"))
    ours = image_script(GroupRobustTrainer, GroupRobustConfig, image_line(pictures, tmp_path / "ours", *GROUPS, "erm"))
    require_twins(ours, plain)
    metrics = metrics_of(tmp_path / "ours", "eval")
    assert sum(metrics[f"eval_group_count/{place}"] for place in PLACES) == 8
    assert ours.model.config.id2label == {0: "cat", 1: "dog"}


@pytest.mark.parametrize("objective", ["group_dro", "cgd"])
def test_an_image_script_moves_the_weights_of_its_groups(pictures: Path, tmp_path: Path, objective: str) -> None:
    run = image_script(
        GroupRobustTrainer, GroupRobustConfig, image_line(pictures, tmp_path, *GROUPS, objective, "--step_size", "0.5")
    )
    assert list(run.groups.names) == PLACES
    assert len(logged(run, "group_weight/north")) == 6
    assert (run.group_weights - 0.5).abs().max() > 1e-3


# ---- Features of such scripts, each beside the plain Trainer ------------------------------------------------------------


class Notes(TrainerCallback):
    """Which events came, with the step; and what the callback is given by name."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.names: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda args, state, control, **given: self._note(name, state.global_step, given)
        return super().__getattribute__(name)

    def _note(self, event: str, step: int, given: dict[str, Any]) -> None:
        self.events.append((event, step))
        self.names |= set(given)


def smoothed(prediction: EvalPrediction) -> dict[str, float]:
    return {"rows": float(len(prediction.label_ids)), "mean": float(np.mean(prediction.predictions))}


class Batches:
    """Metrics batch by batch, as `batch_eval_metrics` wants them."""

    def __init__(self) -> None:
        self.right: list[float] = []

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        self.right += (prediction.predictions.argmax(-1) == prediction.label_ids).float().tolist()
        return {"mine": float(np.mean(self.right))} if compute_result else {}


def classes_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


SETS = {"a": text_dataset(15, seed=1), "b": text_dataset(9, seed=2)}
FEATURES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "callbacks": ({"eval_strategy": "steps", "eval_steps": 2}, lambda: {"callbacks": [Notes()]}),
    "model_init": ({}, lambda: {"model": None, "model_init": lambda: tiny_distilbert(dropout=0.1)}),
    "several evaluation sets": ({"eval_strategy": "steps", "eval_steps": 2}, lambda: {"eval_dataset": SETS}),
    "preprocessed logits": (
        {}, lambda: {"preprocess_logits_for_metrics": classes_of, "compute_metrics": smoothed}
    ),
    "metrics by batch": ({"batch_eval_metrics": True}, lambda: {"compute_metrics": Batches()}),
    "label smoothing": ({"label_smoothing_factor": 0.2}, lambda: {"compute_metrics": smoothed}),
    "stream": ({}, lambda: {"train_dataset": text_dataset(48).to_iterable_dataset()}),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_features_of_the_trainer_under_erm_are_the_plain_ones(tmp_path: Path, name: str, accumulated: int) -> None:
    options, parts = FEATURES[name]
    runs = []
    for kind in (GroupRobustTrainer, Trainer):
        own = {"objective": "erm", "group_column": "group"} if kind is GroupRobustTrainer else {}
        args = (GroupRobustConfig if own else TrainingArguments)(
            str(tmp_path / kind.__name__), per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=4,
            optim="sgd", learning_rate=0.1, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no",
            gradient_accumulation_steps=accumulated, **options, **own,
        )  # fmt: skip
        given = {"model": tiny_distilbert(), "train_dataset": text_dataset(32), "eval_dataset": SETS["a"], **parts()}
        if own and name == "stream":
            given["groups"] = GroupInfo(["0", "1"], [24, 24])
        run = kind(args=args, **given)
        if not own:
            # The loss of a classifier is a mean already. The Trainer takes it for one that is divided by the examples
            # of the whole step, and so multiplies it by the accumulated batches (docs/guide.md).
            run.model_accepts_loss_kwargs = False
        run.train()
        runs.append((run, run.evaluate(), given))
    (ours, metrics, _), (plain, expected, _) = runs
    # Bit for bit; with accumulation the sums are rounded in another order.
    rounding = 0.0 if accumulated == 1 else 1e-6
    assert torch.allclose(parameters_of(ours.model), parameters_of(plain.model), rtol=0, atol=rounding)
    assert logged(ours) == pytest.approx(logged(plain), rel=rounding, abs=0) and len(logged(plain)) == 4
    timed = ("runtime", "per_second")
    for key in (key for key in expected if not key.endswith(timed)):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-5), key
    if name == "callbacks":
        notes = [given["callbacks"][0] for _, _, given in runs]
        assert notes[0].events == notes[1].events and notes[0].names == notes[1].names
        assert ("on_evaluate", 2) in notes[0].events
    if name == "several evaluation sets":
        for entry in ("a", "b"):
            assert metrics[f"eval_{entry}_group_count/0"] == (8 if entry == "a" else 5)
    else:
        assert metrics["eval_group_count/0"] == 8
