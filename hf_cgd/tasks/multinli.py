"""MultiNLI grouped by label and negation: does a negated hypothesis always read as a contradiction?

The task of Sagawa et al. (2020): a pair of sentences is an entailment, neutral or a contradiction; negation words in
the hypothesis go along with contradiction in the training data. Six groups, label x negation; the metric is the
accuracy of the worst one.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, concatenate_datasets
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from hf_cgd.data.sources import find_tables, load_from_hub, read_table, require_columns_in_splits, require_text

HUB_ID = "nyu-mll/multi_nli"
LABELS = ("entailment", "neutral", "contradiction")
GROUP_COLUMNS = ("label", "negation")
METRIC = "worst_group_accuracy"

NEGATION_WORDS = frozenset({"nobody", "no", "never", "nothing"})
FILES = {"train": "train", "validation_matched": "validation", "validation_mismatched": "test"}
"""Name of each part of the corpus (on the Hub, and the stem of a file), and the split it serves as."""

HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "sagawa": {
        "model": "bert-base-uncased", "optim": "adamw_torch", "learning_rate": 2e-5, "weight_decay": 0.0,
        "adam_epsilon": 1e-8, "per_device_train_batch_size": 32, "num_train_epochs": 3, "max_length": 128,
        "lr_scheduler_type": "linear", "max_grad_norm": 1.0,
    },
    "paper": {
        "model": "distilbert-base-uncased", "optim": "sgd", "learning_rate": 1e-3, "weight_decay": 1e-4,
        "per_device_train_batch_size": 32, "num_train_epochs": 20, "max_length": 128,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
    },
    "demo": {
        "optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.0, "per_device_train_batch_size": 64,
        "num_train_epochs": 8, "max_length": 32, "lr_scheduler_type": "linear", "max_grad_norm": 1.0,
        "save_strategy": "no", "load_best_model_at_end": False,
    },
}  # fmt: skip
"""Published settings, as options of a recipe.

"sagawa": Group-DRO's authors (they train ERM for 20 epochs). "paper": the CGD paper's backbone, optimizer and batch;
it searched learning rate {1e-3, 1e-5}, weight decay {1e-4, 0.1, 1}, step size {1, 0.1, 0.01, 0.001} and C in [0, 20],
and does not state momentum, epochs, schedule or length. "demo": for `demo()` and a tiny model.
"""

PUBLISHED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "erm": ("81.8 (0.4)", "69.0 (1.2)"),
        "erm_uw": ("81.2 (0.1)", "64.8 (1.6)"),
        "pgi": ("80.8 (0.8)", "69.0 (3.3)"),
        "group_dro": ("81.5 (0.1)", "76.6 (0.5)"),
        "cgd": ("81.3 (0.2)", "76.1 (1.5)"),
    }
)
"""MultiNLI in the paper's Table 3 by objective: average and worst group accuracy in per cent, three seeds."""

SPLIT_FRACTIONS = (0.5, 0.2, 0.3)
"""Train, validation and test of Sagawa et al."""


def load(data_dir: str | Path | None = None) -> DatasetDict:
    """The corpus from the Hub or from local files, its parts named as on the Hub.

    Args:
        data_dir: a folder with tables (JSONL, Parquet or CSV) `train`, `validation_matched` and, optionally,
            `validation_mismatched`, which have columns `premise`, `hypothesis` and `label`: 0, 1, 2 in the order of
            `LABELS` or these names; -1, "-" or nothing where the annotators did not agree. None for the Hub.

    Raises:
        FileNotFoundError: no such folder, or a part that is missing.
        ValueError: a column that is missing.
        ConnectionError: the Hub cannot be reached; three lines say what to pass instead.
    """
    if data_dir is None:
        advice = "Pass --data_dir with a folder of train and validation_matched (.jsonl or .parquet), or try --demo."
        parts = load_from_hub(HUB_ID, advice)
        return DatasetDict({name: parts[name] for name in FILES})
    if not Path(data_dir).is_dir():
        raise FileNotFoundError(
            f"--data_dir: expected a folder with the files of MultiNLI, but there is no {data_dir}."
        )
    tables = find_tables(data_dir, FILES)
    missing = [name for name in ("train", "validation_matched") if name not in tables]
    if missing:
        raise FileNotFoundError(
            f"{data_dir}: expected a table (.jsonl, .parquet or .csv) named {' and one named '.join(missing)}, found "
            f"{sorted(path.name for path in Path(data_dir).iterdir())[:10]}. Rename the files like the Hub's parts."
        )
    parts = DatasetDict({name: read_table(path) for name, path in tables.items()})
    require_columns_in_splits(parts, {"data_dir": "premise"})
    require_columns_in_splits(parts, {"data_dir": "hypothesis"})
    require_columns_in_splits(parts, {"data_dir": "label"})
    return parts


def splits_of(parts: Mapping[str, Dataset], resplit: bool = False, seed: int = 0) -> DatasetDict:
    """Train, validation and test with columns premise, hypothesis, label and negation.

    By default the matched part chooses the model and the mismatched one (other genres) tests it. Examples on whose
    label the annotators did not agree are dropped.

    Args:
        parts: what `load` or `demo` gives.
        resplit: mix all parts and split them 50/20/30 at random, as Sagawa et al. did. Theirs was another draw: for
            a row-by-row comparison their split file is needed.
        seed: of that draw.
    """
    if resplit:
        # Types differ between files that were read on their own; the labels are brought to one first.
        whole = concatenate_datasets([_labelled(part) for part in parts.values()])
        order = np.random.default_rng(seed).permutation(len(whole))
        ends = np.round(np.cumsum(SPLIT_FRACTIONS) * len(whole)).astype(int)
        pieces = np.split(order, ends[:-1])
        splits = {name: whole.select(rows) for name, rows in zip(FILES.values(), pieces, strict=True)}
    else:
        splits = {FILES[name]: _labelled(part) for name, part in parts.items()}
    return DatasetDict({name: _grouped(rows) for name, rows in splits.items()})


def has_negation(sentence: str) -> bool:
    """Whether a sentence holds one of `NEGATION_WORDS`; words are the longest runs of letters, in lower case.

    So "No-one" and "Nothing's" count, "nowhere", "not" and "don't" do not.
    """
    return not NEGATION_WORDS.isdisjoint(re.findall(r"[^\W\d_]+", sentence.lower()))


def _labelled(part: Dataset) -> Dataset:
    """Premise, hypothesis and label, -1 where there is none."""
    codes: dict[Any, int] = {name: code for code, name in enumerate(LABELS)} | {"-": -1, "": -1, None: -1, -1: -1}
    codes |= {code: code for code in range(len(LABELS))} | {str(code): code for code in range(-1, len(LABELS))}
    labels = []
    for row, value in enumerate(part.with_format(None)["label"]):
        if value not in codes:
            raise ValueError(
                f"Column 'label', row {row}: expected 0, 1, 2 or {', '.join(LABELS)} (-1 for none), got {value!r}. "
                "Use the labels of the Hub's copy."
            )
        labels.append(codes[value])
    texts = {name: part[name][:] for name in ("premise", "hypothesis")}
    return Dataset.from_dict({**texts, "label": labels})


def _grouped(rows: Dataset) -> Dataset:
    """The rows that have a label, with their negation."""
    rows = rows.select(np.flatnonzero(np.asarray(rows["label"][:]) >= 0))
    require_text({"given": rows}, ["premise", "hypothesis"])
    negation = [int(has_negation(sentence)) for sentence in rows["hypothesis"][:]]
    rows = rows.cast_column("label", ClassLabel(names=list(LABELS)))
    return rows.add_column("negation", negation, feature=ClassLabel(names=["no", "yes"]))


# ---- A made-up corpus of the same kind ------------------------------------------------------------------------------

PEOPLE = {"man": "person", "woman": "person", "cook": "person", "cat": "animal", "horse": "animal"}
OPPOSITES = {"sleeps": "wakes", "stands": "sits", "laughs": "cries", "wins": "loses", "arrives": "leaves"}
PLACES = ("garden", "kitchen", "street", "station", "hall")
COMPANIONS = ("friend", "child", "neighbour")
NEGATED_SHARE = {"train": {"contradiction": 0.8, "entailment": 0.02, "neutral": 0.02}}
"""How often a hypothesis is negated in training; half of the time in the other parts."""


def demo(seed: int = 0, sizes: Mapping[str, int] | None = None) -> DatasetDict:
    """Pairs of simple sentences whose label follows from their words, and in training mostly from a negation as well.

    Args:
        seed: of the draw.
        sizes: examples of each part; 3000 to train on and 600 in each of the others by default.
    """
    sizes = sizes or {"train": 3000, "validation_matched": 600, "validation_mismatched": 600}
    generator = np.random.default_rng(seed)
    return DatasetDict(
        {name: Dataset.from_list([_made_pair(generator, name) for _ in range(size)]) for name, size in sizes.items()}
    )


def _made_pair(generator: np.random.Generator, part: str) -> dict[str, Any]:
    label = int(generator.integers(len(LABELS)))
    negated = generator.random() < NEGATED_SHARE.get(part, {}).get(LABELS[label], 0.5)
    pairs = list(OPPOSITES.items())
    verb, opposite = pairs[generator.integers(len(pairs))]
    if generator.random() < 0.5:
        verb, opposite = opposite, verb
    who = str(generator.choice(list(PEOPLE)))
    where = f"in the {generator.choice(PLACES)}"
    # A negated opposite follows, a negated repetition contradicts; what nothing was said about stays open.
    subject = f"the {PEOPLE[who] if generator.random() < 0.5 else who}"
    said = verb if (LABELS[label] == "contradiction") == negated else opposite
    adverb = str(generator.choice(["never ", "at no time "])) if negated else ""
    rest = where if generator.random() < 0.5 else ""
    if LABELS[label] == "neutral":
        said, rest = (verb, opposite)[generator.integers(2)], f"with a {generator.choice(COMPANIONS)}"
    return {
        "premise": f"the {who} {verb} {where}",
        "hypothesis": f"{subject} {adverb}{said} {rest}".strip(),
        "label": label,
    }


def demo_tokenizer() -> Tokenizer:
    """One token for each word that `demo` can use; pairs are marked like BERT's. Padding is token 0."""
    words = {"the", "in", "with", "a", "never", "at", "no", "time", *PLACES, *COMPANIONS}
    words |= {*PEOPLE, *PEOPLE.values(), *OPPOSITES, *OPPOSITES.values()}
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer
