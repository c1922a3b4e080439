"""Writes the four sources of the study of language models in docs/results.md, of real text with open licences.

    pip download --no-deps --no-binary :all: Django==5.2
    python benchmarks/language_sources.py Django-5.2.tar.gz sentences.parquet sources

- reviews: sentences about films and products, and from editorials; the ground truth that the source package of
  vaderSentiment 3.3.2 ships (MIT licence), as a table with a column `text`;
- manual: Django's documentation in English (BSD 3-Clause);
- code: Django's Python code (the same);
- german: Django's messages as translated into German (the same).
"""

import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

SIZES = {"reviews": 500_000, "manual": 250_000, "code": 120_000, "german": 40_000}
"""Characters of each source."""
PIECE = 1_500
"""Characters of a document at most: pages and modules are cut up, so that what is held out is of all of them."""


def files_in(archive: Path, pattern: str) -> Iterator[str]:
    """The texts of the files of a source package whose names match, in the order of the names."""
    with tarfile.open(archive) as package:
        for name in sorted(member.name for member in package if member.isfile()):
            inside = package.extractfile(name) if re.search(pattern, name) else None
            if inside is not None:
                yield inside.read().decode("utf-8")


def messages_of(catalogue: str) -> list[str]:
    """The translations in a .po file."""
    found = re.findall(r'^msgstr(?:\[\d\])? ((?:".*"\n?)+)', catalogue, re.MULTILINE)
    texts = ["".join(re.findall(r'^"(.*)"$', part, re.MULTILINE)) for part in found[1:]]
    return [text.replace('\\"', '"').replace("\\n", " ") for text in texts if text]


def pieces_of(texts: Iterator[str]) -> Iterator[str]:
    """The texts, cut at ends of lines into pieces of about `PIECE` characters."""
    for text in texts:
        piece = ""
        for line in text.splitlines(keepends=True):
            piece += line
            if len(piece) >= PIECE:
                yield piece
                piece = ""
        if piece.strip():
            yield piece


def main() -> None:
    """Write a JSONL file for each source."""
    django, sentences, output = (Path(argument) for argument in sys.argv[1:4])
    output.mkdir(parents=True, exist_ok=True)
    german = (text for page in files_in(django, r"django/.*/de/LC_MESSAGES/.*\.po$") for text in messages_of(page))
    sources = {
        "reviews": iter(Dataset.from_parquet(str(sentences))["text"][:]),
        "manual": pieces_of(files_in(django, r"/docs/(topics|ref)/.*\.txt$")),
        "code": pieces_of(files_in(django, r"/django/(db|forms|http)/.*\.py$")),
        "german": german,
    }
    for name, texts in sources.items():
        kept: list[str] = []
        while sum(map(len, kept)) < SIZES[name] and (text := next(texts, None)) is not None:
            kept.append(text)
        Dataset.from_dict({"text": kept}).to_json(output / f"{name}.jsonl", force_ascii=False)
        print(f"{name}: {len(kept):,} documents, {sum(map(len, kept)):,} characters")


if __name__ == "__main__":
    main()
