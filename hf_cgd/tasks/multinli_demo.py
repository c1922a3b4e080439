"""A made-up corpus of the kind of MultiNLI: tiny, and there without a network connection."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict

LABELS = ("entailment", "neutral", "contradiction")
"""The classes of MultiNLI, in the order of its copy on the Hub."""

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
