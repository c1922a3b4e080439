"""Writing a run's card, record, settings and pictures into its folder."""

import os
from pathlib import Path
from typing import Any

import yaml

from hf_cgd.cards.metadata import card_data
from hf_cgd.cards.model_card import model_card
from hf_cgd.cards.pictures import write_pictures
from hf_cgd.cards.record import RUN_FILE, SETTINGS_FILE, RunRecord, write_json, write_reports
from hf_cgd.whole_files import write_whole

CARD_FILE = "README.md"
"""What the Hub shows of a repository."""


def write_card(
    record: RunRecord,
    folder: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    draw: bool = True,
    **front_matter: Any,
) -> list[Path]:
    """Write a run's card into a folder, and what the card speaks of: reports, record, settings, pictures.

    Args:
        record: the run, that of `GroupRobustTrainer.run_record()` or one's own.
        folder: where to; it is made if need be. A card that is there is written over.
        repo_id: what the model is loaded by; None for the record's name.
        draw: whether to draw the pictures, which takes seconds.
        front_matter: see `hf_cgd.cards.metadata.card_data`.

    Returns:
        the files written, the card first.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = write_record(record, folder)
    pictures = write_pictures(record, folder) if draw else {}
    places = {name: path.relative_to(folder).as_posix() for name, path in pictures.items()}
    card = folder / CARD_FILE
    text = model_card(record, card_data(record, **front_matter), places, repo_id)
    write_whole(card, text)
    return [card, *files, *pictures.values()]


def write_record(record: RunRecord, folder: str | os.PathLike[str]) -> list[Path]:
    """Write reports, record and settings of a run into a folder; the files written."""
    folder = Path(folder)
    files = [write_reports(record.reports, folder), write_json(record.to_dict(), folder / RUN_FILE)]
    if record.settings:
        settings = {name: value for name, value in {**record.training, **record.settings}.items() if value is not None}
        path = folder / SETTINGS_FILE
        write_whole(path, yaml.safe_dump(settings, allow_unicode=True, sort_keys=True))
        files.append(path)
    return files
